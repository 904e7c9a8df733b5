"""gs.spawn, with what PaddlePaddle's spawn offers: the context with its processes and queues, options, failures."""

import functools
import multiprocessing.connection
import os
import queue
import signal
import socket
import subprocess
import sys

import pytest

import gradsync as gs
from commands import is_running, wait_until


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


def environment():
    return dict(os.environ)


def read(path):
    with open(path) as file:
        return file.read(), os.getpid()


def wait_for_a_signal():
    while True:
        signal.pause()


def test_the_context_has_processes_queues_and_sentinels_as_multiprocessing_has(fifo):
    def work(path):
        return read(path) if os.environ["RANK"] == "1" else "first"

    context = gs.spawn(work, (fifo,), 2, join=False)
    first, second = context.sentinels
    assert multiprocessing.connection.wait([first, second], 60) == [first]
    assert context.join(timeout=0) is False
    process = context.processes[1]
    assert (process.name, process.daemon, process.exitcode) == ("gradsync-rank-1", False, None)
    assert process.is_alive()
    assert is_running(process.pid)
    assert "started" in repr(process)
    process.join(0.01)
    with open(fifo, "w") as file:
        file.write("done")
    assert multiprocessing.connection.wait([second], 60) == [second]
    assert context.join() is context.join(timeout=60) is True
    assert multiprocessing.connection.wait(context.sentinels, 0) == [first, second]
    assert [each.exitcode for each in context.processes] == [0, 0]
    assert not process.is_alive()
    assert "stopped exitcode=0" in repr(process)
    process.kill()  # nothing is left to kill
    assert context.pids() == [each.pid for each in context.processes]
    assert isinstance(context, gs.MultiprocessContext)
    results = context.return_queues
    assert not results[1].empty()
    assert [each.get() for each in results] == ["first", ("done", process.pid)]
    for ended in (*results, *context.error_queues):
        with pytest.raises(queue.Empty):  # of a rank that has ended nothing is awaited
            ended.get()


def test_the_caller_may_end_a_process():
    context = gs.spawn(wait_for_a_signal, (), 2, join=False)
    context.processes[1].terminate()
    with pytest.raises(gs.RankFailed, match="SIGTERM") as caught:
        context.join()
    assert (caught.value.rank, caught.value.exit_code, caught.value.phase) == (1, -15, "function")
    assert context.processes[1].exitcode == -15


FAILURES = {
    # what the process does: (its exit code, how the error begins)
    "raise ValueError('boom')": (1, "Process 1 terminated with the following error:\n\nTraceback"),
    "os.kill(os.getpid(), 9)": (-9, "Process 1 terminated with signal SIGKILL"),
    "sys.exit(3)": (3, "Process 1 terminated with exit code 3"),
}


@pytest.mark.parametrize("statement", FAILURES)
def test_a_failure_ends_the_others_and_tells_how(statement, capfd):
    def work(statement):
        if os.environ["RANK"] == "1":
            exec(statement, {"os": os, "sys": sys})
        wait_for_a_signal()

    context = gs.spawn(work, (statement,), 2, join=False)
    with pytest.raises(gs.RankFailed) as caught:
        context.join()
    code, begin = FAILURES[statement]
    assert (caught.value.rank, caught.value.exit_code) == (1, code)
    assert str(caught.value).startswith(begin)
    assert caught.value.traceback_text.endswith("ValueError: boom" if "boom" in statement else "")
    if "boom" in statement:
        assert "ValueError: boom" in context.error_queues[1].get()
    with pytest.raises(queue.Empty):
        context.error_queues[1].get()
    assert capfd.readouterr().out == ""
    assert all(not is_running(pid) for pid in context.pids())


def test_a_function_that_wants_the_rank_first_is_refused_before_anything_starts():
    """As torch.multiprocessing.spawn calls it."""

    def train(rank, world_size, rate=0.1):
        pass

    with pytest.raises(gs.InvalidArgument, match=r"calls .*train\(\*args\) without the rank"):
        gs.spawn(train, (2,), 2)


