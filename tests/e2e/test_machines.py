"""A run over machines with networks of their own: they meet, train, fail together, and notice when one is cut off."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import ExitStack

import pytest

from e2e import namespaces
from ranks import PLACES

REASON = namespaces.why_none() if os.geteuid() == 0 else "network namespaces need root"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

PORT = 29400
SCRIPT = """
    import socket, sys, time
    import gradsync as gs

    how = sys.argv[1]
    with gs.init_process_group("nccl") as comm:
        import cupy
        total = comm.all_reduce(cupy.full(5, comm.rank + 1.0)).get()[0]
        hosts = comm.objects.all_gather(socket.gethostname())
        print(f"rank {comm.rank} on {socket.gethostname()}: {total} {hosts}", flush=True)
        if how == f"raise {comm.rank}":
            raise ValueError("boom")
        while how != "end":
            time.sleep(0.1)
            comm.objects.all_gather(None)
        comm.barrier()
        cupy.cuda.get_current_stream().synchronize()
        comm.objects.all_gather(None)  # rank 0 serves the fake of NCCL: it leaves last
"""


@pytest.fixture
def network():
    with namespaces.machines(2) as machines:
        yield machines
        assert namespaces.left_behind(machines) == []


@pytest.fixture
def start(network, script, tmp_path):
    """start(how, address) starts one launcher on each machine, with a rank each."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("5a" * 32)
    path = script(SCRIPT)
    fake = PLACES["fake"]

    with ExitStack() as processes:

        def start(how, address=None):
            address = address or network[0].ipv4
            variables = {**os.environ, **fake.environment, "PYTHONPATH": fake.folders[0]}
            started = []
            for node, machine in enumerate(network):
                command = ["-n", 1, "--nnodes", 2, "--node-rank", node, "--rendezvous", f"{address}:{PORT}"]
                command += ["--secret-file", secret, "--backend", "nccl", path, how]
                process = machine.start(
                    *(sys.executable, "-m", "gradsync", "run", *command),
                    env=variables | ({"FAKE_CUPY_ADDRESS": network[0].ipv4} if node == 0 else {}),
                )
                started.append(processes.enter_context(process))
                processes.callback(process.kill)
            return started

        yield start


def ends(processes):
    outputs = [process.communicate(timeout=100) for process in processes]
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_machines_meet_and_reduce(network, start, family):
    address = network[0].ipv4 if family == "ipv4" else f"[{network[0].ipv6}]"
    for rank, (code, out, err) in enumerate(ends(start("end", address))):
        assert code == 0, err
        assert f"rank {rank} on host{rank}: 3.0 ['host0', 'host1']" in out


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_on_one_machine_ends_both_and_all_can_be_started_again(start, culprit):
    """At the same address, as a scheduler does it. That rank 0 fails also ends the fake of NCCL, which it serves."""
    results = ends(start(f"raise {culprit}"))
    assert [code for code, _, _ in results] == [1, 1]
    assert results[culprit][2].endswith("ValueError: boom\n")
    assert re.search(rf"RankFailed: rank {1 - culprit}/2: .*rank {culprit}", results[1 - culprit][2]), results
    assert [code for code, _, _ in ends(start("end"))] == [0, 0]


DECORATED = """
    import socket, sys
    import gradsync as gs

    def work():
        comm = gs.get_communicator()
        return comm.objects.all_gather((socket.gethostname(), comm.rank))

    if __name__ == "__main__":
        print(gs.launcher(work, 1, 2, int(sys.argv[1]), sys.argv[2], 29500, backend="nccl")())
"""


def test_decorated_functions_meet_over_machines(network, script, tmp_path):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("5a" * 32)
    fake, path, master = PLACES["fake"], script(DECORATED), network[0].ipv4
    variables = {**os.environ, **fake.environment, "PYTHONPATH": fake.folders[0], "FAKE_CUPY_ADDRESS": master}
    variables["GRADSYNC_SECRET_FILE"] = str(secret)
    started = [machine.start(sys.executable, path, rank, master, env=variables) for rank, machine in enumerate(network)]
    for code, out, err in ends(started):
        assert (code, out) == (0, "[[('host0', 0), ('host1', 1)]]\n"), err


@pytest.mark.parametrize("how", ["take_link_down", "drop_packets"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_machine_that_is_cut_off_is_noticed_on_both_sides(network, start, how, victim):
    processes = start("work")
    for process in processes:
        assert "3.0" in process.stdout.readline()
    getattr(network[victim], how)()
    for (code, _, err), who in zip(ends(processes), ("rank 1", "rendezvous server"), strict=True):
        assert code == 1
        assert who in err, err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_killed_ends_both_machines(network, start, victim):
    processes = start("work")
    for process in processes:
        assert "3.0" in process.stdout.readline()
    processes[victim].send_signal(signal.SIGKILL)
    assert ends(processes)[1 - victim][0] == 1
    assert namespaces.left_behind([network[victim]]) == []  # its ranks have ended with it


def test_nothing_of_a_network_stays_after_an_error():
    with pytest.raises(ZeroDivisionError), namespaces.machines(2) as machines:
        names = [machine.name for machine in machines]
        process = machines[0].start("sleep", "100")
        _ = 1 / 0
    process.communicate()
    assert not [name for name in names if os.path.exists(f"/run/netns/{name}")]
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith(names[0][:-2])]
