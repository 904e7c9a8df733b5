"""The flight recorder remembers the last collectives, in order, and which of them still run."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync import environment
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.local import local_communicator
from gradsync.diagnostics import recorder as flight_recorder
from gradsync.diagnostics.recorder import FlightRecorder, finish, names_text, seconds_text, size_text


class Text(str):
    __slots__ = ()
    is_message = False

    def headline(self) -> str:
        return str(self)


class MessageText(Text):
    __slots__ = ()
    is_message = True


def test_messages_stand_between_the_collectives_and_do_not_count() -> None:
    recorder = FlightRecorder("world", 4)
    for what in (Text("barrier"), MessageText("message(rank 0 to rank 1) int8[3] 3 bytes"), MessageText("second")):
        recorder.begin(what)
        recorder.end()
    assert recorder.begun == 1
    titles = [entry.title for entry in recorder.entries()]
    assert titles == ["barrier #1", "message(rank 0 to rank 1) after #1 (int8[3] 3 bytes)", "second after #1"]
    assert recorder.last is not None
    assert recorder.last.title == "second after #1"
    recorder.begin(Text("barrier"))
    recorder.begin(Text("barrier"))
    assert [entry.number for entry in recorder.entries()] == [1, 1, 2, 3]
    assert recorder.describe().splitlines()[2].startswith("after #1 second done in")


STEPS = st.sampled_from(["ends", "fails", "runs on", "is handed over"])


@given(st.lists(STEPS, max_size=40), st.integers(1, 8))
def test_the_ring_keeps_the_last_in_order(steps: list[str], size: int) -> None:
    recorder = FlightRecorder("world", size)
    running = []
    for number, step in enumerate(steps, 1):
        recorder.begin(Text(number))
        assert recorder.last is not None
        assert recorder.last.number == recorder.begun == number
        if step in ("ends", "fails"):
            recorder.end(step == "fails")
        elif step == "is handed over":
            running.append(recorder.hand_over())
            recorder.end()  # of the call, not of the work
    entries = recorder.entries()
    assert [entry.number for entry in entries] == list(range(1, len(steps) + 1))[-size:]
    for entry in entries:
        step = steps[entry.number - 1]
        assert entry.what == str(entry.number)
        assert (entry.ended is not None) == (step in ("ends", "fails"))
        assert entry.failed == (step == "fails")
    for record in running:
        assert record is not None
        finish(record, failed=False)
    assert all(
        e.ended is not None and e.ended >= e.began for e in recorder.entries() if steps[e.number - 1] != "runs on"
    )


def test_what_is_handed_over_may_outlive_its_place() -> None:
    recorder = FlightRecorder("world", 2)
    recorder.begin(Text("late"))
    record = recorder.hand_over()
    assert record is not None
    for number in range(4):
        recorder.begin(Text(number))
        recorder.end()
    finish(record, failed=True)
    assert [(entry.number, entry.failed) for entry in recorder.entries()] == [(4, False), (5, False)]
    assert recorder.hand_over() is None


@given(st.integers(0, 20), st.integers(1, 8), st.integers(1, 16))
def test_more_room_forgets_nothing(begun: int, size: int, more: int) -> None:
    recorder = FlightRecorder("world", size)
    for number in range(1, begun + 1):
        recorder.begin(Text(number))
    known = recorder.entries()
    recorder.remember(more)
    assert recorder.entries() == known
    for number in range(begun + 1, begun + 4):
        recorder.begin(Text(number))
        assert recorder.last is not None
        assert recorder.last.number == number
    recorder.end()
    wanted = min(begun + 3, min(begun, size) + 3, max(size, more))
    assert [entry.number for entry in recorder.entries()] == list(range(begun + 4 - wanted, begun + 4))


def test_those_to_come_remember_more_while_somebody_wants_it() -> None:
    flight_recorder.remember_at_least(1000)
    more = FlightRecorder("world")
    flight_recorder.remember_at_least(0)
    sizes = [recorder._size for recorder in (more, FlightRecorder("world"), FlightRecorder("world", 3))]
    assert sizes == [1000, 64, 3]


def test_it_reads_like_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.0012, 101.0, 101.5, 102.0, 402.0])
    monkeypatch.setattr(flight_recorder, "monotonic", lambda: next(clock))
    recorder = FlightRecorder("world")
    assert recorder.describe.__defaults__ == (8,)
    for what, ends in (("barrier", True), ("broadcast(root 0) uint8[72] 72 bytes", False), ("all_reduce(sum)", None)):
        recorder.begin(Text(what))
        if ends is not None:
            recorder.end(not ends)
    assert recorder.describe(2).splitlines() == [
        "#3 all_reduce(sum) running for 300.0 s",
        "#2 broadcast(root 0) uint8[72] 72 bytes failed after 500.0 ms, 300.5 s ago",
    ]
    monkeypatch.setattr(flight_recorder, "monotonic", lambda: 103.4012)
    assert recorder.describe().splitlines()[-1] == "#1 barrier done in 1.2 ms, 3.4 s ago"


def test_a_collective_in_a_sentence() -> None:
    recorder = FlightRecorder("world")
    titles = []
    whats = (
        "barrier",
        "all_reduce(sum) float32[2] 8 bytes",
        "flush(sum) after 2 gradients",
        "broadcast(root 0) x[2] 8 kB",
    )
    for what in whats:
        recorder.begin(Text(what))
        assert recorder.last is not None
        titles.append(recorder.last.title)
    assert titles == [
        "barrier #1",
        "all_reduce(sum) #2 (float32[2] 8 bytes)",
        "flush(sum) #3 (after 2 gradients)",
        "broadcast(root 0) #4 (x[2] 8 kB)",
    ]


def test_an_empty_one_says_nothing() -> None:
    recorder = FlightRecorder("world")
    assert recorder.describe() == ""
    assert recorder.last is None


def test_words() -> None:
    assert [seconds_text(seconds) for seconds in (12e-6, 0.0012, 300)] == ["12.0 us", "1.2 ms", "300.0 s"]
    assert [size_text(n) for n in (0, 999, 4096, 25_600_000, 3 * 10**9)] == [
        "0 bytes",
        "999 bytes",
        "4.1 kB",
        "25.6 MB",
        "3 GB",
    ]
    assert names_text(["a"]) == "[a]"
    assert names_text(["a", "b"]) == "[a, b]"
    assert names_text([f"p{i}" for i in range(14)]) == "[p0, p1, 12 more]"


def test_another_thread_reads_whole_entries_at_any_moment() -> None:
    recorder = FlightRecorder("world", 4)
    stop = threading.Event()
    errors: list[str] = []

    def read() -> None:
        while not stop.is_set():
            entries = recorder.entries()
            numbers = [entry.number for entry in entries]
            if numbers != sorted(set(numbers)) or any(e.what != str(e.number) for e in entries):
                errors.append(str(entries))
            recorder.describe()

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 20_000):
        recorder.begin(Text(number))
        recorder.end()
    stop.set()
    reader.join()
    assert not errors


def test_its_size_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSYNC_FLIGHT_RECORDER_ENTRIES", "3")
    with local_communicator() as comm:
        for _ in range(5):
            comm.barrier()
        assert [entry.number for entry in comm.recorder.entries()] == [3, 4, 5]
    assert environment.FLIGHT_RECORDER_ENTRIES.read({}) == 64


def test_a_collective_that_begins_while_more_is_to_be_remembered_is_not_lost() -> None:
    class Ring(list):
        def __getitem__(self, place: Any) -> Any:
            entry = super().__getitem__(place)
            if recorder.begun < 6:  # as another thread may, while this one copies
                recorder.begin(Text("the sixth"))
            return entry

    recorder = FlightRecorder("world", 4)
    for _ in range(5):
        recorder.begin(Text("barrier"))
        recorder.end()
    recorder._ring = Ring(recorder._ring)
    recorder.remember(16)
    assert [entry.number for entry in recorder.entries()] == [3, 4, 5, 6]
    assert recorder.last is not None
    assert recorder.last.what == "the sixth"


def test_equal_calls_share_one_text() -> None:
    first = agreement_on("all_reduce", (3,), np.dtype("float32"), "sum")
    assert agreement_on("all_reduce", (3,), np.dtype("float32"), "sum") is first
    assert first.describe() == "all_reduce of float32[3] (sum)"
