"""What the server's core promises its ranks, in the simplest form: dicts, and no clock but "all waits have ended"."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from gradsync.rendezvous.frames import FrameType

WORLD_SIZE = 3


class Waiting(NamedTuple):
    """A request without an answer."""

    connection: int
    sequence: int


Told = tuple[Any, ...]  # a message without its text


class ReferenceModel:
    """Two generations: the present one, and the next, whose ranks wait until it can form.

    Each method returns nothing; what every connection is to be told is in `told` until it is taken.
    """

    def __init__(self) -> None:
        self.told: dict[int, list[Told]] = defaultdict(list)
        self.number = 0
        self.joining: dict[int, Waiting] = {}
        self.present: dict[int, int] = {}  # rank -> connection, of the present generation
        self._begin()

    def _begin(self) -> None:
        self.left: list[int] = []
        self.culprit: int | None = None
        self.values: dict[str, bytes] = {}
        self.reads: dict[str, dict[Waiting, tuple[int, int | None]]] = defaultdict(dict)  # by whom, and from whom
        self.arrived: dict[str, dict[int, Waiting]] = defaultdict(dict)
        self.exchanged: dict[int, tuple[Waiting, bytes]] = {}

    def take(self) -> dict[int, list[Told]]:
        """Returns what was to be told since the last call, by connection."""
        told, self.told = self.told, defaultdict(list)
        return {connection: sorted(messages, key=repr) for connection, messages in told.items()}

    def waits(self) -> list[tuple[int, Waiting]]:
        """Returns the waits of the present generation, with their ranks."""
        found = [(rank, wait) for arrived in self.arrived.values() for rank, wait in arrived.items()]
        found += [(rank, wait) for reads in self.reads.values() for wait, (rank, _) in reads.items()]
        return found + [(rank, wait) for rank, (wait, _) in self.exchanged.items()]

    def join(self, rank: int, wait: Waiting) -> None:
        self.told[wait.connection].append((FrameType.PULSE,))
        self.joining[rank] = wait
        self._form()

    def set(self, wait: Waiting, key: str, value: bytes) -> None:
        if self._goes_on(wait):
            self._tell(wait, FrameType.REPLY, None)
            self.values[key] = value
            self._answer_reads(key)

    def get(self, rank: int, wait: Waiting, key: str, from_rank: int | None) -> None:
        if not self._goes_on(wait):
            return
        if key in self.values:
            self._tell(wait, FrameType.REPLY, self.values[key])
        elif from_rank in self.left:
            self._tell(wait, FrameType.FAILED, from_rank)
        elif self._one_remains:
            self._tell(wait, FrameType.FAILED, self.left[-1])
        else:
            self.reads[key][wait] = rank, from_rank

    def delete(self, wait: Waiting, key: str) -> None:
        if self._goes_on(wait):
            self._tell(wait, FrameType.REPLY, None)
            self.values.pop(key, None)

    def barrier(self, rank: int, wait: Waiting, name: str) -> None:
        if not self._goes_on(wait):
            return
        arrived = self.arrived[name]
        if rank in arrived:
            self._tell(wait, FrameType.REFUSED)
            return
        arrived[rank] = wait
        if len(arrived) == WORLD_SIZE:
            self._end(arrived, FrameType.REPLY, None)
        elif missed := [rank for rank in sorted(self.left) if rank not in arrived]:
            self._end(arrived, FrameType.FAILED, missed[0])

    def exchange(self, rank: int, wait: Waiting, value: bytes) -> None:
        if not self._goes_on(wait):
            return
        if rank in self.exchanged:
            self._tell(wait, FrameType.REFUSED)
            return
        self.exchanged[rank] = wait, value
        if len(self.exchanged) == WORLD_SIZE:
            values = [value for _, (_, value) in sorted(self.exchanged.items())]
            self._end({rank: wait for rank, (wait, _) in self.exchanged.items()}, FrameType.VALUES, values)
            self.exchanged.clear()
        elif missed := [rank for rank in sorted(self.left) if rank not in self.exchanged]:
            self._end({rank: wait for rank, (wait, _) in self.exchanged.items()}, FrameType.FAILED, missed[0])
            self.exchanged.clear()

    def cancel(self, wait: Waiting) -> None:
        """Comes to a deadline."""
        if wait in [other for _, other in self.waits()]:
            self._withdraw(wait)
            self._tell(wait, FrameType.TIMED_OUT)
        for rank in [rank for rank, other in self.joining.items() if other == wait]:
            self._tell(wait, FrameType.TIMED_OUT)
            del self.joining[rank]

    def _withdraw(self, wait: Waiting) -> None:
        for reads in self.reads.values():
            reads.pop(wait, None)
        for arrived in self.arrived.values():
            for rank in [rank for rank, other in arrived.items() if other == wait]:
                del arrived[rank]
        self.exchanged = {rank: mine for rank, mine in self.exchanged.items() if mine[0] != wait}

    def leave(self, rank: int) -> None:
        for _, wait in [found for found in self.waits() if found[0] == rank]:
            self._withdraw(wait)
        del self.present[rank]
        if self.culprit is None:
            self.left.append(rank)
            self._fail_what_needs(rank)
        self._form()

    def die(self, rank: int) -> None:
        del self.present[rank]
        self._fail(rank, told=list(self.present.values()))
        self._form()

    def report(self, rank: int, culprit: int | None) -> None:
        self._fail(rank if culprit is None else culprit, told=list(self.present.values()))

    @property
    def _one_remains(self) -> bool:
        return len(self.left) >= WORLD_SIZE - 1

    def _tell(self, wait: Waiting, frame_type: FrameType, *values: object) -> None:
        self.told[wait.connection].append((frame_type, wait.sequence, *values))

    def _goes_on(self, wait: Waiting) -> bool:
        if self.culprit is not None:
            self._tell(wait, FrameType.FAILED, self.culprit)
        return self.culprit is None

    def _fail(self, culprit: int, told: list[int]) -> None:
        if self.culprit is not None:
            return
        self.culprit = culprit
        self.reads.clear()
        self.arrived.clear()
        self.exchanged.clear()
        for connection in told:
            self._tell(Waiting(connection, 0), FrameType.FAILED, culprit)

    def _fail_what_needs(self, rank: int) -> None:
        for arrived in self.arrived.values():
            self._end(arrived, FrameType.FAILED, rank)
        self._end({rank: wait for rank, (wait, _) in self.exchanged.items()}, FrameType.FAILED, rank)
        self.exchanged.clear()
        for reads in self.reads.values():
            for wait, (_, from_rank) in list(reads.items()):
                if from_rank == rank or self._one_remains:
                    self._tell(wait, FrameType.FAILED, rank)
                    del reads[wait]

    def _end(self, arrived: dict[int, Waiting], *what: Any) -> None:
        for wait in arrived.values():
            self._tell(wait, *what)
        arrived.clear()

    def _answer_reads(self, key: str) -> None:
        for wait in self.reads.pop(key, {}):
            self._tell(wait, FrameType.REPLY, self.values[key])

    def _form(self) -> None:
        if self.present or len(self.joining) < WORLD_SIZE:
            return
        self._begin()
        self.number += 1
        for rank, wait in self.joining.items():
            self.present[rank] = wait.connection
            self._tell(wait, FrameType.REPLY, (self.number,))
        self.joining.clear()
