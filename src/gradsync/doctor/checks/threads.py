"""Cores, and how many threads each rank's linear algebra takes of them."""

from __future__ import annotations

from gradsync.doctor.finding import Finding, ok, warning
from gradsync.doctor.surroundings import Surroundings
from gradsync.machine import BLAS_VARIABLES


def check_threads(here: Surroundings) -> list[Finding]:
    """Whether ranks have a core each, and whether thread settings ask for more cores than there are."""
    cores = "1 core" if here.cores == 1 else f"{here.cores} cores"
    found = {name: here.environ[name] for name in BLAS_VARIABLES if here.environ.get(name)}
    malformed = [name for name, value in found.items() if not _numbers(value)]
    settings = ", ".join(f"{name}={value}" for name, value in found.items())
    if malformed:
        return [warning("cores", f"{cores}; {settings}: no number of threads", f"unset {' '.join(malformed)}")]
    too_many = [name for name, value in found.items() if max(_numbers(value)) > here.cores]
    if too_many:
        text = f"{cores}, but {settings}: each rank starts more threads than there are cores"
        return [warning("cores", text, f"unset {' '.join(too_many)}: gradsync run shares the cores among its ranks")]
    if here.cores == 1:
        text = "1 core: two ranks take turns on it, and each collective waits for a turn"
        return [warning("cores", text, "use -n 1, or give the container more: docker run --cpus=4")]
    return [ok("cores", f"{cores}; {settings or 'gradsync run shares them among its ranks (OMP_NUM_THREADS)'}")]


def _numbers(value: str) -> list[int]:
    """Returns the threads of "4", or of "4,2" for nested regions; nothing where it is neither."""
    parts = value.strip().split(",")
    return [int(part) for part in parts] if all(part.strip().isdigit() and int(part) > 0 for part in parts) else []
