"""Ranks of one MPI job on several machines made of network namespaces; tests and benchmarks only.

mpiexec runs on the first machine and reaches the others through a program in place of ssh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cross_check_launch import OF_LAUNCHERS, SOURCE, remove_abandoned_segments
from namespaces import Machine

TRAINING = Path(__file__).parents[1] / "mpi" / "mpi_machine_rank.py"
NCCL_RANK = Path(__file__).parent / "nccl_machine_rank.py"
_REMOTE = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec "{folder}/enter-$host" "$@"
"""
_ENTER = """#!/bin/sh
exec ip netns exec {machine.name} unshare --uts sh -c "hostname {machine.host}; exec $*"
"""


class MpiJob:
    """A script on ranks of several machines.

    Args:
        machines: these.
        folder: where the ranks write down what happens to them; their first argument.
        ranks_each: how many on each machine; they count from the first machine on.
        script: of a rank; by default it trains on the digits.
    """

    def __init__(self, machines: Sequence[Machine], folder: Path, ranks_each: int = 2, script: Path = TRAINING) -> None:
        self._script = script
        self.machines = machines
        self.folder = folder
        self.world_size = ranks_each * len(machines)
        self._ranks_each = ranks_each
        self._process: subprocess.Popen[str] | None = None

    def start(self, *arguments: object) -> None:
        """Starts the ranks, with more arguments for the script; of the training, the number of epochs."""
        remote = self.folder / "remote"
        _write_program(remote, _REMOTE.replace("{folder}", str(self.folder)))
        for machine in self.machines:
            _write_program(self.folder / f"enter-{machine.ipv4}", _ENTER.format(machine=machine))
        hosts = ",".join(machine.ipv4 for machine in self.machines)
        mpiexec = str(Path(sysconfig.get_path("scripts")) / "mpiexec")
        first = self.machines[0]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
        self._process = first.start(
            *(mpiexec, "-launcher", "ssh", "-launcher-exec", str(remote), "-localhost", first.ipv4, "-iface", "eth0"),
            *("-hosts", hosts, "-ppn", str(self._ranks_each), "-n", str(self.world_size)),
            *(sys.executable, str(self._script), str(self.folder), *map(str, arguments)),
            # Without UCX_TLS, MPICH sees that the "machines" share memory, and no cut of the network would concern MPI.
            env={**kept, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self"},
        )

    def await_started(self, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Returns what each rank says after some steps."""
        return await_told("started", self.folder, self.world_size, seconds)

    def await_ended(self, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Returns how each rank has ended."""
        return await_told("ended", self.folder, self.world_size, seconds)

    def await_any_ended(self, ranks: Sequence[int], seconds: float = 40.0) -> dict[str, Any]:
        """Returns how the first of these ranks has ended."""
        paths = [self.folder / f"{rank}.ended" for rank in ranks]
        _await_condition(
            lambda: any(path.exists() for path in paths), self.folder, seconds, f"none of {ranks} has ended"
        )
        found: dict[str, Any] = json.loads(next(path for path in paths if path.exists()).read_text())
        return found

    def end(self, seconds: float = 60.0) -> tuple[int, str]:
        """Waits for mpiexec; returns its exit code, and what it has printed."""
        assert self._process is not None
        process, self._process = self._process, None
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        finally:
            remove_abandoned_segments()
        return process.returncode, out + err

    def close(self) -> None:
        """Ends what is left of a job that nobody has waited for."""
        if self._process is not None:
            self._process.kill()
            self.end()


def await_told(what: str, folder: Path, world_size: int, seconds: float) -> list[dict[str, Any]]:
    """Returns what each rank has written down there, "started" or "ended", once all have."""
    paths = [folder / f"{rank}.{what}" for rank in range(world_size)]
    _await_condition(lambda: all(path.exists() for path in paths), folder, seconds, f"not all ranks have {what}")
    return [json.loads(path.read_text()) for path in paths]


def _await_condition(is_met: Callable[[], bool], folder: Path, seconds: float, otherwise: str) -> None:
    """Looks again and again; at the deadline an AssertionError tells what the ranks were doing."""
    deadline = time.monotonic() + seconds
    while not is_met():
        if time.monotonic() >= deadline:
            stacks = [f"{path.name}:\n{path.read_text()}" for path in folder.glob("*.stacks")]
            raise AssertionError("\n".join([otherwise, *stacks]))
        time.sleep(0.02)


def check_ranks_over_nccl(ended: Sequence[dict[str, Any]]) -> None:
    """Checks what four ranks on two machines have found over NCCL's stand-in."""
    for rank, found in enumerate(ended):
        assert found["host"] == f"host{rank // 2}"
        assert found["sum"] == [10.0] * 5
        assert found["objects"] == [{"rank": other} for other in range(4)]


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
