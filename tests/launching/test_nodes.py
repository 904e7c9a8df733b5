"""Several launchers on this machine, as if each were another: options, order, failures, restarts."""

import contextlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import command
import pytest
from node_commands import Nodes, arguments, write

import gradsync as gs
from contract import wait_until
from gradsync.launching.in_rank.result import to_json
from gradsync.launching.nodes import NodeRecord
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer


@pytest.fixture
def nodes(tmp_path):
    made = []

    def make(nnodes=2):
        made.append(Nodes(tmp_path, f"127.0.0.1:{gs.free_port()}", nnodes))
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
        (("--nnodes", 2, "--node-rank", 0, "--join-timeout", "inf"), "--join-timeout to be a number of seconds"),
        (("--nnodes", 99999, "--node-rank", 2), "--nnodes needs to be at most 16384, got 99999"),
        (("--nnodes", 2, "--node-rank", 0), "--nnodes 2 needs --rendezvous HOST:PORT, the same on every machine"),
        (("--nnodes", 2, "--node-rank", 0, "--rendezvous", "h:0"), "--rendezvous: .* port from 1 to 65535, got 'h:0'"),
        (("--nnodes", 2, "--node-rank", 0, "--rendezvous", "head"), "--rendezvous: an address needs the form"),
        (("--nnodes", 2, "--node-rank", 0, "--rendezvous", "0.0.0.0:1"), "needs an address of one particular machine"),
        (("--nnodes", 2, "--node-rank", 0, "--rendezvous", "[fe80::1]:1"), "address of one particular machine"),
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
    assert len(re.findall(r"^\[rank [01]\] id \w+ 1 1 None$", out, flags=re.MULTILINE)) == 2


def test_a_run_on_one_machine_loads_nothing_of_this(tmp_path):
    script = command.write_script(tmp_path, "")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gradsync", "run", "-n", "1", script],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "gradsync.launching.supervisor" in done.stderr
    assert not re.search(r"gradsync\.(interfaces|launching\.(nodes|network))\b", done.stderr)


def test_ranks_are_numbered_over_the_nodes(nodes):
    run = nodes(3)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NCCL_SOCKET_IFNAME MASTER_ADDR"
    run.start_all("none", *names.split(), "MASTER_PORT", "TORCHELASTIC_RUN_ID", ranks=(1, 2, 1))
    found = [run.await_ids(node, count) for node, count in enumerate((1, 2, 1))]
    ends = run.end_all()
    assert [code for code, _ in ends] == [0, 0, 0]
    told = sorted((words[2:10] for of_node in found for words in of_node), key=lambda words: int(words[0]))
    same = ["=lo", "127.0.0.1"]
    assert told == [
        ["0", "4", "0", "1", "0", "3", *same],
        ["1", "4", "0", "2", "1", "3", *same],
        ["2", "4", "1", "2", "1", "3", *same],
        ["3", "4", "0", "1", "2", "3", *same],
    ]
    for place in (0, 1, 10, 11):  # the unique id, the generation, MASTER_PORT, the run's name
        assert len({words[place] for of_node in found for words in of_node}) == 1
    host = socket.gethostname()
    for (_, err), ranks in zip(ends, ("rank 0", "ranks 1 to 2", "rank 3"), strict=True):
        assert re.search(rf"^gradsync: node \d of 3 \({host}\): {ranks} of 4, at 127.0.0.1 \(lo\); rendezvous at", err)


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_failure_is_told_by_all_in_the_same_words(nodes, culprit):
    run = nodes(3)
    run.start_all(f"fail@{culprit}")
    ends = run.end_all()
    assert [code for code, _ in ends] == [1, 1, 1]
    for _, err in ends:
        report = err.partition(f"gradsync: node {culprit} (")[2]
        assert re.match(r"\S+, 127.0.0.1\) failed:\n", report), err
        assert re.search(
            rf"^gradsync: rank {culprit} \(pid \d+ on \S+\) failed with exit code 1:\nTraceback", report, re.M
        )
        assert report.endswith("ValueError: boom\n")


