"""What the modules that gradsync replaces can do, a test for each line: a launcher, a spawn and a launch.

The names say the behaviour; what goes deeper stands in the test files of the modules.
"""

import contextlib
import functools
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import command
import pytest
import rank_functions

import gradsync as gs

BY_DEFAULT_AND_BY_NAME = [None, "fork", "forkserver"]  # the default is "spawn"


def assert_warned(caplog, method, n_launches=1):
    """Ranks start by spawn, and each launch by another method warns of it."""
    warnings = [record.message for record in caplog.records if "gradsync starts ranks by spawn" in record.message]
    assert len(warnings) == (0 if method in (None, "spawn") else n_launches)
    assert all(f"not by {method}: module globals that were set before are not copied" in text for text in warnings)


STAND_IN = Path(__file__).parent.parent / "fake_cupy"


@pytest.fixture(autouse=True)
def _mark_this_process(monkeypatch):
    monkeypatch.setattr(rank_functions, "is_in_a_test", True)


@pytest.fixture
def _default_start_method(monkeypatch):
    monkeypatch.setattr("gradsync.launching.launch._default", "spawn")


@pytest.fixture
def _two_cores(monkeypatch):
    monkeypatch.setattr("gradsync.machine.usable_cores", lambda: 2)


def see_gpus(monkeypatch, tmp_path, visible):
    """Shows this process eight GPUs, of which CUDA_VISIBLE_DEVICES names some."""
    for number in range(8):
        (tmp_path / f"nvidia{number}").touch()
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": listdir(tmp_path if path == "/dev" else path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def stand_in_for_cupy(monkeypatch):
    """Gives ranks the tests' CuPy with two GPUs, on which NCCL runs."""
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.setenv("FAKE_CUPY_DEVICES", "2")


@contextlib.contextmanager
def ended_on_exit(program, **options):
    """Starts a program, and leaves nothing of it, whatever the test finds."""
    with subprocess.Popen(program, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


# -- The launcher --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_two_cores")
def test_launcher_is_a_decorator_without_arguments():
    assert rank_functions.bare() == [2, 2]


def test_launcher_is_a_decorator_with_arguments():
    assert rank_functions.rank_in_group(10, factor=3) == [30, 33]


def test_launcher_is_called_directly():
    assert gs.launcher(rank_functions.plain, n_gpus=2)("x") == [("x", True)] * 2


def test_launcher_options_by_position():
    port = gs.free_port()
    run = gs.launcher(rank_functions.backend_of_group, 1, 1, 0, "127.0.0.1", port, "cpu", "local")
    assert run() == ["local"]
    assert gs.launcher(None, 2)(rank_functions.plain)("x") == [("x", True)] * 2


def test_launcher_takes_functions_of_c():
    assert gs.launcher(time.sleep, 1)(0.0) == [None]
    assert gs.launcher(n_gpus=1)(math.sqrt)(4.0) == [2.0]


@pytest.mark.parametrize("method", BY_DEFAULT_AND_BY_NAME)
def test_launcher_accepts_each_start_method(method, caplog):
    run = gs.launcher(rank_functions.start_method, n_gpus=2, start_method=method)
    assert [run(), run()] == [["spawn"] * 2] * 2
    assert_warned(caplog, method, n_launches=2)


def test_launcher_n_gpus_is_the_devices_of_this_node_and_world_size_is_n_gpus(monkeypatch, tmp_path):
    see_gpus(monkeypatch, tmp_path, "4,5")
    run = gs.launcher(rank_functions.size_and_local_size, backend="shm")
    assert run() == [(2, "2")] * 2


def test_launcher_starts_the_server_at_the_call_at_any_free_port():
    before = os.listdir("/proc/self/fd")
    run = gs.launcher(rank_functions.address, n_gpus=1)
    assert os.listdir("/proc/self/fd") == before
    (first,) = run()
    host, _, port = first.rpartition(":")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another program may have it by now
            stack.enter_context(socket.create_server((host, int(port))))
        (second,) = run()
    assert first != second


def test_launcher_starts_the_server_at_the_port_given():
    port = gs.free_port()
    assert gs.launcher(rank_functions.address, n_gpus=1, port=port)() == [f"127.0.0.1:{port}"]


@pytest.mark.parametrize(
    ("options", "host"),
    [({}, "127.0.0.1"), ({"master_ip": "localhost"}, "127.0.0.1"), ({"master_ip": "127.0.0.2"}, "127.0.0.2")],
)
def test_launcher_master_ip_is_localhost_by_default(options, host):
    port = gs.free_port()
    run = gs.launcher(rank_functions.address_and_secrets, n_gpus=1, port=port, **options)
    assert run() == [(f"127.0.0.1:{port}", host, [])]  # for this machine alone, the server is on loopback all the same


# One rank without a GPU takes "local" where it is left to choose.
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, "local"),
        ({"device_type": "cpu"}, "shm"),
        ({"backend": "shm"}, "shm"),
        ({"device_type": "gpu"}, "nccl"),
        ({"backend": "nccl"}, "nccl"),
        ({"device_type": "gpu", "backend": "shm"}, "shm"),
    ],
)
def test_launcher_backend_is_the_one_given_or_that_of_the_device_type(monkeypatch, options, backend):
    stand_in_for_cupy(monkeypatch)
    assert gs.launcher(rank_functions.backend_of_group, n_gpus=1, **options)() == [backend]


