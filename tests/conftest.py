"""What all tests share. Ranks: ranks.py; commands: commands.py; arrays: arrays.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

import ranks
from commands import cli as cli
from commands import script as script
from gradsync.bucketing import forgotten
from ranks import place as place
from ranks import run_on_ranks as run_on_ranks
from real_cupy.harness import why_not as why_no_host_cuda

# Time is never what a test of a property is about: on a busy machine any example may take long.
hypothesis.settings.register_profile("gradsync", deadline=None)
hypothesis.settings.load_profile("gradsync")

# A shell starts what runs in its background with SIGINT ignored, nohup with SIGHUP, and every process of a test would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Unbuffered, print() writes a line and its end apart, and without prefixes lines of two ranks would mix.
os.environ.pop("PYTHONUNBUFFERED", None)

# NumPy would start a thread for each core in each process, at a fourth of what its import costs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)  # there may be no xdist
def pytest_xdist_auto_num_workers() -> int:
    """Two workers for each core, for tests that wait; a few at most, since each starts ranks of its own."""
    return min(2 * (os.cpu_count() or 1), 8)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes, on=('shm',), ...): runs the body on each rank, see ranks.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    ranks.cases(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return ranks.run_test(pyfuncitem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks.in_order_of_pools(items)
    for mark, why_not in (("gpu", why_no_gpu), ("cupy", why_no_host_cuda)):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = why_not() if marked else None
        for item in marked if reason else []:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionfinish(session: pytest.Session) -> None:
    try:
        ranks.close_pools()
    except AssertionError as error:
        print(error)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def why_no_gpu() -> str | None:
    """Why tests on a GPU cannot run here, or None when they can."""
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "CuPy sees no GPU"
    except Exception as error:
        return f"no usable GPU: {error}"


@pytest.fixture(autouse=True)
def _no_gradients_of_another_test() -> Iterator[None]:
    """Gradients that a test forgets, by an error or on purpose, fail neither the next test nor pytest itself."""
    yield
    forgotten._forget_after_fork()  # there is no other way to be rid of them, and a user never has to
