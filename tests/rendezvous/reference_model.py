"""What the server's core promises its ranks, in the simplest form: it searches lists, and writes no texts.

`Model` has the face of the core (`gradsync.rendezvous.worlds.Worlds`), and sends the same messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradsync.rendezvous.wire import Kind, Message, Status

DIED, STUCK, SILENT = range(3)
SILENT_SECONDS, ANSWER_SECONDS = 9.0, 5.0


class Failure(NamedTuple):
    kind: int
    rank: int
    phase: str
    missing: list[int]


@dataclass(eq=False)
class Request:
    connection: int
    number: int
    kind: Kind
    rank: int
    deadline: float = 0.0
    what: Any = None  # that it waits for: a key and who sets it, or an exchange


@dataclass
class Exchange:
    root: int | None
    values: dict[int, bytes] = field(default_factory=dict)  # of those that have arrived
    late: set[int] = field(default_factory=set)


@dataclass
class Member:
    connection: int
    pid: int  # 0 on another machine
    seen_at: float
    begun: int = 0  # collectives, as far as the server knows
    is_present: bool = True


@dataclass
class Generation:
    size: int
    number: int = 0
    failure: Failure | None = None
    members: dict[int, Member] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    left: list[int] = field(default_factory=list)
    waits: list[Request] = field(default_factory=list)
    values: dict[str, bytes] = field(default_factory=dict)
    exchanges: dict[tuple[str, tuple[int, ...]], Exchange] = field(default_factory=dict)
    departed: dict[tuple[str, tuple[int, ...]], set[int]] = field(default_factory=dict)
    noted: set[tuple[int, int]] = field(default_factory=set)  # in which collective who waits
    stuck: dict[int, tuple[int, tuple[int, ...], list[int]]] = field(default_factory=dict)  # the first one first
    unanswered: set[int] = field(default_factory=set)
    verdict_at: float | None = None

    def ranks(self, ranks: list[int] | None) -> tuple[int, ...]:
        return tuple(range(self.size) if ranks is None else ranks)

    def waits_of(self, kind: Kind) -> list[Request]:
        return [wait for wait in self.waits if wait.kind is kind]

    def forget(self, prefix: str) -> None:
        for key in [key for key in self.values if key == prefix or key.startswith(f"{prefix}/")]:
            del self.values[key]


@dataclass
class World:
    size: int
    formed: int = 0
    generations: list[Generation] = field(default_factory=list)  # the first one, and those that wait for its end
    ended: dict[int, None] = field(default_factory=dict)  # ranks whose processes have ended


class Model:
    """The worlds by name; see `Worlds`."""

    def __init__(
        self,
        send: Callable[..., None],
        close: Callable[[int], None],
        state_of: Callable[[int], str],
        *,
        machine: str,
        size: int,
        host: int,
    ) -> None:
        self.worlds = {"": World(size)}
        self.now = 0.0
        self._send, self._close, self._state_of, self._machine, self._host = send, close, state_of, machine, host

    def find(self, connection: int) -> tuple[Generation, int] | None:
        """Returns the generation of which this connection is a member, and as which rank."""
        found = [(member.connection, each, rank) for each, rank, member in self._present()]
        return next(((each, rank) for its, each, rank in found if its == connection), None)

    # Events.

    def received(self, now: float, connection: int, message: Message) -> None:
        kind, fields, found = message.kind, message.fields, self.find(connection)
        request = Request(connection, message.request, kind, -1)
        if kind in (Kind.JOIN, Kind.GET, Kind.EXCHANGE):
            *fields, milliseconds = fields
            request.deadline = now + milliseconds / 1000
        if kind is Kind.JOIN:
            self._join(now, request, found, *fields)
        elif found is None:
            self._close(connection)
        else:
            generation, request.rank = found
            generation.members[request.rank].seen_at = now
            is_running = generation.number and generation.failure is None
            if is_running or kind in (Kind.FAIL, Kind.BEAT, Kind.STATUS) or (kind is Kind.LEAVE and not fields[0]):
                self.now = now
                getattr(self, f"_{kind.name.lower()}")(generation, request, *fields)
            elif generation.failure is not None and kind not in (Kind.LEAVE, Kind.WAITING):
                self._answer(request, Status.FAILED, *generation.failure)
            elif kind not in (Kind.LEAVE, Kind.WAITING):
                self._answer(request, Status.REFUSED)
        self._advance()

    def lost(self, now: float, connection: int, cause: str, *, is_silent: bool = False) -> None:
        if (found := self.find(connection)) is not None:
            generation, rank = found
            generation.members[rank].is_present = False
            self._fail(generation, SILENT if is_silent else DIED, rank)
        self._advance()

    def process(self, now: float, world: str, rank: int, pid: int | None, how: str = "") -> None:
        if world in self.worlds and pid is None:
            self.worlds[world].ended.setdefault(rank)
        elif world in self.worlds:
            self.worlds[world].ended.pop(rank, None)
        self._advance()

    def tick(self, now: float) -> None:
        generations = list(dict.fromkeys(map(id, ())))  # placeholder
        del generations
        waits = [(wait.deadline, wait.number, wait, each) for each in self._generations() for wait in each.waits]
        for deadline, _, wait, generation in sorted(waits):
            if deadline <= now and wait in generation.waits:
                self._time_out(generation, wait)
        for generation in self._generations():
            if generation.failure is None and generation.verdict_at is not None and generation.verdict_at <= now:
                self._verdict(generation)
        if now > self.now:  # it looks once at each moment
            for generation, rank, member in sorted(self._present(), key=lambda found: found[2].connection):
                if now - member.seen_at >= SILENT_SECONDS and self._state_of(member.pid) in ("T", "Z"):
                    self._fail(generation, SILENT, rank)
        self.now = now
        self._advance()
