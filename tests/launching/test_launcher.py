"""gs.launcher, with what MegEngine's launcher offers: a decorator, options by position, several nodes, results."""

import math
import os
import re
import sys

import pytest

import gradsync as gs
from commands import wait_until
from ranks import PLACES


def found():
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
    assert gs.launcher(None, 1)(math.sqrt)(4.0) == [2.0]  # a function of C


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"device_type": "cpu"}, "shm"),
        ({"device_type": "gpu", "backend": "shm"}, "shm"),
    ],
)
def test_the_backend_is_the_one_given_or_that_of_the_device(options, backend):
    assert gs.launcher(found, n_gpus=1, **options)() == [(0, 1, backend)]


def test_the_server_is_at_the_port_given_and_on_loopback_for_this_machine_alone():
    port = gs.free_port()
    run = gs.launcher(address, 1, 1, 0, "127.0.0.2", port, "cpu", "local")  # by position
    for _ in range(2):  # the port is free again
        assert run() == [(f"127.0.0.1:{port}", "127.0.0.2")]


def test_exit_0_without_a_result_is_a_warning_and_none():
    def work():
        if gs.get_communicator().rank == 1:
            os._exit(0)
        return "returned"

    with pytest.warns(RuntimeWarning, match="rank 1") as caught:
        assert gs.launcher(work, n_gpus=2)() == ["returned", None]
    assert [warning.filename for warning in caught] == [__file__]


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
        if role:
            open(role).close()
        return comm.rank, comm.world_size, *(os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))

    if __name__ == "__main__":
        n_gpus, world_size, rank_start, port = map(int, sys.argv[1:5])
        print(gs.launcher(work, n_gpus, world_size, rank_start, port=port, backend="shm")(sys.argv[5]))
"""


@pytest.fixture
def node(cli, script, tmp_path):
    """Starts one launcher of several of a run, each of which stands for a machine."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    path, options = script(NODE), {"environment": {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}}
    return lambda *arguments: cli.start_program(sys.executable, path, *arguments, **options)


def test_launchers_of_several_machines_meet_and_each_has_the_results_of_its_ranks(node, tmp_path):
    """No rank works before all have joined, and none leaves before all have worked."""
    port = gs.free_port()
    os.mkfifo(tmp_path / "fifo")
    second = node(1, 3, 2, port, tmp_path / "fifo")  # must wait for the other
    first = node(2, 3, 0, port, "")
    assert [first.stdout.readline() for _ in range(2)] == ["works\n"] * 2
    second.read_until("works")  # the ranks of the other node have returned, perhaps, and cannot leave
    assert first.poll() is None
    with open(tmp_path / "fifo", "w"):
        pass
    assert first.result()[:2] == (0, "[(0, 3, '0', '2'), (1, 3, '1', '2')]\n")
    assert second.result()[:2] == (0, "[(2, 3, '0', '1')]\n")
    assert list((tmp_path / "runtime").iterdir()) == []  # of the secret


def test_a_launcher_that_was_killed_is_no_obstacle_and_a_port_that_the_kernel_chose_is_logged(node, tmp_path):
    """The killed one leaves the file with its secret. Given port 0, it says for the other nodes which it has."""
    killed = node(1, 2, 0, 0, "")
    port = int(re.search(r"port=(\d+)", killed.read_until("port=", "stderr"))[1])
    wait_until(lambda: list((tmp_path / "runtime").iterdir()))
    killed.kill()
    killed.wait(60)
    assert [path.stat().st_mode & 0o77 for path in (tmp_path / "runtime").iterdir()] == [0]
    first, second = node(1, 2, 0, port, ""), node(1, 2, 1, port, "")
    assert (first.result().code, second.result().code) == (0, 0)


def test_a_failure_on_one_machine_ends_the_ranks_of_the_other(node):
    port = gs.free_port()
    first, second = [each.result() for each in (node(1, 2, 0, port, "fail"), node(1, 2, 1, port, "wait"))]
    assert (first.code, second.code) == (1, 1)
    assert first.err.endswith("ValueError: boom\n")
    assert "ValueError: boom" in second.err


def test_launchers_on_several_machines_need_a_secret():
    port = gs.free_port()
    for node in ({"rank_start": 0}, {"rank_start": 1}):
        for host in ("192.0.2.1", "node0", "::"):
            with pytest.raises(gs.AuthenticationError):
                gs.launcher(address, n_gpus=1, world_size=2, master_ip=host, port=port, **node)()


def test_a_launcher_that_is_alone_needs_none_as_only_its_own_ranks_reach_the_server():
    port = gs.free_port()
    run = gs.launcher(address, n_gpus=1, master_ip="0.0.0.0", port=port)
    assert run() == [(f"127.0.0.1:{port}", "0.0.0.0")]


def test_a_secret_of_the_user_serves_all_calls(node, monkeypatch, tmp_path):
    monkeypatch.setenv("GRADSYNC_SECRET", "5a" * 32)
    port = gs.free_port()
    for _ in range(2):
        first, second = node(1, 2, 0, port, ""), node(1, 2, 1, port, "")
        assert (first.result().code, second.result().code) == (0, 0)
        assert list((tmp_path / "runtime").iterdir()) == []


def test_a_node_after_the_first_needs_its_port():
    with pytest.raises(gs.InvalidArgument, match="port"):
        gs.launcher(address, n_gpus=1, world_size=2, rank_start=1, port=0)()


def test_ranks_on_gpus_take_nccl(monkeypatch):
    fake = PLACES["fake"]
    monkeypatch.syspath_prepend(fake.folders[0])
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    assert gs.launcher(found, n_gpus=1, device_type="gpu")() == [(0, 1, "nccl")]
