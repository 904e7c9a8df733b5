"""Converts dumps to a Chrome trace, which https://ui.perfetto.dev and chrome://tracing can show.

Each rank is a process of the trace. A process has these tracks:

- The track for steps also shows the arrivals of gradients.
- The track of each group shows the collectives of the group. Below each collective, this track shows its phases, such
  as packing, waiting, reducing and splitting.
- One track shows the messages.

A track has several lanes if its collectives overlap, as on a GPU. Arrows connect the events of one collective on all
ranks, in the order in which the ranks began the collective. Times are microseconds since the first event.

The format follows the document "Trace Event Format" by Google. The events are complete events ("X"), instants ("i"),
flows ("s", "t", "f") and metadata ("M").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from gradsync.diagnostics.dump import CHROME_TRACE_KEY, Dump
from gradsync.diagnostics.tracing import Phase

Event = dict[str, Any]
Key = tuple[str, int, str]

_LANES = 1000  # the number of a track's first lane is a multiple of 1000
_STEPS, _MESSAGES = "steps", "messages"


def chrome_trace(dumps: Sequence[Dump]) -> dict[str, Any]:
    """Returns the Chrome trace of the dumps of a run, as an object that json.dumps accepts."""
    tracks = list(dict.fromkeys([_STEPS, _MESSAGES, *(f"group {name}" for dump in dumps for name in dump.groups)]))
    met: dict[Key, list[Event]] = {}
    events = [
        event
        for dump, offset in zip(dumps, clock_offsets(dumps), strict=True)
        for event in _rank_events(dump, offset, tracks, met)
    ]
    for number, slices in enumerate(met.values()):
        events += _arrows(number, sorted(slices, key=lambda one: float(one["ts"])))
    zero = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round((event["ts"] - zero) * 1e6, 3)
        if "ended" in event:
            end = round((event.pop("ended") - zero) * 1e6, 3)
            event["dur"] = round(max(end - event["ts"], 0.0), 3)
    return {CHROME_TRACE_KEY: events, "displayTimeUnit": "ms", "otherData": {"made by": "gradsync trace"}}


def clock_offsets(dumps: Sequence[Dump]) -> list[float]:
    """Returns, for each dump, the seconds to add to its times, so that the times of all dumps can be compared.

    Ranks on one machine use the same monotonic clock. To align ranks on different machines, this function compares
    their wall clocks at the times of the dumps. If the wall clocks differ, the trace is wrong by this difference.
    """
    zeros = [dump.wall_seconds - dump.monotonic_seconds for dump in dumps]
    return [0.0 if dump.clock == dumps[0].clock else zero - zeros[0] for dump, zero in zip(dumps, zeros, strict=True)]


def _rank_events(dump: Dump, offset: float, tracks: Sequence[str], met: dict[Key, list[Event]]) -> Iterator[Event]:
    """Yields the events of one rank, with times in seconds, and adds the rank's collectives to `met`.

    Args:
        dump: the rank's dump.
        offset: the number of seconds to add to the times of the dump.
        tracks: the names of the tracks of all ranks.
        met: by (group, number, call): the events of this collective, from all ranks.
    """
    lane_names: dict[int, str] = {_LANES: _STEPS}
    lane_ends: dict[int, float] = {}
    phases: dict[tuple[str, int], list[Phase]] = {}
    for phase in dump.phases:
        phases.setdefault((phase.group, phase.number), []).append(phase)

    def event(kind: str, lane: int, name: str, **more: Any) -> Event:
        return {"ph": kind, "name": name, "pid": dump.rank or 0, "tid": lane, **more}

    def piece(lane: int, name: str, category: str, began: float, ended: float, **args: Any) -> Event:
        return event("X", lane, name, cat=category, ts=began + offset, ended=ended + offset, args=args)

    def free_lane(track: str, began: float, ended: float) -> int:
        """Returns the first lane of a track that is free at the time `began`, and reserves it until `ended`."""
        first = _LANES * (1 + tracks.index(track))
        lane = next(lane for lane in count(first) if lane_ends.get(lane, began) <= began)
        lane_ends[lane] = ended
        lane_names[lane] = track if lane == first else f"{track} ({lane - first + 1})"
        return lane

    for step in sorted(dump.steps, key=lambda step: step.began):
        lane = free_lane(_STEPS, step.began, step.ended)
        yield piece(lane, "step", "step", step.began, step.ended, gradients=step.gradients)
    for arrival in dump.arrivals:
        yield event("i", _LANES, arrival.name, s="t", cat="gradient", ts=arrival.at + offset)
    for name, group in dump.groups.items():
        for entry in sorted(group.entries, key=lambda entry: entry.began):
            inner = [] if entry.is_message else phases.get((name, entry.number), [])
            # The event of a collective that had not ended lasts until the time of the dump.
            ended = max([entry.ended or dump.monotonic_seconds, *(phase.ended for phase in inner)])
            lane = free_lane(_MESSAGES if entry.is_message else f"group {name}", entry.began, ended)
            category = "message" if entry.is_message else "collective"
            args = {"group": name, "number": entry.number, "state": entry.state}
            whole = piece(lane, group.calls[entry.call].what, category, entry.began, ended, **args)
            yield whole
            if not entry.is_message:
                met.setdefault((name, entry.number, entry.call), []).append(whole)
            for phase in inner:
                yield piece(lane, phase.name, "phase", phase.began, phase.ended, collective=phase.number)
    yield event("M", 0, "process_name", args={"name": f"rank {dump.rank} (pid {dump.pid} on {dump.host})"})
    for lane, name in lane_names.items():
        yield event("M", lane, "thread_name", args={"name": name})
        yield event("M", lane, "thread_sort_index", args={"sort_index": lane})


def _arrows(number: int, slices: Sequence[Event]) -> Iterator[Event]:
    """Yields the arrows between the events of one collective on several ranks."""
    for place, one in enumerate(slices if len(slices) > 1 else ()):
        kind = "s" if place == 0 else "f" if place == len(slices) - 1 else "t"
        arrow: Event = {"ph": kind, "name": f"#{one['args']['number']} of {one['args']['group']}", "cat": "collective"}
        arrow |= {"id": number, "pid": one["pid"], "tid": one["tid"], "ts": one["ts"]}
        yield arrow | {"bp": "e"} if kind == "f" else arrow
