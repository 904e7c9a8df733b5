"""A rank that does not come to a collective: who waits is heard of, and all ranks get one verdict with its stack."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync import process_group
from gradsync.communicators import failures
from places import GPU, SHM, STAND_IN_STUCK, Place, on

SECONDS = 30.0  # for what must come at all
# On a busy machine rank 2 may be late too.
WAITED_FOR = re.compile(r" (has|have) waited .* for (rank 1|ranks 1 and 2)\b")


def load_batch(until_told: Any) -> None:
    """Stalls until the verdict is there, without looking for it in a collective."""
    deadline = time.monotonic() + SECONDS
    while not until_told():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # what the data loader waits for


def verdict_is_there() -> bool:
    client: Any = process_group._client
    try:
        client.check()
    except gs.CollectiveTimeout:
        return True
    return False


@cache
def callback_of(comm: Any) -> gs.AllreduceCallback:
    """Returns the same one each time: at its first use ranks would wait in another collective."""
    return gs.AllreduceCallback("sum", comm)


def step(comm: Any, collective: str) -> None:
    if collective == "bucket":
        callback = callback_of(comm)
        with callback.backward():
            future = callback("conv1.weight", np.ones(1000, np.float32))
        future.result()
    elif collective == "all_reduce":
        comm.all_reduce(np.ones(1000, np.float32))
    elif collective == "broadcast":
        comm.broadcast(np.ones(1000, np.float32), root=1)
    else:
        comm.barrier()


def stall(comm: Any, collective: str) -> tuple[tuple[int, ...], str]:
    step(comm, collective)
    client: Any = process_group._client
    if comm.rank == 1:
        client.set("it loads", b"")
        load_batch(verdict_is_there)
    else:
        client.get("it loads", timeout_seconds=SECONDS)
    error = expect(gs.CollectiveTimeout, lambda: step(comm, collective))
    later = expect(gs.CommunicatorClosed, comm.barrier)
    assert "for rank 1" in str(later)
    assert "load_batch" not in str(later)  # told once, not again and again
    return error.missing_ranks, str(error)


def without_prefix(text: str) -> str:
    return text.partition(": ")[2]


@pytest.mark.parametrize("collective", ["bucket", "broadcast", "all_reduce", "barrier"])
@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN_STUCK, 2), *on(GPU, 2)])
def test_a_rank_does_not_arrive_at_a_collective(place: Place, world_size: int, collective: str) -> None:
    verdicts = place.run(world_size, stall, collective, collective_timeout_seconds=2.5)
    assert {missing for missing, _ in verdicts} == {(1,)}
    assert len({without_prefix(text) for _, text in verdicts}) == 1, verdicts
    text = verdicts[0][1]
    name = {"bucket": "all_reduce(sum)", "all_reduce": "all_reduce(sum)"}.get(collective, collective)
    assert name in text.partition("\n")[0]
    assert re.search(r"in load_batch\n +(while not until_told\(\)|assert time|time\.sleep\(0\.02\)  # what)", text)
    assert re.search(r" running for [1-9]", text)  # the recorder of a rank that waits
    assert " done in " in text
    if collective == "bucket":
        assert "[conv1.weight]" in text


def warn_and_go_on(comm: Any, collective: str, fifo: str, in_group: bool = False) -> None:
    is_late = comm.rank == 1
    if in_group:
        comm = comm.split(color=int(comm.rank > 0))  # where rank 1 of the world is rank 0
    for _ in range(10):
        step(comm, collective)
    comm.barrier()  # from here on, only rank 1 is late
    failures.WARN_AFTER_SECONDS = 0.2
    if is_late:
        with open(fifo, "rb", buffering=0) as told:
            told.read(1)
    step(comm, collective)


class Teller(logging.Handler):
    """Writes a byte to a file for each message of a rank that is waited for."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if WAITED_FOR.search(record.getMessage()):
            self._file.write(b"!")


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[str]:
    """Gives a file that can be read from once it is told that rank 1 is waited for."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    # Opening to read and write waits for nobody.
    with open(os.open(path, os.O_RDWR), "wb", buffering=0) as file:
        teller = Teller(file)
        logging.getLogger("gradsync").addHandler(teller)
        yield str(path)
        logging.getLogger("gradsync").removeHandler(teller)


@pytest.mark.parametrize("collective", ["bucket", "barrier"])
@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN_STUCK, 2), *on(GPU, 2)])
def test_who_is_waited_for_is_told_before_the_deadline(
    place: Place, world_size: int, collective: str, fifo: str, caplog: pytest.LogCaptureFixture
) -> None:
    place.run(world_size, warn_and_go_on, collective, fifo)
    told = [record.getMessage() for record in caplog.records if WAITED_FOR.search(record.getMessage())]
    assert len(told) == 1, caplog.text


@pytest.mark.parametrize("place", [SHM, STAND_IN_STUCK])
def test_who_is_waited_for_in_a_group_has_its_number_in_the_world(
    place: Place, fifo: str, caplog: pytest.LogCaptureFixture
) -> None:
    place.run(3, warn_and_go_on, "barrier", fifo, True)
    told = [record.getMessage() for record in caplog.records if WAITED_FOR.search(record.getMessage())]
    assert len(told) == 1, caplog.text


def compute_alone(comm: Any) -> None:
    comm.barrier()
    failures.WARN_AFTER_SECONDS = 0.1
    time.sleep(1.5)  # every rank computes past both limits, and nobody waits
    assert not verdict_is_there()


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN_STUCK, 2)])
def test_a_rank_that_nobody_waits_for_is_left_alone(
    place: Place, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    place.run(world_size, compute_alone, collective_timeout_seconds=1.0)
    assert not caplog.records


def first_of_rank_0(meet: Callable[[], None]) -> None:
    meet()


def first_of_rank_1(meet: Callable[[], None]) -> None:
    meet()


def first_of_rank_2(meet: Callable[[], None]) -> None:
    meet()


FIRST = (first_of_rank_0, first_of_rank_1, first_of_rank_2)


def wait_for_each_other(comm: Any, first: str) -> tuple[tuple[int, ...], str]:
    """Each rank sends to the next one first, or each receives first from the one before it."""
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    mine, room = np.full(3, comm.rank), np.zeros(3, int)
    comm.exchange(mine, dest=after, out=room, source=before)  # which does both at once
    assert (room == before).all()
    failures.WARN_AFTER_SECONDS = 0.2
    meet = partial(comm.send, mine, after) if first == "send" else partial(comm.recv, room, before)
    error = expect(gs.CollectiveTimeout, lambda: FIRST[comm.rank](meet))
    expect(gs.CommunicatorClosed, comm.barrier)
    return error.missing_ranks, str(error)


@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize(
    ("place", "world_size"), [*on(SHM, 2), *on(SHM, 3), *on(STAND_IN_STUCK, 2), *on(STAND_IN_STUCK, 3), *on(GPU, 2)]
)
def test_ranks_that_wait_for_each_other_are_told_with_their_lines_and_end_at_the_deadline(
    place: Place, world_size: int, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = place.run(world_size, wait_for_each_other, first, collective_timeout_seconds=2.5)
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert len({without_prefix(text) for _, text in found}) == 1, found
    text = without_prefix(found[0][1])
    assert re.match(r"rank \d waited [2-9]\S* s in message\(rank \d to rank \d\) after #\d .* for rank \d$", text, re.M)
    for rank, missing in enumerate((rank + (1 if first == "send" else -1)) % world_size for rank in range(world_size)):
        way = f"rank {rank} to rank {missing}" if first == "send" else f"rank {missing} to rank {rank}"
        line = FIRST[rank].__code__.co_firstlineno + 1
        place_told = rf"at \S*test_absent_ranks\.py:{line} in first_of_rank_{rank}"
        in_message = rf"message\({way}\) after #\d \(int64\[3\] 24 bytes, {place_told}\)"
        assert re.search(rf"rank {rank} has waited \S+ s in {in_message} for rank {missing}", told), told
        assert f"in first_of_rank_{rank}" in text
    assert {missing for missing, _ in found} <= {(rank,) for rank in range(world_size)}


def wait_in_a_launched_message(comm: Any) -> str:
    """Rank 0 launches what rank 1 does not come to: on shared memory at all, on NCCL after both have agreed."""
    mine, room = np.full(3, comm.rank), np.zeros(3, int)
    comm.exchange(mine, dest=1 - comm.rank, out=room, source=1 - comm.rank)
    failures.WARN_AFTER_SECONDS = 0.2
    if comm.rank == 1:
        if comm.backend == "nccl":
            comm._backend._nccl.call = lambda *_: None
            comm.send(mine, 0)
        client: Any = process_group._client
        error = expect(gs.CollectiveTimeout, lambda: client.get("nobody sets this", timeout_seconds=SECONDS))
        expect(gs.GradsyncError, comm.barrier)  # else closing may raise it: on NCCL a watcher hears of it too
        return str(error)
    return str(expect(gs.CollectiveTimeout, lambda: first_of_rank_0(partial(comm.recv, room, 1))))


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN_STUCK, 2), *on(GPU, 2)])
def test_who_waits_in_a_message_that_was_launched_is_told_with_a_line_too(
    place: Place, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = place.run(world_size, wait_in_a_launched_message, collective_timeout_seconds=2.5)
    line = first_of_rank_0.__code__.co_firstlineno + 1
    at = rf"at \S*test_absent_ranks\.py:{line} in first_of_rank_0"
    if place is not SHM:  # where the thread is by now; what stands in for CuPy counts as the user's program
        at = rf"launched; the program is now (?:{at}|at \S*fake_cupy/cupy/\S+ in \w+)"
    told = rf"{at}\) for rank 1"
    assert re.search(rf"rank 0 has waited \S+ s in message\(rank 1 to rank 0\) .*{told}", caplog.text), caplog.text
    for text in found:
        assert re.search(rf"rank 0 waited \S+ s in message\(rank 1 to rank 0\) .*{told}$", text, re.MULTILINE), text
