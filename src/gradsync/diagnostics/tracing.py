"""When the phases of each collective began and ended, while somebody traces: packing, waiting, reducing, splitting.

Off, it costs one look at `active` for each bucket and each gradient. On, what is noted is a tuple for each phase, held
until the process writes its dump (dump.py); `gradsync trace` turns dumps into a picture.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, NamedTuple

from gradsync.diagnostics.recorder import FlightRecorder, remember_at_least

#: How many collectives a recorder remembers while somebody traces.
TRACED_ENTRIES = 16_384
_MAX_EVENTS = 500_000


class Phase(NamedTuple):
    """A part of a collective.

    Attributes:
        group: of the collective.
        number: its number in the group.
        name: "packing", "waiting", "reducing", "splitting" or "launching".
        began, ended: in time.monotonic() seconds.
    """

    group: str
    number: int
    name: str
    began: float
    ended: float


class Arrival(NamedTuple):
    """A gradient that was handed over, at a moment of time.monotonic()."""

    group: str
    name: str
    at: float


class Step(NamedTuple):
    """From the first gradient of a step to the end of its flush, and how many gradients it had."""

    group: str
    gradients: int
    began: float
    ended: float


class Laps:
    """The phases of one collective, one after the other.

    Args:
        tracer: takes them down.
        recorder: of the communicator; the collective is the one begun last.
    """

    __slots__ = ("_group", "_number", "_since", "_tracer")

    def __init__(self, tracer: Tracer, recorder: FlightRecorder) -> None:
        self._tracer = tracer
        self._group = recorder.group
        self._number = recorder.begun
        self._since = monotonic()

    def end(self, phase: str) -> None:
        """Notes that what was done since the last call was this phase."""
        now = monotonic()
        self._tracer.note(self._tracer.phases, Phase(self._group, self._number, phase, self._since, now))
        self._since = now


class Tracer:
    """Takes down what happens, up to half a million events.

    Attributes:
        phases, arrivals, steps: what has been noted.
        left_out: events that there was no room for.
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.arrivals: list[Arrival] = []
        self.steps: list[Step] = []
        self.left_out = 0
        self._step_began: dict[str, float] = {}  # by group

    def laps(self, recorder: FlightRecorder) -> Laps:
        """Begins to note the phases of the collective that runs now."""
        return Laps(self, recorder)

    def arrive(self, group: str, name: str, *, is_first: bool) -> None:
        """Notes that a gradient was handed over, and whether it begins a step: the one before may have failed."""
        now = monotonic()
        if is_first:
            self._step_began[group] = now
        self.note(self.arrivals, Arrival(group, name, now))

    def end_step(self, group: str, gradients: int) -> None:
        """Notes that a step has ended, which began with the first gradient after the last one."""
        now = monotonic()
        self.note(self.steps, Step(group, gradients, self._step_began.pop(group, now), now))

    def note(self, events: list[Any], event: Phase | Arrival | Step) -> None:
        """Takes an event down, while there is room."""
        if len(events) < _MAX_EVENTS:
            events.append(event)
        else:
            self.left_out += 1

    def content(self) -> dict[str, Any]:
        """Returns all of it, for JSON: lists of the fields of each event, in their order."""
        return {
            "phases": [list(phase) for phase in self.phases],
            "arrivals": [list(arrival) for arrival in self.arrivals],
            "steps": [list(step) for step in self.steps],
            "left_out": self.left_out,
        }


#: Who traces now; None nearly always. Not behind a function: every bucket and every gradient looks here.
active: Tracer | None = None


def laps_of(recorder: FlightRecorder) -> Laps | None:
    """Begins to note the phases of the collective that runs now; None where nobody traces."""
    tracer = active  # looked at once: another thread may end the trace
    return None if tracer is None else tracer.laps(recorder)


def start() -> Tracer:
    """Begins to trace, unless somebody does already; returns the tracer."""
    global active
    if active is None:
        remember_at_least(TRACED_ENTRIES)
        active = Tracer()
    return active


def stop() -> None:
    """Ends that."""
    global active
    active = None
    remember_at_least(0)
