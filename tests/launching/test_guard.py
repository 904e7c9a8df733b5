"""Nothing that a rank has started outlives the rank, nor the launcher, however they end; what cleans up may do so.

The fixture `cli` looks after each test whether any process is left, whatever session it is in.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import is_running, wait_until

RUN = ("run", "--no-prefix", "-n", 2)

# Leaves children of every kind behind: plain, in a session of its own, double-forked, one that ignores SIGTERM, and a
# stopped one. Their process ids are printed on one line, after the rank's own.
BROOD = """
    import os, signal, subprocess, sys, time

    def forget(leave, *, twice=False):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            leave()
            if twice and os.fork():
                os._exit(0)
            os.write(writer, b"%d " % os.getpid())
            while True:
                signal.pause()
        if twice:
            os.waitpid(pid, 0)
        return int(os.read(reader, 32))

    pids = [
        forget(lambda: None),
        forget(os.setsid),
        forget(os.setsid, twice=True),
        forget(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), twice=True),
    ]
    stopped = forget(lambda: None)
    os.kill(stopped, signal.SIGSTOP)
    os.write(1, f"{os.getpid()} {' '.join(map(str, pids))} {stopped}\\n".encode())
"""
WAIT = "    while True:\n        signal.pause()\n"


def exists(pid):
    return os.path.exists(f"/proc/{pid}")  # also as a zombie


def stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent(pid):
    return int(stat(pid)[1])


def families(launcher):
    """The process ids of each rank: its own, and those of its children."""
    return [[int(pid) for pid in launcher.stdout.readline().split()] for _ in range(2)]


def test_nothing_that_a_rank_started_outlives_it(cli, script):
    launcher = cli.start(*RUN, script(BROOD))
    pids = [pid for family in families(launcher) for pid in family]
    launcher.result()
    assert not any(map(exists, pids))  # when the command returns, not some time after


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_launcher(number, cli, script):
    launcher = cli.start(*RUN, script(BROOD + WAIT))
    pids = [pid for family in families(launcher) for pid in family]
    launcher.send_signal(number)
    launcher.wait(60)
    wait_until(lambda: not any(map(is_running, pids)))
    if number != signal.SIGKILL:
        assert not any(map(exists, pids))


def test_a_killed_rank_takes_its_children_along_and_a_stopped_rank_ends_with_the_others(cli, script):
    launcher = cli.start(*RUN, script(BROOD + WAIT))
    first, second = families(launcher)
    os.kill(first[0], signal.SIGSTOP)
    os.kill(second[0], signal.SIGKILL)
    code, _, err = launcher.result()
    assert code == 137
    assert re.search(rf"rank \d \(pid {second[0]} on {os.uname().nodename}\) was killed by SIGKILL", err)
    assert not any(map(exists, first + second))


def test_a_guard_is_named_keeps_its_rank_apart_and_gathers_no_zombies(cli, script):
    path = script(
        """
        import os, signal, subprocess, sys
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
        for _ in range(10):
            subprocess.run(["sh", "-c", "true & true &"])
        os.write(1, f"{os.getpid()} {os.getpgid(0)} {os.getsid(0)}\\n".encode())
        while True:
            signal.pause()
        """
    )
    launcher = cli.start(*RUN, path)
    for rank, *own in families(launcher):
        assert own == [rank, rank]
        guard = parent(rank)
        wait_until(lambda guard=guard: Path(f"/proc/{guard}/comm").read_text() == "gradsync-guard\n")
        shown = Path(f"/proc/{guard}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert re.fullmatch(rf"gradsync: guard of rank \d .*\(pid {rank}\)", shown)
        shown = Path(f"/proc/{rank}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        assert str(path) in shown  # ps and top show what a rank runs
        wait_until(lambda guard=guard: not zombies(guard))
        os.kill(guard, signal.SIGTERM)  # means that every process of the run got it, so the guard has nothing to do
        os.kill(rank, signal.SIGUSR1)
    assert launcher.result().code == 0


def zombies(pid):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            state, above = stat(folder.name)[:2]
            if (state, above) == ("Z", str(pid)):
                found.append(folder.name)
    return found


def test_a_killed_guard_takes_its_rank_along(cli, script):
    launcher = cli.start(*RUN, script("import os, signal\nos.write(1, b'%d\\n' % os.getpid())\nsignal.pause()"))
    [first], [second] = families(launcher)
    guard = parent(first)
    os.kill(guard, signal.SIGKILL)
    code, _, err = launcher.result()
    assert code == 137
    assert f"its guard (pid {guard}) was killed by SIGKILL, and the rank with it" in err
    assert not any(map(is_running, [first, second, guard]))


def test_a_stopped_guard_is_continued_to_end_what_its_rank_has_started(cli, script):
    path = script(
        """
        import os, subprocess
        program = subprocess.Popen(["sleep", "60"], start_new_session=True)
        os.write(1, f"{os.getppid()} {program.pid}\\n".encode())
        program.wait()
        """
    )
    launcher = cli.start("run", "-n", 1, path)
    guard, program = map(int, launcher.stdout.readline().split())
    os.kill(guard, signal.SIGSTOP)
    launcher.terminate()
    code, _, err = launcher.result()
    assert (code, err) == (143, "")
    assert not is_running(program)


# -- Processes that clean up -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "other"),
    [("raise KeyError", "SIG_DFL"), ("os.kill(os.getpid(), 9)", "SIG_IGN")],  # SIG_IGN: the launcher kills it
)
def test_the_resource_tracker_may_remove_shared_memory_of_a_rank_that_died(how, other, cli, script, tmp_path):
    path = script(
        f"""
        import os, signal, subprocess, sys, time
        from multiprocessing import shared_memory
        signal.signal(signal.SIGTERM, signal.{other})
        memory = shared_memory.SharedMemory(create=True, size=1000)
        subprocess.Popen(["sleep", "60"])
        os.write(1, f"{{memory.name}}\\n".encode())
        open(sys.argv[1] + os.environ["RANK"], "w").close()
        if os.environ["RANK"] == "1":
            while not os.path.exists(sys.argv[1] + "0"):
                time.sleep(0.01)
            {how}
        signal.pause()
        """
    )
    code, out, _ = cli(*RUN, "--grace", 0.5, path, tmp_path / "ready-")
    assert code == (1 if "raise" in how else 137)
    names = out.split()
    assert len(names) == 2
    assert not [name for name in names if Path("/dev/shm", name).exists()]


def test_the_helper_of_torch_may_clean_up_too(cli, script, tmp_path):
    """It ends 2 s after its last user."""
    path = script(
        """
        import os, sys, time
        helper = "import os, sys, time; open(sys.argv[2], 'w').close(); sys.stdin.read(); time.sleep(2.0); "
        helper += "os.unlink(sys.argv[2])"
        segment = sys.argv[1]
        reader, writer = os.pipe()  # only the rank holds the write end
        if os.fork() == 0:
            os.close(writer)
            os.setsid()
            os.dup2(reader, 0)
            os.execv(sys.executable, [sys.executable, "-c", helper, "torch_shm_manager", segment])
        while not os.path.exists(segment):
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
        """
    )
    assert cli("run", "-n", 1, path, tmp_path / "segment").code == 137
    assert not (tmp_path / "segment").exists()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "read_line()"])
def test_a_helper_that_does_not_end_is_killed(end, cli, script):
    """The launcher kills a stubborn rank when another one fails, and its helper may not stay either."""
    path = script(
        f"""
        import os, signal, subprocess, sys
        def read_line():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open(sys.argv[1], "w").close()
            while True:
                signal.pause()
        if os.environ["RANK"] == "1":
            open(sys.argv[1]).close()  # waits for rank 0
            sys.exit(3)
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "resource_tracker"])
        os.write(1, b"%d\\n" % program.pid)
        {end}
        """
    )
    fifo = path.with_name("fifo")
    os.mkfifo(fifo)
    ranks = 2 if end == "read_line()" else 1
    code, out, _ = cli("run", "--no-prefix", "-n", ranks, "--grace", 0.2, path, fifo)
    assert code == (3 if ranks == 2 else 137)
    wait_until(lambda: not exists(int(out)))  # the launcher may end a moment before it is gone


# -- Programs that fork beside a launch --------------------------------------------------------------------------------

IDLE_CHILDREN = """
    import os, signal, sys, threading, time
    import gradsync as gs

    lifeline, our_end = os.pipe()
    children = []

    def fork_idle_child():
        pid = os.fork()
        if pid == 0:
            try:
                os.close(our_end)
                os.read(lifeline, 1)  # until the program ends, however it ends
            finally:
                os._exit(0)
        children.append(pid)
