"""What an `srun` step tells its tasks in SLURM_* variables: their place, their hosts, and a port to meet at."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from gradsync.errors import InvalidArgument
from gradsync.variable_values import read_below, read_integer, read_pair, value_of

# Slurm numbers the steps that no `srun` made from here on: batch scripts, shells of salloc, and others.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_TASKS_OF_NODES = re.compile(r"[1-9]\d{0,6}(\(x[1-9]\d{0,6}\))?(,[1-9]\d{0,6}(\(x[1-9]\d{0,6}\))?)*")
# Below the ports that Linux gives to outgoing connections, 32768 and up.
_FIRST_PORT = 15_000
_PORTS = 15_000


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Tells whether `srun` started this process: a plain command in a batch script has SLURM_PROCID=0 too."""
    step = _step_of(environ)
    return (
        value_of(environ, "SLURM_PROCID") is not None
        and step is not None
        and not (step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)
    )


def read_slurm_place(environ: Mapping[str, str]) -> tuple[int, int, int | None, int | None]:
    """Reads (rank, world size, local rank, local world size); of the last two, None for what is not told.

    Raises:
        InvalidArgument: a variable is malformed, out of range, or missing; the text names it.
    """
    # SLURM_NTASKS may still describe the whole allocation where the step is smaller.
    tasks = "SLURM_NTASKS" if value_of(environ, "SLURM_STEP_NUM_TASKS") is None else "SLURM_STEP_NUM_TASKS"
    rank, world_size = read_pair(environ, "SLURM_PROCID", tasks)
    if value_of(environ, "SLURM_LOCALID") is None:
        return rank, world_size, None, None
    local_world_size = _tasks_here(environ)
    return rank, world_size, read_below(environ, "SLURM_LOCALID", local_world_size or world_size), local_world_size


def first_host(environ: Mapping[str, str]) -> str | None:
    """Gives the step's first host, where Slurm puts rank 0 unless it is told to distribute tasks otherwise.

    Reads lists such as "rack[1-2]node[03-04,7],login" as `scontrol show hostnames` would.
    """
    hosts = value_of(environ, "SLURM_STEP_NODELIST") or value_of(environ, "SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts)
    return None if first is None else re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def step_port(environ: Mapping[str, str]) -> int:
    """Gives a port that all tasks of a step find, and that those of another step hardly share."""
    return _FIRST_PORT + zlib.crc32(step_name(environ).encode()) % _PORTS


def step_name(environ: Mapping[str, str]) -> str:
    """Names the step, unlike any other on its hosts; a job that is queued again runs under another name."""
    job = value_of(environ, "SLURM_JOB_ID") or value_of(environ, "SLURM_JOBID") or ""
    again = value_of(environ, "SLURM_RESTART_COUNT") or "0"
    return f"slurm-{job}.{_step_of(environ)}.{again}"


def _step_of(environ: Mapping[str, str]) -> str | None:
    return value_of(environ, "SLURM_STEP_ID") or value_of(environ, "SLURM_STEPID")


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Gives this node's entry of SLURM_STEP_TASKS_PER_NODE, which reads like "4(x2),1", or None."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = value_of(environ, name)
    if text is None:
        return None
    if not _TASKS_OF_NODES.fullmatch(text):
        raise InvalidArgument(f"{name} needs to read like 4(x2),1, got {text!r}")
    node = read_integer(environ, "SLURM_NODEID") if value_of(environ, "SLURM_NODEID") else 0
    for entry in text.split(","):
        tasks, _, repeat = entry.rstrip(")").partition("(x")
        node -= int(repeat or 1)
        if node < 0:
            return int(tasks)
    raise InvalidArgument(f"SLURM_NODEID={environ['SLURM_NODEID']} has no entry in {name}={text!r}")