def configured(function):
    @functools.wraps(function)
    def with_configuration(*args):
        return function({"rate": 0.1}, *args)

    return with_configuration


@configured
def rate(configuration):
    return configuration["rate"]


def test_a_decorator_may_fill_in_the_first_argument():
    assert gs.spawn(rate, (), 1).return_queues[0].get() == 0.1


def test_each_process_has_its_own_environment_without_proxies(monkeypatch):
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    for name in proxies:
        monkeypatch.setenv(name, "http://proxy.invalid")
    before = dict(os.environ)
    context = gs.spawn(environment, (), 2)
    assert dict(os.environ) == before
    for rank, results in enumerate(context.return_queues):
        variables = results.get()
        assert variables["RANK"] == str(rank)
        assert not variables.keys() & set(proxies)


def test_options_print_config_backend_and_ips(capfd):
    context = gs.spawn(environment, (), 1, backend="local", ips="127.0.0.1", print_config=True)
    assert context.return_queues[0].get()["GRADSYNC_BACKEND"] == "local"
    settings = "nprocs 1, start_method spawn, backend local, gpus as this process, port a free one"
    assert capfd.readouterr().out == f"gradsync.spawn: {settings}\n"


def test_deprecated_options_are_warnings_that_name_the_caller():
    port = gs.free_port()
    given = {
        "selected_devices": "0",
        "cluster_node_ips": "127.0.0.1",
        "node_ip": "127.0.0.1",
        "started_port": port,
        "use_paddlecloud": True,
    }
    with pytest.warns(DeprecationWarning, match="is deprecated") as caught:
        context = gs.spawn(environment, nprocs=1, **given)
    assert [warning.filename for warning in caught] == [__file__] * len(given)
    variables = context.return_queues[0].get()
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["GRADSYNC_ADDRESS"]) == ("0", f"127.0.0.1:{port}")
    for wrong in ("text", -1, 65536, True):
        with (
            pytest.warns(DeprecationWarning, match="started_port"),
            pytest.raises(gs.InvalidArgument, match="started_port"),
        ):
            gs.spawn(environment, started_port=wrong)


def test_a_taken_port_is_an_error_and_leaves_nothing_open():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        counts = []
        for _ in range(2):  # what is loaded once stays open
            with pytest.raises(gs.RendezvousError, match=str(port)):
                gs.launcher(environment, n_gpus=1, port=port)()
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] <= counts[0]  # something else of the process may have closed one meanwhile


def test_gloo_means_shared_memory_and_the_log_says_so(caplog):
    def backend():
        with gs.init_process_group() as comm:
            return comm.backend

    context = gs.spawn(backend, nprocs=1, backend="gloo")
    assert [results.get() for results in context.return_queues] == ["shm"]
    assert [record.message.partition(":")[0] for record in caplog.records] == ["spawn"]


# -- The end of the program --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("daemon", [True, False])
def test_a_program_ends_its_daemons_and_waits_for_other_processes(daemon, cli, script, fifo):
    program = cli.start_program(
        sys.executable,
        script(
            f"""
            import sys
            import gradsync as gs
            def work(path):
                print(open(path).read())
            if __name__ == "__main__":
                context = gs.spawn(work, (sys.argv[1],), 1, join=False, daemon={daemon})
                print(context.pids()[0], context.processes[0].daemon, flush=True)
            """
        ),
        fifo,
    )
    pid, is_daemon = program.stdout.readline().split()
    if not daemon:
        with open(fifo, "w") as file:  # waits until the rank is there
            file.write("worked on")
    assert program.result() == (0, "" if daemon else "worked on\n", "")
    assert is_daemon == str(daemon)
    wait_until(lambda: not is_running(int(pid)))


def test_a_failure_is_told_once_by_join_or_at_the_end_of_the_program(cli, script):
    path = script(
        """
        import sys
        import gradsync as gs
        def work():
            raise ValueError("boom")
        if __name__ == "__main__":
            for join in (True, False):
                try:
                    gs.spawn(work, (), 1, join=join).join()
                except gs.RankFailed:
                    print("raised")
            if sys.argv[1:]:
                gs.spawn(work, (), 1, join=False)
                raise SystemExit(3)
        """
    )
    assert cli.python(path) == (0, "raised\n" * 2, "")
    done = cli.python(path, "end")
    assert done.code == 3
    assert done.err.startswith("gradsync: rank 0 (pid ")
    assert done.err.endswith("ValueError: boom\n")


