"""What the server's core promises its ranks, in the simplest form: dicts, and no clock but "all waits have ended"."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from gradsync.rendezvous.messages import FrameType

WORLD_SIZE = 3
ROOT = 0  # of the one id


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
        self.reads: dict[str, dict[Waiting, int]] = defaultdict(dict)  # with the rank that reads
        self.arrived: dict[str, dict[int, Waiting]] = defaultdict(dict)
        self.unique_id: bytes | None = None
        self.id_waits: dict[Waiting, int] = {}

    def take(self) -> dict[int, list[Told]]:
        """Returns what was to be told since the last call, by connection."""
        told, self.told = self.told, defaultdict(list)
        return {connection: sorted(messages, key=repr) for connection, messages in told.items()}

    def waits(self) -> list[tuple[int, Waiting]]:
        """Returns the waits of the present generation, with their ranks."""
        found = [(rank, wait) for arrived in self.arrived.values() for rank, wait in arrived.items()]
        found += [(rank, wait) for reads in self.reads.values() for wait, rank in reads.items()]
        return found + [(rank, wait) for wait, rank in self.id_waits.items()]

    def join(self, rank: int, wait: Waiting) -> None:
        self._tell(wait, FrameType.SEATED)
        self.joining[rank] = wait
        self._form()

    def set(self, wait: Waiting, key: str, value: bytes) -> None:
        if self._goes_on(wait):
            self.values[key] = value
            self._tell(wait, FrameType.REPLY, None)
            self._answer_reads(key)

    def add(self, wait: Waiting, key: str, amount: int) -> None:
        if not self._goes_on(wait):
            return
        try:
            total = int(self.values.get(key, b"0")) + amount
        except ValueError:
            self._tell(wait, FrameType.REFUSED)
            return
        self.values[key] = b"%d" % total
        self._tell(wait, FrameType.REPLY, total)
        self._answer_reads(key)

    def get(self, rank: int, wait: Waiting, key: str) -> None:
        if not self._goes_on(wait):
            return
        if key in self.values:
            self._tell(wait, FrameType.REPLY, self.values[key])
        elif self._one_remains:
            self._tell(wait, FrameType.FAILED, self.left[-1])
        else:
            self.reads[key][wait] = rank

    def delete(self, wait: Waiting, key: str) -> None:
        if self._goes_on(wait):
            self._tell(wait, FrameType.REPLY, self.values.pop(key, None) is not None)

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

    def put_id(self, wait: Waiting, value: bytes) -> None:
        if not self._goes_on(wait):
            return
        if self.unique_id is not None:
            self._tell(wait, FrameType.REFUSED)
            return
        self.unique_id = value
        self._tell(wait, FrameType.REPLY, None)
        self._end_id_waits(FrameType.REPLY, value)

    def get_id(self, rank: int, wait: Waiting) -> None:
        if not self._goes_on(wait):
            return
        if self.unique_id is not None:
            self._tell(wait, FrameType.REPLY, self.unique_id)
        elif ROOT in self.left:
            self._tell(wait, FrameType.FAILED, ROOT)
        else:
            self.id_waits[wait] = rank

    def cancel(self, wait: Waiting) -> None:
        for reads in (*self.reads.values(), self.id_waits):
            reads.pop(wait, None)
        for arrived in self.arrived.values():
            for rank in [rank for rank, other in arrived.items() if other == wait]:
                del arrived[rank]

    def leave(self, rank: int) -> None:
        for _, wait in [found for found in self.waits() if found[0] == rank]:
            self.cancel(wait)
        del self.present[rank]
        if self.culprit is None:
            self.left.append(rank)
            self._fail_what_needs(rank)
        self._form()

    def die(self, rank: int) -> None:
        del self.present[rank]
        self._fail(rank, told=list(self.present.values()))
        self._form()

    def report(self, rank: int, wait: Waiting, culprit: int | None) -> None:
        self._tell(wait, FrameType.REPLY, None)
        own = [other for other_rank, other in self.waits() if other_rank == rank]
        if self.culprit is None:
            named = rank if culprit is None else culprit
            for other in own:
                self._tell(other, FrameType.FAILED, named)
            self._fail(named, told=[c for r, c in self.present.items() if r != rank])

    def let_all_waits_end(self) -> None:
        """Longer than any deadline; says only that each ends: whom it names is tested elsewhere."""
        for wait in [*(wait for _, wait in self.waits()), *self.joining.values()]:
            self._tell(wait, FrameType.TIMED_OUT)
        for _, wait in self.waits():
            self.cancel(wait)
        self.joining.clear()

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
        self.id_waits.clear()
        for connection in told:
            self._tell(Waiting(connection, 0), FrameType.FAILED, culprit)

    def _fail_what_needs(self, rank: int) -> None:
        for arrived in self.arrived.values():
            self._end(arrived, FrameType.FAILED, rank)
        if rank == ROOT and self.unique_id is None:
            self._end_id_waits(FrameType.FAILED, rank)
        if self._one_remains:
            for reads in self.reads.values():
                for wait in reads:
                    self._tell(wait, FrameType.FAILED, rank)
            self.reads.clear()

    def _end(self, arrived: dict[int, Waiting], *what: Any) -> None:
        for wait in arrived.values():
            self._tell(wait, *what)
        arrived.clear()

    def _end_id_waits(self, *what: Any) -> None:
        for wait in self.id_waits:
            self._tell(wait, *what)
        self.id_waits.clear()

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
            self._tell(wait, FrameType.REPLY, self.number)
        self.joining.clear()