def test_launcher_of_another_node_must_be_given_the_port():
    with pytest.raises(gs.InvalidArgument, match="rank_start 2 needs the port of the node with rank_start 0"):
        gs.launcher(n_gpus=2, world_size=4, rank_start=2)


# Once there is a group, the launcher tells of every wait. Rank 2 waits for the test: when it is about to leave
# init_process_group, and at work. On a busy machine rank 1 is late, too: the notice then has a line for each late rank.
NOTICE = re.compile(r"gradsync: ranks? .* (?:has|have) waited \S+ s in barrier #(\d+) for ranks? ([^;\n]+)")
NODE = """
    import os, sys
    import gradsync as gs
    from gradsync import process_group
    from gradsync.communicators import failures

    init_process_group = process_group.init_process_group
    rank = os.environ.get("RANK")

    def tell(what):
        os.write(1, f"rank {rank} {what}\\n".encode())  # in one piece

    def init_slowly(*arguments):
        group = init_process_group(*arguments)
        failures.WARN_AFTER_SECONDS = 0.0
        if rank == "2":
            os.read(gate, 1)
        tell("is initialised")
        return group

    class Result(tuple):
        def __reduce__(self):  # on its way to the launcher
            tell("has left")
            return tuple, (list(self),)

    def work():
        tell("works")
        if rank == "2":
            os.read(gate, 1)
        tell("is done")
        names = "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
        return Result([rank, *(os.environ[name] for name in names)])

    if rank:
        process_group.init_process_group = init_slowly
        gate = os.open(sys.argv[4], os.O_RDONLY)
    if __name__ == "__main__":
        n_gpus, rank_start, port = map(int, sys.argv[1:4])
        run = gs.launcher(work, n_gpus=n_gpus, world_size=3, rank_start=rank_start, port=port, backend="shm")
        os.write(1, f"{run()}\\n".encode())
"""


@contextlib.contextmanager
def nodes(folder, port):
    """Starts two launchers of one run that stand for two machines; gives what all tell, and the gate of rank 2."""
    gate = folder / "gate"
    os.mkfifo(gate)
    reader, writer = os.pipe()
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(open(reader))
        # Opening to read and write waits for nobody.
        opened = stack.enter_context(open(os.open(gate, os.O_RDWR), "wb", buffering=0))
        script = command.write_script(folder, NODE)
        options = {"stdout": writer, "stderr": writer, "env": {**os.environ, "XDG_RUNTIME_DIR": str(folder)}}
        for place in ((1, 2, port), (2, 0, port)):  # the one that must wait for the other comes first
            program = [sys.executable, script, *map(str, place), str(gate)]
            stack.enter_context(ended_on_exit(program, **options))
        os.close(writer)
        yield told, opened


def read_until(told, wanted, barriers, count):
    """Reads until what is wanted, and nothing else, has come, and rank 2 has been waited for in so many barriers."""
    missing = set(wanted)
    while missing or len(barriers) < count:
        line = told.readline()
        notice = NOTICE.match(line)
        if notice and notice[2].endswith("2"):
            barriers.add(notice[1])
        if not is_of_notice(line):
            assert line in missing
            missing.remove(line)


def is_of_notice(line):
    """Whether the line is a notice or, as "  rank 1 (pid 7651) is running", belongs to one."""
    return NOTICE.match(line) or re.match(r"  rank \d+ \(pid \d+\) ", line)


def tells(what, *ranks):
    return {f"rank {rank} {what}\n" for rank in ranks}


