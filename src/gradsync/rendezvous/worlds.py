"""The server's core: worlds by name, their generations, keys, exchanges, failures. No sockets, no clock, no randomness.

A world is a set of ranks that join under one name. It has generations: one forms when all ranks have joined and the one
before has ended; it fails when a member's connection ends without a LEAVE, a member reports a failure or is found
stopped, or a collective does not end in time (`stuck.py`). Every member gets the first failure at once, and again as
the answer to each later request. What a generation has stored goes with it.

A rebuilt generation (gs.rebuild) forms from fewer ranks, beside the one before: as soon as all who are left of that one
have come, and as many as they ask for. Those who wait to join at that moment are in it, too. Its ranks are numbered
anew, in the order of their numbers at launch. Until it forms, a rank that dies in the queue is one fewer, and no
failure. A member that was found stopped, or was missing at a deadline, is lost: nobody waits for it, and it is out.

Requests that wait have a deadline, which travels with them: the core answers at the deadline, and names who is missing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsync.errors import MAX_NAMED_RANKS
from gradsync.rendezvous.stuck import Stuck, Waiting, check_counts
from gradsync.rendezvous.wire import (
    DIED,
    MAX_EXCHANGED_BYTES,
    MAX_NAME_BYTES,
    MAX_RANKS,
    MAX_VALUE_BYTES,
    SILENT,
    STUCK,
    Failure,
    FrameError,
    Kind,
    Message,
    Status,
    check_fields,
    clip_text,
    is_under,
)

MAX_STORED_BYTES = 64 * 1024**2
MAX_WAITS_PER_CONNECTION = 64
NOTICE_SECONDS = 5.0
SILENT_SECONDS = 9.0  # a member that has sent nothing for so long, and that /proc calls stopped or zombie, is lost
REPLACED = "gs.rebuild() has made a new world"
_LOOK_SECONDS = 0.5  # how often silent members are looked for
_LATEST_SECONDS = 10**9
_CROWD = 1024  # so many requests may lie in the heap of deadlines before those that are answered are removed

# Ranks in ascending order. All ranks together are a `range`, which is compared, hashed and searched in constant time.
Members = tuple[int, ...] | range


@dataclass(eq=False, slots=True)
class Member:
    """One rank of a generation.

    Attributes:
        number: its rank at launch.
        connection: the number of its connection.
        pid: its process id; 0 if unknown.
        host: the name of its machine; "" on the server's machine.
        seen_at: when it last sent something, in monotonic seconds.
        came_at: when it joined, likewise.
        min_ranks: how many ranks it asks for at least, if it has come by gs.rebuild(); else None.
        is_present: whether it is connected, and has neither left nor been given up, nor has a rebuild taken its place.
        has_left: whether it has left, in order.
        begun: the number of collectives that it has begun, by group.
    """

    number: int
    connection: int
    pid: int
    host: str
    seen_at: float
    came_at: float
    min_ranks: int | None = None
    is_present: bool = True
    has_left: bool = False
    begun: dict[str, int] = field(default_factory=dict)


class Request:
    """One request, until it is answered.

    Attributes:
        rank: who asks.
        connection, number: where the answer goes.
        is_open: whether it waits for its answer.
    """

    __slots__ = ("_send", "connection", "is_open", "number", "rank", "when_late")

    def __init__(self, send: Callable[..., None], connection: int, number: int, rank: int) -> None:
        self._send = send
        self.connection, self.number, self.rank = connection, number, rank
        self.is_open = True
        self.when_late: Callable[[Request], None] = _do_nothing

    def close(self) -> None:
        """Lets it wait no longer; what it was about is not kept until its deadline."""
        self.is_open = False
        self.when_late = _do_nothing

    def reply(self, *values: object) -> None:
        """Answers with values."""
        self._answer(Status.OK, True, *values)

    def accept(self) -> None:
        """Says that the request is known, and waits: the answer begins with an empty part."""
        self._send(self.connection, Kind.REPLY, self.number, Status.OK, False, [])

    def reply_in_parts(self, parts: Sequence[list[bytes]]) -> None:
        """Answers with lists that do not fit into one frame."""
        for part in parts[:-1]:
            self._send(self.connection, Kind.REPLY, self.number, Status.OK, False, part)
        self.reply(parts[-1])

    def invalid(self, text: str) -> None:
        """Answers that the caller made a mistake."""
        self._answer(Status.INVALID, True, clip_text(text))

    def refuse(self, text: str) -> None:
        """Answers that the state of the run forbids it."""
        self._answer(Status.REFUSED, True, clip_text(text))

    def fail(self, failure: Failure) -> None:
        """Answers with a failure."""
        self._answer(Status.FAILED, True, *failure.fields())

    def time_out(self, missing: Sequence[int], states: str) -> None:
        """Answers at the deadline, with the ranks that are missing and their states in words."""
        self._answer(Status.TIMED_OUT, True, tuple(missing), clip_text(states))

    def _answer(self, status: Status, *fields: object) -> None:
        if self.is_open:
            self.close()
            if self.number:
                self._send(self.connection, Kind.REPLY, self.number, status, *fields)


def _do_nothing(_: Request) -> None: ...


def ignore(*_: object) -> None:
    """Does nothing."""


class Exchange:
    """One exchange: its members arrive, each with a value. A barrier is an exchange of empty values."""

    def __init__(self, members: Members, root: int | None) -> None:
        self.members = members
        self.root = root
        self.values: dict[int, bytes] = {}  # of those that have arrived
        self.waiting: dict[int, Request] = {}
        self.late: set[int] = set()  # those that had arrived, and have reached their deadline
        self.never: tuple[int, ...] | None = None  # those that never arrived, kept from one deadline to the next

    def missing(self) -> tuple[int, ...]:
        """Returns the members that never arrived; if there are none, those that have reached their deadline."""
        if self.never is None:
            self.never = tuple([rank for rank in self.members if rank not in self.values and rank not in self.late])
        return self.never or tuple([rank for rank in self.members if rank not in self.values])


class Generation:
    """The ranks of a world that have joined together.

    Attributes:
        size: the number of ranks.
        number: counted from 1; 0 until it has formed.
        failure: why it has failed, or None.
        failed_at: when it has, in monotonic seconds.
        members: the ranks that have joined, also those that have left or failed; by rank, and until it has formed by
            their ranks at launch.
        is_rebuilt: whether it has formed from those that asked for it, and has other ranks than at launch.
    """

    def __init__(self, worlds: Worlds, world: World) -> None:
        self._worlds = worlds
        self.world = world
        self.size = world.size
        self.number = 0
        self.failure: Failure | None = None
        self.failed_at: float | None = None
        self.is_rebuilt = False
        self.members: dict[int, Member] = {}
        self._by_number = self.members  # by their ranks at launch
        self.joins: dict[int, Request] = {}
        self.late: set[int] = set()  # ranks that had asked to join, and have reached their deadline
        self.never: tuple[int, ...] | None = None  # ranks that never asked, kept from one deadline to the next
        self.left: dict[int, None] = {}  # the ranks that have left the world, in order
        self.values: dict[str, bytes] = {}
        self.stored_bytes = 0
        self.reads: dict[str, dict[Request, int | None]] = {}  # key -> who waits for it -> who sets it
        self.exchanges: dict[tuple[str, Members], Exchange] = {}
        self.departed: dict[tuple[str, Members], set[int]] = {}  # who has left a group
        self.untold: dict[tuple[str, Members], dict[int, int]] = {}  # of those, whom the others have not been told of
        self.stuck = Stuck(self)

    def forget_join(self, number: int) -> None:
        """Forgets a rank that does not want to join any more."""
        self.joins.pop(number).close()
        del self.members[number]
        self.never = None

    # -- Who is there --------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The word "joining" until it has formed, then "running"."""
        return "running" if self.number else "joining"

    def present(self) -> list[tuple[int, Member]]:
        """Returns the connected members, in ascending order of rank."""
        return [(rank, member) for rank, member in sorted(self.members.items()) if member.is_present]

    def member(self, number: int) -> Member | None:
        """Returns the member that had a rank at launch."""
        return self._by_number.get(number)

    def renumber(self) -> None:
        """Gives the members of a rebuilt generation their ranks: in the order of their numbers at launch."""
        ordered = sorted(self.members.values(), key=lambda each: each.number)
        self._by_number = {each.number: each for each in ordered}
        self.members, self.size, self.is_rebuilt = dict(enumerate(ordered)), len(ordered), True
        self.late.clear()

    @property
    def is_asked_for(self) -> bool:
        """Whether a rank has come to it by gs.rebuild()."""
        return any(member.min_ranks is not None for member in self.members.values())

    def missing(self) -> tuple[int, ...]:
        """Returns the ranks that have not asked to join; if there are none, those that have reached their deadline."""
        if self.never is None:
            self.never = tuple(
                [rank for rank in range(self.size) if rank not in self.members and rank not in self.late]
            )
        return self.never or tuple([rank for rank in range(self.size) if rank not in self.members])

    def members_of(self, ranks: list[int] | None) -> Members:
        """Returns the ranks that a request names; none if it names one that does not exist, or not in order."""
        if ranks is None:
            return range(self.size)
        is_in_order = all(type(rank) is int for rank in ranks) and ranks == sorted(set(ranks))
        if not is_in_order or not ranks or ranks[0] < 0 or ranks[-1] >= self.size:
            return ()
        return range(self.size) if len(ranks) == self.size else tuple(ranks)

    # -- Words ---------------------------------------------------------------------------------------------------

    def label(self, rank: int) -> str:
        """Returns e.g. "rank 1/4"."""
        return f"rank {rank}/{self.size}"

    def process(self, rank: int) -> str:
        """Returns "pid 123" or "pid 123 on node7"; "" if it is not known. In a rebuilt generation the member, too."""
        member = self.members.get(rank)
        if member is None or not member.pid:
            return ""
        pid = f"pid {member.pid} on {member.host}" if member.host else f"pid {member.pid}"
        return f"member {member.number}, {pid}" if self.is_rebuilt else pid

    def name(self, rank: int) -> str:
        """Returns e.g. "rank 1/4 (pid 123)"."""
        process = self.process(rank)
        return f"{self.label(rank)} ({process})" if process else self.label(rank)

    def states(self, ranks: Iterable[int]) -> str:
        """Returns e.g. "rank 1 (running), rank 2 (not joined)"."""
        ranks = list(ranks)
        named = ", ".join([f"rank {rank} ({self._state(rank)})" for rank in ranks[:MAX_NAMED_RANKS]])
        more = len(ranks) - MAX_NAMED_RANKS
        return f"{named} and {more} more" if more > 0 else named

    def _state(self, rank: int) -> str:
        if rank not in self.members:
            last = self.world.running
            member = None if last is None else last.member(rank)
            if rank in self.late:
                return "stopped waiting to join"
            if member is not None and member.is_present:
                return "runs, and has not called gs.rebuild()"
            pid = self.world.pids.get(rank)
            if pid is not None and self._worlds.state_of(pid) == "T":
                return f"not joined; its process {pid} is stopped: SIGSTOP?"
            return "not joined"
        return "left" if rank in self.left else self.phase

    def while_joining(self) -> str:
        """Returns what a failure's text has after "died"."""
        return "" if self.number else " while joining"

    # -- Its end -------------------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        """Fails the generation, and tells all members; the first failure stays."""
        if self.failure is not None:
            return
        self.failure, self.failed_at = failure, self._worlds.now
        self.tell_departures()
        for request in [*self.joins.values(), *self._take_waiting()]:
            request.close()  # FAILED answers them all
        fields = failure.fields()
        for _, member in self.present():
            self._worlds.send(member.connection, Kind.FAILED, 0, *fields)

    def replace(self) -> None:
        """Ends it without a failure: a rebuilt generation takes its place, and its connections end soon."""
        for request in self._take_waiting():
            request.refuse(REPLACED)
        for member in self.members.values():
            member.is_present = False

    def _take_waiting(self) -> list[Request]:
        """Returns the requests of its members that wait, and forgets them."""
        waiting = [request for exchange in self.exchanges.values() for request in exchange.waiting.values()]
        waiting += [request for reads in self.reads.values() for request in reads]
        self.reads.clear()
        self.exchanges.clear()
        return waiting

    def leave(self, rank: int) -> None:
        """Records that a member has left the world: requests that need it fail, and its own are over."""
        self.members[rank].is_present, self.members[rank].has_left = False, True
        self.left[rank] = None
        for key, exchange in list(self.exchanges.items()):
            if rank in exchange.waiting:
                exchange.waiting.pop(rank).close()
            if rank in exchange.members and rank not in exchange.values:
                self._fail_exchange(key, rank)
        for read, requests in list(self.reads.items()):
            for request, setter in list(requests.items()):
                if request.rank == rank:
                    request.close()
                    self._drop_read(read, request)
                else:
                    self._fail_read(read, request, setter)
        for group in [group for group in self.departed if rank in group[1]]:
            self._forget_departed(*group)

    def _left_failure(self, rank: int, need: str) -> Failure:
        self.tell_departures()
        return Failure(rank, "left", f"{self.label(rank)} left (an orderly close), but {need}")

    # -- Keys ----------------------------------------------------------------------------------------------------

    def set(self, request: Request, key: str, value: bytes) -> None:
        """Stores a value, and answers those that wait for it."""
        old = self.values.get(key)
        growth = len(value) - len(old) if old is not None else len(key) + len(value)
        if not self._has_room(request, key, growth):
            return
        self.values[key] = value
        request.reply()
        if key in self.reads:
            self.tell_departures()
        for read in self.reads.pop(key, {}):
            read.reply(value)

    def _has_room(self, request: Request, name: str, growth: int) -> bool:
        """Takes so much more room for values; else refuses the request."""
        if self.stored_bytes + growth > MAX_STORED_BYTES:
            request.refuse(
                f"no room for {name!r} ({growth} bytes more): the rendezvous stores at most {MAX_STORED_BYTES} bytes "
                "in one generation; delete keys that are no longer needed"
            )
            return False
        self.stored_bytes += growth
        return True

    def get(self, request: Request, key: str, setter: int | None) -> bool:
        """Answers with a value, or returns True: the request waits until the key is set."""
        if key in self.values:
            self.tell_departures()
            request.reply(self.values[key])
            return False
        if setter is not None and not 0 <= setter < self.size:
            request.invalid(f"from_rank needs a rank from 0 to {self.size - 1}, got {setter}")
            return False
        self.reads.setdefault(key, {})[request] = setter
        request.when_late = lambda late: self._end_read(key, late, setter)
        return not self._fail_read(key, request, setter)

    def _end_read(self, key: str, request: Request, setter: int | None) -> None:
        self._drop_read(key, request)
        missing = () if setter is None else (setter,)
        request.time_out(missing, self.states(missing))

    def _drop_read(self, key: str, request: Request) -> None:
        reads = self.reads.get(key, {})
        reads.pop(request, None)
        if not reads:
            self.reads.pop(key, None)

    def _fail_read(self, key: str, request: Request, setter: int | None) -> bool:
        """Fails a read of a key that no remaining rank will set."""
        one_remains = self.size > 1 and len(self.left) >= self.size - 1
        if setter is not None and setter in self.left:
            gone = setter
        elif one_remains:
            gone = next(reversed(self.left))
        else:
            return False
        need = f"key {key!r} is not set, and " + (
            "no other rank remains to set it" if one_remains else "only this rank sets it"
        )
        self._drop_read(key, request)
        request.fail(self._left_failure(gone, need))
        return True

    def delete(self, prefix: str) -> None:
        """Removes a key, and all keys that begin with "prefix/"."""
        for key in [key for key in self.values if is_under(key, prefix)]:
            self.stored_bytes -= len(key) + len(self.values.pop(key))

    # -- Exchanges -----------------------------------------------------------------------------------------------

    def arrive(self, request: Request, name: str, ranks: list[int] | None, value: bytes, root: int | None) -> bool:
        """Records an arrival; the last one releases all. Returns whether the request waits."""
        members, rank = self.members_of(ranks), request.rank
        if rank not in members or (root is not None and root not in members):
            request.invalid(f"{name!r} needs existing ranks that include {self.label(rank)}, got {tuple(ranks or ())}")
            return False
        if root is None and len(value) * len(members) > MAX_EXCHANGED_BYTES:
            request.invalid(
                f"exchange {name!r} with {len(members)} ranks needs values of at most "
                f"{MAX_EXCHANGED_BYTES // len(members)} bytes each, got {len(value)} bytes"
            )
            return False
        key = name, members
        exchange = self.exchanges.get(key) or Exchange(members, root)
        if exchange.root != root:
            request.invalid(f"the ranks name different roots of {name!r}")
            return False
        if not self._has_room(request, name, len(value) - len(exchange.values.get(rank, b""))):
            return False
        self.exchanges[key] = exchange
        if rank in exchange.waiting:  # perhaps Ctrl-C has ended that wait
            exchange.waiting[rank].invalid(f"{self.label(rank)} waits in {name!r} again: that call has taken its place")
        exchange.values[rank] = value
        exchange.late.discard(rank)
        exchange.never = None
        request.when_late = lambda late: self._end_arrival(key, exchange, late)
        if root in (None, rank):
            exchange.waiting[rank] = request
        if len(exchange.values) == len(members):
            self._release(key, exchange)
        elif gone := [each for each in self.left if each in members and each not in exchange.values]:
            self._fail_exchange(key, min(gone))
        if root not in (None, rank):
            request.reply()
        return request.is_open

    def _release(self, key: tuple[str, Members], exchange: Exchange) -> None:
        """Answers with all values, in rank order; with none if all are empty, as at a barrier."""
        self.tell_departures()
        self._forget_exchange(key)
        values = [exchange.values[rank] for rank in exchange.members]
        parts = _parts_of(values) if any(values) else []
        for request in exchange.waiting.values():
            request.reply_in_parts(parts) if parts else request.reply()

    def _fail_exchange(self, key: tuple[str, Members], gone: int) -> None:
        failure = self._left_failure(gone, f"{key[0]!r} needs this rank")
        for request in self._forget_exchange(key).waiting.values():
            request.fail(failure)

    def _forget_exchange(self, key: tuple[str, Members]) -> Exchange:
        exchange = self.exchanges.pop(key)
        self.stored_bytes -= sum(map(len, exchange.values.values()))
        return exchange

    def _end_arrival(self, key: tuple[str, Members], exchange: Exchange, request: Request) -> None:
        """A member that has reached its deadline does not count as arrived any more."""
        missing = exchange.missing()
        del exchange.waiting[request.rank]
        self.stored_bytes -= len(exchange.values.pop(request.rank))
        exchange.late.add(request.rank)
        if not exchange.values:
            self.exchanges.pop(key, None)
        request.time_out(missing, self.states(missing))

    # -- Groups --------------------------------------------------------------------------------------------------

    def depart(self, rank: int, group: str, ranks: list[int] | None, begun: int) -> None:
        """Records that a member has left a group; `tell_departures` tells the others."""
        members = self.members_of(ranks)
        if rank in members:
            self.departed.setdefault((group, members), set()).add(rank)
            self.untold.setdefault((group, members), {})[rank] = begun
            self._forget_departed(group, members)

    def tell_departures(self) -> None:
        """Tells those that have not left a group who has: before they hear of anything that a rank did afterwards.

        Else it is done once all that has arrived is handled. Most leave together, and then nobody needs to be told.
        """
        untold, self.untold = self.untold, {}
        for (group, members), begun_by in untold.items():
            departed = self.departed[group, members]
            for other, member in self.present():
                if other in members and other not in departed:
                    for rank, begun in begun_by.items():
                        self._worlds.send(member.connection, Kind.LEFT, 0, group, rank, begun)

    def _forget_departed(self, group: str, members: Members) -> None:
        """Removes the keys of a group that all members have left: a run may make many groups."""
        departed = self.departed[group, members]
        if all(rank in departed or rank in self.left for rank in members):
            del self.departed[group, members]
            self.untold.pop((group, members), None)
            self.delete(group)