def test_an_error_that_follows_from_another_is_not_the_cause_even_if_it_comes_first(nodes, tmp_path):
    run = nodes()
    run.script = command.write_script(
        tmp_path,
        """
        import os, sys, time
        import gradsync as gs
        if os.environ["RANK"] == "0":
            raise gs.RankFailed("rank 1/2 failed: ValueError: boom", rank=1)
        time.sleep(0.4)
        raise ValueError("boom")
        """,
    )
    run.start_all()
    for code, err in run.end_all():
        assert code == 1
        assert re.search(r"^gradsync: node 1 \(", err, re.M)
        assert err.endswith("ValueError: boom\n")
        assert "because of rank 1" not in err


def test_a_terminal_that_stands_still_keeps_no_failure_from_the_others(nodes, tmp_path):
    run = nodes()
    run.script = command.write_script(
        tmp_path,
        """
        import os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        if os.environ["RANK"] == "0":
            signal.sigwait([signal.SIGTERM])
            print("stopped", flush=True)
            os._exit(1)
        print("x" * 80_000, flush=True)
        raise ValueError("boom")
        """,
    )
    run.start_all()
    # The rank of node 0 is stopped while nobody reads what node 1 shows.
    assert "stopped" in run.processes[0].stdout.readline()
    code, err = run.end(1)
    assert (code, err.endswith("ValueError: boom\n")) == (1, True)
    assert run.end(0)[0] == 1


