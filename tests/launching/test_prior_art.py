"""What the modules that gradsync replaces can do, a test for each line: a launcher, a spawn and a launch.

The names say the behaviour; what goes deeper stands in the test files of the modules.
"""

import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading

import command
import pytest
import rank_functions

import gradsync as gs
from gradsync.launching import cuda_state, start_method_choice

METHODS = ["spawn", "fork", "forkserver"]


@pytest.fixture
def _default_start_method(monkeypatch):
    monkeypatch.setattr(start_method_choice, "_default", "spawn")


@pytest.fixture
def _two_cores(monkeypatch):
    monkeypatch.setattr("gradsync.visible_devices.usable_cores", lambda: 2)


def see_gpus(monkeypatch, tmp_path, visible):
    """Shows this process eight GPUs, of which CUDA_VISIBLE_DEVICES names some."""
    for number in range(8):
        (tmp_path / f"nvidia{number}").touch()
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": listdir(tmp_path if path == "/dev" else path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def touch_cuda(monkeypatch):
    monkeypatch.setattr(cuda_state, "devices_in_use", lambda: [0])


# -- The launcher --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_two_cores")
def test_launcher_is_a_decorator_without_arguments():
    assert rank_functions.bare() == [2, 2]


def test_launcher_is_a_decorator_with_arguments():
    assert rank_functions.rank_in_group(10, factor=3) == [30, 33]


def test_launcher_is_called_directly():
    assert gs.launcher(rank_functions.plain, n_gpus=2)("x") == [("x", True)] * 2


@pytest.mark.parametrize("method", METHODS)
def test_launcher_starts_processes_by_each_method(method):
    run = gs.launcher(rank_functions.rank_in_group.__wrapped__, n_gpus=2, start_method=method)
    assert run(10, factor=2) == [20, 22]


def test_launcher_n_gpus_is_the_devices_of_this_node_and_world_size_is_n_gpus(monkeypatch, tmp_path):
    see_gpus(monkeypatch, tmp_path, "4,5")
    run = gs.launcher(rank_functions.size_and_local_size, backend="shm")
    assert run() == [(2, "2")] * 2


def test_launcher_starts_the_server_at_the_call_at_any_free_port():
    before = os.listdir("/proc/self/fd")
    run = gs.launcher(rank_functions.address, n_gpus=1)
    assert os.listdir("/proc/self/fd") == before
    ports = {int(run()[0].rpartition(":")[2]) for _ in range(2)}
    assert min(ports) > 0


def test_launcher_starts_the_server_at_the_port_given():
    port = gs.free_port()
    assert gs.launcher(rank_functions.address, n_gpus=1, port=port)() == [f"127.0.0.1:{port}"]


def test_launcher_of_another_node_must_be_given_the_port():
    with pytest.raises(gs.InvalidArgument, match="rank_start 2 needs the port of the node with rank_start 0"):
        gs.launcher(n_gpus=2, world_size=4, rank_start=2)


NODE = """
    import os, sys
    import gradsync as gs
    def work(fifo):
        comm = gs.get_communicator()
        os.write(1, b"%d\\n" % os.getpid())  # in one piece
        if comm.rank == comm.world_size - 1:
            open(fifo).close()
        names = "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
        return comm.rank, [os.environ[name] for name in names]
    if __name__ == "__main__":
        n_gpus, rank_start, port = map(int, sys.argv[1:4])
        run = gs.launcher(work, n_gpus=n_gpus, world_size=3, rank_start=rank_start, port=port, backend="shm")
        print(run(sys.argv[4]))
"""


