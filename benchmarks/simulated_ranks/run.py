"""One run of one contender: a server in a process of its own, and a few processes that are all its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gradsync.machine import BLAS_VARIABLES
from gradsync.rendezvous.liveness import heartbeat_seconds
from simulated_ranks.contenders import GET_ID, GRADSYNC, LEAVE, PHASES, PUT_ID
from simulated_ranks.names import with_names

_BENCHMARKS = Path(__file__).parents[1]
_ONE_THREAD = dict.fromkeys(BLAS_VARIABLES, "1")
LOAD_PROCESSES = 2


@dataclass
class Phase:
    """The times of a phase, from the first rank's begin to the last one's end, and the processor times.

    Attributes:
        wall_seconds: of all ranks together.
        server_cpu_seconds, clients_cpu_seconds: of the server, and of the processes that are the ranks.
    """

    wall_seconds: float
    server_cpu_seconds: float
    clients_cpu_seconds: float


@dataclass
class Run:
    """The figures of one run, in seconds and bytes.

    Attributes:
        memory_growth_bytes: of the server, from before the ranks join to the end of the barrier.
    """

    phases: dict[str, Phase] = field(default_factory=dict)
    memory_growth_bytes: int = 0
    lost_connections: int = 0
    heartbeats: int = 0
    heartbeat_seconds: float = 0.0
    heartbeat_cpu_seconds: float = 0.0


def play(contender: str, world_size: int, *, beat_seconds: float, torch_python: str) -> Run:
    """Runs ranks that join, share an id, meet and, if asked for, send heartbeats for a while.

    Args:
        contender: one of CONTENDERS.
        world_size: how many ranks.
        beat_seconds: how long gradsync's ranks send heartbeats; 0 is not at all.
        torch_python: the Python that has PyTorch.

    Raises:
        RuntimeError: a process ended early, or the ranks failed.
    """
    run = Run()
    secret = secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="rendezvous-scale-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        server = stack.enter_context(_process(_server_command(contender, world_size, folder, torch_python), secret))
        port = int(_line(server))
        load_of = [sys.executable, "-m", "simulated_ranks.load", contender]
        command = [*load_of, "127.0.0.1", str(port), str(world_size)]
        per_process = -(-world_size // LOAD_PROCESSES)
        starts = range(0, world_size, per_process)
        shares = [(first, min(per_process, world_size - first)) for first in starts]
        loads = [stack.enter_context(_process([*command, str(f), str(n)], secret)) for f, n in shares]
        for load in loads:
            _line(load)
        resident = _resident_bytes(server.pid)
        for phase in PHASES:
            run.phases[phase] = _play_phase(phase, server, loads, run)
        run.memory_growth_bytes = _resident_bytes(server.pid) - resident
        if beat_seconds:
            cpu = _cpu_seconds(server.pid)
            reports = _tell_all(loads, [f"beat:{beat_seconds} {heartbeat_seconds(world_size)}"] * len(loads))
            run.heartbeat_cpu_seconds = _cpu_seconds(server.pid) - cpu
            run.heartbeat_seconds = max(r["ended"] for r in reports) - min(r["began"] for r in reports)
            run.heartbeats = int(sum(report["beats"] for report in reports))
        if contender == GRADSYNC:
            run.phases[LEAVE] = _play_phase(LEAVE, server, loads, run)
    return run


def _play_phase(phase: str, server: subprocess.Popen[str], loads: list[subprocess.Popen[str]], run: Run) -> Phase:
    commands = [f"{phase}:0-"] * len(loads)
    if phase == PUT_ID:
        loads, commands = loads[:1], [f"{phase}:0-1"]
    elif phase == GET_ID:
        commands[0] = f"{phase}:1-"
    cpu = _cpu_seconds(server.pid)
    began = time.monotonic()
    reports = _tell_all(loads, commands)
    wall = max(report["ended"] for report in reports) - began
    run.lost_connections = max(run.lost_connections, int(sum(report["lost"] for report in reports)))
    time.sleep(0.05)  # work that the server still does for this phase counts for it
    cpu = _cpu_seconds(server.pid) - cpu
    return Phase(wall, cpu, sum(report["cpu_seconds"] for report in reports))


def _tell_all(loads: list[subprocess.Popen[str]], commands: list[str]) -> list[dict[str, Any]]:
    for load, command in zip(loads, commands, strict=True):
        _input(load).write(f"{command}\n")
        _input(load).flush()
    return [json.loads(_line(load)) for load in loads]


def _server_command(contender: str, world_size: int, folder: Path, torch_python: str) -> list[str]:
    if contender == GRADSYNC:
        return [sys.executable, "-m", "simulated_ranks.serve_gradsync", str(world_size)]
    return with_names([torch_python, "-E", "-m", "simulated_ranks.serve_tcpstore", str(world_size)], folder)


@contextlib.contextmanager
def _process(command: list[str], secret: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that ends with its standard input, and sends it the secret."""
    variables = {**os.environ, **_ONE_THREAD, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(
        command, cwd=_BENCHMARKS, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            _input(process).write(f"{secret}\n")
            _input(process).flush()
            yield process
            _input(process).close()
            process.wait(30)
        finally:
            process.kill()


def _input(process: subprocess.Popen[str]) -> IO[str]:
    if process.stdin is None:
        raise RuntimeError("started without a standard input")
    return process.stdin


def _line(process: subprocess.Popen[str]) -> str:
    if process.stdout is None:
        raise RuntimeError("started without a standard output")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with {process.wait(30)}")
    return line


def _cpu_seconds(pid: int) -> float:
    """Returns the processor time of all threads of a process, in user code and in the kernel, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