def test_launcher_several_machines_barrier_after_init_and_before_exit_and_results_by_local_rank(tmp_path):
    port, barriers = gs.free_port(), set()
    with nodes(tmp_path, port) as (told, gate):
        read_until(told, tells("is initialised", 0, 1), barriers, 1)
        gate.write(b"!")
        read_until(told, tells("is initialised", 2), barriers, 1)
        read_until(told, tells("works", 0, 1, 2) | tells("is done", 0, 1), barriers, 2)
        gate.write(b"!")
        read_until(told, tells("is done", 2), barriers, 2)
        rest = {line for line in told if not is_of_notice(line)}
    where = f"'127.0.0.1', '{port + 1}')"
    results = {
        f"[('0', '3', '0', '2', {where}, ('1', '3', '1', '2', {where}]\n",
        f"[('2', '3', '0', '1', {where}]\n",
    }
    assert rest == results | tells("has left", 0, 1, 2)
    assert not list(tmp_path.glob("*.secret*"))


def test_launcher_exit_0_without_a_result_is_a_warning_and_none():
    with pytest.warns(RuntimeWarning, match="rank 1 exited with code 0 before its function returned") as caught:
        assert rank_functions.exit_0_on_rank_1() == ["returned", None]
    assert [warning.filename for warning in caught] == [__file__]


def test_launcher_failing_process_ends_the_others_and_raises_with_rank_and_exit_code(tmp_path):
    run = gs.launcher(rank_functions.fail_beside_a_rank_that_waits, n_gpus=2)
    with pytest.raises(gs.RankFailed, match=r"rank 1 .* failed with exit code 1; all other ranks") as caught:
        run(tmp_path / "pid")
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    assert command.is_gone(int((tmp_path / "pid").read_text()))


def test_launcher_large_results_do_not_deadlock():
    size = 16 * 2**20
    assert [len(result) for result in rank_functions.large_in_group(size)] == [size] * 2


# -- spawn ---------------------------------------------------------------------------------------------------


