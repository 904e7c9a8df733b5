"""A trace: the times of the phases of each collective, such as packing, waiting, reducing and splitting.

Without a trace, each bucket and each gradient only reads the variable `active`. During a trace each phase is a tuple,
which is kept until the process writes its dump (dump.py). `gradsync trace` makes a picture of dumps.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, NamedTuple

from gradsync.diagnostics.recorder import FlightRecorder, remember_at_least

#: The number of collectives that a recorder remembers during a trace.
TRACED_ENTRIES = 16_384
_MAX_EVENTS = 500_000


class Phase(NamedTuple):
    """A part of a collective.

    Attributes:
        group: the group of the collective.
        number: the number of the collective in the group.
        name: "packing", "waiting", "reducing", "splitting" or "launching".
        began, ended: the times of the phase, in time.monotonic() seconds.
    """

    group: str
    number: int
    name: str
    began: float
    ended: float


class Arrival(NamedTuple):
    """The hand-over of a gradient, in time.monotonic() seconds."""

    group: str
    name: str
    at: float


class TracedStep(NamedTuple):
    """A step, from its first gradient to the end of its flush, with its number of gradients."""

    group: str
    gradients: int
    began: float
    ended: float


class Laps:
    """The phases of one collective, one after the other.

    Args:
        tracer: the tracer that records the phases.
        recorder: the communicator's recorder; its last collective is the one that is timed.
    """

    __slots__ = ("_group", "_number", "_since", "_tracer")

    def __init__(self, tracer: Tracer, recorder: FlightRecorder) -> None:
        self._tracer = tracer
        self._group = recorder.group
        self._number = recorder.begun
        self._since = monotonic()

    def end(self, phase: str) -> None:
        """Records the time since the last call as this phase."""
        now = monotonic()
        self._tracer.note(self._tracer.phases, Phase(self._group, self._number, phase, self._since, now))
        self._since = now


class Tracer:
    """Records phases, arrivals and steps, half a million of each at most.

    Attributes:
        phases, arrivals, steps: the events.
        left_out: the number of further events, which were not recorded.
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.arrivals: list[Arrival] = []
        self.steps: list[TracedStep] = []
        self.left_out = 0
        self._step_began: dict[str, float] = {}  # by group

    def laps(self, recorder: FlightRecorder) -> Laps:
        """Begins to record the phases of the running collective."""
        return Laps(self, recorder)

    def arrive(self, group: str, name: str, *, is_first: bool) -> None:
        """Records a gradient's hand-over. `is_first` begins a step, also if the step before has failed."""
        now = monotonic()
        if is_first:
            self._step_began[group] = now
        self.note(self.arrivals, Arrival(group, name, now))

    def end_step(self, group: str, gradients: int) -> None:
        """Records the end of the step that began last."""
        now = monotonic()
        self.note(self.steps, TracedStep(group, gradients, self._step_began.pop(group, now), now))

    def note(self, events: list[Any], event: Phase | Arrival | TracedStep) -> None:
        """Keeps an event, unless the list is full."""
        if len(events) < _MAX_EVENTS:
            events.append(event)
        else:
            self.left_out += 1

    def content(self) -> dict[str, Any]:
        """Returns the events for JSON, each as a list of its fields."""
        return {
            "phases": [list(phase) for phase in self.phases],
            "arrivals": [list(arrival) for arrival in self.arrivals],
            "steps": [list(step) for step in self.steps],
            "left_out": self.left_out,
        }


#: The tracer during a trace, else None. It is a variable, because every bucket and every gradient reads it.
active: Tracer | None = None


def laps_of(recorder: FlightRecorder) -> Laps | None:
    """Begins to record the phases of the running collective; None without a trace."""
    tracer = active  # read once: another thread may end the trace
    return None if tracer is None else tracer.laps(recorder)


def start() -> Tracer:
    """Begins a trace, unless one is on; returns its tracer."""
    global active
    if active is None:
        remember_at_least(TRACED_ENTRIES)
        active = Tracer()
    return active


def stop() -> None:
    """Ends the trace."""
    global active
    active = None
    remember_at_least(0)