def _parts_of(values: list[bytes]) -> list[list[bytes]]:
    """Splits values into lists that each fit into one frame."""
    parts: list[list[bytes]] = [[]]
    room = MAX_VALUE_BYTES
    for value in values:
        room -= len(value) + 5  # the header that msgpack adds
        if room < 0 and parts[-1]:
            parts.append([])
            room = MAX_VALUE_BYTES - len(value) - 5
        parts[-1].append(value)
    return parts


class World:
    """One world: its generations, and what its launcher has told of its processes."""

    def __init__(self, size: int, min_ranks: int = 1, *, respawns: bool = False) -> None:
        self.size = size
        self.min_ranks = min_ranks  # how many ranks a rebuilt generation needs at least
        self.respawns = respawns  # whether the others wait for a rank that dies before all have joined
        self.generations: list[Generation] = []  # the current one first
        self.formed = 0
        self.pids: dict[int, int] = {}  # rank -> process, as its launcher has reported
        self.ended: dict[int, str] = {}  # rank -> how its process ended
        self.notice_at: float | None = None  # when the ranks that have not joined are told of

    @property
    def running(self) -> Generation | None:
        """The generation that has formed last, while it has members."""
        return self.generations[0] if self.generations and self.generations[0].number else None

    @property
    def forming(self) -> Generation | None:
        """The first generation that has not formed."""
        return next((each for each in self.generations if not each.number), None)


