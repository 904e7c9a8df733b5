"""A trace: the times of steps and gradients, and of the phases of all-reduces, such as packing, waiting and reducing.

Without a trace, gradsync only reads the variable `active` for each bucket and each gradient, and calls an empty
function at the end of each phase. During a trace, gradsync keeps a tuple for each phase, each gradient and each step.
The process writes these tuples into its dump (dump.py). `gradsync trace --out` converts dumps to a Chrome trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from gradsync.diagnostics.recorder import FlightRecorder, remember_at_least

#: The number of collectives that a recorder remembers during a trace.
TRACED_ENTRIES = 16_384
_MAX_EVENTS = 500_000


class Phase(NamedTuple):
    """One phase of a collective.

    Attributes:
        group: the name of the group of the collective.
        number: the number of the collective in the group.
        name: the name of the phase: "packing", "waiting", "reducing", "splitting" or "launching".
        began: the time at which the phase began, in time.monotonic() seconds.
        ended: the time at which the phase ended, in time.monotonic() seconds.
    """

    group: str
    number: int
    name: str
    began: float
    ended: float


class Arrival(NamedTuple):
    """A gradient's name, and the time at which gradsync received the gradient, in time.monotonic() seconds."""

    group: str
    name: str
    at: float


class TracedStep(NamedTuple):
    """The time of a training step, from its first gradient to the end of its flush, and its number of gradients."""

    group: str
    gradients: int
    began: float
    ended: float


class Tracer:
    """Records phases, arrivals of gradients, and steps: the last half million of each.

    Attributes:
        phases, arrivals, steps: the recorded events.
    """

    def __init__(self) -> None:
        self.phases: deque[Phase] = deque(maxlen=_MAX_EVENTS)
        self.arrivals: deque[Arrival] = deque(maxlen=_MAX_EVENTS)
        self.steps: deque[TracedStep] = deque(maxlen=_MAX_EVENTS)
        self._step_began: dict[str, float] = {}  # by group: the time at which its step began

    def arrive(self, group: str, name: str, *, is_first: bool) -> None:
        """Records the arrival of a gradient. If `is_first`, a new step begins, even if the last step has not ended."""
        now = monotonic()
        if is_first:
            self._step_began[group] = now
        self.arrivals.append(Arrival(group, name, now))

    def end_step(self, group: str, gradients: int) -> None:
        """Records the end of the group's current step."""
        now = monotonic()
        self.steps.append(TracedStep(group, gradients, self._step_began.pop(group, now), now))


#: The tracer during a trace, otherwise None. Other modules read this variable directly for every bucket and every
#: gradient, because calling a function would take longer.
active: Tracer | None = None


def phases_of(recorder: FlightRecorder) -> Callable[[str], None]:
    """Begins to record the phases of the running collective, one after the other.

    Returns a function. The caller must call this function at the end of each phase, with the name of the phase. Without
    a trace the function does nothing.
    """
    tracer = active  # read once: another thread may end the trace
    if tracer is None:
        return _ignore
    phases, group, number, since = tracer.phases, recorder.group, recorder.begun, monotonic()

    def end(phase: str) -> None:
        nonlocal since
        now = monotonic()
        phases.append(Phase(group, number, phase, since, now))
        since = now

    return end


def _ignore(phase: str) -> None:
    pass


def start() -> None:
    """Begins a trace, unless a trace is on."""
    global active
    if active is None:
        remember_at_least(TRACED_ENTRIES)
        active = Tracer()


def stop() -> None:
    """Ends the trace, and deletes its records."""
    global active
    active = None
    remember_at_least(0)