def test_the_exit_code_is_that_of_the_failing_rank(nodes):
    run = nodes()
    run.start_all("exit@1", ranks=(2, 2))
    ends = run.end_all()
    assert [code for code, _ in ends] == [7, 7]
    for _, err in ends:
        assert re.search(r"gradsync: node 0 \(\S+ 127.0.0.1\) failed:\n", err)
        assert re.search(r"rank 1 \(pid \d+ on \S+\) failed with exit code 7$", err)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_ends_before_it_joins_is_not_awaited(nodes, victim):
    run, began = nodes(), time.monotonic()
    run.start_all(f"absent@{victim}")
    ends = run.end_all()
    assert time.monotonic() - began < 30  # to join takes 60 s at most
    assert [code for code, _ in ends] == [1, 1]
    assert f"rank {victim}/2 ended with exit code 0 without joining" in ends[1 - victim][1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped_before_it_joins_is_not_awaited(nodes, victim):
    run, began = nodes(), time.monotonic()
    run.start_all(f"stopped@{victim}", options=("--grace", 1))
    ends = run.end_all()
    assert time.monotonic() - began < 30  # 3 s on an idle machine; to join takes 60 s at most
    assert [code for code, _ in ends] == [1, 1]
    assert re.search(rf"rank {victim}/2 \(pid \d+\) was stopped \(SIGSTOP\?\) before it joined", ends[1 - victim][1])


def test_launchers_and_ranks_share_one_port(nodes):
    run = nodes()
    run.start_all("wait", "GRADSYNC_ADDRESS")
    assert {run.await_ids(node)[0][2] for node in range(2)} == {run.rendezvous}
    run.processes[1].send_signal(signal.SIGTERM)
    assert [code for code, _ in run.end_all()] == [143, 143]


def test_a_node_that_is_done_waits_for_the_others(nodes):
    run = nodes()
    run.start_all("linger@0")
    assert [code for code, _ in run.end_all()] == [0, 0]


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_signal_to_one_launcher_ends_all(nodes, victim, number):
    run = nodes()
    run.start_all("wait")
    for node in range(2):
        run.await_ids(node)
    run.processes[victim].send_signal(number)
    ends = run.end_all()
    assert [code for code, _ in ends] == [128 + number] * 2
    for _, err in ends:
        assert re.search(rf"gradsync: node {victim} \(\S+ 127.0.0.1\) was ended by {number.name}$", err), err


def listens(host, port):
    with socket.socket() as stream:
        return not stream.connect_ex((host, port))


@pytest.mark.parametrize("number", [signal.SIGHUP])
def test_a_signal_while_the_others_are_awaited_leaves_nothing(nodes, tmp_path, monkeypatch, number):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    run = nodes()
    run.start(0, "none", options=("--max-restarts", 1))
    host, port = run.rendezvous.split(":")
    wait_until(lambda: listens(host, int(port)))
    assert list(folder.iterdir())
    run.processes[0].send_signal(number)
    code, err = run.end(0)
    assert (code, err) == (128 + number, f"gradsync: node 0 of 2 was ended by {number.name}\n")
    assert list(folder.iterdir()) == []


@contextlib.contextmanager
def node_0_in_this_process(run):
    """Starts node 1, and yields the connection of a launcher of node 0 that both have joined."""
    secret = bytes.fromhex(Path(run.secret).read_text())
    host, port = run.rendezvous.split(":")
    with RendezvousServer(2, secret=secret, host=host, port=int(port), of_launchers=True) as server:
        run.start(1, "none")
        client = RendezvousClient.connect(server.address, secret=secret, rank=0, world_size=2, noun="node")
        try:
            yield client
        finally:
            client.abandon()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_launchers_exchange_their_records_reaches_the_others(nodes, number):
    run = nodes()
    with node_0_in_this_process(run) as client:
        with pytest.raises(gs.RendezvousTimeout):
            client.get("nothing", timeout_seconds=0.5)  # by now node 1 waits for the record of node 0
        run.processes[1].send_signal(number)
        code, err = run.end(1)
        assert (code, err) == (128 + number, f"gradsync: node 1 of 2 was ended by {number.name}\n")
        raised = "KeyboardInterrupt" if number == signal.SIGINT else "SystemExit: 143"
        with pytest.raises(gs.RankFailed, match=rf"node 1/2 \(pid \d+\) failed: {raised}"):
            client.barrier()


def test_a_launcher_that_fails_right_after_the_exchange_is_not_awaited_for_its_return(nodes):
    run = nodes()
    with node_0_in_this_process(run) as client:
        client.exchange("nodes", to_json(NodeRecord(0, "first", "127.0.0.1", 1, 0, 0, 4000, "00ff")))
        client.report_failure("no space left")
        code, err = run.end(1)
    assert code == 1
    assert re.search(r"gradsync: node 0 \(first, 127.0.0.1\) was lost at .*: no space left$", err), err


def test_a_signal_to_a_launcher_whose_ranks_are_done(nodes):
    run = nodes()
    run.start(0, "none")
    run.start(1, "wait")
    for node in range(2):
        run.await_ids(node)
    pid = run.processes[0].pid
    wait_until(lambda: not Path(f"/proc/{pid}/task/{pid}/children").read_text())
    run.processes[0].send_signal(signal.SIGINT)
    ends = run.end_all()
    assert "gradsync: stopping the ranks of the other nodes (Ctrl-C again leaves at once)" in ends[0][1]
    assert [code for code, _ in ends] == [130, 130], ends
    assert "was ended by SIGINT" in ends[1][1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_killed_ends_all(nodes, victim):
    run = nodes()
    run.start_all("wait")
    for node in range(2):
        run.await_ids(node)
    run.processes[victim].kill()
    code, err = run.end(1 - victim)
    assert code == 1
    assert re.search(rf"^gradsync: node {victim} \(\S+ 127.0.0.1\) was lost at \d\d:\d\d:\d\d: ", err, re.M), err
    why = "the rendezvous server on node 0 is gone" if victim == 0 else "control connection ended unexpectedly"
    assert why in err.splitlines()[-1]


def test_all_ranks_start_again_after_a_failure(nodes):
    run = nodes()
    run.start_all("fail@1", "GRADSYNC_RESTART_COUNT", options=("--max-restarts", 2))
    found = [run.await_ids(node, 2) for node in range(2)]
    ends = run.end_all()
    assert [code for code, _ in ends] == [0, 0]
    for of_node in found:
        assert [words[1:] for words in of_node] == [["1", "0"], ["1", "1"]]
    assert found[0][0][0] != found[0][1][0]
    for _, err in ends:
        assert err.count("ValueError: boom") >= 1
        assert err.count("gradsync: starting all ranks again (restart 1 of at most 2)") == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_was_lost_may_come_back(nodes, victim):
    run = nodes()
    options = ("--max-restarts", 1)
    run.start_all("wait@0", "GRADSYNC_RESTART_COUNT", options=options)
    for node in range(2):
        run.await_ids(node)
    run.processes[victim].kill()
    run.processes[victim].wait()
    run.start(victim, "wait@0", "GRADSYNC_RESTART_COUNT", options=options)
    found = [run.await_ids(node)[0] for node in range(2)]
    ends = run.end_all()
    assert [code for code, _ in ends] == [0, 0]
    assert [words[1:] for words in found] == [["1", "1"]] * 2
    assert f"once node {victim} is back (restart 1 of at most 1)" in ends[1 - victim][1]


def test_who_does_not_come_is_named(nodes):
    run = nodes(3)
    for node in range(2):
        run.start(node, "none", options=("--join-timeout", 9))
    told = [run.end(node) for node in range(2)]
    for node, (code, err) in enumerate(told):
        assert code == 1
        assert re.search(r"missing: node 2 \(not joined\)", err.splitlines()[-1]), err
        assert f"node {node} of 3: not all nodes joined at {run.rendezvous} within 9 s (--join-timeout)" in err
    assert "gradsync: 2 of 3 nodes have joined; waiting for node 2 (not joined)" in told[0][1]
    assert re.search(r"gradsync: node 1 of 3 waits for others at \S+: missing: node 2 \(not joined\)", told[1][1])


def test_who_does_not_come_is_named_before_node_0_ends(nodes):
    """Node 1 waits for longer than node 0, which hosts the server."""
    run = nodes(3)
    for node, seconds in enumerate((7, 11)):
        run.start(node, "none", options=("--join-timeout", seconds))
    assert run.end(0)[0] == 1
    code, err = run.end(1)
    assert code == 1
    assert f"waits for others at {run.rendezvous}: missing: node 2 (not joined)" in err
    assert err.splitlines()[-1].endswith("missing: node 0 (Connection refused)")


def test_node_0_that_does_not_come_is_named(nodes):
    run = nodes()
    run.start(1, "none", options=("--join-timeout", 0.5))
    code, err = run.end(1)
    assert code == 1
    assert "missing: node 0 (Connection refused)" in err


def test_another_secret_is_refused(nodes, tmp_path):
    run = nodes()
    run.start(0, "none")
    other = tmp_path / "other"
    other.mkdir()
    _, secret = write(other)
    code, _, err = command.run(*arguments(1, 2, run.rendezvous, secret), run.script, "none")
    assert code == 1
    assert "--secret-file needs the same secret on every machine" in err
    assert run.processes[0].poll() is None


def test_a_node_that_is_there_already_is_refused(nodes):
    run = nodes(3)
    run.start(0, "none", options=("--join-timeout", 100))
    run.start(1, "none", options=("--join-timeout", 100))
    assert "waiting for node 2" in run.processes[0].stderr.readline()
    code, _, err = command.run(*arguments(1, 3, run.rendezvous, run.secret), run.script, "none")
    assert code == 1
    assert "node 1/3 has joined already and is alive (joining); each node joins once" in err
    code, _, err = command.run(*arguments(1, 2, run.rendezvous, run.secret), run.script, "none")
    assert "world_size 3, node 1 joined with world_size 2 (see --nnodes, --node-rank, --rendezvous)" in err


def test_a_variable_with_an_invalid_value_is_refused_before_the_others_are_awaited(nodes, monkeypatch):
    monkeypatch.setenv("GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS", "abc")
    run = nodes()
    run.start(1, "none")
    code, err = run.end(1)
    assert code == 2
    assert re.search(r"^gradsync: error: GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS needs .* got 'abc'$", err)


def test_a_taken_port_names_its_holder(tmp_path):
    script, secret = write(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, _, err = command.run(*arguments(0, 2, f"127.0.0.1:{port}", secret), script)
    assert code == 1
    assert re.search(
        rf"port {port} on 127.0.0.1 is in use by process \d+ \(.*\); stop its holder, or name another", err
    )


def test_node_0_elsewhere_is_refused(tmp_path):
    script, secret = write(tmp_path)
    code, _, err = command.run(*arguments(0, 2, "192.0.2.77:29400", secret), script)
    assert code == 1
    assert "start node 0 on the machine with the address '192.0.2.77:29400'" in err


def test_a_name_without_an_address_is_refused(tmp_path):
    script, secret = write(tmp_path)
    code, _, err = command.run(*arguments(0, 2, "no-such-machine.invalid:29400", secret), script)
    assert code == 1
    assert "the rendezvous cannot use host 'no-such-machine.invalid'" in err


def test_an_address_of_another_machine_is_refused(nodes):
    run = nodes(3)
    timeouts = {0: 12, 2: 7}  # node 0 hosts the server, and must not end first
    for node, seconds in timeouts.items():
        run.start(node, "none", options=("--join-timeout", seconds))
    run.start(1, "none", options=("--node-address", "192.0.2.77"))
    code, err = run.end(1)
    assert (code, "--node-address '192.0.2.77' is no address of this machine" in err) == (2, True)
    for node, seconds in timeouts.items():  # it did not join: they wait for it as for any other, and it may come yet
        code, err = run.end(node)
        assert (code, f"within {seconds} s (--join-timeout)" in err) == (1, True), err
        assert "missing: node 1 (not joined)" in err.splitlines()[-1]


def test_different_restarts_are_refused(nodes):
    run = nodes()
    run.start(0, "none", options=("--max-restarts", 1))
    run.start(1, "none")
    ends = run.end_all()
    assert [code for code, _ in ends] == [2, 2]
    assert all("all machines need the same --max-restarts; node 0 has 1, node 1 (" in err for _, err in ends)


def test_launchers_may_share_a_log_directory(nodes, tmp_path):
    run = nodes()
    run.start_all("none", options=("--log-dir", tmp_path / "logs"))
    assert [code for code, _ in run.end_all()] == [0, 0]
    folder = tmp_path / "logs"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.log", "rank-1.log"]
    assert all((folder / f"rank-{rank}.log").read_text().startswith("id ") for rank in range(2))


def test_a_launcher_that_cannot_start_its_ranks_says_why(nodes, tmp_path):
    (tmp_path / "file").write_text("")
    run = nodes()
    run.start(0, "wait")
    run.start(1, "wait", options=("--log-dir", tmp_path / "file"))
    ends = run.end_all()
    assert [code for code, _ in ends] == [1, 2]
    assert re.search(r"node 1 \(\S+ 127.0.0.1\) was lost at .* failed: .*file", ends[0][1])


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
    assert all((advice in err) == bool(exit_code) for _, err in ends)


def test_ranks_that_need_mpi_are_not_started(tmp_path):
    script, secret = write(tmp_path)
    for node in range(2):
        line = arguments(node, 2, "127.0.0.1:29400", secret, "--backend", "mpi", ranks=2)
        code, _, err = command.refused(*line, script, "a b")
        assert code == 2
        needed = "gradsync: error: --backend mpi needs MPI's own launcher; run on one node only, with the hosts: "
        assert needed + shlex.join(("mpiexec", "-n", "4", "python", script, "a b")) in err.splitlines()[-1]
