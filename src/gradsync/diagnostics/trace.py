"""A trace: when each rank trained, packed, waited, reduced and split, as files that https://ui.perfetto.dev opens.

It is on if GRADSYNC_TRACE names a folder, which `gradsync run --trace DIR` sets for its ranks. Each rank keeps its
events in memory, and writes DIR/rank-N.json at the end of its process group, also after a failure. The last one finds
the files of all: it joins them in DIR/all-ranks.json, and prints where the time went. Several machines need a shared
folder.

Without a trace all that runs is a look at `active` for each bucket and each gradient, and an empty function at the end
of each phase.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any

from gradsync.diagnostics import recorder as recording
from gradsync.diagnostics.recorder import FlightRecorder
from gradsync.environment import TRACE
from gradsync.errors import InvalidArgument, describe, name_ranks

if TYPE_CHECKING:
    from pathlib import Path  # pathlib takes long to import, and few processes write a trace

_MAX_EVENTS = 150_000  # of phases, and of steps: the oldest are dropped
_ALL_RANKS, _SUMMARY = "all-ranks.json", "summary.txt"

#: An event of the Trace Event Format by Google: "X", which has a begin and a duration in microseconds, or "M", a name.
Event = dict[str, Any]
#: A collective: its group, and its number in the group.
Key = tuple[str, int]

_log = logging.getLogger("gradsync")


# -- Recording ---------------------------------------------------------------------------------------------------------


class Tracer:
    """The events of this process so far.

    Attributes:
        folder: where the files go.
        phases: the recorder and the number of a collective, and a phase's name, begin and end.
        steps: the number of a step's gradients, begin and end.
        rank: this rank at launch.
        needed: the ranks at launch of the last world, of which all have to write their file.
        worlds: how many recorders there were when a world began, and the world's number, the same on its ranks.
        is_writing, is_terminated: whether the files are being written, and whether SIGTERM has come.
        wall_offset: the wall clock minus the monotonic clock, in seconds, to compare the times of several machines.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.phases: deque[tuple[FlightRecorder, int, str, float, float]] = deque(maxlen=_MAX_EVENTS)
        self.steps: deque[tuple[int, float, float]] = deque(maxlen=_MAX_EVENTS)
        self.rank = 0
        self.needed: tuple[int, ...] = (0,)
        self.worlds: list[tuple[int, int]] = []
        self.wall_offset = time.time() - monotonic()
        self.is_writing = self.is_terminated = False
        self._step_began: dict[FlightRecorder, float] = {}

    def begin_step(self, recorder: FlightRecorder) -> None:
        """Records the first gradient of a step. If the step before has failed, it leaves no event."""
        self._step_began[recorder] = monotonic()

    def end_step(self, recorder: FlightRecorder, gradients: int) -> None:
        """Records the end of a step's flush."""
        now = monotonic()
        self.steps.append((gradients, self._step_began.pop(recorder, now), now))


#: The tracer during a trace, otherwise None. A variable, because others look at it for every bucket and every gradient.
active: Tracer | None = None


def phases_of(recorder: FlightRecorder) -> Callable[[str], None]:
    """Begins to record the phases of the running collective, one after the other.

    Returns what to call at the end of each phase, with its name: "packing", "waiting", "reducing", "splitting" or
    "launching". Without a trace that does nothing.
    """
    if active is None:
        return no_phases
    phases, number, since = active.phases, recorder.begun, monotonic()

    def end(phase: str) -> None:
        nonlocal since
        now = monotonic()
        phases.append((recorder, number, phase, since, now))
        since = now

    return end


def no_phases(phase: str) -> None:
    """What phases_of returns without a trace."""


# -- Begin and end -----------------------------------------------------------------------------------------------------


def make_folder(path: str, named_by: str) -> Path:
    """Makes the folder for traces, if needed, and returns its path.

    Raises:
        InvalidArgument: the folder cannot be made, or this process cannot write to it.
    """
    from pathlib import Path

    folder = Path(os.path.abspath(path))
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidArgument(f"{named_by}={path}: traces cannot be written there: {error.strerror}") from None
    return folder


def begin(rank: int, world_size: int) -> None:
    """Turns the trace on if GRADSYNC_TRACE is set, and removes this rank's file of an earlier run.

    The ranks do so before they meet, so that at the end of a rank each file is of this run. A rank that SIGTERM would
    end writes its trace first: after a failure the launcher soon asks all ranks to end.
    """
    global active
    path = TRACE.read()
    if path is None:
        return
    folder = make_folder(path, TRACE)
    for name in (_name_of(rank), _ALL_RANKS, _SUMMARY):
        (folder / name).unlink(missing_ok=True)
    if active is None:
        active, recording.traced = Tracer(folder), []
    active.rank, active.needed = rank, tuple(range(world_size))
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)


