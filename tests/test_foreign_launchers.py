"""One script, unchanged, under every launcher that starts ranks: what is installed here for real, the rest simulated.

Under torchrun and mpiexec: tests/prove/mpi/test_real_launchers.py.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync as gs

SCRIPT = """
import sys
import numpy as np
import gradsync as gs
with gs.init_process_group(timeout_seconds=30) as comm:
    total = np.full(3, comm.rank + 1.0)
    comm.all_reduce(total)
    sys.stdout.write(f"{comm.backend} {comm.rank}/{comm.world_size} {total[0]:g}\\n")
"""
EXPECTED = ["shm 0/2 3", "shm 1/2 3"]
FOREIGN = ("GRADSYNC_", "SLURM_", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "GROUP_", "ROLE_")
PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The variables of a shell in which no launcher has been."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN) and name not in PLAIN}
    source = str(Path(gs.__file__).parents[1])
    return {**kept, "PYTHONPATH": source, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def lines_of(command: list[str], variables: dict[str, str]) -> list[str]:
    """Runs a launcher; returns the lines of its ranks, sorted, without the rank that ours puts before each."""
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return sorted(re.sub(r"^\[rank \d+\] ", "", line) for line in done.stdout.splitlines())


def ranks_by_hand(script: str, variables: dict[str, str], *own: dict[str, str]) -> list[tuple[int, str, str]]:
    """Starts a rank for each dict of its own variables; returns exit codes, outputs and errors."""
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={**variables, **of_rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for of_rank in own
    ]
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, out.strip(), err) for rank, (out, err) in zip(ranks, outputs, strict=True)]


def check(outcomes: list[tuple[int, str, str]]) -> None:
    assert [out for _, out, _ in outcomes] == EXPECTED, outcomes


def nothing_is_left(folder: str) -> bool:
    return not list(Path(folder).glob("gradsync-*"))


def test_gradsync_run(script: str, variables: dict[str, str]) -> None:
    assert lines_of([sys.executable, "-m", "gradsync", "run", "-n", "2", script], variables) == EXPECTED


def slurm_task(rank: int) -> dict[str, str]:
    """Returns what srun tells a task of a step of two on one machine, inside a larger job."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "gpu[07-09]",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NODELIST": "gpu08",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def test_srun(script: str, variables: dict[str, str]) -> None:
    check(ranks_by_hand(script, variables, slurm_task(0), slurm_task(1)))
    assert nothing_is_left(variables["XDG_RUNTIME_DIR"])


def test_srun_with_a_secret(script: str, variables: dict[str, str], tmp_path: Path) -> None:
    for name, digits in (("right", "5a"), ("wrong", "a5")):
        (tmp_path / name).write_text(digits * 32)
        (tmp_path / name).chmod(0o600)
    right, wrong = ({"GRADSYNC_SECRET_FILE": str(tmp_path / name)} for name in ("right", "wrong"))
    check(ranks_by_hand(script, variables, slurm_task(0) | right, slurm_task(1) | right))
    script_in_haste = tmp_path / "haste.py"
    # The first rank has 8 s, in which the other one has to come and be refused, on a busy machine too.
    script_in_haste.write_text(SCRIPT.replace("30", "8 if __import__('os').environ['SLURM_PROCID'] == '0' else 30"))
    outcomes = ranks_by_hand(str(script_in_haste), variables, slurm_task(0) | right, slurm_task(1) | wrong)
    assert "AuthenticationError" in outcomes[1][2]
    assert "RendezvousTimeout" in outcomes[0][2]


def test_srun_on_several_machines_needs_a_secret(script: str, variables: dict[str, str]) -> None:
    several = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[08-09]"}
    ((code, _, error),) = ranks_by_hand(script, {**variables, "GRADSYNC_BACKEND": "shm"}, slurm_task(1) | several)
    assert code == 1
    assert "AuthenticationError: rank 1/4: a run across hosts needs a secret" in error
    assert "address gpu08:" in error


LOOK = """
import os, sys
import numpy as np
import gradsync as gs
for _ in range(2):
    with gs.init_process_group(timeout_seconds=30) as comm:
        comm.all_reduce(np.ones(3))
        sys.stdout.write(f"{os.listdir(os.environ['XDG_RUNTIME_DIR'])}\\n")
"""


def test_the_file_is_gone_once_all_have_met(variables: dict[str, str], tmp_path: Path) -> None:
    """Else a rank of the step's next run could come to this one's server; later generations do without it."""
    script, folder = tmp_path / "look.py", tmp_path / "runtime"
    script.write_text(LOOK)
    folder.mkdir()
    outcomes = ranks_by_hand(str(script), {**variables, "XDG_RUNTIME_DIR": str(folder)}, slurm_task(0), slurm_task(1))
    assert [out for _, out, _ in outcomes] == ["[]\n[]", "[]\n[]"], outcomes