"""


def test_a_run_ends_although_children_forked_meanwhile_live_on(cli, script):
    """Whenever the launching thread has made a pipe, another one has a moment to fork."""
    path = script(
        IDLE_CHILDREN
        + """
    def fail():
        raise SystemExit(3)

    if __name__ == "__main__":
        make_pipe = os.pipe
        wanted, forked = threading.Event(), threading.Event()

        def fork_when_wanted():
            while True:
                wanted.wait()
                wanted.clear()
                fork_idle_child()
                forked.set()

        def make_pipe_and_wait():
            made = make_pipe()
            forked.clear()
            wanted.set()
            forked.wait(0.2)
            return made

        threading.Thread(target=fork_when_wanted, daemon=True).start()
        os.pipe = make_pipe_and_wait
        try:
            gs.launch(fail, (), 2)
        except gs.WorkerError as error:
            print(error.exitcode, children != [] and all(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in children))
    """
    )
    assert cli.python("-W", "ignore", path)[:2] == (0, "3 True\n")


def test_ranks_of_a_killed_program_end_although_its_other_children_live_on(cli, script):
    path = script(
        IDLE_CHILDREN
        + """
    def idle():
        os.write(1, b"%d\\n" % os.getpid())
        while True:
            signal.pause()

    def fork_children():
        while True:
            fork_idle_child()
            time.sleep(0.01)

    if __name__ == "__main__":
        threading.Thread(target=fork_children, daemon=True).start()
        gs.launch(idle, (), 2)
    """
    )
    program = cli.start_program(sys.executable, "-W", "ignore", path, start_new_session=True)
    ranks = [int(program.stdout.readline()) for _ in range(2)]
    program.kill()
    try:
        wait_until(lambda: not any(map(is_running, ranks)))
    finally:
        os.killpg(program.pid, signal.SIGKILL)


# The guard begins to watch when the rank has ended.
SLOW_GUARD = """
    import os
    guard = os.getpid()
    def wait_for_the_rank_to_end():
        if os.getpid() == guard:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    os.register_at_fork(after_in_parent=wait_for_the_rank_to_end)
