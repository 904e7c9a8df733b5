"""Dumps as a picture: a trace in the Chrome trace-event format, for https://ui.perfetto.dev and chrome://tracing.

One process a rank. Its tracks: the steps, with the gradients' arrivals; for each group its collectives, below each of
which lie its phases (packing, waiting, reducing, splitting); and messages. Arrows lead from rank to rank of the same
collective, in the order in which the ranks began it. Times are microseconds from the first event on.

Source: "Trace Event Format", Google; complete events ("X"), instants ("i"), flows ("s", "t", "f") and metadata ("M").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gradsync.diagnostics.dump_files import Dump, DumpedCall, DumpedGroup
from gradsync.tracing import Phase

Event = dict[str, Any]

_STEPS_TRACK = 1
_MESSAGES_TRACK = 2
_FIRST_GROUP_TRACK = 3


def chrome_trace(dumps: Sequence[Dump]) -> dict[str, Any]:
    """Returns the trace of the ranks of a run, to be written as JSON.

    Ranks of one machine share its monotonic clock; those of others are laid beside them by the wall clocks at the time
    of the dumps, as well as those agree.
    """
    names = list(dict.fromkeys(name for dump in dumps for name in dump.groups))
    tracks = {name: _FIRST_GROUP_TRACK + number for number, name in enumerate(names)}
    clock = _Clock(dumps)
    events: list[Event] = []
    for dump in dumps:
        events += _OfRank(dump, tracks, clock).events()
    events += _arrows(dumps, tracks, clock)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"made by": "gradsync trace"}}


class _Clock:
    """Turns the moments of any rank into microseconds of one time line, the first moment of all being 0.

    Args:
        dumps: of all ranks.
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
        """Returns a moment of a rank's own clock, with a resolution of a nanosecond."""
        return round((at + self._offsets[id(dump)] - self._zero) * 1e6, 3)


class _OfRank:
    """The events of one rank.

    Args:
        dump: the rank's.
        tracks: by group.
        clock: of the picture.
    """

    def __init__(self, dump: Dump, tracks: dict[str, int], clock: _Clock) -> None:
        self._dump = dump
        self._pid = dump.rank or 0
        self._tracks = tracks
        self._clock = clock

    def events(self) -> Iterator[Event]:
        """Makes all of them."""
        yield from self._names()
        for step in self._dump.steps:
            yield self._slice(_STEPS_TRACK, "step", step.began, step.ended, {"gradients": step.gradients})
        for arrival in self._dump.arrivals:
            yield self._event("i", _STEPS_TRACK, arrival.name, arrival.at) | {"s": "t", "cat": "gradient"}
        phases: dict[tuple[str, int], list[Phase]] = {}
        for phase in self._dump.phases:
            phases.setdefault((phase.group, phase.number), []).append(phase)
        for group in self._dump.groups.values():
            for call in group.calls:
                if call.is_message:
                    yield self._call(_MESSAGES_TRACK, group, call, ())
                else:
                    yield self._call(self._tracks[group.name], group, call, phases.get((group.name, call.number), ()))
            first = min((call.number for call in group.calls), default=0)
            for (name, number), of_call in phases.items():
                if name == group.name and number >= first:  # else the collective around them is not remembered
                    yield from self._phases(group, of_call)

    def _phases(self, group: DumpedGroup, phases: Sequence[Phase]) -> Iterator[Event]:
        for phase in phases:
            args = {"collective": phase.number}
            yield self._slice(self._tracks[group.name], phase.name, phase.began, phase.ended, args, "phase")

    def _call(self, track: int, group: DumpedGroup, call: DumpedCall, phases: Sequence[Phase]) -> Event:
        ended = self._dump.at if call.ended is None else call.ended
        facts = {name: value for name, value in call.facts.items() if name != "description"}
        args = {"group": group.name, "number": call.number, "state": call.state, **facts}
        # A collective that was dumped while it ran ends with the dump; phases noted after that do not stand out of it.
        ended = max([ended, *(phase.ended for phase in phases)])
        return self._slice(track, call.what, call.began, ended, args, "message" if call.is_message else "collective")

    def _names(self) -> Iterator[Event]:
        dump = self._dump
        yield self._metadata("process_name", 0, {"name": f"rank {dump.rank} (pid {dump.pid} on {dump.host})"})
        yield self._metadata("process_sort_index", 0, {"sort_index": self._pid})
        tracks = {"steps": _STEPS_TRACK, "messages": _MESSAGES_TRACK}
        tracks |= {f"group {name}": self._tracks[name] for name in dump.groups}
        for name, track in tracks.items():
            yield self._metadata("thread_name", track, {"name": name})
            yield self._metadata("thread_sort_index", track, {"sort_index": track})

    def _metadata(self, name: str, track: int, args: dict[str, Any]) -> Event:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": track, "args": args}

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
            "pid": self._pid,
            "tid": track,
            "ts": self._clock.microseconds(self._dump, at),
        }


def _arrows(dumps: Sequence[Dump], tracks: dict[str, int], clock: _Clock) -> Iterator[Event]:
    """Makes the arrows between the ranks of each collective that several remember, and mean alike."""
    met: dict[tuple[str, int, int], list[tuple[float, Dump, DumpedCall]]] = {}
    for dump in dumps:
        for group in dump.groups.values():
            for call in group.calls:
                if not call.is_message:
                    key = group.name, call.number, call.digest
                    met.setdefault(key, []).append((clock.microseconds(dump, call.began), dump, call))
    for identity, ((name, number, _), calls) in enumerate(met.items(), 1):
        if len(calls) < 2:
            continue
        ordered = sorted(calls, key=lambda met_call: met_call[0])
        for place, (at, dump, _) in enumerate(ordered):
            kind = "s" if place == 0 else "f" if place == len(ordered) - 1 else "t"
            arrow = {"ph": kind, "name": f"#{number} of {name}", "cat": "collective", "id": identity}
            arrow |= {"pid": dump.rank or 0, "tid": tracks[name], "ts": at}
            yield arrow | {"bp": "e"} if kind == "f" else arrow


def _share_clock(dump: Dump, other: Dump) -> bool:
    """Whether two processes were on one machine; containers of it have a name of their own, and its boot id."""
    boots = dump.machine.partition(" ")[0], other.machine.partition(" ")[0]
    return boots[0] == boots[1] if all(boots) else dump.host == other.host


def _begins(dump: Dump) -> Iterator[float]:
    yield from (call.began for group in dump.groups.values() for call in group.calls)
    yield from (phase.began for phase in dump.phases)
    yield from (arrival.at for arrival in dump.arrivals)
    yield from (step.began for step in dump.steps)
