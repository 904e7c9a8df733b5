import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import subprocess
import sys
import threading

import command
import pytest
import rank_functions

import gradsync as gs


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


def test_processes_look_like_those_of_multiprocessing(fifo):
    context = gs.spawn(rank_functions.read_and_return, (fifo,), 1, join=False)
    assert isinstance(context, gs.MultiprocessContext)
    (process,) = context.processes
    assert context.pids() == [process.pid]
    os.kill(process.pid, 0)
    assert (process.name, process.daemon, process.exitcode, process.is_alive()) == (
        "gradsync-rank-0",
        False,
        None,
        True,
    )
    assert "started" in repr(process)
    process.join(0.01)
    assert not context.join(timeout=0.01)
    assert not multiprocessing.connection.wait(context.sentinels, 0)
    with open(fifo, "w") as file:
        file.write("done")
    assert context.join()
    assert context.join()
    assert multiprocessing.connection.wait(context.sentinels, 0) == context.sentinels == [process.sentinel]
    assert (process.exitcode, process.is_alive()) == (0, False)
    assert "stopped exitcode=0" in repr(process)
    process.join()
    process.kill()  # nothing is left to kill
    (results,) = context.return_queues
    assert not results.empty()
    assert results.get() == ("done", process.pid)


def test_a_queue_of_a_rank_that_has_ended_does_not_wait():
    context = gs.spawn(rank_functions.place, (), 1)
    context.return_queues[0].get()
    for ended in (*context.return_queues, *context.error_queues):
        with pytest.raises(queue.Empty):
            ended.get()


@pytest.mark.parametrize(("method", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)])
def test_a_process_that_the_caller_ends(method, number):
    context = gs.spawn(rank_functions.wait_for_signal, (), 2, join=False)
    assert len(set(context.pids())) == 2
    getattr(context.processes[1], method)()
    with pytest.raises(gs.RankFailed, match=rf"^Process 1 terminated with signal {number.name}$") as caught:
        context.join()
    assert (caught.value.rank, caught.value.exit_code) == (1, -number)
    assert context.processes[1].exitcode == -number


def test_result_that_does_not_unpickle_here():
    context = gs.spawn(rank_functions.return_stubborn, (), 1)
    with pytest.raises(gs.InvalidArgument, match="return value of rank 0 cannot be unpickled in the launching process"):
        context.return_queues[0].get()


def test_nothing_is_left_behind():
    gs.spawn(rank_functions.place, (), 1)  # what stays loaded stays open
    gc.collect()  # what other tests have left
    descriptors, threads = os.listdir("/proc/self/fd"), set(threading.enumerate())
    context = gs.spawn(rank_functions.place, (), 2, join=False)
    context.join()
    with pytest.raises(gs.RankFailed):
        gs.spawn(rank_functions.exit_with, (1,), 2)
    with pytest.raises(gs.RankFailed):
        context = gs.spawn(rank_functions.exit_with, (1,), 2, join=False)
        context.join()
    del context
    for thread in threading.enumerate():
        if thread.name == "gradsync-supervisor":
            thread.join()
    assert not command.opened_since(descriptors)
    assert set(threading.enumerate()) <= threads  # what an earlier test has left may end meanwhile


def run_python(script, **options):
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)"])
def test_a_program_that_ends_waits_for_its_processes_and_tells_their_failure(tmp_path, ending):
    script = command.write_script(
        tmp_path,
        f"""
        import gradsync as gs
        def work(path):
            open(path, "w").close()
            raise ValueError("boom")
        if __name__ == "__main__":
            gs.spawn(work, ({str(tmp_path / "begun")!r},), 1, join=False)
            {ending}
        """,
    )
    done = run_python(script)
    assert (tmp_path / "begun").exists()
    assert done.returncode == (3 if ending else 0)
    assert done.stderr.endswith("ValueError: boom\n")
    assert "gradsync: rank 0 (pid " in done.stderr


def test_a_failure_that_was_told_is_not_told_again(tmp_path):
    script = command.write_script(
        tmp_path,
        """
        import gradsync as gs
        def work():
            raise ValueError("boom")
        if __name__ == "__main__":
            for join in (True, False):
                try:
                    gs.spawn(work, (), 1, join=join).join()
                except gs.RankFailed:
                    print("told")
        """,
    )
    done = run_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\ntold\n", "")


INTERRUPTED = """
    import os, signal, sys, threading
    import gradsync as gs
    def told(wait):
        def told_and_wait(*timeout):
            os.write(1, b"waiting\\n")
            return wait(*timeout)
        return told_and_wait
    def work(stubborn):
        if stubborn:
            signal.signal(signal.SIGINT, lambda *_: os.write(1, b"stubborn\\n"))
        os.write(1, b"%d\\n" % os.getpid())
        while True:
            signal.pause()
    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        where, stubborn = sys.argv[1], len(sys.argv) > 2
        try:
            context = gs.spawn(work, (stubborn,), 2, join=where == "spawn")
            if where == "outside":
                told(signal.pause)()
            context._end.wait = told(context._end.wait)
            context.join()
        except KeyboardInterrupt:
            os.write(1, b"interrupted\\n")
            if where == "outside":
                raise
            if where == "join":
                print(context.join(), [process.exitcode for process in context.processes])
"""


