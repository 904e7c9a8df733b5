"""gs.launcher, with what MegEngine's launcher offers: a decorator, options by position, several nodes, results."""

import math
import os
import re
import sys
import time

import pytest

import gradsync as gs
from commands import is_running, wait_until
from ranks import PLACES


def place():
    comm = gs.get_communicator()
    return comm.rank, comm.world_size, comm.backend


def address():
    return os.environ["GRADSYNC_ADDRESS"], os.environ["MASTER_ADDR"]


@gs.launcher(n_gpus=2)
def scaled(offset, *, factor=1):
    return (gs.get_communicator().rank + offset) * factor


def test_a_call_runs_the_function_on_ranks_and_gives_the_results_by_rank():
    assert scaled(10, factor=3) == [30, 33]
    assert scaled.__name__ == "scaled"
    assert gs.launcher(lambda: gs.is_initialized(), n_gpus=1)() == [True]
    assert gs.launcher(None, 1)(math.sqrt)(4.0) == [2.0]  # functions of C
    assert gs.launcher(time.sleep, 1)(0.0) == [None]


def test_without_a_number_there_is_a_rank_for_each_core_but_no_more_than_world_size(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cores = len(os.sched_getaffinity(0))
    assert gs.launcher(place)() == [(rank, cores, "shm" if cores > 1 else "local") for rank in range(cores)]
    assert gs.launcher(place, world_size=1)() == [(0, 1, "local")]


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, "local"),  # a rank alone, without a GPU
        ({"device_type": "cpu"}, "shm"),
        ({"backend": "shm"}, "shm"),
        ({"device_type": "gpu", "backend": "shm"}, "shm"),
    ],
)
def test_the_backend_is_the_one_given_or_that_of_the_device(options, backend):
    assert gs.launcher(place, n_gpus=1, **options)() == [(0, 1, backend)]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2"])
def test_the_server_is_at_the_port_given_and_on_loopback_by_default(host):
    port = gs.free_port()
    # For this machine alone, the server is on loopback all the same.
    wanted = [(f"127.0.0.1:{port}", "127.0.0.1" if host == "localhost" else host)]
    run = gs.launcher(address, 1, 1, 0, host, port, "cpu", "local")  # by position
    assert run() == wanted
    if host == "localhost":
        assert run() == wanted  # the port is free again


def test_decorating_opens_nothing_and_loads_nothing_that_starts_ranks(cli):
    source = (
        "import os, sys, gradsync as gs; before = os.listdir('/proc/self/fd'); gs.launcher(n_gpus=2)(print); "
        "print(os.listdir('/proc/self/fd') == before, 'multiprocessing' in sys.modules, 'numpy' in sys.modules)"
    )
    assert cli.python("-c", source) == (0, "True False False\n", "")


def test_exit_0_without_a_result_is_a_warning_and_none():
    def work():
        if gs.get_communicator().rank == 1:
            os._exit(0)
        return "returned"

    with pytest.warns(RuntimeWarning, match="rank 1") as caught:
        assert gs.launcher(work, n_gpus=2)() == ["returned", None]
    assert [warning.filename for warning in caught] == [__file__]


def test_a_failing_process_ends_the_others_and_is_named(tmp_path):
    def work(path):
        comm = gs.get_communicator()
        if comm.rank == 0:
            path.write_text(str(os.getpid()))
        comm.barrier()
        if comm.rank == 1:
            raise ValueError("boom")
        while True:
            time.sleep(1)

    with pytest.raises(gs.RankFailed) as caught:
        gs.launcher(work, n_gpus=2)(tmp_path / "pid")
    assert (caught.value.rank, caught.value.exit_code, caught.value.phase) == (1, 1, "function")
    assert caught.value.traceback_text.endswith("ValueError: boom")
    assert not is_running(int((tmp_path / "pid").read_text()))


# -- Several nodes -----------------------------------------------------------------------------------------------------

NODE = """
    import os, sys
    import gradsync as gs

    def work(role):
        comm = gs.get_communicator()
        os.write(1, b"works\\n")
        if role == "fail":
            raise ValueError("boom")
        if role == "wait":
            while True:
                comm.barrier()
        return comm.rank, comm.world_size, *(os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))

    if __name__ == "__main__":
        n_gpus, rank_start, port = map(int, sys.argv[1:4])
        print(gs.launcher(work, n_gpus, 3, rank_start, port=port, backend="shm")(sys.argv[4]))
"""


