"""Signals to the launcher: forwarded once to each rank, a second Ctrl-C kills, and none is lost."""

import os
import re
import select
import signal
import sys
import threading
import time

import pytest

import gradsync as gs
from commands import wait_until

RUN = ("run", "--no-prefix", "-n", 2)
PATIENTLY = ("--grace", 1000)  # a rank of a busy machine takes its time, and would be killed

TELLS_AND_ENDS = """
    import os, signal, sys
    def note(number, _):
        os.write(1, b"got %d\\n" % number)  # in one piece: both ranks write
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, note)
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        signal.pause()
"""
STUBBORN = TELLS_AND_ENDS.replace("sys.exit(0)", "pass")


@pytest.fixture
def launched(cli, script):
    """Starts two ranks of a script, and gives the launcher and their process ids."""

    def start(source, *options):
        launcher = cli.start(*RUN, *options, script(source))
        return launcher, [int(launcher.stdout.readline()) for _ in range(2)]

    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_forwarded_once_and_ends_the_run(number, launched):
    launcher, pids = launched(TELLS_AND_ENDS, *PATIENTLY)
    launcher.send_signal(number)
    code, out, err = launcher.result()
    assert (code, out) == (128 + number, f"got {int(number)}\n" * 2)
    assert err == ("gradsync: stopping 2 ranks (Ctrl-C again kills them)\n" if number == signal.SIGINT else "")
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # when the command returns, not some time after


def test_ranks_that_a_signal_ends_are_no_failure(launched):
    launcher, _ = launched("import os, signal\nos.write(1, b'%d\\n' % os.getpid())\nsignal.pause()")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.result() == (143, "", "")


def test_a_second_ctrl_c_kills_at_once(launched):
    launcher, _ = launched(STUBBORN, *PATIENTLY)
    launcher.send_signal(signal.SIGINT)
    assert [launcher.stdout.readline() for _ in range(2)] == ["got 2\n"] * 2
    launcher.send_signal(signal.SIGINT)
    assert launcher.result(60).code == 130  # far less than the grace


def test_stubborn_ranks_are_killed_after_the_grace_and_not_before(launched):
    launcher, _ = launched(STUBBORN, "--grace", 1.5)
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.result().code == 143
    assert time.monotonic() - began > 1.4


def test_ctrl_c_while_the_ranks_start_is_quiet(cli, script, tmp_path):
    """sitecustomize runs long before gradsync's own code in the rank."""
    (tmp_path / "first").mkdir()
    script(
        f"""
        import os, time
        if os.environ.get("RANK") == "0":
            os.kill(os.getppid(), 2)
        while "RANK" in os.environ and not os.path.exists({str(tmp_path / "noticed")!r}):
            time.sleep(0.01)
        """,
        "first/sitecustomize.py",
    )
    launcher = cli.start(
        *(*RUN, *PATIENTLY, script("signal.pause()")), environment={"PYTHONPATH": str(tmp_path / "first")}
    )
    line = launcher.stderr.readline()
    assert re.fullmatch(r"gradsync: stopping (1 rank|2 ranks) \(Ctrl-C again kills (it|them)\)\n", line)
    (tmp_path / "noticed").touch()
    assert launcher.result() == (130, "", "")


