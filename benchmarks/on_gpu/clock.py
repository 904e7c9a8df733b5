"""Timing on a GPU: by the device's clock for work on the device, by the host's clock for a whole step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import cupy

# With a gigabyte read and written for each, more than any host needs to queue what is timed here.
_MAX_FILLERS = 256


class Operation(NamedTuple):
    """A timed operation, and its preparation, which is not timed."""

    work: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


class Sample(NamedTuple):
    """One timing.

    Attributes:
        seconds: until the device was done.
        host_seconds: until the call returned.
        is_late: whether the device waited for the host in between, so that `seconds` holds the host's time too.
    """

    seconds: float
    host_seconds: float
    is_late: bool = False


class DeviceClock:
    """Times work by events on a stream of its own.

    A kernel takes microseconds, and so does the host to queue it: on an idle device the time between two events would
    be the host's. So the device is kept busy with copies until all is queued; as many as that takes, found by trying.
    They also leave the caches full of something else, as a training step would.

    Args:
        filler_bytes: size of one such copy.
    """

    def __init__(self, filler_bytes: int) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        with self._stream:
            self._source, self._target = (cupy.zeros(filler_bytes, cupy.uint8) for _ in range(2))
        self._fillers = 1

    def __call__(self, operation: Operation) -> Sample:
        """Times one call, whose work goes to the current stream."""
        cupy.cuda.runtime.deviceSynchronize()  # arrays may have been made on other streams
        with self._stream:
            while True:
                operation.prepare()
                sample = self._attempt(operation.work)
                if not sample.is_late or self._fillers >= _MAX_FILLERS:
                    return sample
                self._fillers *= 2

    def _attempt(self, work: Callable[[], object]) -> Sample:
        self._stream.synchronize()
        for _ in range(self._fillers):
            self._target.data.copy_from_device_async(self._source.data, self._source.nbytes, self._stream)
        self._begin.record(self._stream)
        began = time.perf_counter()
        work()
        host_seconds = time.perf_counter() - began
        self._end.record(self._stream)
        is_late = bool(self._begin.done)
        self._end.synchronize()
        return Sample(cupy.cuda.get_elapsed_time(self._begin, self._end) / 1e3, host_seconds, is_late)


def host_clock(operation: Operation) -> Sample:
    """Times one call by the host's clock, from an idle device until it is idle again."""
    operation.prepare()
    cupy.cuda.runtime.deviceSynchronize()
    began = time.perf_counter()
    operation.work()
    returned = time.perf_counter()
    cupy.cuda.runtime.deviceSynchronize()
    return Sample(time.perf_counter() - began, returned - began)


def take_turns(
    operations: Mapping[str, Operation],
    clock: Callable[[Operation], Sample],
    rounds: int,
    warm_up: int,
    together: Callable[[], object] = lambda: None,
) -> dict[str, list[Sample]]:
    """Times the contenders in turn; every second round backwards, so that none always follows the same one.

    Args:
        operations: by contender.
        clock: what times one of them.
        rounds: how many samples of each to return.
        warm_up: how many timings to throw away before them.
        together: called before each sample, so that several ranks begin at once.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in operations}
    for round_ in range(warm_up + rounds):
        for name in list(operations)[:: 1 if round_ % 2 else -1]:
            together()
            samples[name].append(clock(operations[name]))
    return {name: of_contender[warm_up:] for name, of_contender in samples.items()}