def begin_world(number: int, numbers: tuple[int, ...] | None) -> None:
    """Begins a world, which has its number from the server; `numbers`: if it was rebuilt, its ranks at launch."""
    if active is not None:
        active.worlds.append((len(recording.traced or ()), number))
        active.needed = numbers or active.needed


def _on_sigterm(_number: int, _frame: object) -> None:
    if active is not None:
        active.is_terminated = True
        end()


def end() -> None:
    """Writes this rank's trace, if it is on; the last rank writes the files about all. Never raises.

    A SIGTERM that comes meanwhile ends the rank afterwards.
    """
    if active is None or active.is_writing:
        return
    active.is_writing = True
    try:
        _write(active.folder / _name_of(active.rank), _events(active, active.rank))
        _join(active.folder, active.needed)
    except Exception as error:  # the program has ended well, or with an error of its own
        _log.warning("the trace was not written: %s", describe(error))
    finally:
        active.is_writing = False
    if active.is_terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def _name_of(rank: int) -> str:
    return f"rank-{rank}.json"


def _write(path: Path, events: list[Event]) -> None:
    """Writes a file under another name first, so that whoever finds it finds all of it."""
    import json

    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    temporary.replace(path)


def _join(folder: Path, needed: tuple[int, ...]) -> None:
    """Joins the files of the ranks of the last world, if this rank is the last to end, and prints the summary."""
    import json

    files = {rank: folder / _name_of(rank) for rank in needed}
    if not all(file.exists() for file in files.values()):
        return
    try:
        by_rank = {rank: json.loads(file.read_text())["traceEvents"] for rank, file in files.items()}
    except FileNotFoundError:  # a rank has begun its next process group; the files are joined when that has ended
        return
    try:
        summary = (folder / _SUMMARY).open("x")
    except FileExistsError:  # another rank has ended at the same moment, and joins them
        return
    _write(folder / _ALL_RANKS, [event for events in by_rank.values() for event in events])
    lines = [*summary_of(by_rank), f"open {folder / _ALL_RANKS} in https://ui.perfetto.dev"]
    text = "".join([f"gradsync: {line}\n" for line in lines])
    with summary:
        summary.write(text)
    sys.stderr.write(text)


def _forget_after_fork() -> None:
    """The child of a fork is no rank, and must not replace its parent's file."""
    global active
    active = recording.traced = None


os.register_at_fork(after_in_child=_forget_after_fork)


# -- The events of one rank --------------------------------------------------------------------------------------------


def _events(tracer: Tracer, rank: int) -> list[Event]:
    """Returns the rank's steps, and the collectives and messages of each group with their phases."""
    lanes: dict[str, float] = {}  # the events of a lane do not overlap, so a track may need several; each with its end
    events: list[Event] = []

    def reserve(track: str, began: float, ended: float) -> str:
        names = (track if number == 1 else f"{track} ({number})" for number in count(1))
        lane = next(name for name in names if lanes.get(name, began) <= began)
        lanes[lane] = ended
        return lane

    def add(lane: str, category: str, name: str, began: float, ended: float, **args: Any) -> None:
        begin_us, end_us = (began + tracer.wall_offset) * 1e6, (ended + tracer.wall_offset) * 1e6
        where = {"pid": rank, "tid": list(lanes).index(lane) + 1, "ts": begin_us, "dur": end_us - begin_us}
        events.append({"ph": "X", "name": name, "cat": category, **where, "args": args})

    phases: dict[tuple[FlightRecorder, int], list[tuple[str, float, float]]] = defaultdict(list)
    for recorder, number, phase, began, ended in tracer.phases:
        phases[recorder, number].append((phase, began, ended))
    kept_since = tracer.phases[0][3] if len(tracer.phases) == _MAX_EVENTS else 0.0
    now = monotonic()
    names: Counter[tuple[str, int]] = Counter()
    for index, recorder in enumerate(recording.traced or ()):
        world = max((number for begun, number in tracer.worlds if begun <= index), default=1)
        names[recorder.group, world] += 1  # a later world or process group may use the name again
        number = world + names[recorder.group, world] - 1
        group = recorder.group if number == 1 else f"{recorder.group} ({number})"
        entries = recorder.entries()
        if entries and entries[0].number > 1:  # the oldest were dropped
            kept_since = max(kept_since, entries[0].began)
        for entry in entries:
            inner = [] if entry.what.is_message else phases[recorder, entry.number]
            ended = max([entry.ended or now, *(end for _, _, end in inner)])
            lane = reserve(f"group {group}", entry.began, ended)
            key = {"group": group, "number": entry.number}
            state = "failed" if entry.failed else "running" if entry.ended is None else "done"
            category, what = "message" if entry.what.is_message else "collective", entry.what.headline()
            add(lane, category, what, entry.began, ended, **key, state=state, backend=recorder.backend)
            for phase, began, ended in inner:
                add(lane, "phase", phase, began, ended, **key)
    for gradients, began, ended in tracer.steps:
        if began >= kept_since:
            add(reserve("steps", began, ended), "step", "step", began, ended, gradients=gradients)
    told = [("process_name", 0, f"rank {rank}"), *[("thread_name", tid, lane) for tid, lane in enumerate(lanes, 1)]]
    events += [{"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": {"name": name}} for kind, tid, name in told]
    return events