def test_ctrl_z_stops_all_and_fg_goes_on(cli, script, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    path = script("import os, sys\nos.write(1, b'%d\\n' % os.getpid())\nopen(sys.argv[1]).close()")
    launcher = cli.start(*RUN, path, tmp_path / "fifo")
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    launcher.send_signal(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(launcher.pid, os.WUNTRACED)[1])
    wait_until(lambda: all(state_of(pid) == "T" for pid in pids))
    launcher.send_signal(signal.SIGCONT)
    # Opening to read and write waits for nobody, and a rank may come to it late.
    with open(os.open(tmp_path / "fifo", os.O_RDWR), "wb"):
        assert launcher.result().code == 0


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_exit_codes_survive_an_ignored_sigchld_and_a_program_that_reaps_its_children(cli, script):
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    run = (sys.executable, "-m", "gradsync", *RUN, script("raise SystemExit(3)"))
    assert cli.python("-c", ignore, *run).code == 3
    path = script(
        """
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
    )
    assert cli.python(path) == (0, "[0, 1]\n", "")


def test_what_is_ignored_stays_ignored(cli, script):
    """As under nohup: a closed terminal ends nothing."""
    path = script("import os, sys\nos.write(1, b'%d\\n' % os.getpid())\nsys.stdin.readline()")
    launcher = cli.start(
        *("run", "--no-prefix", "-n", 1, path),
        stdin=-1,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    launcher.stdout.readline()
    launcher.send_signal(signal.SIGHUP)
    assert launcher.communicate("go on\n", 60) == ("", "")
    assert launcher.returncode == 0


def test_a_schedulers_warning_is_forwarded_to_the_ranks(cli, script):
    """As Slurm's --signal=USR1@120, and those of LSF and Grid Engine: time to save a checkpoint."""
    path = script(
        """
        import os, signal
        def save(*_):
            os.write(1, b"saved\\n")
            raise SystemExit(0)
        signal.signal(signal.SIGUSR1, save)
        os.write(1, b"ready\\n")
        while True:
            signal.pause()
        """
    )
    launcher = cli.start(*RUN, path)
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.result().told == (0, "saved\n" * 2, "")


def test_a_signal_to_every_process_of_the_run_reaches_each_rank_once(launched):
    """As scancel and systemd send it. The guard, too, must not forward what the launcher has forwarded."""
    launcher, pids = launched(STUBBORN, "--grace", 1.0)
    with open(f"/proc/{pids[0]}/stat") as file:
        guard = int(file.read().rpartition(")")[2].split()[1])
    launcher.send_signal(signal.SIGTERM)
    before = [launcher.stdout.readline() for _ in range(2)]
    os.kill(guard, signal.SIGTERM)
    code, out, _ = launcher.result()
    assert code == 143
    assert "".join(before) + out == "got 15\n" * 2


# -- Within a program that calls gs.launch -----------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_signal_during_a_launch_is_never_lost(raises):
    """At whatever call it comes: it ends the launch, or the program's own handler runs; which is there again later."""

    class Stopped(Exception):
        pass

    def handle(number, frame):
        received.append(number)
        if raises:
            raise Stopped

    before = signal.signal(signal.SIGTERM, handle)
    handlers = [signal.getsignal(number) for number in range(1, signal.NSIG)]
    change, set_wakeup = signal.signal, signal.set_wakeup_fd
    try:
        for moment in range(12):  # by calls that change what signals do
            received, calls = [], []

            def then_comes(function, calls=calls, moment=moment):
                def call(*arguments, **options):
                    result = function(*arguments, **options)
                    calls.append(arguments)
                    if len(calls) == moment + 1:
                        signal.raise_signal(signal.SIGTERM)
                    return result

                return call

            signal.signal, signal.set_wakeup_fd = then_comes(change), then_comes(set_wakeup)
            try:
                gs.launch(int, (), 1)
            except (Stopped, gs.MainProcessError) as error:
                received.append(error)
            finally:
                signal.signal, signal.set_wakeup_fd = change, set_wakeup
            assert received or len(calls) <= moment
            assert [signal.getsignal(number) for number in range(1, signal.NSIG)] == handlers
            assert signal.set_wakeup_fd(-1) == -1
            if len(calls) <= moment:
                break
        assert moment > 0
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_launch_also_if_another_thread_takes_it(number, tmp_path):
    """As one that comes just before the launcher begins to wait: Python's handlers run in the main thread alone."""

    def work(path):
        path.with_name("written").write_text(str(os.getpid()))
        path.with_name("written").rename(path)
        while True:
            signal.pause()

    def take():
        wait_until(lambda: (tmp_path / "pid").exists() and state_of_thread(main) == "S")
        signal.pthread_kill(threading.get_ident(), number)

    main = threading.get_native_id()
    thread = threading.Thread(target=take)
    thread.start()
    with pytest.raises(gs.MainProcessError, match=number.name) as caught:
        gs.launch(work, tmp_path / "pid", 1)
    thread.join()
    assert caught.value.signal_no == number
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text()}")


def state_of_thread(thread):
    with open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_signal_of_the_programs_own_reaches_its_wake_up_descriptor(tmp_path):
    """asyncio learns of its signals so, and a program may call gs.launch within it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before, handler = signal.set_wakeup_fd(writer), signal.signal(signal.SIGUSR1, lambda *_: None)

    def signal_the_launcher(pid):
        os.kill(pid, signal.SIGUSR1)

    try:
        gs.launch(signal_the_launcher, os.getpid(), 1)
        assert select.select([reader], [], [], 60)[0]
        assert os.read(reader, 10) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(writer) == writer
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR1, handler)
        os.close(reader)
        os.close(writer)
