"""A real all-reduce of each backend that seems usable, with two ranks, each under a deadline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsync.doctor.finding import Finding, Status
from gradsync.doctor.probes import call
from gradsync.doctor.surroundings import Surroundings
from gradsync.machine import count_gpus

BACKENDS = ("local", "shm", "mpi", "nccl")
_OPTIONS = ("-b", "16M", "-e", "16M", "--iters", "5", "-w", "2", "--blocks", "3")


@dataclass(frozen=True)
class Trial:
    """What came of trying a backend.

    Attributes:
        backend: its name.
        works: whether an all-reduce gave the right result; None where it was not tried.
        ranks: that took part.
        text: what was found, for a person.
        advice: what to do; "" where there is nothing to do.
        bus_bytes_per_second: of 16 MB, the bus bandwidth; None where it was not tried, or for one rank.
        seconds: that it took, start of the ranks included.
    """

    backend: str
    works: bool | None
    ranks: int
    text: str
    advice: str = ""
    bus_bytes_per_second: float | None = None
    seconds: float = 0.0


def try_backend(backend: str, here: Surroundings, findings: Sequence[Finding], deadline_seconds: float) -> Trial:
    """Runs an all-reduce over a backend, where nothing says that it cannot work; never longer than about the deadline.

    Args:
        backend: one of BACKENDS.
        here: the facts.
        findings: of the checks.
        deadline_seconds: for all of it; then its processes are killed.
    """
    reason = why_not(backend, here, findings)
    if reason is not None:
        return Trial(backend, None, 0, reason)
    ranks = _ranks(backend, here)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradsync-doctor-") as folder:
        trial = _run(backend, ranks, f"{folder}/result.json", deadline_seconds)
    return replace(trial, seconds=time.monotonic() - began)


def why_not(backend: str, here: Surroundings, findings: Sequence[Finding]) -> str | None:
    """Returns why a backend need not be tried; None where it has to be."""
    if backend == "nccl" and not here.has_gpu:
        return "no NVIDIA GPU is here"
    wanted = {"nccl": ("GPUs", "CuPy", "NCCL"), "mpi": ("MPI",), "shm": ("Python",)}.get(backend, ())
    for finding in findings:
        if finding.what in wanted and finding.status is Status.UNUSABLE:
            return f"see {finding.what}"
    return None


def _ranks(backend: str, here: Surroundings) -> int:
    """Returns two, but for what has place for one only."""
    if backend == "nccl":
        return min(2, max(count_gpus(here.environ), 1))
    return 1 if backend == "local" else 2


def _run(backend: str, ranks: int, output: str, deadline_seconds: float) -> Trial:
    """Has `gradsync bench collectives` time 16 MB in a process of its own: what is broken may crash or hang."""
    options = ["--backend", backend, "-n", str(ranks), "--json", output, *_OPTIONS]
    try:
        done = call([sys.executable, "-m", "gradsync", "bench", "collectives", *options], deadline_seconds)
    except OSError as error:
        return Trial(backend, False, ranks, f"{type(error).__name__}: {error}")
    except subprocess.TimeoutExpired:
        return Trial(backend, False, ranks, f"no answer within {deadline_seconds:.0f} s", _advice(backend))
    if done.returncode and not os.path.exists(output):
        return Trial(backend, False, ranks, _cause(done), _advice(backend))
    with open(output, encoding="utf-8") as file:
        [row] = json.load(file)["rows"]
    forms = row["forms"].values()
    if wrong := sum(form["wrong"] or 0 for form in forms):
        return Trial(backend, False, ranks, f"{wrong:,} elements of the result are wrong", "please report this")
    if ranks == 1:
        alone = "" if backend == "local" else "; there is one GPU, and each rank needs its own"
        return Trial(backend, True, ranks, f"works with one rank{alone}")
    seconds = min(form["seconds"]["median"] for form in forms)
    bus = max(form["bus_bytes_per_second"] for form in forms)
    text = f"works: 16 MB in {1e3 * seconds:.3g} ms between {ranks} ranks, {bus / 1e9:.3g} GB/s"
    return Trial(backend, True, ranks, text, bus_bytes_per_second=bus)


def _advice(backend: str) -> str:
    return f"see all of it: gradsync bench collectives --backend {backend} -e 1K"


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what the ranks say of their end: the last line of a traceback, or the command's own error."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    of_ranks = [line for line in lines[:-1] if re.match(r"[\w.]*(?:Error|Exception|[A-Z]\w+): ", line)]
    return (of_ranks or lines)[-1].removeprefix("gradsync: error: ").replace("gradsync.errors.", "")