INTERRUPTED = """
    import os, signal, sys
    import gradsync as gs
    def work(stubborn):
        if stubborn:
            signal.signal(signal.SIGINT, lambda *_: os.write(1, b"stubborn\\n"))
        os.write(1, b"rank\\n")
        while True:
            signal.pause()
    if __name__ == "__main__":
        where, stubborn = sys.argv[1], len(sys.argv) > 2
        try:
            context = gs.spawn(work, (stubborn,), 2, join=where == "spawn")
            os.write(1, b"started\\n")  # from here on a signal finds the context
            if where == "outside":
                signal.pause()
            context.join()
        except KeyboardInterrupt:
            if where == "outside":
                raise
            print("interrupted")
            if where == "join":
                print(context.join(), [process.exitcode for process in context.processes])
"""


@pytest.mark.parametrize("where", ["spawn", "join", "outside"])
def test_ctrl_c_ends_the_ranks_in_order(where, cli, script):
    program = cli.start_program(sys.executable, script(INTERRUPTED), where)
    wanted = ["rank\n"] * 2 + ["started\n"] * (where != "spawn")
    assert sorted(program.stdout.readline() for _ in wanted) == wanted
    wait_until(lambda: sleeps(program.pid))
    program.send_signal(signal.SIGINT)
    code, out, err = program.result()
    if where == "outside":
        assert (code, out) == (-signal.SIGINT, "")
        assert err.endswith("KeyboardInterrupt\n")
    else:
        assert (code, out, err) == (0, "interrupted\n" + "True [130, 130]\n" * (where == "join"), "")


def sleeps(pid):
    """Whether its main thread waits: where a signal may come at any moment of a start, Python has no rules."""
    with open(f"/proc/{pid}/task/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"


def test_a_second_ctrl_c_kills(cli, script):
    program = cli.start_program(sys.executable, script(INTERRUPTED), "join", "stubborn")
    assert sorted(program.stdout.readline() for _ in range(3)) == ["rank\n"] * 2 + ["started\n"]
    wait_until(lambda: sleeps(program.pid))
    program.send_signal(signal.SIGINT)
    assert [program.stdout.readline() for _ in range(2)] == ["stubborn\n"] * 2
    program.send_signal(signal.SIGINT)
    assert program.result() == (0, "interrupted\nTrue [-9, -9]\n", "")


def test_sigterm_while_spawn_waits_ends_the_program(cli, script):
    program = cli.start_program(sys.executable, script(INTERRUPTED), "spawn")
    assert [program.stdout.readline() for _ in range(2)] == ["rank\n"] * 2
    program.send_signal(signal.SIGTERM)
    assert program.result().code == 128 + signal.SIGTERM


def test_ctrl_c_while_the_ranks_start_ends_them(cli, script):
    """The kernel may give it to any thread; and it comes before all ranks have been started."""
    path = script(
        """
        import signal, subprocess, threading
        import gradsync as gs
        def work():
            while True:
                signal.pause()
        def interrupt():
            begun.wait()
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            sent.set()
        class Popen(subprocess.Popen):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                begun.set()
                sent.wait()
        begun, sent = threading.Event(), threading.Event()
        if __name__ == "__main__":
            threading.Thread(target=interrupt).start()
            subprocess.Popen = Popen
            try:
                gs.spawn(work, nprocs=4, join=False)
            except KeyboardInterrupt as error:
                print("interrupted", repr(error.__context__))
        """
    )
    assert cli.python(path) == (0, "interrupted None\n", "")


def test_ctrl_c_is_not_blocked_where_a_rank_cannot_be_started(monkeypatch):
    def fail(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)  # as the kernel answers at a limit of processes
    with pytest.raises(gs.BackendUnavailable):
        gs.launch(os.getpid, nprocs=2)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