"""


def test_a_rank_may_end_before_its_guard_is_ready(cli, script, tmp_path):
    """And an orphan that it leaves is found."""
    (tmp_path / "first").mkdir()
    script(SLOW_GUARD, "first/sitecustomize.py")
    path = script(
        """
        import os, signal
        import gradsync as gs
        def rank():
            reader, writer = os.pipe()
            if (child := os.fork()) == 0:
                os.setsid()
                if os.fork() == 0:
                    os.write(writer, b"%d" % os.getpid())
                    while True:
                        signal.pause()
                os._exit(0)
            orphan = int(os.read(reader, 32))
            os.waitpid(child, 0)
            return orphan
        if __name__ == "__main__":
            print(*gs.launch(rank, (), 1))
        """
    )
    done = cli.python(path, environment={"PYTHONPATH": str(tmp_path / "first")})
    assert done.code == 0, done.err
    wait_until(lambda: not is_running(int(done.out)))


def test_a_process_of_another_user_does_not_save_the_others(script):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, which gives up its right to end processes of others, and setpriv")
    path = script("""
        import subprocess, sys, time
        theirs = subprocess.Popen(["setpriv", "--reuid=65534", "--clear-groups", "sleep", "60"])
        time.sleep(0.3)  # until it is another user's
        ours = subprocess.Popen(["sleep", "60"])
        print(theirs.pid, ours.pid)
    """)
    command = [
        "setpriv",
        "--bounding-set=-kill",
        sys.executable,
        "-m",
        "gradsync",
        "run",
        "-n",
        "1",
        "--no-prefix",
        path,
    ]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    theirs, ours = map(int, out.split())
    try:
        assert is_running(theirs)
        assert not is_running(ours)
    finally:
        os.kill(theirs, signal.SIGKILL)
