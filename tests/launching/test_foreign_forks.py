"""Other processes that the launching program forks, or that its surroundings have closed or ignored, do no harm."""

import os
import signal
import subprocess
import sys
import textwrap

import command
import pytest

import gradsync as gs


def run_script(tmp_path, source, **options):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(source))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100, **options)


_our_ends = {}


def end(pid, number=signal.SIGKILL):
    """Ends an idle child by a signal; gives the one that it has died of."""
    os.kill(pid, number)
    status = os.waitpid(pid, 0)[1]
    os.close(_our_ends.pop(pid))
    return os.WTERMSIG(status)


# Children of a launching program that live until it ends, however it ends.
IDLE_CHILDREN = """
    import os, threading
    import gradsync as gs

    lifeline, our_end = os.pipe()
    children = []

    def fork_idle_child():
        pid = os.fork()
        if pid == 0:
            try:
                os.close(our_end)
                os.read(lifeline, 1)
            finally:
                os._exit(0)
        children.append(pid)

    def fail():
        raise SystemExit(3)

    def launch_failing():
        try:
            gs.launch(fail, (), 2)
        except gs.WorkerError as error:
            print(error.exitcode, children != [] and all(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in children))
"""


# Whenever the launching thread has made a pipe, another one has a moment to fork.
FORKS_AT_EVERY_PIPE = (
    IDLE_CHILDREN
    + """
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
        launch_failing()
"""
)


def test_run_ends_although_children_forked_meanwhile_live_on(tmp_path):
    done = run_script(tmp_path, FORKS_AT_EVERY_PIPE, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    assert done.stdout == "3 True\n", done.stderr


def test_program_that_reaps_its_children_itself(tmp_path):
    source = """
        import os, signal
        import gradsync as gs
        def reap(*_):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
        def rank():
            return int(os.environ["RANK"])
        if __name__ == "__main__":
            signal.signal(signal.SIGCHLD, reap)
            print(gs.launch(rank, (), 2))
        """
    done = run_script(tmp_path, source)
    assert done.stdout == "[0, 1]\n", done.stderr


def in_each_interpreter(tmp_path, source):
    """Gives the environment of a program whose interpreters, also those of its ranks, run this first."""
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(source))
    return os.environ | {"PYTHONPATH": str(folder)}


# The guard begins to watch when the rank has ended.
SLOW_GUARD = """
    import os
    guard = os.getpid()
    def wait_for_the_rank_to_end():
        if os.getpid() == guard:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    os.register_at_fork(after_in_parent=wait_for_the_rank_to_end)
"""


def test_rank_that_ends_before_its_guard_is_ready(tmp_path):
    source = """
        import os, signal, threading
        import gradsync as gs
        def rank():
            return int(os.environ["RANK"])
        def run():
            print(gs.launch(rank, (), 2))
        if __name__ == "__main__":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its children inherit this
            threading.Thread(target=run).start()  # only the main thread can set it back
        """
    done = run_script(tmp_path, source, env=in_each_interpreter(tmp_path, SLOW_GUARD))
    assert done.stdout == "[0, 1]\n", done.stderr


def test_orphan_of_a_rank_that_ends_before_its_guard_is_ready(tmp_path):
    source = """
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
    done = run_script(tmp_path, source, env=in_each_interpreter(tmp_path, SLOW_GUARD))
    assert command.has_ended(int(done.stdout), 60), done.stderr


def descriptors_of_a_program():
    """Runs in each rank: what a program that it starts inherits beside the standard streams."""
    listed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; print(*(os.readlink(f'/proc/self/fd/{d}') for d in sorted(map(int, "
            "os.listdir('/proc/self/fd')))[3:-1]))",
        ],
        close_fds=False,
        capture_output=True,
        text=True,
    )
    return listed.stdout.split()


def own_secret_descriptors():
    return [link for d in os.listdir("/proc/self/fd") if "gradsync-start" in (link := _link(d))]


def _link(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def test_rank_keeps_no_secret_open_and_its_programs_inherit_no_pipe_of_ours():
    assert gs.launch(own_secret_descriptors, (), 1) == [[]]
    inherited = gs.launch(descriptors_of_a_program, (), 1)[0]
    assert not [link for link in inherited if "gradsync" in link]


def test_closed_standard_streams_are_not_taken_by_ours(tmp_path):
    script = command.write_script(tmp_path, "import os, sys; open(sys.argv[1], 'wb').write(os.read(0, 100) + b'end')")
    out = tmp_path / "out"
    for closed in ("<&-", "<&- >&-", "<&- >&- 2>&-"):
        out.unlink(missing_ok=True)
        line = f'"{sys.executable}" -m gradsync run -n 1 "{script}" "{out}" {closed}'
        code = subprocess.run(["sh", "-c", line], timeout=60).returncode
        assert (code, out.read_bytes()) == (0, b"end"), closed


def test_interrupt_while_spawn_starts_its_ranks_leaves_none(tmp_path):
    source = """
        import os, signal, sys
        import gradsync as gs
        from gradsync.launching import supervisor
        begin = supervisor.Supervisor._start_rank
        def begin_and_interrupt(self, *arguments):
            begin(self, *arguments)
            os.kill(os.getpid(), signal.SIGINT)
        supervisor.Supervisor._start_rank = begin_and_interrupt
        def idle(folder):
            open(f"{folder}/{os.getpid()}", "w").close()
            signal.pause()
        if __name__ == "__main__":
            try:
                gs.spawn(idle, (sys.argv[1],), 2, join=False)
            except KeyboardInterrupt:
                print("interrupted")
        """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(source))
    folder = tmp_path / "pids"
    folder.mkdir()
    done = subprocess.run([sys.executable, str(path), str(folder)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\n", done.stderr
    assert all(command.has_ended(int(name), 60) for name in os.listdir(folder))


@pytest.mark.parametrize("kernel", ["new", "before 5.3"])
def test_ranks_of_a_killed_launcher_end_although_its_other_children_live_on(tmp_path, kernel):
    source = (
        IDLE_CHILDREN
        + """
    import signal, sys, time

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
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(source))
    env = in_each_interpreter(tmp_path, "import os; del os.pidfd_open" if kernel == "before 5.3" else "")
    line = [sys.executable, "-W", "ignore", str(path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True, env=env) as launcher:
        ranks = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.kill()
        try:
            assert all(command.has_ended(rank, 20) for rank in ranks)
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)
