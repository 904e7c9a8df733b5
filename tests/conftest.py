"""What all tests share: nothing may be left running, and GPU tests say why they do not run."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Time is never what a property test is about: on a busy machine any example may take long.
hypothesis.settings.register_profile("gradsync", deadline=None)
hypothesis.settings.load_profile("gradsync")

# A shell starts what runs in its background with SIGINT ignored, nohup with SIGHUP, and every process of a test would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Each process of NumPy's would start a thread for each core, at a fourth of what its import costs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Rank processes import the test modules by name.
TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))

from gradsync.bucketing import forgotten  # noqa: E402
from places import why_no_gpu  # noqa: E402


def pytest_xdist_auto_num_workers() -> int:
    """Two workers for each core, for tests that wait; a few at most, since each starts ranks of its own."""
    return min(2 * (os.cpu_count() or 1), 8)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Has each worker import its share of the tests first: on a clean clone all would compile all of them."""
    worker = getattr(session.config, "workerinput", {})
    if worker.get("workercount", 1) == 1 or session.config.args != session.config.getini("testpaths"):
        return
    left_out = set(session.config.getini("norecursedirs"))
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if not left_out.intersection(path.parts)]
    for path in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        sys.path.insert(0, str(path.parent))
        with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest will say so, when it comes to this file
            importlib.import_module(path.stem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("gpu" in item.keywords for item in items):
        return
    reason = why_no_gpu()
    if reason is not None:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _no_gradients_of_another_test() -> Iterator[None]:
    """Gradients that a test forgets, by an error or on purpose, fail neither the next test nor pytest itself."""
    yield
    forgotten._forget_after_fork()


@pytest.fixture(autouse=True)
def _no_secret_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps the secret of its run; tests that share one must not."""
    monkeypatch.setattr("gradsync.environment._secret", None)
