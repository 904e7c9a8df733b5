"""gradsync run on several machines: a launcher on each, here all on this one, each as if it were another."""

import os
import re
import secrets
import signal
import socket
from pathlib import Path

import pytest

import gradsync as gs
from commands import refusals, wait_until

# Each rank meets the others, says who it is, and does what its argument says: "ROLE@RANK" for one rank, or "ROLE".
SCRIPT = """
    import os, signal, sys, time
    import gradsync as gs
    comm = gs.init_process_group("shm", timeout_seconds=float(os.environ.get("MEET_SECONDS", 60)))
    os.write(1, f"met {comm.rank}\\n".encode())
    what, _, who = sys.argv[1].partition("@")
    if what == "show":
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NCCL_SOCKET_IFNAME MASTER_ADDR"
        shown = [os.environ.get(name) for name in (*names.split(), "MASTER_PORT", "GRADSYNC_ADDRESS")]
        os.write(1, (" ".join(map(str, shown)) + "\\n").encode())  # in one piece: all ranks write
    comm.barrier()
    if what == "busy":
        if who and comm.rank == int(who):
            raise ValueError("boom")
        time.sleep(100)
    if what == "linger" and comm.rank == int(who):
        with open(sys.argv[2]) as fifo:
            fifo.read()
    if what == "wait":
        while True:
            comm.barrier()
            time.sleep(0.02)
    comm.close()
"""

# What befalls the ranks of the second argument is the first; the others go on.
GOES_ON = """
    import os, signal, sys, time
    import numpy as np
    import gradsync as gs
    comm = gs.init_process_group("shm")
    for round in range(2):
        try:
            if round == 0 and str(comm.member) in sys.argv[2]:
                os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "kill" else time.sleep(1000)
            comm.all_reduce(np.ones(1))
            if round == 0:
                comm.barrier()
        except (gs.RankFailed, gs.CollectiveTimeout):
            comm = gs.rebuild()
    os.write(1, f"{comm.member} of {comm.world_size}\\n".encode())
"""


class Machines:
    """The launchers of one run."""

    def __init__(self, cli, path, secret, count, host):
        self._cli, self._path, self._secret, self.count = cli, path, secret, count
        self.rendezvous = f"{host}:{gs.free_port()}"
        self.launchers = [None] * count

    def start(self, node, *arguments, n=1, options=(), secret=None, environment=None):
        where = ("--nnodes", self.count, "--node-rank", node, "--rendezvous", self.rendezvous)
        secret = ("--secret-file", secret or self._secret)
        line = ("run", "--no-prefix", "-n", n, *where, *secret, *options, self._path, *arguments)
        self.launchers[node] = self._cli.start(*line, environment=environment)
        return self.launchers[node]

    def start_all(self, *arguments, **options):
        for node in reversed(range(self.count)):  # the others wait for node 0
            self.start(node, *arguments, **options)

    def have_met(self):
        for launcher in self.launchers:
            launcher.read_until("met")

    def results(self):
        return [launcher.result() for launcher in self.launchers]


@pytest.fixture
def secret(tmp_path):
    def write(name="secret"):
        path = tmp_path / name
        path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
        return path

    return write


@pytest.fixture
def machines(cli, script, secret):
    def make(count=2, host="127.0.0.1", source=SCRIPT):
        return Machines(cli, script(source), secret(), count, host)

    return make


MPI = ("--secret-file", "secret", "--backend", "mpi")
REFUSED = {
    # a word of the refusal: the options
    "--node-rank needs --nnodes": ("--node-rank", 1),
    "from 0 to 0": ("--nnodes", 1, "--node-rank", 1),
    "--rendezvous needs --nnodes": ("--rendezvous", "h:1"),
    "--secret-file needs --nnodes": ("--secret-file", "f"),
    "needs --node-rank": ("--nnodes", 2),
    "from 0 to 1": ("--nnodes", 2, "--node-rank", 2),
    "scheduler": ("--nnodes", 2, "--node-rank", 0, "--max-restarts", 1),
    "needs --rendezvous": ("--nnodes", 2, "--node-rank", 0),
    "from 1 to 65535": ("--nnodes", 2, "--node-rank", 0, "--rendezvous", "h:0"),
    "'head'": ("--nnodes", 2, "--node-rank", 0, "--rendezvous", "head"),
    "got 0.0.0.0": ("--nnodes", 2, "--node-rank", 1, "--rendezvous", "0.0.0.0:1"),
    "needs --secret-file": ("--nnodes", 2, "--node-rank", 0, "--rendezvous", "10.0.0.1:1"),
    "cannot be opened": ("--nnodes", 2, "--node-rank", 0, "--rendezvous", "h:1", "--secret-file", "/none"),
    "mpiexec -n 2 python": ("--nnodes", 2, "--node-rank", 1, "--rendezvous", "h:1", *MPI),
}  # fmt: skip


def test_options_that_do_not_fit_are_refused(cli, script, secret, tmp_path):
    secret()
    path = script("print('started')")
    for word, code, out, err in refusals(
        cli, {word: ("run", "-n", 1, *REFUSED[word], path) for word in REFUSED}, tmp_path
    ):
        assert (code, out) == (2, "")
        assert err.splitlines()[-1].startswith("gradsync: error: ")
        assert word in err


def test_one_machine_may_be_named(cli, script, secret):
    where = ("--nnodes", 1, "--node-rank", 0, "--rendezvous", "head:29400", "--secret-file", secret())
    path = script("import os; print(os.environ['GROUP_WORLD_SIZE'], os.environ.get('NCCL_SOCKET_IFNAME'))")
    assert cli("run", "--no-prefix", "-n", 1, *where, path) == (0, "1 None\n", "")