@pytest.fixture
def nodes(cli, script, tmp_path):
    """Starts two launchers of one run, which stand for two machines: of two ranks and of one."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    path, port = script(NODE), gs.free_port()

    def start(first, second):
        options = {"environment": {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}}
        later = cli.start_program(sys.executable, path, 1, 2, port, second, **options)  # must wait for the other
        return cli.start_program(sys.executable, path, 2, 0, port, first, **options), later

    return start


def test_launchers_of_several_machines_meet_and_each_has_the_results_of_its_ranks(nodes, tmp_path):
    first, second = (node.result() for node in nodes("return", "return"))
    assert first.out.splitlines()[2:] == ["[(0, 3, '0', '2'), (1, 3, '1', '2')]"]
    assert second.out.splitlines()[1:] == ["[(2, 3, '0', '1')]"]
    assert list((tmp_path / "runtime").iterdir()) == []  # of the secret


def test_a_launcher_that_was_killed_is_no_obstacle_and_a_port_that_the_kernel_chose_is_told(cli, script, tmp_path):
    """The killed one leaves the file with its secret. The next tells the port for the other nodes, given 0."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    path, options = script(NODE), {"environment": {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}}
    killed = cli.start_program(sys.executable, path, 2, 0, 0, "return", **options)
    port = int(re.search(r"port=(\d+)", killed.read_until("port=", "stderr"))[1])
    wait_until(lambda: list((tmp_path / "runtime").iterdir()))
    killed.kill()
    killed.wait(60)
    assert [path.stat().st_mode & 0o77 for path in (tmp_path / "runtime").iterdir()] == [0]
    first = cli.start_program(sys.executable, path, 2, 0, port, "return", **options)
    second = cli.start_program(sys.executable, path, 1, 2, port, "return", **options)
    assert (first.result().code, second.result().code) == (0, 0)


def test_no_rank_works_before_all_have_joined_and_none_leaves_before_all_have_worked(cli, script, tmp_path):
    """A barrier after the start and one before the end."""
    path = script(NODE.replace('if role == "fail"', 'role and open(role).close()\n        if role == "fail"'))
    port = gs.free_port()
    (tmp_path / "runtime").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "fifo")
    options = {"environment": {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}}
    first = cli.start_program(sys.executable, path, 2, 0, port, "", **options)
    second = cli.start_program(sys.executable, path, 1, 2, port, tmp_path / "fifo", **options)
    assert [first.stdout.readline() for _ in range(2)] == ["works\n"] * 2
    second.read_until("works")  # the ranks of the other node have returned, perhaps, and cannot leave
    assert first.poll() is None
    with open(tmp_path / "fifo", "w"):
        pass
    assert (first.result().code, second.result().code) == (0, 0)


@pytest.mark.parametrize("culprit", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_failure_on_one_machine_ends_the_ranks_of_the_other(culprit, nodes):
    codes = [node.result() for node in nodes(*(["fail", "wait"] if culprit == 0 else ["wait", "fail"]))]
    assert [node.code for node in codes] == [1, 1]
    assert codes[culprit].err.endswith("ValueError: boom\n")
    assert "ValueError: boom" in codes[1 - culprit].err


def test_other_machines_need_a_secret(monkeypatch):
    port = gs.free_port()
    run = gs.launcher(address, n_gpus=1, master_ip="0.0.0.0", port=port)
    with pytest.raises(gs.AuthenticationError):
        run()
    for node in ({"rank_start": 0}, {"rank_start": 1}):
        for host in ("192.0.2.1", "node0", "::"):
            with pytest.raises(gs.AuthenticationError):
                gs.launcher(address, n_gpus=1, world_size=2, master_ip=host, port=port, **node)()
    monkeypatch.setenv("GRADSYNC_SECRET", "5a" * 32)
    for _ in range(2):  # the secret is kept for the next call
        assert run() == [(f"0.0.0.0:{port}", "0.0.0.0")]


@pytest.mark.parametrize("options", [{"device_type": "gpu"}, {"backend": "nccl"}])
def test_ranks_on_gpus_take_nccl(options, monkeypatch):
    fake = PLACES["fake"]
    monkeypatch.syspath_prepend(fake.folders[0])
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    assert gs.launcher(place, n_gpus=1, **options)() == [(0, 1, "nccl")]
