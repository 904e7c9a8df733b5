"""What the server's core promises its ranks, in the simplest form: it searches lists, and writes no texts.

A world that was rebuilt keeps the order of its ranks. Until a generation has formed, its members go by their ranks at
launch.

`Model` has the face of the core (`gradsync.rendezvous.worlds.Worlds`), and sends the same messages.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class Request(NamedTuple):
    connection: int
    number: int
    kind: Kind
    rank: int  # of a JOIN at launch
    deadline: float
    what: Any  # that it waits for: a key and who sets it, or an exchange's name and members


@dataclass
class Exchange:
    root: int | None
    values: dict[int, bytes] = field(default_factory=dict)  # of those that have arrived
    late: set[int] = field(default_factory=set)


@dataclass
class Member:
    number: int  # at launch
    connection: int
    pid: int  # 0 on another machine
    machine: str
    came_at: float
    seen_at: float
    min_ranks: int | None  # None: it does not rebuild
    begun: int = 0  # collectives, as far as the server knows
    is_present: bool = True
    has_left: bool = False


@dataclass(eq=False)
class Generation:
    world: World
    size: int
    number: int = 0
    failure: Failure | None = None
    failed_at: float | None = None
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

    def present(self) -> list[tuple[int, Member]]:
        return [(rank, member) for rank, member in self.members.items() if member.is_present]

    def seat(self, number: int) -> Member | None:
        """Returns the member that had a rank at launch."""
        return next((member for member in self.members.values() if member.number == number), None)

    @property
    def askers(self) -> list[Member]:
        """Those that have come to it to rebuild their world."""
        return [member for member in self.members.values() if member.min_ranks is not None]

    def ranks(self, ranks: list[int] | None) -> tuple[int, ...]:
        """Returns the ranks that a message names; none if that is no list of ranks in order."""
        found = tuple(range(self.size) if ranks is None else ranks)
        return found if found == tuple(sorted({*found} & {*range(self.size)})) else ()

    def forget(self, prefix: str) -> None:
        for key in [key for key in self.values if key == prefix or key.startswith(f"{prefix}/")]:
            del self.values[key]


@dataclass
class World:
    size: int
    min_ranks: int = 1
    respawns: bool = False
    formed: int = 0
    generations: list[Generation] = field(default_factory=list)  # the first one, and those that wait for its end
    ended: dict[int, None] = field(default_factory=dict)  # ranks whose processes have ended

    @property
    def running(self) -> Generation | None:
        return next((each for each in self.generations if each.number), None)

    @property
    def forming(self) -> Generation | None:
        return next((each for each in self.generations if not each.number), None)

    def awaited(self) -> list[int]:
        """Returns who was in the world, is left, and has not come to rebuild it, by the ranks at launch."""
        left = [member for _, member in self.running.present()]
        return sorted(member.number for member in left if self.forming.seat(member.number) is None)

    def needed(self) -> int:
        asked = [member.min_ranks for member in self.forming.askers if member.min_ranks]
        members = self.running.members.values()
        is_cut_perhaps = not asked and len({member.machine for member in members}) > 1
        return max(self.min_ranks, *asked, 1, -(-len(members) // 2) if is_cut_perhaps else 0)


class Model:
    """The worlds by name."""

    def __init__(
        self,
        send: Any,
        close: Any,
        state_of: Any,
        *,
        machine: str,
        size: int,
        host: int,
        min_ranks: int,
        respawns: bool,
        on_lost: Any,
        on_rebuilt: Any,
    ) -> None:
        self.worlds = {"": World(size, min_ranks, respawns)}
        self.replaced: dict[int, Generation] = {}  # by connection: what it was in, until the others went on without it
        self._send, self._close, self._state_of, self._machine, self._host = send, close, state_of, machine, host
        self._on_lost, self._on_rebuilt = on_lost, on_rebuilt
        self._now = self._looked_at = 0.0

    def find(self, connection: int) -> tuple[Generation, int] | None:
        """Returns the generation of which this connection is a member, and as which rank."""
        found = (
            (each, rank)
            for each in self._generations()
            for rank, member in each.present()
            if member.connection == connection
        )
        return next(found, None)

    # Events.

    def received(self, now: float, connection: int, message: Message) -> None:
        self._now = now
        kind, fields, found = message.kind, message.fields, self.find(connection)
        deadline = now + fields[-1] / 1000 if kind in (Kind.JOIN, Kind.GET, Kind.EXCHANGE) else 0.0
        request = Request(connection, message.request, kind, found[1] if found else -1, deadline, None)
        if kind is Kind.JOIN:
            self._join(request, found is not None or connection in self.replaced, *fields)
        elif connection in self.replaced:
            failure = self.replaced[connection].failure
            if kind is Kind.LEAVE:
                self._close(connection)
            elif kind in (Kind.SET, Kind.GET, Kind.DELETE, Kind.EXCHANGE):
                self._answer(request, *(Status.FAILED, *failure) if failure else (Status.REFUSED,))
        elif found is None:
            self._close(connection)
        else:
            generation, rank = found
            generation.members[rank].seen_at = now
            if kind is Kind.LEAVE and not fields[0]:
                self._leave(generation, request, *fields)
            elif kind is Kind.FAIL and self._drop(generation, rank):
                self._close(connection)
            elif kind is Kind.FAIL:
                self._fail(generation, DIED, fields[1] if fields[1] in generation.members else rank)
            elif kind in (Kind.BEAT, Kind.STATUS):
                self._hear(generation, request, fields[0])
            elif generation.number and generation.failure is None:
                getattr(self, f"_{kind.name.lower()}")(generation, request, *fields)
            elif kind in (Kind.SET, Kind.GET, Kind.DELETE, Kind.EXCHANGE):
                failure = generation.failure
                self._answer(request, *(Status.FAILED, *failure) if failure else (Status.REFUSED,))
        self._advance()

    def lost(self, now: float, connection: int, cause: str, *, is_silent: bool = False) -> None:
        self._now = now
        self.replaced.pop(connection, None)
        if (found := self.find(connection)) is not None:
            generation, rank = found
            if not self._drop(generation, rank):
                generation.members[rank].is_present = False
                self._fail(generation, SILENT if is_silent else DIED, rank)
            self._advance()

    def process(self, now: float, rank: int, pid: int | None, how: str = "") -> None:
        self._now = now
        if pid is None:
            self.worlds[""].ended[rank] = None
        else:
            self.worlds[""].ended.pop(rank, None)
        self._advance()

    def tick(self, now: float) -> None:
        self._now = now
        waits = [(wait.deadline, wait.number, wait, each) for each in self._generations() for wait in each.waits]
        for deadline, _, wait, generation in sorted(waits, key=lambda found: found[:2]):
            if deadline <= now and wait in generation.waits:
                self._time_out(generation, wait)
        for generation in self._generations():
            if generation.failure is None and generation.verdict_at is not None and generation.verdict_at <= now:
                self._verdict(generation)
        if now > self._looked_at:  # once at each moment
            members = [(member, rank, each) for each in self._generations() for rank, member in each.present()]
            for member, rank, generation in sorted(members, key=lambda found: found[0].connection):
                if now - member.seen_at >= SILENT_SECONDS and self._state(member) in ("T", "Z"):
                    self._miss(generation, rank, member)
        self._looked_at = now
        self._advance()

    # Messages.

    def _join(self, request: Request, has_joined: bool, *fields: Any) -> None:
        name, number, size, last, min_ranks, machine, host, pid, _ = fields
        world = self.worlds.get(name) or World(size)
        running, is_rebuild = world.running, last is not None
        is_refused = has_joined or size != world.size or not 0 <= number < size or not 0 <= min_ranks <= size
        for each in world.generations:
            seat = each.seat(number)
            is_refused |= seat is not None and seat.is_present and not (each is running and is_rebuild)
        if is_rebuild:
            seat = running.seat(number) if running else None
            is_refused |= seat is None or running.number != last or not seat.is_present
        open_ones = [each for each in world.generations if not each.number and each.seat(number) is None]
        generation = open_ones[0] if open_ones else Generation(world, size)
        if is_refused or generation.failure is not None:
            self._answer(request, *(Status.REFUSED,) if is_refused else (Status.FAILED, *generation.failure))
            self._close(request.connection)
            return
        self.worlds[name] = world
        if generation not in world.generations:
            world.generations.append(generation)
        pid, where = (pid, "") if machine == self._machine else (0, host)
        asks = min_ranks if is_rebuild else None
        generation.members[number] = Member(number, request.connection, pid, where, self._now, self._now, asks)
        generation.late.discard(number)
        generation.waits.append(request._replace(rank=number))
        self._send(request.connection, Kind.REPLY, request.number, Status.OK, False, [])

    def _set(self, generation: Generation, request: Request, key: str, value: bytes) -> None:
        self._answer(request, Status.OK)
        generation.values[key] = value
        for wait in generation.waits[:]:
            if wait.kind is Kind.GET and wait.what[0] == key:
                self._end(generation, wait, Status.OK, value)

    def _get(self, generation: Generation, request: Request, key: str, setter: int | None, timeout_ms: int) -> None:
        if key in generation.values:
            self._answer(request, Status.OK, generation.values[key])
        elif setter is not None and not 0 <= setter < generation.size:
            self._answer(request, Status.INVALID)
        else:
            generation.waits.append(request._replace(what=(key, setter)))
            self._fail_what_needs_who_left(generation)

    def _delete(self, generation: Generation, request: Request, prefix: str) -> None:
        generation.forget(prefix)
        self._answer(request, Status.OK)

    def _exchange(self, generation: Generation, request: Request, *fields: Any) -> None:
        name, ranks, value, root, _ = fields
        rank, members = request.rank, generation.ranks(ranks)
        key = name, members
        exchange = generation.exchanges.get(key) or Exchange(root)
        if not {rank, rank if root is None else root} <= {*members} or exchange.root != root:
            self._answer(request, Status.INVALID)
            return
        generation.exchanges[key] = exchange
        for wait in self._arrived(generation, key):
            if wait.rank == rank:
                self._end(generation, wait, Status.INVALID)
        exchange.values[rank] = value
        exchange.late.discard(rank)
        if root in (None, rank):
            generation.waits.append(request._replace(what=key))
        else:
            self._answer(request, Status.OK)
        if len(exchange.values) == len(members):
            del generation.exchanges[key]
            values = [exchange.values[member] for member in members]
            for wait in self._arrived(generation, key):
                self._end(generation, wait, Status.OK, *[values] if any(values) else [])
        self._fail_what_needs_who_left(generation)

    def _leave(self, generation: Generation, request: Request, group: str, ranks: Any, begun: int) -> None:
        rank, key = request.rank, (group, generation.ranks(ranks))
        if not group:
            self._close(request.connection)
            generation.waits = [wait for wait in generation.waits if wait.rank != rank]
            generation.members[rank].is_present, generation.members[rank].has_left = False, True
            if generation.number:
                generation.left.append(rank)
                self._fail_what_needs_who_left(generation)
            else:
                del generation.members[rank]
        elif rank in key[1]:
            departed = generation.departed.setdefault(key, set())
            departed.add(rank)
            self._send_all(generation, {*key[1]} - departed, Kind.LEFT, group, rank, begun)
        for (name, members), departed in list(generation.departed.items()):
            if {*members} <= {*departed, *generation.left}:
                del generation.departed[name, members]
                generation.forget(name)

    def _hear(self, generation: Generation, request: Request, status: dict[str, Any]) -> None:
        begun = status.get("g", 0)
        generation.members[request.rank].begun = begun if request.kind is Kind.BEAT or not begun else begun[0]
        if request.kind is Kind.STATUS and request.rank in generation.unanswered:
            generation.unanswered.discard(request.rank)
            if not generation.unanswered:
                generation.verdict_at = self._now

    def _waiting(self, generation: Generation, request: Request, *fields: Any) -> None:
        _, ranks, number, _, _, missing, is_over = fields
        rank = request.rank
        if not is_over:
            generation.noted.add((number, rank))
            return
        if generation.verdict_at is None:
            generation.verdict_at = self._now + ANSWER_SECONDS
            generation.unanswered = {other for other, _ in generation.present()}
            self._send_all(generation, generation.unanswered, Kind.ASK)
        elif number != next(iter(generation.stuck.values()))[0]:
            return
        missing = [other for other in missing or () if other in generation.members and other != rank]
        generation.stuck[rank] = number, generation.ranks(ranks), missing

    # What follows.

    def _advance(self) -> None:
        for name, world in list(self.worlds.items()):
            world.generations = [each for each in world.generations if each.present()]
            if not world.generations:
                if name:
                    del self.worlds[name]
                continue
            running, forming = world.running, world.forming
            if forming is None or forming.failure is not None:
                continue
            gone = [rank for rank in world.ended if rank not in forming.members]
            if running is not None:
                if forming.askers and not world.awaited() and len(forming.members) >= world.needed():
                    self._rebuild(world, running, forming)
            elif len(forming.members) == world.size:
                self._form(forming, None, 0.0)
            elif gone:
                self._fail(forming, DIED, gone[0])

    def _form(self, forming: Generation, numbers: list[int] | None, seconds: float) -> None:
        """Forms a generation; `numbers` are the ranks at launch of a rebuilt one."""
        world = forming.world
        forming.number = world.formed = world.formed + 1
        for wait in forming.waits[:]:
            self._end(forming, wait, Status.OK, forming.number, numbers)
        if world is self.worlds.get(""):
            self._on_rebuilt(forming.number, tuple(range(world.size) if numbers is None else numbers), seconds)

    def _rebuild(self, world: World, running: Generation, forming: Generation) -> None:
        """Who has come replaces who was there, in the old order and without gaps."""
        for wait in running.waits[:]:
            self._end(running, wait, Status.REFUSED)
        for _, member in running.present():
            self.replaced[member.connection] = running
            member.is_present = False
        world.generations.remove(running)
        began = min(member.came_at for member in forming.askers) if running.failed_at is None else running.failed_at
        numbers = sorted(forming.members)
        forming.members = {rank: forming.members[number] for rank, number in enumerate(numbers)}
        forming.size = len(numbers)
        forming.late.clear()
        self._form(forming, numbers, self._now - began)

    def _drop(self, generation: Generation, rank: int) -> bool:
        """Who waits beside a world that runs and has ended, or is given up, is one fewer, and fails nobody.

        It is a failure where all have left, and join again; before the first world, where nobody starts it again.
        """
        world, running = generation.world, generation.world.running
        if generation.number or generation.failure is not None or (running is None and not world.respawns):
            return False
        before = running.seat(rank) if running else None
        if before is not None and before.has_left and not generation.askers:
            return False
        generation.waits = [wait for wait in generation.waits if wait.rank != rank]
        del generation.members[rank]
        return True

    def _miss(self, generation: Generation, rank: int, member: Member) -> None:
        """A member was found stopped, or its process has ended unseen."""
        world = generation.world
        is_awaited = generation is world.running and world.forming is not None and bool(world.forming.askers)
        joins = [wait for wait in generation.waits if wait.kind is Kind.JOIN and wait.rank == rank]
        if generation.failure is not None and not is_awaited:
            return
        if self._drop(generation, rank):
            self._answer(joins[0], Status.REFUSED)
            self._close(member.connection)
            before = world.running.seat(rank) if world.running else None
            is_new = before is None or member.min_ranks is None
            self._give_up(generation if is_new else world.running, member if is_new else before)
        elif generation.failure is not None:
            self._give_up(generation, member)
        else:
            self._fail(generation, SILENT, rank)
            self._give_up_at_most_half(generation, [rank])

    def _give_up_at_most_half(self, generation: Generation, ranks: list[int]) -> None:
        if len(ranks) <= generation.size / 2:
            for rank in ranks:
                self._give_up(generation, generation.members[rank])

    def _give_up(self, generation: Generation, member: Member) -> None:
        """Nobody waits for it any more; its launcher hears of that once."""
        if member.is_present:
            member.is_present = False
            self.replaced[member.connection] = generation
            self._close(member.connection)
            if generation.world is self.worlds.get(""):
                self._on_lost(member.number)

    def _time_out(self, generation: Generation, wait: Request) -> None:
        if wait.kind is Kind.JOIN:
            world, missing = generation.world, _missing(range(generation.size), generation.members, generation.late)
            if world.running is not None and generation.askers:
                missing = [number for number in world.awaited() if number not in generation.late] or missing
            if world.running is not None and generation.members[wait.rank].min_ranks is None:
                before = world.running.seat(wait.rank)
                if before is None or not before.has_left:
                    missing = [wait.rank]  # it is new, and asks again
            if world.running is not None and generation.members[wait.rank].min_ranks is None:
                before = world.running.seat(wait.rank)
                if before is None or not before.has_left:
                    missing = [wait.rank]  # it is new: the others take it in when they rebuild
            is_host = wait.rank == self._host and world is self.worlds.get("") and world.running is None
            for each in generation.waits[:] if is_host else [wait]:
                del generation.members[each.rank]
                generation.late.add(each.rank)
                self._end(generation, each, Status.TIMED_OUT, missing)
                self._close(each.connection)
        elif wait.kind is Kind.GET:
            self._end(generation, wait, Status.TIMED_OUT, [] if wait.what[1] is None else [wait.what[1]])
        else:
            exchange = generation.exchanges[wait.what]
            self._end(generation, wait, Status.TIMED_OUT, _missing(wait.what[1], exchange.values, exchange.late))
            del exchange.values[wait.rank]
            exchange.late.add(wait.rank)
            if not exchange.values:
                del generation.exchanges[wait.what]

    def _verdict(self, generation: Generation) -> None:
        for rank in sorted(generation.unanswered):
            if generation.members[rank].is_present and self._state(generation.members[rank]) == "T":
                self._fail(generation, SILENT, rank)
                self._give_up_at_most_half(generation, [rank])
                return
        first, (number, members, missing) = next(iter(generation.stuck.items()))
        if number and not missing:
            waiting = {*generation.stuck, *[rank for noted, rank in generation.noted if noted == number]}
            missing = [rank for rank in members if generation.members[rank].begun < number and rank not in waiting]
        waits = {wait.rank for wait in generation.waits}
        blamed = min(missing, key=lambda rank: (rank in waits, rank), default=first)
        self._fail(generation, STUCK, blamed, missing)
        self._give_up_at_most_half(generation, missing)

    def _fail(self, generation: Generation, kind: int, rank: int, missing: list[int] | None = None) -> None:
        """The first failure stays, and answers all requests of all members."""
        if generation.failure is None:
            generation.failure = Failure(kind, rank, "running" if generation.number else "joining", missing or [])
            generation.failed_at = self._now
            generation.waits.clear()
            self._send_all(generation, generation.members, Kind.FAILED, *generation.failure)

    def _fail_what_needs_who_left(self, generation: Generation) -> None:
        left = generation.left
        for key, exchange in list(generation.exchanges.items()):
            if gone := [rank for rank in key[1] if rank in left and rank not in exchange.values]:
                del generation.exchanges[key]
                for wait in self._arrived(generation, key):
                    self._end(generation, wait, Status.FAILED, DIED, gone[0], "left", [])
        for wait in generation.waits[:]:
            setter = wait.what[1] if wait.kind is Kind.GET else None
            if setter in left or (wait.kind is Kind.GET and left and len(left) >= generation.size - 1):
                self._end(generation, wait, Status.FAILED, DIED, setter if setter in left else left[-1], "left", [])

    def _arrived(self, generation: Generation, key: tuple[str, tuple[int, ...]]) -> list[Request]:
        return [wait for wait in generation.waits if wait.kind is Kind.EXCHANGE and wait.what == key]

    def _generations(self) -> Iterator[Generation]:
        for world in list(self.worlds.values()):
            yield from world.generations

    def _state(self, member: Member) -> str:
        return self._state_of(member.pid) if member.pid else ""

    def _end(self, generation: Generation, wait: Request, status: Status, *values: object) -> None:
        generation.waits.remove(wait)
        self._answer(wait, status, *values)

    def _answer(self, request: Request, status: Status, *values: object) -> None:
        self._send(request.connection, Kind.REPLY, request.number, status, True, *values)

    def _send_all(self, generation: Generation, ranks: Any, kind: Kind, *fields: object) -> None:
        for rank, member in generation.present():
            if rank in ranks:
                self._send(member.connection, kind, 0, *fields)


def _missing(ranks: Any, there: Any, late: set[int]) -> list[int]:
    """Returns who never came; if there is nobody, who has reached its deadline."""
    absent = [rank for rank in ranks if rank not in there]
    return [rank for rank in absent if rank not in late] or absent
