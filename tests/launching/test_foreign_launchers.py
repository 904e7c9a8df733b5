"""One script, unchanged, under every launcher that starts ranks: here their variables are set by hand.

Under the real mpiexec: tests/backends. Ranks of torchrun and srun, and by hand, with and without a secret:
tests/rendezvous/test_hosting.py.
"""

import contextlib
import os
import shutil
import sys

import numpy as np
import pytest

import gradsync as gs
from ranks import become

# What each launcher tells a rank of two on one machine; {} is the rank. srun: of a step inside a larger job.
ON_ONE_MACHINE = {
    "Open MPI": "OMPI_COMM_WORLD_RANK={} OMPI_COMM_WORLD_SIZE=2 "
    "OMPI_COMM_WORLD_LOCAL_RANK={} OMPI_COMM_WORLD_LOCAL_SIZE=2",
    "PMI": "PMI_RANK={} PMI_SIZE=2 MPI_LOCALRANKID={} MPI_LOCALNRANKS=2",
    "Slurm": "SLURM_STEP_ID=3 SLURM_PROCID={} SLURM_NTASKS=2 SLURM_LOCALID={} SLURM_STEP_TASKS_PER_NODE=2",
    "srun": "SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=gpu[07-09] SLURM_NTASKS=2 SLURM_STEP_ID=3 SLURM_STEP_NODELIST=gpu08 "
    "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_PROCID={} SLURM_LOCALID={} SLURM_NODEID=0",
    "by hand": "RANK={} WORLD_SIZE=2",
    "arguments": "",
}


def variables(launcher, rank):
    return dict(word.split("=") for word in ON_ONE_MACHINE[launcher].replace("{}", str(rank)).split())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runtime").mkdir(mode=0o700)
    return tmp_path / "runtime"


@pytest.fixture
def port():
    return gs.free_port()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("launcher", "address"),
    [
        ("Open MPI", "127.0.1.1"),  # as on Debian
        ("PMI", "192.0.2.1"),
        ("Slurm", "the-name.of-a-container.invalid"),
        ("srun", None),
        ("arguments", "127.0.0.1"),
    ],
)
def test_ranks_that_are_all_here_meet_here_whatever_master_addr_is(rank, launcher, address, folder, port):
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port} if address else {}
    become(**variables(launcher, rank), XDG_RUNTIME_DIR=folder, **meeting)
    arguments = {"rank": rank, "world_size": 2} if launcher == "arguments" else {}
    for _ in range(2):
        with gs.init_process_group("shm", timeout_seconds=60, **arguments) as comm:
            assert comm.all_reduce(np.full(3, rank + 1.0)).tolist() == [3.0] * 3
            # The file by which they find each other has gone: else a rank of the next run could come here.
            assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "own",
    [
        variables("srun", 1)
        | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[08-09]"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
        | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ],
    ids=["srun", "by hand", "torchrun"],
)
def test_ranks_that_may_be_elsewhere_need_a_secret(own, monkeypatch):
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(gs.AuthenticationError):
        gs.init_process_group("shm")


# Stands for mpiexec, which tells no address: starts ranks 0 and 1, each by what its arguments say.
MPIEXEC = """
import os, subprocess, sys
words, command = sys.argv[1], sys.argv[2:]
ranks = []
for rank in "01":
    own = dict(word.split("=") for word in words.replace("{}", rank).split())
    ranks.append(subprocess.Popen(command, env={**os.environ, **own}))
sys.exit(max(rank.wait() for rank in ranks))
"""


def test_ranks_of_several_mpiexecs_at_once_find_their_own(cli, script, folder):
    """Also where shells are between mpiexec and its ranks, and inside a rank of another run."""
    path = script(
        """
        import os, sys
        import gradsync as gs
        with gs.init_process_group("shm") as comm:
            os.write(1, f"{comm.objects.all_gather(sys.argv[1])}\\n".encode())
        """
    )
    shells = ("sh", "-c", 'sh -c \'"$0" "$@"; exit $?\' "$0" "$@"; exit $?')
    started = {
        name: cli.start_program(
            *(sys.executable, "-c", MPIEXEC, ON_ONE_MACHINE["PMI"], *wrapper, sys.executable, path, name),
            environment={"XDG_RUNTIME_DIR": str(folder), **around},
        )
        for name, wrapper, around in (("plain", (), {}), ("inner", shells, {"PMI_RANK": "1", "PMI_SIZE": "7"}))
    }
    for name, run in started.items():
        assert run.result()[:2] == (0, f"{[name] * 2}\n" * 2), name


