"""Several launchers on this machine, as if each were another: options, ranks, failures on either side."""

import io
import re
import shlex
import signal
import socket
import time
from pathlib import Path

import command
import pytest
from node_commands import Nodes, arguments, write

import gradsync as gs
from contract import wait_until
from gradsync.launching.hosting import Nodes as Options
from gradsync.launching.hosting import node_endpoint
from gradsync.launching.output import Notices
from gradsync.rendezvous import sockets


@pytest.fixture
def nodes(tmp_path):
    made = []

    def make(nnodes=2, host="127.0.0.1"):
        made.append(Nodes(tmp_path, f"{host}:{gs.free_port()}", nnodes))
        return made[-1]

    yield make
    for each in made:
        each.__exit__()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--node-rank", 1), "--node-rank needs --nnodes, the number of machines"),
        (("--nnodes", 1, "--node-rank", 1), "--node-rank needs to be from 0 to 0 with --nnodes 1, got 1"),
        (("--rendezvous", "h:1"), "--rendezvous needs --nnodes, the number of machines"),
        (("--secret-file", "f"), "--secret-file needs --nnodes"),
        (("--nnodes", 2), "--nnodes 2 needs --node-rank, this machine's number from 0 to 1"),
        (("--nnodes", 2, "--node-rank", 2), "--node-rank needs to be from 0 to 1 with --nnodes 2, got 2"),
        (("--nnodes", 2, "--node-rank", 0, "--max-restarts", 1), "--max-restarts works on one machine only.*scheduler"),
        (("--nnodes", 2, "--node-rank", 0), "--nnodes 2 needs --rendezvous HOST:PORT, the same on every machine"),
        (("--nnodes", 2, "--node-rank", 0, "--rendezvous", "h:0"), "--rendezvous: .* port from 1 to 65535, got 'h:0'"),
        (("--nnodes", 2, "--node-rank", 0, "--rendezvous", "head"), "--rendezvous: an address needs the form"),
        (("--nnodes", 2, "--node-rank", 1, "--rendezvous", "0.0.0.0:1"), "needs an address of the machine"),
        (("--nnodes", 2, "--node-rank", 0, "--rendezvous", "10.0.0.1:1"), "needs --secret-file .*make one with"),
        (("--nnodes", 2, "--node-rank", 0, "--rendezvous", "h:1", "--secret-file", "/none"), "cannot be opened"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(tmp_path, options, text):
    script = command.write_script(tmp_path, "")
    code, _, err = command.refused("run", "-n", 1, *options, script)
    assert code == 2
    assert re.search(f"^gradsync: error: .*{text}", err), err


def test_one_machine_may_be_named(tmp_path):
    script, secret = write(tmp_path)
    place = ("--nnodes", 1, "--node-rank", 0, "--rendezvous", "head:29400", "--secret-file", secret)
    code, out, err = command.run("run", "-n", 2, *place, script, "none", "GROUP_WORLD_SIZE", "NCCL_SOCKET_IFNAME")
    assert (code, err) == (0, "")
    assert len(re.findall(r"^\[rank [01]\] id \w+ 1 None$", out, flags=re.MULTILINE)) == 2


def test_ranks_are_numbered_over_the_nodes(nodes):
    run = nodes(3)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NCCL_SOCKET_IFNAME MASTER_ADDR"
    run.start_all("none", *names.split(), "MASTER_PORT", "GRADSYNC_ADDRESS", ranks=2)
    found = [words for node in range(3) for words in run.await_ids(node, 2)]
    ends = run.end_all()
    assert [code for code, _ in ends] == [0, 0, 0]
    assert sorted(words[1:7] for words in found) == [[str(r), "6", str(r % 2), "2", str(r // 2), "3"] for r in range(6)]
    port = run.rendezvous.split(":")[1]
    shared = {(words[0], *words[7:]) for words in found}
    assert {words[1:] for words in shared} == {("=lo", "127.0.0.1", str(int(port) + 1), run.rendezvous)}
    assert len(shared) == 1  # the unique id
    for node, (_, err) in enumerate(ends):
        ranks = f"ranks {2 * node} and {2 * node + 1} of 6"
        assert err == f"gradsync: node {node} of 3: {ranks}; rendezvous at {run.rendezvous}\n"


def test_another_number_of_ranks_on_one_node_is_refused(nodes):
    run = nodes()
    run.start(0, "none", ranks=1)
    run.start(1, "none", ranks=2)
    code, err = run.end(1)
    assert code == 1
    assert re.search(r"the server expects world_size 2, rank [23] joined with world_size 4", err), err


@pytest.mark.parametrize("culprit", [0, 3])
def test_a_failure_on_either_side_ends_both(nodes, culprit):
    run = nodes()
    run.start_all(f"fail@{culprit}", ranks=2)
    ends = run.end_all()
    assert [code for code, _ in ends] == [1, 1]
    of_culprit, of_others = ends[culprit // 2][1], ends[1 - culprit // 2][1]
    told = rf"^gradsync: rank {culprit} \(pid \d+ on \S+\) failed with exit code 1:\nTraceback"
    assert re.search(told, of_culprit, re.MULTILINE)
    assert of_culprit.endswith("ValueError: boom\n")
    # On a busy machine the other rank of the culprit's node, which its launcher ends, may be gone first.
    gone = "[01]" if culprit == 0 else "[23]"
    assert re.search(rf"because of rank {gone}:\n", of_others), of_others
    assert re.search(rf"RankFailed: rank \d/4: .*rank {gone}/4 \(pid \d+\) died", of_others), of_others


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_ends_ranks_that_are_busy(nodes, culprit):
    """No collective tells them, and no other launcher."""
    run = nodes()
    run.start_all(f"busy@{culprit}")
    code, err = run.end(1 - culprit)
    assert code == 1
    assert re.search(rf"rank {1 - culprit} .* failed with exit code 1, because of rank {culprit}:\n", err), err
    assert run.end(culprit)[1].endswith("ValueError: boom\n")


def test_ranks_that_are_busy_end_with_the_server(nodes):
    run = nodes()
    run.start_all("busy")
    for node in range(2):
        run.await_ids(node)
    run.processes[0].kill()
    code, err = run.end(1)
    assert code == 1
    assert f"the rendezvous server at {run.rendezvous} is gone" in err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_killed_ends_the_other(nodes, victim):
    run = nodes()
    run.start_all("wait")
    for node in range(2):
        run.await_ids(node)
    run.processes[victim].kill()
    code, err = run.end(1 - victim)
    assert code == 1
    why = rf"the rendezvous server at {run.rendezvous} is gone" if victim == 0 else "rank 1/2 .* died: its control conn"
    assert re.search(why, err), err


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_signal_to_one_launcher_ends_both(nodes, victim, number):
    run = nodes()
    run.start_all("wait")
    for node in range(2):
        run.await_ids(node)
    run.processes[victim].send_signal(number)
    ends = run.end_all()
    assert ends[victim][0] == 128 + number
    assert ends[1 - victim][0] == 1
    assert f"because of rank {victim}" in ends[1 - victim][1]


def test_node_0_keeps_the_server_until_the_others_are_done(nodes):
    run = nodes()
    run.start_all("linger@1")
    assert [code for code, _ in run.end_all()] == [0, 0]


def test_node_0_says_for_whom_it_waits_and_ends_at_a_signal(nodes):
    run = nodes()
    run.script = command.write_script(
        Path(run.secret).parent,
        """
        import os, time
        import gradsync as gs
        with gs.init_process_group("shm"):
            if os.environ["RANK"] == "1":
                time.sleep(100)
        """,
        "uneven.py",
    )
    run.start_all()
    lines = [run.processes[0].stderr.readline() for _ in range(2)]
    assert lines[1] == "gradsync: the ranks of this machine have ended; waiting for the other machines\n"
    run.processes[0].send_signal(signal.SIGINT)
    assert run.end(0)[0] == 130


def listens(host, port):
    with socket.socket() as stream:
        return not stream.connect_ex((host, port))


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_node_is_awaited(nodes, late):
    run = nodes(host="127.0.0.2")
    run.start(1 - late, "none")
    if late == 1:
        host, port = run.rendezvous.split(":")
        wait_until(lambda: listens(host, int(port)))
    else:
        time.sleep(1.0)
    run.start(late, "none")
    assert [code for code, _ in run.end_all()] == [0, 0]


def test_ranks_that_do_not_come_are_named(nodes):
    run = nodes()
    source = "import gradsync as gs\ngs.init_process_group('shm', timeout_seconds=0.5)\n"
    run.script = command.write_script(Path(run.secret).parent, source, "hasty.py")
    run.start(0)
    code, err = run.end(0)
    assert code == 1
    assert "missing: rank 1 (not joined)" in err


def test_another_secret_is_refused(nodes, tmp_path):
    run = nodes()
    run.start(0, "none")
    other = tmp_path / "other"
    other.mkdir()
    _, secret = write(other)
    code, _, err = command.run(*arguments(1, 2, run.rendezvous, secret), run.script, "none")
    assert code == 1
    assert "does not know this run's secret: the secret here is wrong" in err
    assert run.processes[0].poll() is None


def test_a_node_that_is_there_already_is_refused(nodes):
    run = nodes(3)
    for node in range(2):
        run.start(node, "none")
    assert "waiting for rank 2 (not joined)" in "".join(run.processes[0].stderr.readline() for _ in range(2))
    code, _, err = command.run(*arguments(1, 3, run.rendezvous, run.secret), run.script, "none")
    assert code == 1
    assert "rank 1/3 has joined already and is alive (joining); each rank joins once" in err


def test_a_taken_port_is_refused(tmp_path):
    script, secret = write(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, _, err = command.run(*arguments(0, 2, f"127.0.0.1:{port}", secret), script)
    assert code == 1
    assert re.search(rf"port {port} on 127.0.0.1 is in use.*name another port in --rendezvous, on every machine", err)


def test_node_0_elsewhere_is_refused(tmp_path):
    script, secret = write(tmp_path)
    code, _, err = command.run(*arguments(0, 2, "192.0.2.77:29400", secret), script)
    assert code == 1
    assert "node 0 hosts the rendezvous server: start it on the machine with the address '192.0.2.77'" in err


def test_a_name_that_means_loopback_on_node_0_is_warned_of(monkeypatch):
    """As /etc/hosts of Debian has it for the machine's own name."""
    monkeypatch.setattr(sockets, "look_up", lambda _host, port: socket.getaddrinfo("127.0.1.1", port, type=1))
    shown = io.StringIO()
    options = Options(2, 0, "head", gs.free_port(), b"s" * 32)
    with node_endpoint(options, Notices(shown)) as (endpoint, listener):
        assert endpoint.address == sockets.format_address(listener)
    assert shown.getvalue() == (
        "gradsync: warning: on this machine 'head' has the address 127.0.1.1, which no other machine can reach; name "
        "another address in --rendezvous, on every machine\n"
    )


def test_launchers_may_share_a_log_directory(nodes, tmp_path):
    run = nodes()
    run.start_all("none", options=("--log-dir", tmp_path / "logs"))
    assert [code for code, _ in run.end_all()] == [0, 0]
    folder = tmp_path / "logs"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.log", "rank-1.log"]
    assert all((folder / f"rank-{rank}.log").read_text().startswith("id ") for rank in range(2))


@pytest.mark.parametrize(("backend", "exit_code"), [("shm", 0), ("auto", 1)])
def test_which_backend_joins_launchers_of_one_machine(nodes, tmp_path, backend, exit_code):
    run = nodes()
    run.script = command.write_script(
        tmp_path, "import gradsync as gs\nwith gs.init_process_group() as comm:\n    comm.barrier()\n", "group.py"
    )
    run.start_all(options=("--backend", backend))
    ends = run.end_all()
    assert [code for code, _ in ends] == [exit_code] * 2
    advice = "ranks of several hosts communicate over MPI: start the ranks with mpiexec or srun"
    assert any(advice in err for _, err in ends) == bool(exit_code)


def test_ranks_that_need_mpi_are_not_started(tmp_path):
    script, secret = write(tmp_path)
    for node in range(2):
        line = arguments(node, 2, "127.0.0.1:29400", secret, "--backend", "mpi", ranks=2)
        code, _, err = command.refused(*line, script, "a b")
        assert code == 2
        needed = "gradsync: error: --backend mpi needs MPI's own launcher; run on one node only, with the hosts: "
        assert needed + shlex.join(("mpiexec", "-n", "4", "python", script, "a b")) in err.splitlines()[-1]
