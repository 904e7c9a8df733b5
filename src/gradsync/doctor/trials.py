"""A real all-reduce of each backend that seems usable, with two ranks, each under a deadline."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradsync.bench.collectives.cases import Case
from gradsync.bench.collectives.measuring import start
from gradsync.bench.collectives.operation import IN_PLACE, Prepared
from gradsync.bench.crew import Crew, CrewFailed, Patience
from gradsync.doctor.finding import Finding, Status
from gradsync.doctor.surroundings import Surroundings
from gradsync.machine import count_gpus

BACKENDS = ("local", "shm", "mpi", "nccl")
_COUNT = 4 * 1024**2  # of float32: 16 MB
_ITERATIONS, _WARM_UP, _BLOCKS = 5, 2, 3
_END_SECONDS = 2.0


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
        deadline_seconds: for the ranks to start, and once more for them to answer.
    """
    reason = why_not(backend, here, findings)
    if reason is not None:
        return Trial(backend, None, 0, reason)
    ranks = _ranks(backend, here)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="gradsync-doctor-") as folder:
            trial = _run(backend, ranks, folder, deadline_seconds)
    except CrewFailed as error:
        words = error.summary.removeprefix(f"gradsync/{backend}: ").replace("gradsync.errors.", "")
        advice = f"see all of it: gradsync bench collectives --backend {backend} -e 1K"
        trial = Trial(backend, False, ranks, words, advice)
    except Exception as error:  # whatever is broken is a line of the doctor's
        trial = Trial(backend, False, ranks, f"{type(error).__name__}: {error}")
    return Trial(**{**vars(trial), "seconds": time.monotonic() - began})


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


def _run(backend: str, ranks: int, folder: str, deadline_seconds: float) -> Trial:
    case = Case("all_reduce", _COUNT, "float32", "sum", ranks, _ITERATIONS, _WARM_UP, checks=True)
    patience = Patience(deadline_seconds, deadline_seconds, _END_SECONDS)
    with start(backend, folder, ranks, patience) as crew:
        prepared: list[Prepared] = crew.ask("prepare", case, IN_PLACE)
        wrong = sum(rank.wrong or 0 for rank in prepared)
        if wrong:
            return Trial(backend, False, ranks, f"{wrong:,} elements of the result are wrong", "please report this")
        seconds = min(_slowest(crew, block) for block in range(_BLOCKS))
    size_bytes = case.count * 4
    bus = size_bytes / seconds * case.kind.bus_factor(ranks)
    if ranks == 1:
        alone = (
            "works with one rank"
            if backend == "local"
            else "works with one rank; there is one GPU, and each rank needs its own"
        )
        return Trial(backend, True, ranks, alone)
    text = f"works: 16 MB in {1e3 * seconds:.3g} ms between {ranks} ranks, {bus / 1e9:.3g} GB/s"
    return Trial(backend, True, ranks, text, bus_bytes_per_second=bus)


def _slowest(crew: Crew, block: int) -> float:
    answers: list[Any] = crew.ask("time", IN_PLACE, _ITERATIONS, _WARM_UP if block == 0 else 0)
    return max(map(float, answers))
