"""A run over machines with networks of their own: they meet, fail together, and notice when one is cut off."""

import json
import os
import re
import signal
import sys
import time

import command
import namespaces
import pytest
from mpi_machines import NCCL_RANK, check_ranks_over_nccl
from node_commands import Nodes, write

_WHY_NOT = namespaces.why_none()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))

PORT = 29400
# 3 s by the heartbeats, two heartbeats more across hosts; asserted generously, the machine may be busy.
CUT_OFF_SECONDS = 3 * (3.0 + 2 * 0.5)


@pytest.fixture
def network():
    with namespaces.machines(3) as machines:
        yield machines
        assert namespaces.left_behind(machines) == []


def run_on(machines, folder, address=None):
    return Nodes(folder, f"{address or machines[0].ipv4}:{PORT}", len(machines), machines)


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_machines_meet_and_share_one_id(network, tmp_path, family):
    address = network[0].ipv4 if family == "ipv4" else f"[{network[0].ipv6}]"
    with run_on(network, tmp_path, address) as run:
        run.start_all("none", "MASTER_ADDR", "MASTER_PORT", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", ranks=2)
        found = [words for node in range(3) for words in run.await_ids(node, 2)]
        ends = run.end_all()
    assert [code for code, _ in ends] == [0, 0, 0]
    assert len({words[0] for words in found}) == 1
    expected = [getattr(network[0], family), str(PORT + 1), "=eth0", "AF_INET6" if family == "ipv6" else "None"]
    assert [words[1:] for words in found] == [expected] * 6


def test_ranks_of_several_machines_communicate_over_nccl(network, tmp_path):
    """On NCCL's stand-in; Python objects go through the rendezvous."""
    machines = network[:2]
    with run_on(machines, tmp_path) as run:
        run.script = str(NCCL_RANK)
        run.start_all(str(tmp_path), machines[0].ipv4, ranks=2, options=("--backend", "nccl"))
        ends = run.end_all()
    assert [code for code, _ in ends] == [0, 0], ends
    check_ranks_over_nccl([json.loads((tmp_path / f"{rank}.ended").read_text()) for rank in range(4)])


def test_a_failure_on_one_machine_ends_all(network, tmp_path):
    with run_on(network, tmp_path) as run:
        run.start_all("fail@2")
        ends = run.end_all()
    assert [code for code, _ in ends] == [1, 1, 1]
    told = r"^gradsync: rank 2 \(pid \d+ on host2\) failed with exit code 1:\nTraceback"
    assert re.search(told, ends[2][1], re.MULTILINE), ends[2][1]
    assert ends[2][1].endswith("ValueError: boom\n")
    for node in range(2):
        assert re.search(r"RankFailed: rank \d/3: .*rank 2/3 \(pid \d+( on host2)?\) died", ends[node][1]), ends[node][
            1
        ]


@pytest.mark.parametrize("how", ["take_link_down", "drop_packets"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_machine_that_is_cut_off_is_noticed_on_both_sides(network, tmp_path, how, victim):
    machines = network[:2]
    with run_on(machines, tmp_path) as run:
        run.start_all("wait")
        for node in range(2):
            run.await_ids(node)
        began = time.monotonic()
        getattr(machines[victim], how)()
        ends = run.end_all()
        taken_seconds = time.monotonic() - began
    assert [code for code, _ in ends] == [1, 1]
    for (_, err), who in zip(ends, (r"rank 1/2 \(pid \d+\)", "the rendezvous server at"), strict=True):
        # "is gone": the machines share process ids here, and the other side may have ended first.
        assert re.search(rf"{who}.* (cannot be reached|is gone).*no sign of life for \d\.\d s", err), err
    assert taken_seconds < CUT_OFF_SECONDS


@pytest.mark.parametrize("victim", [0, 2])
def test_a_launcher_that_is_killed_ends_the_others(network, tmp_path, victim):
    with run_on(network, tmp_path) as run:
        run.start_all("wait")
        for node in range(3):
            run.await_ids(node)
        pids = network[victim].pids()
        run.processes[victim].send_signal(signal.SIGKILL)
        others = [node for node in range(3) if node != victim]
        ends = [run.end(node) for node in others]
        assert pids
        assert namespaces.left_behind([network[victim]]) == []  # its ranks have ended with it
    for code, err in ends:
        assert code == 1
        assert re.search("the rendezvous server at .* is gone" if victim == 0 else r"rank 2/3 \(.*\) died", err), err


LAUNCHER = """
    import os, signal, sys
    import gradsync as gs
    from gradsync.launching import launcher

    def meet(function, backend, has_others, role):
        # As far as the ranks come without a network for data: they meet, and lose one another.
        from gradsync.rendezvous.hosting import join
        from gradsync.environment import read_environment
        client, _ = join(read_environment(), None, 60)
        if client.rank == 0:
            client.set("id", os.urandom(128))
        unique_id = client.get("id", from_rank=0)
        interface = os.environ["NCCL_SOCKET_IFNAME"]
        os.write(1, f"id {unique_id.hex()[:12]} {interface}\\n".encode())
        client.barrier("told")
        if role == "fail":
            try:
                raise ValueError("boom")
            except ValueError as error:
                client.report_failure(repr(error))
                raise
        client.barrier("never" if role == "wait" else "done")
        client.close()

    def work():
        pass

    if __name__ == "__main__":
        place = {"rank_start": int(sys.argv[1]), "master_ip": sys.argv[2], "port": 29500}
        launcher.call_in_group = meet
        gs.launcher(work, n_gpus=1, world_size=2, **place)(sys.argv[3])
"""


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
@pytest.mark.parametrize("role", ["work", "fail"])
def test_decorated_functions_meet_over_machines(network, tmp_path, family, role):
    machines, (_, secret) = network[:2], write(tmp_path)
    script = command.write_script(tmp_path, LAUNCHER, "decorated.py")
    master = getattr(machines[0], family)
    roles = ("work", "work") if role == "work" else ("wait", "fail")
    env = {**os.environ, "GRADSYNC_SECRET_FILE": secret}
    processes = [
        machine.start(sys.executable, script, str(number), master, roles[number], env=env)
        for number, machine in enumerate(machines)
    ]
    told = [process.communicate(timeout=60) for process in processes]
    codes = [process.returncode for process in processes]
    assert len({out for out, _ in told}) == 1, told
    assert re.fullmatch(r"id \w{12} =eth0\n", told[0][0])
    assert codes == ([0, 0] if role == "work" else [1, 1]), told
    if role == "fail":
        assert told[1][1].endswith("ValueError: boom\n")
        assert "rank 1/2 (pid " in told[0][1]
        assert "ValueError('boom')" in told[0][1]


def test_nothing_of_a_network_stays_after_an_error():
    with pytest.raises(ZeroDivisionError), namespaces.machines(2) as machines:
        names = [machine.name for machine in machines]
        process = machines[0].start("sleep", "100")
        while not machines[0].pids():
            time.sleep(0.01)
        _ = 1 / 0
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not [name for name in names if os.path.exists(f"/run/netns/{name}")]
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith(names[0][:-2])]