# -- Where the time went -----------------------------------------------------------------------------------------------

#: The phases of a collective -> the part of a step's time to which they belong.
_PARTS = {
    "packing": "packing and copying",
    "splitting": "packing and copying",
    "waiting": "waiting",
    "reducing": "reducing and moving",
    "launching": "launching on the GPU",
}


def summary_of(by_rank: Mapping[int, list[Event]]) -> list[str]:
    """Returns lines about the number of steps, the parts of a step's time, and the rank that the others waited for.

    Times are means over the ranks and their steps, without the first, in which buffers are made. A line is left out if
    nothing was measured for it: no rank has ended two steps, or there is only one rank.

    Args:
        by_rank: each rank's events.
    """
    began: dict[Key, dict[int, float]] = defaultdict(dict)  # by collective: when each rank began it
    for rank, events in by_rank.items():
        for event in _of("collective", events):
            began[_key(event)][rank] = event["ts"]
    ends = {rank: sorted(map(_end, _of("step", events))) for rank, events in by_rank.items()}
    ends = {rank: of_rank for rank, of_rank in ends.items() if len(of_rank) > 1}
    if not ends:
        return _who_came_last(list(began.values()), 1, "")
    steps = max(map(len, ends.values())) - 1
    step_us = _mean([(of_rank[-1] - of_rank[0]) / (len(of_rank) - 1) for of_rank in ends.values()])
    parts: dict[str, float] = defaultdict(float)
    for rank, of_rank in ends.items():
        for part, begin_us, end_us in _spans(by_rank[rank], began):
            inside_us = min(end_us, of_rank[-1]) - max(begin_us, of_rank[0])
            parts[part] += max(inside_us, 0.0) / (len(of_rank) - 1) / len(ends)
    parts["your code"] = max(step_us - sum(parts.values()), 0.0)
    ordered = sorted([part for part in parts.items() if part[1] >= 0.005 * step_us], key=lambda part: -part[1])
    since = max(of_rank[0] for of_rank in ends.values())
    return [
        f"{steps} steps of {name_ranks(list(ends))} after the first, {_ms(step_us)} each",
        "a step: " + ", ".join(f"{part} {_ms(us)} ({us / step_us:.0%})" for part, us in ordered),
        *_who_came_last([times for times in began.values() if min(times.values()) >= since], steps, " a step"),
    ]


def _of(category: str, events: list[Event]) -> list[Event]:
    return [event for event in events if event.get("cat") == category]


def _key(event: Event) -> Key:
    return event["args"]["group"], event["args"]["number"]


def _end(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f} ms"


def _spans(events: list[Event], began: Mapping[Key, Mapping[int, float]]) -> Iterator[tuple[str, float, float]]:
    """Yields a rank's times in gradsync: the part, begin and end.

    A collective without phases waits until the last rank has begun it. On a GPU it runs beside the program, so its time
    is no part of the step.
    """
    phases = _of("phase", events)
    for phase in phases:
        yield _PARTS[phase["name"]], phase["ts"], _end(phase)
    with_phases = set(map(_key, phases))
    for event in _of("collective", events):
        if event["args"]["backend"] != "nccl" and _key(event) not in with_phases:
            all_came = min(max(began[_key(event)].values()), _end(event))
            yield "waiting", event["ts"], all_came
            yield "reducing and moving", all_came, _end(event)


def _who_came_last(collectives: list[dict[int, float]], steps: int, each: str) -> list[str]:
    """Returns a line about the rank that came last and cost the others the most time; none if no ranks met.

    Args:
        collectives: when each rank began each of them, in microseconds.
        steps: what to divide the time by.
        each: the words for that, such as " a step".
    """
    waited: dict[int, list[float]] = defaultdict(list)  # by rank: how long the others waited for it, at the mean
    for times in collectives:
        if len(times) > 1:
            last = max(times, key=times.__getitem__)
            waited[last].append(times[last] - _mean([at for rank, at in times.items() if rank != last]))
    if not waited:
        return []
    rank, us = max(waited.items(), key=lambda of_rank: sum(of_rank[1]))
    came = f"came last to {len(us)} of {sum(map(len, waited.values()))} collectives"
    return [f"most waited for: rank {rank}, {_ms(sum(us) / steps)}{each}; it {came}"]


def _mean(values: list[float]) -> float:  # every rank imports this module, and the module statistics takes 2 ms
    return sum(values) / len(values)