def test_spawn_gives_a_context_with_processes_queues_and_sentinels(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    context = gs.spawn(rank_functions.read_on_rank_1, (str(tmp_path / "fifo"),), 2, join=False)
    first, second = context.sentinels
    assert multiprocessing.connection.wait([first, second], 60) == [first]
    with open(tmp_path / "fifo", "w"):
        pass
    assert multiprocessing.connection.wait([second], 60) == [second]
    assert context.join() is True
    assert [process.exitcode for process in context.processes] == [0, 0]
    assert len(context.return_queues) == len(context.error_queues) == 2


@pytest.mark.parametrize("daemon", [True, False])
def test_spawn_daemons_end_with_the_program_and_others_are_waited_for(tmp_path, daemon):
    script = command.write_script(
        tmp_path,
        f"""
        import sys
        import gradsync as gs
        def work(path):
            print(open(path).read())
        if __name__ == "__main__":
            context = gs.spawn(work, (sys.argv[1],), 1, join=False, daemon={daemon})
            print(context.pids()[0], context.processes[0].daemon, flush=True)
        """,
    )
    os.mkfifo(tmp_path / "fifo")
    with ended_on_exit([sys.executable, script, str(tmp_path / "fifo")], stdout=subprocess.PIPE) as program:
        pid, told = program.stdout.readline().split()
        if daemon:
            rest = program.communicate(timeout=60)[0]
            assert command.has_ended(int(pid), 60)
        else:
            with open(tmp_path / "fifo", "w") as fifo:  # waits until the rank is there
                fifo.write("worked on")
            rest = program.communicate(timeout=60)[0]
    assert (told, rest, program.returncode) == (str(daemon), "" if daemon else "worked on\n", 0)


def test_spawn_join_gives_false_when_the_time_is_over(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    context = gs.spawn(rank_functions.read_and_return, (str(tmp_path / "fifo"),), 1, join=False)
    assert context.join(timeout=0) is False
    with open(tmp_path / "fifo", "w"):
        pass
    assert context.join(timeout=60) is True


def test_spawn_return_values_are_in_the_return_queues():
    context = gs.spawn(rank_functions.place, (1, "two"), 2)
    assert [results.get()[1] for results in context.return_queues] == [(1, "two")] * 2


def test_spawn_takes_the_visible_devices(monkeypatch, tmp_path):
    see_gpus(monkeypatch, tmp_path, "4,5,7")
    assert len(gs.spawn(rank_functions.place).processes) == 3


@pytest.mark.usefixtures("_two_cores")
def test_spawn_takes_the_cores_where_there_is_no_device():
    assert len(gs.spawn(rank_functions.place).processes) == 2


@pytest.mark.parametrize("method", BY_DEFAULT_AND_BY_NAME)
def test_spawn_start_methods(method, caplog):
    given = multiprocessing.get_context("spawn")
    numbers = given.Queue()
    options = {} if method is None else {"start_method": method}
    context = gs.spawn(rank_functions.start_method_and_rank, (numbers, given.Lock()), 2, **options)
    assert [results.get() for results in context.return_queues] == [("spawn", rank) for rank in range(2)]
    assert sorted(numbers.get(timeout=30) for _ in range(2)) == [0, 1]
    numbers.close()
    numbers.join_thread()
    assert_warned(caplog, method)


def test_spawn_gpus_are_those_of_the_processes(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    context = gs.spawn(rank_functions.environment, gpus="4,5")
    assert [results.get()["CUDA_VISIBLE_DEVICES"] for results in context.return_queues] == ["4", "5"]
    with pytest.raises(gs.InvalidArgument, match="GPU 6, which is not in this process's CUDA_VISIBLE_DEVICES=3,4,5"):
        gs.spawn(rank_functions.environment, nprocs=2, gpus="4,6")
    with pytest.raises(gs.InvalidArgument, match="one GPU for each of 3 ranks, got 2"):
        gs.spawn(rank_functions.environment, nprocs=3, gpus="4,5")


def test_spawn_ips_are_this_machine():
    gs.spawn(rank_functions.place, nprocs=1, ips="127.0.0.1")
    with pytest.raises(gs.InvalidArgument, match="spawn starts processes on this machine only"):
        gs.spawn(rank_functions.place, nprocs=1, ips="127.0.0.1,192.0.2.1")


def test_spawn_backend_and_print_config(capfd):
    context = gs.spawn(rank_functions.backend, (), 1, backend="local", print_config=True)
    assert context.return_queues[0].get() == "local"
    settings = "nprocs 1, start_method spawn, backend local, gpus as this process, port a free one"
    assert capfd.readouterr().out == f"gradsync.spawn: {settings}\n"


@pytest.mark.parametrize(("nprocs", "gpus", "backend"), [(1, 0, "local"), (2, 0, "shm"), (2, 2, "nccl"), (2, 1, "shm")])
def test_spawn_backend_auto_goes_by_the_devices(monkeypatch, nprocs, gpus, backend):
    stand_in_for_cupy(monkeypatch)
    monkeypatch.setenv("FAKE_CUPY_DEVICES", str(gpus))
    options = {"backend": "auto"} if gpus else {}
    context = gs.spawn(rank_functions.backend, (gpus,), nprocs, **options)
    assert [results.get() for results in context.return_queues] == [backend] * nprocs


def test_spawn_unknown_option_is_named():
    with pytest.raises(gs.InvalidArgument, match="no option 'gpu': did you mean gpus"):
        gs.spawn(rank_functions.place, nprocs=1, gpu="0")


def test_spawn_deprecated_option_is_a_warning():
    given = {
        "selected_devices": ("0", "use gpus"),
        "cluster_node_ips": ("127.0.0.1", "use ips"),
        "node_ip": ("127.0.0.1", "use ips"),
        "started_port": (None, "free port"),
        "use_paddlecloud": (True, "out of scope"),
    }
    options = {name: value for name, (value, _) in given.items()}
    with pytest.warns(DeprecationWarning, match="is deprecated") as caught:
        context = gs.spawn(rank_functions.environment, nprocs=1, **options)
    assert [warning.filename for warning in caught] == [__file__] * len(given)
    for name, (_, advice) in given.items():
        assert any(re.search(f"option {name} is deprecated.*{advice}", str(each.message)) for each in caught), name
    assert context.return_queues[0].get()["CUDA_VISIBLE_DEVICES"] == "0"


def test_spawn_started_port_is_where_the_ranks_meet():
    port = gs.free_port()
    with pytest.warns(DeprecationWarning, match="started_port"):
        context = gs.spawn(rank_functions.environment, nprocs=1, started_port=port)
    assert context.return_queues[0].get()["GRADSYNC_ADDRESS"] == f"127.0.0.1:{port}"


def test_spawn_each_child_has_its_own_environment_without_proxies(monkeypatch):
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    for name in proxies:
        monkeypatch.setenv(name, "http://proxy.invalid")
    before = dict(os.environ)
    context = gs.spawn(rank_functions.environment, (), 2)
    assert dict(os.environ) == before
    for rank, results in enumerate(context.return_queues):
        variables = results.get()
        assert variables["RANK"] == str(rank)
        assert not variables.keys() & set(proxies)


def test_spawn_failure_tells_the_traceback():
    with pytest.raises(gs.RankFailed, match=r"^Process 1 terminated with the following error:\n\nTraceback") as caught:
        gs.spawn(rank_functions.raise_on_rank_1, (), 2)
    assert caught.value.traceback_text.endswith("ValueError: boom")
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


def test_spawn_failure_tells_the_signal():
    with pytest.raises(gs.RankFailed, match=r"^Process 1 terminated with signal SIGKILL$"):
        gs.spawn(rank_functions.kill_rank_1, (), 2)


def test_spawn_failure_tells_the_exit_code():
    with pytest.raises(gs.RankFailed, match=r"^Process 0 terminated with exit code 3$"):
        gs.spawn(rank_functions.exit_with, (3,), 1)


def test_spawn_keyboard_interrupt_in_a_child_is_quiet(capfd):
    context = gs.spawn(rank_functions.interrupt_oneself, (), 1, join=False)
    with pytest.raises(gs.RankFailed, match=r"^Process 0 terminated with exit code 130$"):
        context.join()
    with pytest.raises(queue.Empty):
        context.error_queues[0].get()
    assert capfd.readouterr() == ("", "")


# -- launch --------------------------------------------------------------------------------------------------


def test_launch_sets_the_variables_of_each_process():
    results = gs.launch(rank_functions.place, 1, 2, "localhost", 4321)
    for rank, (variables, _) in enumerate(results):
        assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("localhost", "4321")


def test_launch_never_touches_the_environment_of_the_parent(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    before, during = dict(os.environ), []

    def look_meanwhile():
        with open(tmp_path / "fifo", "w"):  # waits until the rank is there
            during.append(dict(os.environ))

    looker = threading.Thread(target=look_meanwhile, daemon=True)  # no rank may come
    looker.start()
    gs.launch(rank_functions.read_and_return, str(tmp_path / "fifo"), 1)
    looker.join(60)
    assert during == [before]
    assert dict(os.environ) == before


def test_launch_free_port():
    first, second = gs.free_port(), gs.free_port()
    assert first != second
    with socket.create_server(("", first)), socket.create_server(("", second)):
        pass


@pytest.mark.parametrize("method", BY_DEFAULT_AND_BY_NAME)
@pytest.mark.usefixtures("_default_start_method")
def test_launch_set_start_method(method, caplog):
    if method is not None:
        gs.set_start_method(method)
    given = multiprocessing.get_context("spawn")
    numbers = given.Queue()
    results = gs.launch(functools.partial(rank_functions.start_method_and_rank, numbers, given.Lock()), nprocs=2)
    assert results == [("spawn", rank) for rank in range(2)]
    assert sorted(numbers.get(timeout=30) for _ in range(2)) == [0, 1]
    numbers.close()
    numbers.join_thread()
    assert_warned(caplog, method)
    with pytest.raises(gs.InvalidArgument, match="'spawn', 'fork', 'forkserver', got 'thread'"):
        gs.set_start_method("thread")


def test_launch_worker_error():
    with pytest.raises(gs.WorkerError) as caught:
        gs.launch(rank_functions.exit_with, 2, 1)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, multiprocessing.ProcessError)
    assert str(error).splitlines()[0] == "worker[0] failed with exitcode=2"
    assert (error.exitcode, error.worker_id, error.msg) == (2, 0, str(error))


def test_launch_failed_worker_ends_all_grandchildren_too():
    numbers = multiprocessing.get_context("spawn").Queue()
    with pytest.raises(gs.WorkerError, match=r"^worker\[0\] failed with exitcode=1\n"):
        gs.launch(rank_functions.start_grandchild_and_fail, numbers, 2)
    assert command.has_ended(numbers.get(timeout=30), 0)
    numbers.close()
    numbers.join_thread()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_launch_signal_to_the_main_process_ends_all_and_is_told(tmp_path, number):
    script = command.write_script(
        tmp_path,
        """
        import os, signal, sys
        import gradsync as gs
        def work():
            os.write(1, b"%d\\n" % os.getpid())
            while True:
                signal.pause()
        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                gs.launch(work, (), 2)
            except gs.MainProcessError as error:
                left = [pid for pid in sys.stdin.readline().split() if os.path.exists(f"/proc/{pid}")]
                print(error.signal_no, left, error)
        """,
    )
    with ended_on_exit([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        out, _ = process.communicate(" ".join(map(str, pids)), timeout=60)
    assert out.startswith(f"{int(number)} [] ")
    assert number.name in out


def test_launch_is_woken_by_the_end_of_a_worker_and_never_polls(monkeypatch):
    timeouts = []

    class Selector(selectors.DefaultSelector):
        def select(self, timeout=None):
            timeouts.append(timeout)
            return super().select(timeout)

    monkeypatch.setattr("gradsync.launching.supervisor.selectors.DefaultSelector", Selector)
    gs.launch(rank_functions.place, (), 2)
    assert set(timeouts) <= {None, 60.0}  # it looks once a minute whether memory ran out