def by_hand(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_by_hand(script: str, variables: dict[str, str]) -> None:
    port = gs.free_port()  # and the one beside it, where the ranks meet, is not one that the kernel hands out either
    check(ranks_by_hand(script, variables, by_hand(0, port), by_hand(1, port)))
    assert nothing_is_left(variables["XDG_RUNTIME_DIR"])


ON_ONE_MACHINE = {  # {} is the rank
    "torchrun": "RANK={} WORLD_SIZE=2 LOCAL_RANK={} LOCAL_WORLD_SIZE=2",
    "Open MPI": "OMPI_COMM_WORLD_RANK={} OMPI_COMM_WORLD_SIZE=2 "
    "OMPI_COMM_WORLD_LOCAL_RANK={} OMPI_COMM_WORLD_LOCAL_SIZE=2",
    "PMI": "PMI_RANK={} PMI_SIZE=2 MPI_LOCALRANKID={} MPI_LOCALNRANKS=2",
    "Slurm": "SLURM_STEP_ID=3 SLURM_PROCID={} SLURM_NTASKS=2 SLURM_LOCALID={} SLURM_STEP_TASKS_PER_NODE=2",
}


@pytest.mark.parametrize("launcher", ON_ONE_MACHINE)
def test_ranks_that_are_all_here_meet_here(script: str, variables: dict[str, str], launcher: str) -> None:
    """MASTER_ADDR is the machine's own name under torchrun: on Debian 127.0.1.1, in a container its outer address."""
    port = gs.free_port()
    for address in (socket.gethostname(), "127.0.1.1", "192.0.2.1", "the-name.of-a-container.invalid"):
        master = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        ranks = [
            master | dict(word.split("=") for word in ON_ONE_MACHINE[launcher].replace("{}", str(rank)).split())
            for rank in range(2)
        ]
        check(ranks_by_hand(script, {**variables, "GRADSYNC_BACKEND": "shm"}, *ranks))
    assert nothing_is_left(variables["XDG_RUNTIME_DIR"])


def test_ranks_that_may_be_elsewhere_need_a_secret(script: str, variables: dict[str, str]) -> None:
    """By hand without LOCAL_WORLD_SIZE, or with fewer ranks here than in all."""
    for fewer in ({}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", **fewer}
        ((code, _, error),) = ranks_by_hand(script, {**variables, "GRADSYNC_BACKEND": "shm"}, rank)
        assert code == 1
        assert "AuthenticationError: rank 1/2: a run across hosts needs a secret" in error


@pytest.mark.parametrize("names", [("MASTER_ADDR", "MASTER_PORT"), ("GRADSYNC_ADDRESS",)], ids=["MASTER", "GRADSYNC"])
def test_ranks_as_arguments_with_an_address_in_variables(
    script: str, variables: dict[str, str], names: tuple[str, ...]
) -> None:
    path = Path(script)
    path.write_text(
        SCRIPT.replace("group(", 'group("shm", rank=int(__import__("os").environ["MY_RANK"]), world_size=2, ')
    )
    port = str(gs.free_port())
    found = dict(zip(names, ("127.0.0.1", port) if len(names) == 2 else (f"127.0.0.1:{port}",), strict=True))
    check(ranks_by_hand(script, variables, {"MY_RANK": "0", **found}, {"MY_RANK": "1", **found}))


RANK_THAT_LAUNCHES = """
import os, subprocess, sys
for rank in "01":
    own = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    inner = subprocess.run([sys.executable, sys.argv[1]], env={**os.environ, **own}, capture_output=True, text=True)
    print(inner.stderr)
"""


@pytest.mark.parametrize("outer_size", [1, 2])
def test_a_launcher_inside_a_rank_of_gradsync_is_told(
    script: str, variables: dict[str, str], tmp_path: Path, outer_size: int
) -> None:
    """As torchrun started by a script that `gradsync run` has started: the ranks of neither run go astray."""
    outer = tmp_path / "outer.py"
    outer.write_text(RANK_THAT_LAUNCHES)
    run = [sys.executable, "-m", "gradsync", "run", "-n", str(outer_size), str(outer), script]
    told = "\n".join(lines_of(run, variables))
    # Of two in two, one has the same place in both runs; it lacks the secret of the outer one.
    same = 0 if outer_size == 1 else 2
    assert told.count("InvalidArgument: ") == 2 * outer_size - same
    assert told.count("name different ranks for this process") == 2 * outer_size - same
    assert told.count("has inherited the rank's variables without the secret") == same