def start_interrupted(tmp_path, *arguments):
    script = command.write_script(tmp_path, INTERRUPTED)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            command.Launcher(
                [sys.executable, script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        lines = [process.stdout.readline().strip() for _ in range(2 if arguments[0] == "spawn" else 3)]
        pids = [int(line) for line in lines if line != "waiting"]
        stack.pop_all()
    return process, pids


@pytest.mark.parametrize("where", ["spawn", "join", "outside"])
def test_ctrl_c_ends_the_ranks_in_order(tmp_path, where):
    process, pids = start_interrupted(tmp_path, where)
    with process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert all(command.has_ended(pid, 0) for pid in pids)
    assert out.replace("waiting\n", "") == "interrupted\n" + ("True [130, 130]\n" if where == "join" else "")
    if where == "outside":
        assert err.endswith("KeyboardInterrupt\n")
        assert process.returncode == -signal.SIGINT
    else:
        assert (process.returncode, err) == (0, "")


INTERRUPTED_AT_START = """
    import os, signal, subprocess, threading
    import gradsync as gs
    def work():
        while True:
            signal.pause()
    def interrupt():
        begun.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # the kernel gives it to any thread that takes it
        sent.set()
    class Popen(subprocess.Popen):  # waits, so that the signal comes before all ranks have started
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            begun.set()
            sent.wait()
    begun, sent = threading.Event(), threading.Event()
    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt).start()
        subprocess.Popen = Popen
        try:
            gs.spawn(work, nprocs=4, join=False)
        except KeyboardInterrupt as error:
            print("interrupted", repr(error.__context__))
"""


def test_ctrl_c_while_the_ranks_start_ends_them(tmp_path):
    script = command.write_script(tmp_path, INTERRUPTED_AT_START)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted None\n", "")


def test_a_second_ctrl_c_kills(tmp_path):
    process, pids = start_interrupted(tmp_path, "join", "stubborn")
    with process:
        process.send_signal(signal.SIGINT)
        lines = [process.stdout.readline() for _ in range(3)]
        assert sorted(lines) == ["stubborn\n", "stubborn\n", "waiting\n"]
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert out.replace("waiting\n", "") == "interrupted\nTrue [-9, -9]\n"
    assert all(command.has_ended(pid, 0) for pid in pids)


def test_sigterm_while_spawn_waits(tmp_path):
    process, pids = start_interrupted(tmp_path, "spawn")
    with process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert all(command.has_ended(pid, 0) for pid in pids)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((None,), {}, "spawn needs a function, got None"),
        ((rank_functions.place, 5), {}, "spawn needs args as a tuple, got 5"),
        ((rank_functions.place, "text"), {}, r"one argument is written \(value,\)"),
        ((rank_functions.place, (), 0), {}, "spawn needs nprocs to be an integer of at least 1, got 0"),
        ((rank_functions.place, (), -2), {}, "got -2"),
        ((rank_functions.place, (), True), {}, "got True"),
        ((rank_functions.place,), {"zzz": 1}, r"no option 'zzz' \(it has start_method, gpus, ips, backend"),
        ((rank_functions.place,), {"start_method": "thread"}, "the start method to be one of 'spawn', 'fork'"),
        ((rank_functions.place,), {"backend": "ucc"}, "spawn needs backend to be one of auto, .*, got 'ucc'"),
        ((rank_functions.place, (), 1), {"ips": [""]}, "'' in ips .* does not belong to it"),
    ],
)
def test_bad_arguments_are_refused_before_any_process_starts(monkeypatch, arguments, options, text):
    monkeypatch.setattr("gradsync.launching.supervisor.RankProcess", None)
    with pytest.raises(gs.InvalidArgument, match=text):
        gs.spawn(*arguments, **options)


@pytest.mark.parametrize("port", ["text", -1, 65536, True])
def test_bad_port(port):
    with (
        pytest.warns(DeprecationWarning, match="started_port"),
        pytest.raises(gs.InvalidArgument, match="started_port to be an integer from 0 to 65535"),
    ):
        gs.spawn(rank_functions.place, started_port=port)


def test_a_start_that_fails_leaves_nothing(monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        for _ in range(2):  # what stays loaded stays open: counted is the second time
            descriptors = os.listdir("/proc/self/fd")
            with (
                pytest.warns(DeprecationWarning, match="started_port"),
                pytest.raises(gs.RendezvousError, match=str(port)),
            ):
                gs.spawn(rank_functions.place, (), 1, started_port=port)
    assert not command.opened_since(descriptors)
