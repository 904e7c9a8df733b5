"""One rank, started as all are: `python -m gradsync.bench.collectives.rank BACKEND SOCKET`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from gradsync.bench.collectives.cases import Case
from gradsync.bench.collectives.operation import Buffers, NotOffered, Prepared, make_buffers
from gradsync.bench.collectives.over_gradsync import Gradsync
from gradsync.bench.collectives.values import count_wrong, source_of
from gradsync.bench.crew_member import serve

# A rank that has slept may have woken on another rank's core, where both take turns: ranks that train have computed for
# long, and have each their own.
_COMPUTE_FIRST_SECONDS = 0.1


class Timer:
    """What the controller may ask of a rank.

    Args:
        system: what moves the bytes.
    """

    def __init__(self, system: Gradsync) -> None:
        self._system = system
        self.rank, self.versions, self.close = system.rank, system.versions, system.close
        self._runs: dict[str, Callable[[], object]] = {}
        self._arrays: dict[str, Buffers] = {}

    def backend(self) -> str:
        """Returns what carries the bytes."""
        return self._system.backend

    def prepare(self, case: Case, form: str) -> Prepared:
        """Makes the arrays of a form, runs it twice, and counts what is wrong; the second time takes other paths."""
        try:
            buffers = make_buffers(self._system.rank, self._system.empty, case, form)
            run = self._system.operation(case, buffers)
            wrong = max(self._count_wrong(case, buffers, run) for _ in range(2))
        except NotOffered as refusal:
            return Prepared(refusal=str(refusal))
        self._runs[form], self._arrays[form] = run, buffers
        return Prepared(wrong if case.checks else None)

    def _count_wrong(self, case: Case, buffers: Buffers, run: Callable[[], object]) -> int:
        system = self._system
        for array in (buffers.target, buffers.source):  # the source last: it may be, or hold, the target
            if array is not None:
                system.fill(array, 0)
        if buffers.source is not None:
            system.fill(buffers.source, source_of(case, system.rank))
        system.wait()
        system.barrier()
        run()
        system.wait()
        if not case.checks:
            return 0
        target = None if buffers.target is None else system.to_host(buffers.target)
        return count_wrong(case, target, system.rank)

    def time(self, form: str, iterations: int, warm_up: int) -> float:
        """Returns the seconds of one call, of so many in a row. All ranks are asked at once."""
        run, system = self._runs[form], self._system
        for array in (self._arrays[form].source, self._arrays[form].target):
            if array is not None:
                system.fill(array, 0)  # the only values that no reduction in place makes larger
        _compute_for(_COMPUTE_FIRST_SECONDS)
        for _ in range(warm_up):
            run()
        system.wait()
        system.barrier()
        began = time.perf_counter()
        for _ in range(iterations):
            run()
        system.wait()
        return (time.perf_counter() - began) / iterations

    def release(self) -> None:
        """Gives the memory of all forms back."""
        self._runs.clear()
        self._arrays.clear()


def _compute_for(seconds: float) -> None:
    """Keeps this rank's core busy for a while."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def main() -> None:
    """Serves the controller until it hangs up."""
    backend, address = sys.argv[1:]
    serve(address, lambda: Timer(Gradsync(backend)))


if __name__ == "__main__":
    main()