def start_node(tmp_path, *arguments):
    script = command.write_script(tmp_path, NODE)
    program = [sys.executable, script, *map(str, arguments), str(tmp_path / "fifo")]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_launcher_several_machines_results_by_local_rank_and_barrier_before_exit(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    port = gs.free_port()
    # Two launchers on this machine stand for two machines; the one that must wait for the other comes first.
    with start_node(tmp_path, 1, 2, port) as second, start_node(tmp_path, 2, 0, port) as first:
        pids = [int(first.stdout.readline()) for _ in range(2)]
        int(second.stdout.readline())
        assert not any(command.has_ended(pid, 0.2) for pid in pids)  # their work is done, that of rank 2 is not
        with open(tmp_path / "fifo", "w"):
            pass
        ends = [process.communicate(timeout=60) for process in (first, second)]
    variables = ["127.0.0.1", str(port + 1)]
    local = [(rank, ["3", str(rank), "2", *variables]) for rank in (0, 1)]
    assert ends == [(f"{local}\n", ""), (f"{[(2, ['3', '0', '1', *variables])]}\n", "")]
    assert not list(tmp_path.glob("*.secret*"))


def test_launcher_exit_0_without_a_result_is_a_warning_and_none():
    with pytest.warns(RuntimeWarning, match="rank 1 exited with code 0 before its function returned") as caught:
        assert rank_functions.exit_0_on_rank_1() == ["returned", None]
    assert [warning.filename for warning in caught] == [__file__]


def test_launcher_failing_process_ends_the_others_and_raises_with_rank_and_exit_code():
    with pytest.raises(gs.RankFailed, match=r"rank 1 .* failed with exit code 1; all other ranks") as caught:
        rank_functions.fail_in_group()
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


def test_launcher_large_results_do_not_deadlock():
    size = 16 * 2**20
    assert [len(result) for result in rank_functions.large_in_group(size)] == [size] * 2


@pytest.mark.parametrize(
    "start",
    [
        lambda: gs.launcher(rank_functions.plain, n_gpus=1, start_method="fork")(1),
        lambda: gs.spawn(rank_functions.place, (), 1, start_method="fork"),
        lambda: (gs.set_start_method("fork"), gs.launch(rank_functions.place, (), 1)),
    ],
)
@pytest.mark.usefixtures("_default_start_method")
def test_cuda_is_checked_before_processes_start(monkeypatch, start):
    monkeypatch.setattr("gradsync.launching.supervisor.RankProcess", None)
    touch_cuda(monkeypatch)
    with pytest.raises(gs.InvalidArgument, match="keep CUDA out of the parent before forking"):
        start()


# -- spawn ---------------------------------------------------------------------------------------------------


def test_spawn_gives_a_context_with_processes_queues_and_sentinels():
    context = gs.spawn(rank_functions.place, (1,), 2, join=False)
    assert context.join() is True
    assert [process.exitcode for process in context.processes] == [0, 0]
    assert len(context.return_queues) == len(context.error_queues) == len(context.sentinels) == 2


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


@pytest.mark.parametrize("method", [None, *METHODS])
def test_spawn_start_methods(method):
    given = multiprocessing.get_context(method or "spawn")
    numbers = given.Queue()
    options = {} if method is None else {"start_method": method}
    context = gs.spawn(rank_functions.start_method_and_rank, (numbers, given.Lock()), 2, **options)
    expected = "forkserver" if method == "forkserver" else "other"
    if method != "fork":  # which has all that this process has imported
        assert [results.get() for results in context.return_queues] == [(expected, 0), (expected, 1)]
    assert sorted(numbers.get(timeout=30) for _ in range(2)) == [0, 1]
    numbers.close()
    numbers.join_thread()


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
    assert [line.split() for line in capfd.readouterr().out.splitlines()] == [
        ["gradsync.spawn"],
        ["nprocs", "1"],
        ["start_method", "spawn"],
        ["backend", "local"],
        ["gpus", "as", "this", "process"],
        ["port", "a", "free", "one"],
    ]


def test_spawn_unknown_option_is_named():
    with pytest.raises(gs.InvalidArgument, match="no option 'gpu'; did you mean gpus"):
        gs.spawn(rank_functions.place, nprocs=1, gpu="0")


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("selected_devices", "0", "use gpus"),
        ("cluster_node_ips", "127.0.0.1", "use ips"),
        ("node_ip", "127.0.0.1", "use ips"),
        ("started_port", None, "free port"),
        ("use_paddlecloud", True, "out of scope"),
    ],
)
def test_spawn_deprecated_option_is_a_warning(name, value, advice):
    with pytest.warns(DeprecationWarning, match=f"option {name} is deprecated.*{advice}") as caught:
        context = gs.spawn(rank_functions.environment, nprocs=1, **{name: value})
    assert [warning.filename for warning in caught] == [__file__]
    if name == "selected_devices":
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
    results = gs.launch(rank_functions.place, (1,), 2, "localhost", 4321)
    for rank, (variables, _) in enumerate(results):
        assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("localhost", "4321")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("_default_start_method")
def test_launch_never_touches_the_environment_of_the_parent(tmp_path, method):
    gs.set_start_method(method)
    os.mkfifo(tmp_path / "fifo")
    before, during = dict(os.environ), []

    def look_meanwhile():
        with open(tmp_path / "fifo", "w"):  # waits until the rank is there
            during.append(dict(os.environ))

    looker = threading.Thread(target=look_meanwhile)
    looker.start()
    gs.launch(rank_functions.read_and_return, (str(tmp_path / "fifo"),), 1)
    looker.join()
    assert during == [before]
    assert dict(os.environ) == before


def test_launch_free_port():
    assert 0 < gs.free_port() < 65536


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("_default_start_method")
def test_launch_set_start_method(method):
    gs.set_start_method(method)
    given = multiprocessing.get_context(method)
    numbers = given.Queue()
    results = gs.launch(rank_functions.start_method_and_rank, (numbers, given.Lock()), 2)
    assert [rank for _, rank in results] == [0, 1]
    if method != "fork":
        assert results[0][0] == ("forkserver" if method == "forkserver" else "other")
    assert sorted(numbers.get(timeout=30) for _ in range(2)) == [0, 1]
    numbers.close()
    numbers.join_thread()
    with pytest.raises(gs.InvalidArgument, match="'spawn', 'fork', 'forkserver', got 'thread'"):
        gs.set_start_method("thread")


def test_launch_worker_error():
    with pytest.raises(gs.WorkerError) as caught:
        gs.launch(rank_functions.exit_with, (2,), 1)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, multiprocessing.ProcessError)
    assert str(error).splitlines()[0] == "worker[0] failed with exitcode=2"
    assert (error.exitcode, error.worker_id, error.msg) == (2, 0, str(error))


def test_launch_failed_worker_ends_all_grandchildren_too():
    numbers = multiprocessing.get_context("spawn").Queue()
    with pytest.raises(gs.WorkerError, match=r"^worker\[0\] failed with exitcode=1\n"):
        gs.launch(rank_functions.start_grandchild_and_fail, (numbers,), 2)
    assert command.has_ended(numbers.get(timeout=30), 0)
    numbers.close()
    numbers.join_thread()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_launch_signal_to_the_main_process_ends_all_and_is_told(tmp_path, number):
    script = command.write_script(
        tmp_path,
        """
        import os, signal
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
                print(error.signal_no, error)
        """,
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert out.startswith(f"{int(number)} ")
    assert number.name in out
    assert all(command.has_ended(pid, 0) for pid in pids)