class Worlds:
    """Handles what arrives; tells the server what to do.

    Args:
        send: send(connection, kind, request, *fields) sends a message.
        close: close(connection) closes a connection once its last bytes are written.
        notice: notice(text) writes a line to the log.
        state_of: returns the state of a process of this machine, as the letter of /proc/<pid>/stat; "" if unknown.
        machine: the server's `machine_identity`; "" if unknown.
        size: the size of the world "", that of the launched ranks; in other worlds the first rank says it.
        host: the rank of the world "" that hosts the server; when its join reaches its deadline, all joins end, but for
            a rebuild: the server goes on.
        min_ranks: how many ranks a rebuilt generation of the world "" needs at least.
        respawns: whether a rank of the world "" that dies before all have joined is started again: the others wait,
            until `process` says how it has ended.
        on_lost: on_lost(number, why) is called with a member of the world "" that nobody waits for any more.
        on_rebuilt: on_rebuilt(generation, numbers, seconds) is called when the world "" has formed: from these members,
            so long after the failure of the one before; 0.0 if all ranks have joined, as at their start.
    """

    def __init__(
        self,
        send: Callable[..., None],
        close: Callable[[int], None],
        notice: Callable[[str], None],
        state_of: Callable[[int], str],
        *,
        size: int,
        machine: str = "",
        host: int | None = None,
        min_ranks: int = 1,
        respawns: bool = False,
        on_lost: Callable[[int, str], object] = ignore,
        on_rebuilt: Callable[[int, tuple[int, ...], float], object] = ignore,
    ) -> None:
        self.send = send
        self._close = close
        self._notice = notice
        self.state_of = state_of
        self._machine = machine
        self._host = host
        self._launched = World(size, min_ranks, respawns=respawns)
        self._worlds = {"": self._launched}
        self._on_lost, self._on_rebuilt = on_lost, on_rebuilt
        self.now = 0.0  # of the current event, in monotonic seconds
        self.has_joined = False  # whether any rank ever has
        self._of: dict[int, tuple[World, Generation, int]] = {}  # connection -> where it has joined, and as which rank
        self._late: list[tuple[float, int, Request]] = []  # a heap of requests, by deadline; some are answered already
        self._crowded_above = _CROWD
        self._count = 0
        self._look_at = 0.0  # when silent members are looked for
        self._waits: dict[int, int] = {}  # connection -> an upper bound of its requests that wait

    # -- Events --------------------------------------------------------------------------------------------------

    def received(self, now: float, connection: int, message: Message) -> None:
        """Handles a message of an authenticated connection.

        Raises:
            FrameError: the message is malformed; the server ends this connection.
        """
        self.now = now
        handler = _HANDLERS[message.kind]
        check_fields(handler, 3, message.kind, message.fields)
        if message.kind is Kind.JOIN:
            request = Request(self.send, connection, message.request, message.fields[1])
            handler(self, None, request, *message.fields)
        else:
            place = self._of.get(connection)
            if place is None:
                self._close(connection)  # it was refused, or has timed out, while this was on its way
                return
            _, generation, rank = place
            generation.members[rank].seen_at = now
            request = Request(self.send, connection, message.request, rank)
            if generation.members[rank].is_present:
                handler(self, generation, request, *message.fields)
            elif message.kind is Kind.LEAVE:  # it was given up, or a rebuild has taken its place
                self._close(connection)
            elif generation.failure is not None:
                request.fail(generation.failure)
            else:
                request.refuse(REPLACED)
        if message.kind in (Kind.JOIN, Kind.LEAVE, Kind.FAIL):  # no other one changes who is there
            self._advance()

    def lost(self, now: float, connection: int, cause: str, *, is_silent: bool = False) -> None:
        """Handles the end of a connection; `is_silent`: the peer's machine acknowledges nothing any more."""
        self.now = now
        place = self._of.pop(connection, None)
        self._waits.pop(connection, None)
        if place is not None and self._drop(*place):
            self._advance()
        elif place is not None:
            _, generation, rank = place
            if not generation.members[rank].is_present:  # it was given up, or a rebuild has taken its place
                return
            generation.members[rank].is_present = False
            who, when = generation.name(rank), generation.while_joining()
            text = f"{who} died{when}: its control connection ended unexpectedly ({cause})"
            if is_silent:
                why = "its machine acknowledges nothing; the machine or the network failed"
                text = f"{who} cannot be reached{when}: {why}"
            generation.fail(Failure(rank, generation.phase, text, SILENT if is_silent else DIED))
            self._advance()

    def process(self, now: float, rank: int, pid: int | None, how: str = "") -> None:
        """Handles what the launcher says: a rank's process has started, or how it has ended (then `pid` is None)."""
        self.now = now
        world = self._launched
        if pid is None:
            world.ended[rank] = how
            world.pids.pop(rank, None)
        else:
            world.pids[rank] = pid
            world.ended.pop(rank, None)
        self._advance()

    def tick(self, now: float) -> None:
        """Does what is due."""
        self.now = now
        while self._late and self._late[0][0] <= now:
            _, _, request = heapq.heappop(self._late)
            if request.is_open:
                request.when_late(request)
        for world in self._worlds.values():
            self._tell_missing(world)
            for generation in world.generations:
                generation.tell_departures()
                if generation.number and generation.failure is None:
                    failure = generation.stuck.advance(now, self._notice, self.state_of)
                    if failure is not None:
                        self._fail(world, generation, failure)
        if self._look_at <= now:
            self._look_at = now + _LOOK_SECONDS
            self._look_for_silent()
        self._advance()

    def next_deadline(self) -> float | None:
        """Returns when `tick` is due, in monotonic seconds; None: nobody waits."""
        while self._late and not self._late[0][2].is_open:
            heapq.heappop(self._late)
        due = [self._late[0][0]] if self._late else []
        if self._of:
            due.append(self._look_at)
        due += [world.notice_at for world in self._worlds.values() if world.notice_at is not None]
        for world in self._worlds.values():
            due += [each.stuck.due_at for each in world.generations if each.stuck.due_at is not None]
            due += [0.0 for each in world.generations if each.untold]
        return min(due, default=None)

    def _wait(self, request: Request, timeout_ms: int) -> None:
        """Has a request answered at its deadline."""
        self._count += 1
        seconds = min(max(timeout_ms, 0) / 1000.0, _LATEST_SECONDS)
        heapq.heappush(self._late, (self.now + seconds, self._count, request))
        if len(self._late) > self._crowded_above:  # most have been answered long before their deadline
            self._late = [each for each in self._late if each[2].is_open]
            heapq.heapify(self._late)
            self._crowded_above = max(_CROWD, 2 * len(self._late))

    # -- Handlers: the fields of each message are the parameters after the request ------------------------------------

    def _on_join(
        self,
        _: Generation | None,
        request: Request,
        name: str,
        rank: int,
        size: int,
        last: int | None,
        min_ranks: int,
        machine: str,
        host: str,
        pid: int,
        timeout_ms: int,
    ) -> None:
        if not 0 <= pid < 2**31:
            raise FrameError(f"malformed JOIN: there is no process {pid}")
        world = self._worlds.get(name)
        if world is None:
            world = World(size)
        refusal = _join_refusal(world.size, rank, size, min_ranks)
        if request.connection in self._of:
            refusal = "this connection has joined already"
        running, generation = world.running, None
        if last is not None and not refusal:  # it wants to rebuild the world of its last generation
            refusal = _rebuild_refusal(running, rank, size, last)
        for each in world.generations:
            member = each.member(rank)
            if member is None and not each.number:
                generation = each
                break
            if member is not None and member.is_present and not (each is running and last is not None):
                alive = f"rank {rank}/{size} has joined already and is alive ({each.phase})"
                refusal = refusal or f"{alive}; each rank joins once"
        if refusal:
            request.refuse(refusal)
            self._close(request.connection)
            return
        if generation is None:
            generation = Generation(self, world)
        if generation.failure is not None:
            request.fail(generation.failure)
            self._close(request.connection)
            return
        self._worlds[name] = world
        self.has_joined = True
        if generation not in world.generations:
            world.generations.append(generation)
        where = "" if machine and machine == self._machine else host or "another machine"
        asks_for = None if last is None else min_ranks
        generation.members[rank] = Member(rank, request.connection, pid, where, self.now, self.now, asks_for)
        generation.late.discard(rank)
        generation.never = None
        generation.joins[rank] = request
        self._of[request.connection] = world, generation, rank
        request.accept()
        request.when_late = lambda late: self._end_join(generation, late)
        self._wait(request, timeout_ms)

    def _end_join(self, generation: Generation, request: Request) -> None:
        """A rank has waited for the others until its deadline."""
        missing, states = self._awaited(generation)
        if _is_new(generation, request.rank):
            # Nobody is missing but this rank itself, so that its client asks again.
            missing, states = (request.rank,), "the others run, and take it in when they call gs.rebuild()"
        late = [request]
        # The server is about to end: the others get the names of the missing ranks first.
        world = generation.world
        if request.rank == self._host and world is self._launched and world.running is None:
            late += [join for rank, join in generation.joins.items() if rank != request.rank]
        for join in late:
            del generation.joins[join.rank], generation.members[join.rank]
            self._of.pop(join.connection, None)
            generation.late.add(join.rank)
            join.time_out(missing, states)
            self._close(join.connection)

    def _awaited(self, generation: Generation) -> tuple[tuple[int, ...], str]:
        """Returns the ranks, as at launch, for which those wait that have joined a generation, and their states."""
        running = generation.world.running
        if running is None or not generation.is_asked_for:
            missing = generation.missing()
            return missing, generation.states(missing)
        if missing := tuple(sorted({*_left_of(running, generation)} - generation.late)):
            return missing, generation.states(missing)
        needed, has = _needed(generation.world, running, generation), len(generation.members) + len(generation.late)
        absent = generation.missing()
        return absent, f"{generation.states(absent)}; {has} came, and {needed} are needed at least"

    def _on_set(self, generation: Generation, request: Request, key: str, value: bytes) -> None:
        if self._may_ask(generation, request, key, value):
            generation.set(request, key, value)

    def _on_get(self, generation: Generation, request: Request, key: str, setter: int | None, timeout_ms: int) -> None:
        if self._may_ask(generation, request, key) and generation.get(request, key, setter):
            self._wait(request, timeout_ms)

    def _on_delete(self, generation: Generation, request: Request, prefix: str) -> None:
        if self._may_ask(generation, request, prefix):
            generation.delete(prefix)
            request.reply()

    def _on_exchange(
        self,
        generation: Generation,
        request: Request,
        name: str,
        ranks: list[int] | None,
        value: bytes,
        root: int | None,
        timeout_ms: int,
    ) -> None:
        if self._may_ask(generation, request, name, value) and generation.arrive(request, name, ranks, value, root):
            self._wait(request, timeout_ms)

    def _may_ask(self, generation: Generation, request: Request, name: str, value: bytes = b"") -> bool:
        """Answers a request that the state of the generation, or its own size, does not allow."""
        if generation.failure is not None:
            request.fail(generation.failure)
        elif not generation.number:
            request.refuse("this connection has not joined a complete generation yet")
        elif len(name.encode()) > MAX_NAME_BYTES or len(value) > MAX_VALUE_BYTES:
            request.invalid(f"a name has at most {MAX_NAME_BYTES} bytes, and a value {MAX_VALUE_BYTES}")
        elif self._open_requests(request) > MAX_WAITS_PER_CONNECTION:
            request.refuse(f"this rank already has {MAX_WAITS_PER_CONNECTION} requests that wait, which is the limit")
        else:
            return True
        return False

    def _open_requests(self, request: Request) -> int:
        """Returns how many requests of a connection wait, with this one."""
        count = self._waits[request.connection] = self._waits.get(request.connection, 0) + 1
        if count > MAX_WAITS_PER_CONNECTION:  # perhaps of old ones: count anew
            waiting = [each for _, _, each in self._late if each.is_open and each.connection == request.connection]
            count = self._waits[request.connection] = len(waiting) + 1
        return count

    def _on_leave(
        self, generation: Generation, request: Request, group: str, ranks: list[int] | None, begun: int
    ) -> None:
        if group:
            if generation.number and generation.failure is None:
                generation.depart(request.rank, group, ranks, begun)
            return
        self._of.pop(request.connection, None)
        if generation.number:
            generation.leave(request.rank)
        else:
            generation.forget_join(request.rank)
        self._close(request.connection)

    def _on_fail(self, generation: Generation, request: Request, reason: str, culprit: int | None) -> None:
        rank = request.rank
        if self._drop(*self._of[request.connection]):
            self._of.pop(request.connection)
            self._close(request.connection)
            return
        text = f"{generation.name(rank)} failed{generation.while_joining()}: {reason}"
        blamed = rank if culprit is None or culprit not in generation.members else culprit
        generation.fail(Failure(blamed, generation.phase, text))

    def _on_beat(self, generation: Generation, request: Request, begun: dict[str, int]) -> None:
        generation.members[request.rank].begun = check_counts(begun)

    def _on_waiting(
        self,
        generation: Generation,
        request: Request,
        group: str,
        ranks: list[int] | None,
        number: int,
        what: str,
        waited_ms: int,
        missing: list[int] | None,
        is_over: bool,
    ) -> None:
        if generation.number and generation.failure is None:
            rank, seconds = request.rank, waited_ms / 1000.0
            awaited = [each for each in sorted(set(missing or ())) if each in generation.members and each != rank]
            members = generation.members_of(ranks)
            waiting = Waiting(group, members, number, what, seconds, (rank,), tuple(awaited))
            for member in generation.stuck.report(self.now, waiting, is_over=is_over):
                self.send(member.connection, Kind.ASK, 0)

    def _on_status(self, generation: Generation, request: Request, status: dict[str, Any], text: str) -> None:
        generation.stuck.answer(self.now, request.rank, status, text)

    # -- Generations ---------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Drops generations that have ended, and forms the next one of a world once its ranks have joined."""
        for name, world in list(self._worlds.items()):
            world.generations = [
                each for each in world.generations if any(member.is_present for member in each.members.values())
            ]
            if not world.generations and name:
                del self._worlds[name]
                continue
            running, forming = world.running, world.forming
            if forming is None or forming.failure is not None:
                world.notice_at = None
            elif running is not None:
                self._rebuild(world, running, forming)
            elif len(forming.members) == world.size:
                self._form(world, forming, None, 0.0)
            else:
                world.notice_at = world.notice_at or self.now + NOTICE_SECONDS
                for rank, how in world.ended.items():
                    if rank not in forming.members:
                        text = f"{forming.label(rank)} {how} without joining; the other ranks waited for it"
                        forming.fail(Failure(rank, "joining", text))
                        break

    def _form(self, world: World, forming: Generation, numbers: list[int] | None, seconds: float) -> None:
        """Forms a generation, and tells its ranks; `numbers` are their ranks at launch, None if it has all of them."""
        forming.number = world.formed = world.formed + 1
        world.notice_at = None
        joins, forming.joins = forming.joins, {}
        for join in joins.values():
            join.reply(forming.number, numbers)
        if world is self._launched:
            self._on_rebuilt(forming.number, tuple(numbers or range(world.size)), seconds)

    def _rebuild(self, world: World, running: Generation, forming: Generation) -> None:
        """Forms a rebuilt generation, once those have come that it needs; ends the one before."""
        if not forming.is_asked_for:  # those that wait are taken in when the others rebuild
            world.notice_at = None
            return
        is_awaited = next(_left_of(running, forming), None) is not None
        if is_awaited or len(forming.members) < _needed(world, running, forming):
            world.notice_at = world.notice_at or self.now + NOTICE_SECONDS
            return
        running.replace()
        world.generations.remove(running)
        forming.renumber()
        numbers = [member.number for member in forming.members.values()]
        for rank, member in forming.members.items():
            self._of[member.connection] = world, forming, rank
        since = running.failed_at
        if since is None:
            since = min(each.came_at for each in forming.members.values() if each.min_ranks is not None)
        self._form(world, forming, numbers, self.now - since)

    def _drop(self, world: World, generation: Generation, rank: int, refusal: str = "") -> bool:
        """Forgets a rank that waited for a rebuild, or was new, and has ended; returns whether it was one."""
        running = world.running
        if generation.number or (running is None and not world.respawns) or generation.failure is not None:
            return False
        before = None if running is None else running.member(rank)
        if before is not None and before.has_left and not generation.is_asked_for:  # all leave and join again
            return False
        if refusal:
            generation.joins[rank].refuse(refusal)
        generation.forget_join(rank)
        return True

    def _fail(self, world: World, generation: Generation, failure: Failure) -> None:
        """Fails a generation, and gives up the members that do not answer, unless they are more than half."""
        generation.fail(failure)
        lost = failure.missing if failure.kind == STUCK else (failure.rank,)
        if 2 * len(lost) <= generation.size:
            for rank in lost:
                self._give_up(world, generation.members[rank], failure.text)

    def _give_up(self, world: World, member: Member, why: str) -> None:
        """Lets nobody wait any more for a member, unless it has left."""
        if member.is_present:
            member.is_present = False
            self._close(member.connection)  # also a sign for a launcher on another machine
            if world is self._launched:
                self._on_lost(member.number, why)

    def _tell_missing(self, world: World) -> None:
        """Logs the ranks that have not joined, every few seconds."""
        if world.notice_at is not None and world.notice_at <= self.now:
            world.notice_at = self.now + NOTICE_SECONDS
            forming = world.forming
            assert forming is not None
            where, count = self._awaited(forming)[1], len(forming.members)
            who = f"{count} of {world.size} ranks have joined"
            if world.running is not None:
                who = f"{count} rank{' waits' if count == 1 else 's wait'} for gs.rebuild()"
            self._notice(f"{who}; waiting for {where}")

    def _look_for_silent(self) -> None:
        """Gives up the members that have been silent for long, and that /proc calls stopped or a zombie.

        Their generation fails; one that waits for a rebuild, or that is waited for after a failure, is only left out.
        """
        for connection, (world, generation, rank) in list(self._of.items()):
            member, forming = generation.members[rank], world.forming
            silent_seconds = self.now - member.seen_at
            if silent_seconds < SILENT_SECONDS or member.host or not member.pid:
                continue
            if not member.is_present:
                continue
            is_awaited = generation is world.running and forming is not None and forming.is_asked_for
            if generation.failure is not None and not is_awaited:
                continue
            state = self.state_of(member.pid)
            if state not in ("T", "Z"):
                continue
            why = f"{generation.while_joining()}: {{}}; no sign of life for {silent_seconds:.1f} s"
            text = _lost_text(generation.name(rank), state, why)
            if self._drop(world, generation, rank, text):
                del self._of[connection]
                self._close(connection)
                before = None if world.running is None else world.running.member(rank)
                self._give_up(world, member if before is None or member.min_ranks is None else before, text)
            elif generation.failure is not None:
                self._give_up(world, member, text)
            else:
                if len(generation.present()) == 1:
                    self._notice(text)  # no other rank can report it
                self._fail(world, generation, Failure(rank, generation.phase, text, SILENT))