def test_ranks_are_numbered_over_the_machines_and_share_a_log_directory(machines, tmp_path):
    run = machines()
    run.start_all("show", n=2, options=("--log-dir", tmp_path / "logs"))
    results = run.results()
    port = int(run.rendezvous.split(":")[1])
    for node, (code, out, err) in enumerate(results):
        assert code == 0
        lines = sorted(line for line in out.splitlines() if "met" not in line)
        shared = f"=lo 127.0.0.1 {port + 1} {run.rendezvous}"
        assert lines == [f"{2 * node + local} 4 {local} 2 {node} 2 {shared}" for local in range(2)]
        ranks = f"ranks {2 * node} and {2 * node + 1} of 4"
        assert err == f"gradsync: node {node} of 2: {ranks}; rendezvous at {run.rendezvous}\n"
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"rank-{rank}.log" for rank in range(4)]
    assert (tmp_path / "logs" / "rank-3.log").read_text().startswith("met 3\n")


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_on_one_machine_ends_both_also_ranks_that_are_busy(culprit, machines):
    """No collective tells them, and no other launcher."""
    run = machines()
    run.start_all(f"busy@{culprit}")
    results = run.results()
    assert [result.code for result in results] == [1, 1]
    assert f"because of rank {culprit}:\n" in results[1 - culprit].err
    report = rf"^gradsync: rank {culprit} \(pid \d+ on \S+\) failed with exit code 1:\nTrace"
    assert re.search(report, results[culprit].err, re.M)
    assert results[culprit].err.endswith("ValueError: boom\n")


@pytest.mark.parametrize(("victim", "role"), [(0, "busy"), (1, "wait")])
def test_a_launcher_that_is_killed_ends_the_other(victim, role, machines):
    run = machines()
    run.start_all(role)
    run.have_met()
    run.launchers[victim].kill()
    code, _, err = run.launchers[1 - victim].result()
    assert code == 1
    assert (f"the rendezvous server at {run.rendezvous} is gone" if victim == 0 else "rank 1/2") in err


def test_a_signal_to_one_launcher_ends_both(machines):
    run = machines()
    run.start_all("wait")
    run.have_met()
    run.launchers[1].send_signal(signal.SIGINT)
    first, second = run.results()
    assert (first.code, second.code) == (1, 130)
    assert "because of rank 1" in first.err


def test_machine_0_keeps_the_server_for_the_others(machines, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    run = machines()
    run.start_all("linger@1", tmp_path / "fifo")
    run.have_met()
    pid = run.launchers[0].pid
    wait_until(lambda: not Path(f"/proc/{pid}/task/{pid}/children").read_text(), "the end of its ranks")
    with open(tmp_path / "fifo", "w"):
        pass
    assert [result.code for result in run.results()] == [0, 0]


@pytest.mark.parametrize(
    ("how", "who", "codes"), [("kill", "3", [0, 0]), ("hang", "3", [0, 0]), ("kill", "01", [137, 0])]
)
def test_both_machines_go_on_without_ranks_of_one(how, who, codes, machines):
    """A rank that hangs on the machine without the server; all ranks of the machine with the server."""
    run = machines(source=GOES_ON)
    quickly = {"GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS": "2"} if how == "hang" else {}
    run.start_all(how, who, n=2, options=("--min-ranks", 2), environment=quickly)
    results = run.results()
    assert [result.code for result in results] == codes, results
    left = [member for member in "0123" if member not in who]
    shown = sorted(line for result in results for line in result.out.splitlines())
    assert shown == [f"{member} of {len(left)}" for member in left]
    assert results["0" not in who].err.count("; the others go on\n") == len(who)


def test_a_machine_with_another_secret_is_refused_and_harms_nobody(machines, secret):
    """What else may be wrong with a rank that joins: tests/rendezvous/test_joining.py."""
    run = machines()
    run.start(0, "return")
    code, _, err = run.start(1, "return", secret=secret("other")).result()
    assert (code, "AuthenticationError" in err) == (1, True)
    run.start(1, "return")
    assert [result.code for result in run.results()] == [0, 0]


def test_an_address_that_machine_0_cannot_have_is_refused(machines):
    run = machines()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        run.rendezvous = f"127.0.0.1:{holder.getsockname()[1]}"
        code, out, err = run.start(0, "return").result()
        assert (code, out) == (1, "")
        assert "in use; --rendezvous needs an address of the machine with --node-rank 0, and a port that is free" in err
    run.rendezvous = "192.0.2.77:29400"
    code, out, err = run.start(0, "return").result()
    assert (code, out) == (1, "")
    assert "192.0.2.77" in err.splitlines()[-1]


def test_a_name_that_means_loopback_on_machine_0_is_warned_of(machines, tmp_path):
    """As /etc/hosts of Debian has it for the machine's own name; here by Python's own look-up."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(
        "import socket\nlook_up = socket.getaddrinfo\n"
        "def in_debian(host, *rest, **options):\n"
        "    return look_up('127.0.1.1' if host in ('head', b'head') else host, *rest, **options)\n"
        "socket.getaddrinfo = in_debian\n"
    )
    run = machines(host="head")
    run.start_all("return", environment={"PYTHONPATH": str(tmp_path / "first")})
    results = run.results()
    assert [result.code for result in results] == [0, 0], results
    assert "warning: on this machine 'head' has the address 127.0.1.1" in results[0].err