@pytest.mark.parametrize("name", ["HOROVOD_RANK", "PADDLE_TRAINER_ID"])
def test_ranks_of_a_launcher_that_is_not_known_do_not_train_alone(name, monkeypatch):
    for variable in (name, "HOROVOD_SIZE", "PADDLE_TRAINERS_NUM"):
        if variable.partition("_")[0] == name.partition("_")[0]:
            monkeypatch.setenv(variable, "1" if variable == name else "4")
    with pytest.raises(gs.InvalidArgument, match=name):
        gs.init_process_group()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "address",
    [*("LOCALHOST", "localhost:29530", "ip6-localhost", "127.1"), *("[::1]", "::ffff:127.0.0.1", "tcp://localhost")],
)
def test_every_spelling_of_this_machine_is_this_machine_or_refused_as_such(rank, address, folder, port):
    become(**variables("by hand", rank), XDG_RUNTIME_DIR=folder, MASTER_ADDR=address, MASTER_PORT=port)
    with contextlib.suppress(gs.InvalidArgument), gs.init_process_group("shm", timeout_seconds=10):
        pass


@pytest.mark.ranks(2)
def test_a_rank_with_a_temporary_folder_of_its_own_hears_of_the_folder(rank, folder, port):
    """And not that it has another address, which it has not."""
    own = folder / str(rank)
    own.mkdir(mode=0o700)
    become(**variables("by hand", rank), XDG_RUNTIME_DIR=own, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(gs.RendezvousTimeout) as raised:
        gs.init_process_group("shm", timeout_seconds=1)
    assert "same address" not in str(raised.value)
    assert rank == 0 or str(own) in str(raised.value)


def test_a_shell_in_a_step_of_several_tasks_learns_which_variable_says_so(folder, monkeypatch):
    """srun -n 4 --pty bash; python script.py"""
    several = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
    for name, value in (variables("srun", 0) | several | {"XDG_RUNTIME_DIR": str(folder)}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(gs.RendezvousTimeout) as raised:
        gs.init_process_group("shm", timeout_seconds=0.3)
    assert "SLURM_STEP_NUM_TASKS" in str(raised.value)


HAS_NAMESPACES = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "mount", "ip")))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, unshare and ip")
@pytest.mark.parametrize("machine", ["Debian", "Docker"])
def test_torchrun_on_one_ordinary_machine(machine, cli, script, tmp_path):
    """Whose name is no alias of localhost: 127.0.1.1, or the container's address."""
    pytest.importorskip("torch")
    own = "127.0.1.1 myhost.example.org myhost" if machine == "Debian" else "172.17.0.2 myhost"
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{own}\n")
    path = script("import os, gradsync as gs\nwith gs.init_process_group(): os.write(1, b'met\\n')")
    line = (
        "ip link set lo up; ip addr add 172.17.0.2/32 dev lo; hostname myhost; "
        f"mount --bind {tmp_path}/hosts /etc/hosts; "
        f"exec {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {path}"
    )
    done = cli.program("unshare", "-n", "-m", "-u", "sh", "-c", line, environment={"OMP_NUM_THREADS": "1"})
    assert done.out == "met\n" * 2, done.err


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, unshare and ip")
def test_a_loopback_interface_that_is_down_is_told(cli, script):
    path = script("import gradsync as gs\ngs.init_process_group(timeout_seconds=12)")
    done = cli.program("unshare", "-n", sys.executable, "-m", "gradsync", "run", "-n", "2", path)
    assert "loopback" in done.err.splitlines()[-1]