def _left_of(running: Generation, forming: Generation) -> Iterator[int]:
    """Yields the numbers of those that are left of a generation, and have not asked for the next one."""
    for member in running.members.values():
        if member.is_present and member.number not in forming.members:
            yield member.number


def _is_new(forming: Generation, rank: int) -> bool:
    """Returns whether a rank waits to join others that run, in the place of one that has died."""
    running = forming.world.running
    if running is None or forming.members[rank].min_ranks is not None:
        return False
    before = running.member(rank)
    return before is None or not before.has_left  # else all leave and join again


def _needed(world: World, running: Generation, forming: Generation) -> int:
    """Returns how many ranks a rebuilt generation needs.

    On several machines half of the last one, unless a rank asks for another number: where a network is cut, the smaller
    part does not go on.
    """
    asked = [member.min_ranks for member in forming.members.values() if member.min_ranks]
    are_apart = len({member.host for member in running.members.values()}) > 1
    return max(world.min_ranks, *asked, (running.size + 1) // 2 if are_apart and not asked else 1)


def _rebuild_refusal(running: Generation | None, rank: int, size: int, last: int) -> str:
    """Returns the reason to refuse a rank that wants to rebuild its world; "" if there is none."""
    member = None if running is None else running.member(rank)
    if member is None or running is None or running.number != last or not member.is_present:
        return (
            f"rank {rank}/{size} was taken for dead, because it was stopped, did not come to a collective or has lost "
            "its connection, and the others go on without it: end this process"
        )
    return ""


def _lost_text(who: str, state: str, more: str) -> str:
    """Returns the sentence about a rank whose process does not run; `more` has a place for the explanation."""
    what, why = ("is gone", "its process has ended, but another process holds its connection open")
    if state == "T":
        what, why = ("was stopped (SIGSTOP?)", "its process needs a SIGCONT to continue")
    return f"{who} {what}{more.format(why)}"


def _join_refusal(expected_size: int, rank: int, size: int, min_ranks: int) -> str:
    """Returns the reason to refuse a join, with the expected and the given value; "" if it is accepted."""
    if size != expected_size:
        return f"the server expects world_size {expected_size}, rank {rank} joined with world_size {size}"
    if not 1 <= size <= MAX_RANKS or not 0 <= rank < expected_size:
        return f"the server expects ranks 0 to {expected_size - 1}, got rank {rank}"
    if not 0 <= min_ranks <= size:
        return f"min_ranks needs to be 1 to {size}, got {min_ranks}"
    return ""


_HANDLERS: dict[Kind, Callable[..., None]] = {
    Kind.JOIN: Worlds._on_join,
    Kind.SET: Worlds._on_set,
    Kind.GET: Worlds._on_get,
    Kind.DELETE: Worlds._on_delete,
    Kind.EXCHANGE: Worlds._on_exchange,
    Kind.LEAVE: Worlds._on_leave,
    Kind.FAIL: Worlds._on_fail,
    Kind.BEAT: Worlds._on_beat,
    Kind.WAITING: Worlds._on_waiting,
    Kind.STATUS: Worlds._on_status,
}
