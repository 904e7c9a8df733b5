"""Converts dumps to a Chrome trace, which https://ui.perfetto.dev and chrome://tracing can show.

Each rank is a process of the trace. A process has one track for steps, which also shows the arrivals of gradients; one
track for each group, which shows its collectives and, below them, their phases (packing, waiting, reducing, splitting);
and one track for messages. A track has several lanes if its collectives overlap, as on a GPU. Arrows connect the events
of one collective on all ranks, in the order in which the ranks began it. Times are microseconds since the first event.

The format is that of "Trace Event Format", Google. The events are complete events ("X"), instants ("i"), flows ("s",
"t", "f") and metadata ("M").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gradsync.diagnostics.dump import CHROME_TRACE_KEY, Dump, DumpedCall, DumpedGroup
from gradsync.diagnostics.tracing import Phase

Event = dict[str, Any]

# The number of the first lane of each track. A track has several lanes if some of its events overlap.
_LANES = 100
_STEPS_TRACK = _LANES
_MESSAGES_TRACK = 2 * _LANES
_FIRST_GROUP_TRACK = 3 * _LANES


def chrome_trace(dumps: Sequence[Dump]) -> dict[str, Any]:
    """Returns the Chrome trace of the dumps of a run, for JSON.

    Ranks on one machine use the same monotonic clock. To align ranks on different machines, this function compares
    their wall clocks at the times of the dumps. An error of these clocks becomes an error of the trace.
    """
    names = list(dict.fromkeys(name for dump in dumps for name in dump.groups))
    tracks = {name: _FIRST_GROUP_TRACK + _LANES * number for number, name in enumerate(names)}
    clock = Clock(dumps)
    ranks = [_RankEvents(dump, tracks, clock) for dump in dumps]
    events = [event for rank in ranks for event in rank.events()]
    events += _arrows(ranks)
    return {CHROME_TRACE_KEY: events, "displayTimeUnit": "ms", "otherData": {"made by": "gradsync trace"}}


class Clock:
    """Converts times on the clock of any rank to microseconds since the first event of all ranks.

    Args:
        dumps: the dumps of all ranks.
    """

    def __init__(self, dumps: Sequence[Dump]) -> None:
        first = dumps[0]
        self._offsets = {
            id(dump): 0.0 if _share_clock(dump, first) else (dump.wall_at - dump.at) - (first.wall_at - first.at)
            for dump in dumps
        }
        begins = [begin + self._offsets[id(dump)] for dump in dumps for begin in _begins(dump)]
        self._zero = min(begins, default=0.0)

    def microseconds(self, dump: Dump, at: float) -> float:
        """Converts a time on the clock of a dump's rank to microseconds of the trace, rounded to a nanosecond."""
        return round((at + self._offsets[id(dump)] - self._zero) * 1e6, 3)


class PlacedCall(NamedTuple):
    """A collective or a message, with its lane and its times in the trace.

    Attributes:
        group: the group of the collective or message.
        call: the collective or message.
        phases: the phases of the collective; a message has none.
        lane: the number of a lane in which no other event overlaps this one.
        at: the time at which the collective or message began, in microseconds of the trace.
        ended: the time at which the collective or message ended, in seconds on the rank's clock.
    """

    group: DumpedGroup
    call: DumpedCall
    phases: tuple[Phase, ...]
    lane: int
    at: float
    ended: float


