"""Python, the platform and NumPy."""

from __future__ import annotations

from gradsync.doctor.finding import Finding, broken, ok, unusable, warning
from gradsync.doctor.surroundings import Surroundings

_OLDEST_PYTHON, _OLDEST_NUMPY = (3, 10), (2, 1)


def check_python(here: Surroundings) -> list[Finding]:
    """Python's version; Linux on x86-64, which shared memory needs."""
    version, path = here.python
    text = f"{version} on {here.system} {here.machine}, {path}"
    if _numbers(version)[:2] < _OLDEST_PYTHON:
        return [broken("Python", text, "gradsync needs Python 3.10 or newer: make a venv of a newer one")]
    if here.system != "linux":
        return [broken("Python", text, "ranks run on Linux only: use Linux, on Windows WSL2, or a container")]
    if here.machine not in ("x86_64", "AMD64"):
        return [unusable("Python", text, "shared memory needs x86-64: use --backend mpi, or nccl with GPUs")]
    return [ok("Python", text)]


def check_numpy(here: Surroundings) -> list[Finding]:
    """NumPy's version, and whether it loads; msgpack, which the rendezvous speaks."""
    answer = here.answers.get("numpy", {"error": "it was not asked"})
    if "error" in answer:
        return [broken("NumPy", f"it does not load: {answer['error']}", "pip install --force-reinstall 'numpy>=2.1'")]
    if "msgpack_error" in answer:
        return [
            broken("msgpack", f"it does not load: {answer['msgpack_error']}", "pip install --force-reinstall msgpack")
        ]
    version = answer["version"]
    if _numbers(version)[:2] < _OLDEST_NUMPY:
        return [warning("NumPy", f"{version}; gradsync needs 2.1 or newer", "pip install --upgrade 'numpy>=2.1'")]
    return [ok("NumPy", version)]


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)
