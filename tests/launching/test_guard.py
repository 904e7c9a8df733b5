"""What a rank started is gone with the rank, and with the launcher, however they end."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import command
import pytest

from contract import wait_until
from process_table import parent_of, state_of

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
    print(os.getpid(), *pids, stopped, flush=True)
"""
WAIT = "\n    signal.pause()\n"


def start(tmp_path, source, *options):
    script = command.write_script(tmp_path, source)
    return command.start("run", "--no-prefix", "-n", 2, *options, script)


def pids_of(process):
    return [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]


def all_end(pids):
    return all(command.has_ended(pid, 60) for pid in pids)


@pytest.mark.parametrize("end", ["", "\n    raise SystemExit(3)", "\n    os.kill(os.getpid(), 9)"])
def test_nothing_that_a_rank_started_outlives_it(tmp_path, end):
    with start(tmp_path, BROOD + end) as process:
        pids = pids_of(process)
        process.communicate()
    assert all(map(command.is_gone, pids))  # when the command returns, not some time after


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_outlives_the_launcher(tmp_path, number):
    with start(tmp_path, BROOD + WAIT) as process:
        pids = pids_of(process)
        guards = {parent_of(pid) for pid in pids[:1] + pids[6:7]}
        process.send_signal(number)
        process.communicate()
    assert len(guards) == 2
    assert all_end(pids)
    assert all_end(guards)


def test_grandchildren_of_a_killed_rank_are_gone(tmp_path):
    with start(tmp_path, BROOD + WAIT) as process:
        pids = pids_of(process)
        os.kill(pids[0], signal.SIGKILL)
        _, err = process.communicate()
    assert process.returncode == 137
    assert f"(pid {pids[0]} on {os.uname().nodename}) was killed by SIGKILL" in err
    assert all(map(command.is_gone, pids))


def test_stopped_rank_is_ended_with_the_others(tmp_path):
    with start(tmp_path, BROOD + WAIT) as process:
        pids = pids_of(process)
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(pids[6], signal.SIGKILL)
        process.communicate()
    assert process.returncode == 137
    assert all(map(command.is_gone, pids))