class _RankEvents:
    """The events of one rank in the trace.

    Args:
        dump: the dump of the rank.
        tracks: [name of a group] -> the number of the first lane of its track.
        clock: the object that converts times of this rank to times in the trace.

    Attributes:
        pid: the number of the rank's process in the trace.
        calls: the rank's collectives and messages.
    """

    def __init__(self, dump: Dump, tracks: dict[str, int], clock: Clock) -> None:
        self._dump = dump
        self.pid = dump.rank or 0
        self._clock = clock
        phases: dict[tuple[str, int], list[Phase]] = {}
        for phase in dump.phases:
            phases.setdefault((phase.group, phase.number), []).append(phase)
        self._names_of_tracks = {_STEPS_TRACK: "steps"}
        self._lane_ends: dict[int, list[float]] = {}
        self.calls: list[PlacedCall] = []
        for group in dump.groups.values():
            self._names_of_tracks[tracks[group.name]] = f"group {group.name}"
            for call in sorted(group.calls, key=lambda call: call.began):
                of_call = () if call.is_message else tuple(phases.get((group.name, call.number), ()))
                # A collective that had not ended is shown until the time of the dump.
                ended = max([call.ended or dump.at, *(phase.ended for phase in of_call)])
                track = _MESSAGES_TRACK if call.is_message else tracks[group.name]
                lane = self._lane(track, call.began, ended)
                self.calls.append(PlacedCall(group, call, of_call, lane, clock.microseconds(dump, call.began), ended))

    def _lane(self, track: int, began: float, ended: float) -> int:
        """Returns the first lane of a track that is free at the time `began`, and reserves it until `ended`."""
        ends = self._lane_ends.setdefault(track, [])
        lane = next((lane for lane, end in enumerate(ends) if end <= began), min(len(ends), _LANES - 1))
        ends[lane : lane + 1] = [ended]
        name = self._names_of_tracks.setdefault(track, "messages")
        self._names_of_tracks[track + lane] = f"{name} ({lane + 1})" if lane else name
        return track + lane

    def events(self) -> Iterator[Event]:
        """Yields all events of the rank in the trace."""
        for step in sorted(self._dump.steps, key=lambda step: step.began):
            lane = self._lane(_STEPS_TRACK, step.began, step.ended)
            yield self._slice(lane, "step", step.began, step.ended, {"gradients": step.gradients})
        yield from self._names()
        for arrival in self._dump.arrivals:
            yield self._event("i", _STEPS_TRACK, arrival.name, arrival.at) | {"s": "t", "cat": "gradient"}
        for placed in self.calls:
            call = placed.call
            facts = {name: value for name, value in call.facts.items() if name != "description"}
            args = {"group": placed.group.name, "number": call.number, "state": call.state, **facts}
            category = "message" if call.is_message else "collective"
            yield self._slice(placed.lane, call.what, call.began, placed.ended, args, category)
            for phase in placed.phases:
                args = {"collective": phase.number}
                yield self._slice(placed.lane, phase.name, phase.began, phase.ended, args, "phase")

    def _names(self) -> Iterator[Event]:
        dump = self._dump
        yield self._metadata("process_name", 0, {"name": f"rank {dump.rank} (pid {dump.pid} on {dump.host})"})
        yield self._metadata("process_sort_index", 0, {"sort_index": self.pid})
        for track, name in sorted(self._names_of_tracks.items()):
            yield self._metadata("thread_name", track, {"name": name})
            yield self._metadata("thread_sort_index", track, {"sort_index": track})

    def _metadata(self, name: str, track: int, args: dict[str, Any]) -> Event:
        return {"ph": "M", "name": name, "pid": self.pid, "tid": track, "args": args}

    def _slice(
        self, track: int, name: str, began: float, ended: float, args: dict[str, Any], category: str = "step"
    ) -> Event:
        event = self._event("X", track, name, began)
        end = self._clock.microseconds(self._dump, ended)
        return event | {"dur": round(max(end - event["ts"], 0.0), 3), "cat": category, "args": args}

    def _event(self, kind: str, track: int, name: str, at: float) -> Event:
        return {
            "ph": kind,
            "name": name,
            "pid": self.pid,
            "tid": track,
            "ts": self._clock.microseconds(self._dump, at),
        }


def _arrows(ranks: Sequence[_RankEvents]) -> Iterator[Event]:
    """Yields the arrows of each collective that is in several dumps, from rank to rank."""
    met: dict[tuple[str, int, int], list[tuple[int, PlacedCall]]] = {}
    for rank in ranks:
        for placed in rank.calls:
            if not placed.call.is_message:
                key = placed.group.name, placed.call.number, placed.call.digest
                met.setdefault(key, []).append((rank.pid, placed))
    for identity, ((name, number, _), calls) in enumerate(met.items(), 1):
        if len(calls) < 2:
            continue
        ordered = sorted(calls, key=lambda met_call: met_call[1].at)
        for place, (pid, placed) in enumerate(ordered):
            kind = "s" if place == 0 else "f" if place == len(ordered) - 1 else "t"
            arrow = {"ph": kind, "name": f"#{number} of {name}", "cat": "collective", "id": identity}
            arrow |= {"pid": pid, "tid": placed.lane, "ts": placed.at}
            yield arrow | {"bp": "e"} if kind == "f" else arrow


def _share_clock(dump: Dump, other: Dump) -> bool:
    """Whether two dumps come from one machine, by its boot id if both have one, or else by its host name.

    The host name alone would not be enough, because each container has a host name of its own.
    """
    boots = dump.machine.partition(" ")[0], other.machine.partition(" ")[0]
    return boots[0] == boots[1] if all(boots) else dump.host == other.host


def _begins(dump: Dump) -> Iterator[float]:
    yield from (call.began for group in dump.groups.values() for call in group.calls)
    yield from (phase.began for phase in dump.phases)
    yield from (arrival.at for arrival in dump.arrivals)
    yield from (step.began for step in dump.steps)
