import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time

import command
import pytest

import gradsync as gs
from contract import wait_until
from gradsync.launching.signals import SignalInbox
from gradsync.machine import read_stat

PATIENT = """
    import os, signal
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        signal.pause()
"""
STUBBORN = """
    import os, signal
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: os.write(1, b"got %d\\n" % n))
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        signal.pause()
"""
PATIENTLY = ("--grace", 1000)  # a rank of a busy machine takes its time, and would be killed
STOPPING = "gradsync: stopping 2 ranks (Ctrl-C again kills them)\n"
COUNTING = """
    import os, signal, sys
    def note(number, frame):
        os.write(1, b"got %d\\n" % number)  # in one piece: both ranks write
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, note)
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        signal.pause()
"""


@pytest.fixture
def launched(tmp_path):
    processes = []

    def start(source, *options):
        script = command.write_script(tmp_path, source)
        process = command.start("run", "--no-prefix", "-n", 2, *options, script)
        processes.append(process)
        pids = [int(process.stdout.readline()) for _ in range(2)]
        return process, pids

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_all_quietly(launched):
    process, pids = launched(PATIENT, *PATIENTLY)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", STOPPING)
    assert all(map(command.is_gone, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_is_forwarded_once(launched, number):
    process, pids = launched(COUNTING, *PATIENTLY)
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, err) == (128 + number, STOPPING if number == signal.SIGINT else "")
    assert out == f"got {int(number)}\n" * 2
    assert all(map(command.is_gone, pids))


def test_second_ctrl_c_kills_at_once(launched):
    process, pids = launched(STUBBORN, *PATIENTLY)
    process.send_signal(signal.SIGINT)
    assert [process.stdout.readline() for _ in pids] == ["got 2\n"] * 2
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)  # far less than the grace
    assert process.returncode == 130
    assert all(map(command.is_gone, pids))


def test_sigterm_kills_stubborn_ranks_after_the_grace(launched):
    process, pids = launched(STUBBORN)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert time.monotonic() - start > 4
    assert process.returncode == 143
    assert all(map(command.is_gone, pids))


def test_ctrl_c_while_the_ranks_boot_is_quiet(tmp_path):
    # sitecustomize runs long before our own code in the rank.
    command.write_script(
        tmp_path,
        """
        import os, select, sys
        if "GRADSYNC_RANK" in os.environ:
            os.kill(os.getppid(), 2) if os.environ["GRADSYNC_RANK"] == "0" else None
            rank, pid, record, status, command, *_ = sys.orig_argv[sys.orig_argv.index("-c") + 2].split(",")
            select.select([int(command)], [], [], 30)  # until the launcher has forwarded the signal
        """,
        "sitecustomize.py",
    )
    script = command.write_script(tmp_path, "import signal; signal.pause()")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    code, out, err = command.run("run", "-n", 2, *PATIENTLY, script, env=os.environ | {"PYTHONPATH": path})
    assert (code, out) == (130, "")
    assert err in (STOPPING, "gradsync: stopping 1 rank (Ctrl-C again kills it)\n")  # the other may not be started yet


def test_exit_codes_survive_an_ignored_sigchld(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit(3)")
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", ignore, sys.executable, "-m", "gradsync", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr


def test_a_signal_that_nobody_read_acts_on_leaving():
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with SignalInbox():
            signal.raise_signal(signal.SIGTERM)
            assert received == []
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


STUCK = """
    import sys, threading, time
    import numpy as np
    import gradsync as gs

    def read_batch():
        with open(sys.argv[1]) as pipe:  # to which nobody writes
            print("opened", flush=True)
            pipe.read()

    def tell_when_inside(recorder):
        while not recorder.last.title.startswith("all_reduce"):
            time.sleep(0.01)
        print("inside", flush=True)

    with gs.init_process_group("shm") as comm:
        comm.barrier()
        if comm.rank == 1:
            read_batch()
        threading.Thread(target=tell_when_inside, args=[comm.recorder], daemon=True).start()
        comm.all_reduce(np.ones(4))
"""


def test_a_signal_that_comes_outside_pythons_main_thread_ends_the_launchers_wait():
    # As one does that comes just before the wait begins: Python's handlers run in the main thread alone, and not there.
    main = threading.get_native_id()

    def take() -> None:
        wait_until(lambda: (stat := read_stat(main)) is None or stat.state == "S")
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with SignalInbox() as inbox:
        thread = threading.Thread(target=take)
        thread.start()
        ready, _, _ = select.select([inbox.descriptor], [], [], 30)
        thread.join()
        assert ready == [inbox.descriptor]
        assert inbox.read() == [signal.SIGINT]
        assert inbox.read() == []


class Stopped(Exception):
    pass


@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("raises", [False, True])
def test_no_signal_is_lost_as_an_inbox_opens_or_closes(place, raises, monkeypatch):
    # SIGTERM arrives right after the place-th call by which the inbox changes what signals do.
    received, taken, calls = [], [], []

    def handle(number, frame):
        received.append(number)
        if raises:
            raise Stopped

    def then_comes(function):
        def call(*args, **options):
            result = function(*args, **options)
            calls.append(args)
            if len(calls) == place + 1:
                signal.raise_signal(signal.SIGTERM)
            return result

        return call

    before = signal.signal(signal.SIGTERM, handle)
    all_before = [signal.getsignal(number) for number in range(1, signal.NSIG)]
    try:
        with monkeypatch.context() as patch, contextlib.suppress(Stopped):
            patch.setattr(signal, "signal", then_comes(signal.signal))
            patch.setattr(signal, "set_wakeup_fd", then_comes(signal.set_wakeup_fd))
            with SignalInbox() as inbox:
                taken += inbox.read()
        assert len(calls) <= place or received + taken
        assert [signal.getsignal(number) for number in range(1, signal.NSIG)] == all_before
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_is_not_blocked_where_a_rank_could_not_be_started(monkeypatch):
    def fail(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", fail)
            with pytest.raises(gs.BackendUnavailable):
                gs.launch(os.getpid, nprocs=2)
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def test_a_signal_of_the_programs_own_reaches_its_wake_up_descriptor():
    # asyncio learns of its signals so, and a program may call gs.launch within it.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with SignalInbox() as inbox:
            signal.raise_signal(signal.SIGUSR1)
            assert inbox.read() == []
            assert os.read(reader, 10) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(writer) == writer
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR1, handler)
        os.close(reader)
        os.close(writer)


def test_a_thread_may_put_a_signal_after_the_inbox_has_been_left():
    with SignalInbox() as inbox:
        pass
    reader, writer = os.pipe()  # with the descriptors that the inbox had
    try:
        inbox.put(signal.SIGINT)
        assert select.select([reader], [], [], 0) == ([], [], [])
    finally:
        os.close(reader)
        os.close(writer)