@pytest.mark.parametrize("how", ["raise KeyError", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("other", ["SIG_DFL", "SIG_IGN"])  # with SIG_IGN the launcher has to kill the other rank
def test_helpers_that_clean_up_may_do_so(tmp_path, how, other):
    source = f"""
        import os, signal, subprocess, sys, time
        from multiprocessing import shared_memory
        signal.signal(signal.SIGTERM, signal.{other})
        memory = shared_memory.SharedMemory(create=True, size=1000)
        subprocess.Popen(["sleep", "60"])
        print(memory.name, flush=True)
        open(sys.argv[1] + os.environ["RANK"], "w").close()
        if os.environ["RANK"] == "1":
            while not os.path.exists(sys.argv[1] + "0"):
                time.sleep(0.01)
            {how}
        signal.pause()
        """
    script = command.write_script(tmp_path, source)
    code, out, _ = command.run("run", "--no-prefix", "--grace", 0.5, "-n", 2, script, tmp_path / "ready-")
    assert code == (1 if "raise" in how else 137)
    names = out.split()
    assert len(names) == 2
    assert not [name for name in names if Path("/dev/shm", name).exists()]


def test_the_helper_of_torch_may_clean_up_too(tmp_path):
    """It ends 2 s after its last user."""
    source = """
        import os, sys, time
        helper = "open(sys.argv[2], 'w').close(); sys.stdin.read(); time.sleep(2.0); os.unlink(sys.argv[2])"
        helper = "import os, sys, time; " + helper
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
    segment = tmp_path / "segment"
    code, _, _ = command.run("run", "--no-prefix", "-n", 1, command.write_script(tmp_path, source), segment)
    assert code == 137
    assert not segment.exists()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os.kill(os.getppid(), 15); signal.pause()"])
def test_a_helper_that_does_not_end_is_killed(tmp_path, end):
    source = f"""
        import os, signal, subprocess, sys
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "resource_tracker"])
        print(program.pid, flush=True)
        {end}
        """
    code, out, _ = command.run("run", "--no-prefix", "-n", 1, command.write_script(tmp_path, source))
    assert code in (137, 143)
    assert command.is_gone(int(out))


def test_the_launcher_that_kills_a_rank_waits_for_its_helpers(tmp_path):
    source = """
        import os, signal, subprocess, sys
        if os.environ["RANK"] == "1":
            sys.stdin.readline()
            sys.exit(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "resource_tracker"])
        print(program.pid, flush=True)
        signal.pause()
        """
    script = command.write_script(tmp_path, source)
    with command.start(
        *("run", "--no-prefix", "-n", 2, "--stdin", 1, "--grace", 0.2, script), stdin=subprocess.PIPE
    ) as process:
        helper = int(process.stdout.readline())
        process.communicate("\n")
    assert process.returncode == 3
    assert command.is_gone(helper)


def test_killed_guard_takes_its_rank_with_it(tmp_path):
    with start(tmp_path, "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()") as process:
        pids = pids_of(process)
        guard = parent_of(pids[0])
        os.kill(guard, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 137
    assert all_end([*pids, guard])


def test_guard_forwards_a_signal_and_is_named_in_the_process_list(tmp_path):
    source = """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print(os.getpid(), flush=True)
        signal.pause()
        """
    with start(tmp_path, source) as process:
        pids = pids_of(process)
        for pid in pids:
            guard = parent_of(pid)
            wait_until(lambda guard=guard: Path(f"/proc/{guard}/comm").read_text() == "gradsync-guard\n")
            shown = Path(f"/proc/{guard}/cmdline").read_bytes().rstrip(b"\0").decode()
            assert shown.startswith("gradsync: guard of rank ")
            assert shown.endswith(f"(pid {pid})")
            os.kill(guard, signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0


def test_ranks_have_process_groups_of_their_own(tmp_path):
    source = "import os\nprint(os.getpid(), os.getpgid(0), os.getsid(0), flush=True)"
    with start(tmp_path, source) as process:
        out, _ = process.communicate()
    lines = [line.split() for line in out.splitlines()]
    assert all(pid == group == session for pid, group, session in lines)
    assert len({pid for pid, *_ in lines}) == 2


def test_no_zombies_gather_under_a_guard(tmp_path):
    source = """
        import os, subprocess, signal
        for _ in range(20):
            subprocess.run(["sh", "-c", "true & true &"])
        print(os.getpid(), os.getppid(), flush=True)
        signal.pause()
        """
    with start(tmp_path, source) as process:
        pids = pids_of(process)
        guards = pids[1::2]
        wait_until(lambda: not any(map(zombies_of, guards)))
        process.terminate()
        process.communicate()


def zombies_of(parent):
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            pid = int(folder.name)
            with contextlib.suppress(OSError):  # it has gone meanwhile
                if state_of(pid) == "Z" and parent_of(pid) == parent:
                    found.append(pid)
    return found


def test_ctrl_z_stops_all_and_fg_goes_on(tmp_path):
    source = """
        import os, sys
        print(os.getpid(), flush=True)
        open(sys.argv[1]).close()  # waits until somebody opens it to write
        """
    script = command.write_script(tmp_path, source)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with command.start("run", "--no-prefix", "-n", 2, script, fifo) as process:
        pids = pids_of(process)
        process.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        for pid in pids:
            wait_until_stopped(pid)
        process.send_signal(signal.SIGCONT)
        # Opening to read and write waits for nobody, and a rank may come to it late.
        with open(os.open(fifo, os.O_RDWR), "wb"):
            process.communicate()
    assert process.returncode == 0


def wait_until_stopped(pid):
    wait_until(lambda: state_of(pid) == "T")


@pytest.mark.parametrize(
    ("seconds_to_meet", "told"),
    [
        (1, "was paused by a signal"),
        (60, r"RankFailed: rank 0/2: .*rank 1/2 \(pid \d+\) was stopped \(SIGSTOP\?\) before it joined"),
    ],
)
def test_rank_stopped_before_it_joins_is_named(tmp_path, seconds_to_meet, told):
    source = f"""
        import os, signal, sys
        import gradsync as gs
        if os.environ["RANK"] == "1":
            print(os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        sys.stdin.readline()
        gs.init_process_group(timeout_seconds={seconds_to_meet})
        """
    script = command.write_script(tmp_path, source)
    with command.start("run", "--no-prefix", "-n", 2, script, stdin=subprocess.PIPE) as process:
        wait_until_stopped(int(process.stdout.readline()))
        _, err = process.communicate("\n")
    assert process.returncode == 1
    assert re.search(told, err), err


def test_a_guard_that_was_stopped_ends_what_its_rank_has_started(tmp_path):
    source = """
        import os, subprocess
        program = subprocess.Popen(["sleep", "60"], start_new_session=True)
        print(os.getppid(), program.pid, flush=True)
        program.wait()
        """
    script = command.write_script(tmp_path, source)
    with command.start("run", "--no-prefix", "-n", 1, script) as process:
        guard, program = map(int, process.stdout.readline().split())
        os.kill(guard, signal.SIGSTOP)
        process.terminate()
        _, err = process.communicate()
    assert (process.returncode, err) == (143, "")
    assert command.has_ended(program, 60)
