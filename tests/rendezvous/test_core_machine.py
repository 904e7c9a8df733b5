"""The server's core beside a reference model, under every order of events. Hypothesis shortens what differs.

This file names a private module, because the core is the protocol: it has no sockets and no clock, so that hypothesis
can drive it through orders of events that no network brings about in an hour.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgpack
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gradsync.rendezvous.wire import Kind, Message, Status
from gradsync.rendezvous.worlds import Worlds
from rendezvous.reference_model import Model

SIZES = {"": 3, "b": 4}  # by world
SEATS = st.sampled_from([(world, rank) for world, size in SIZES.items() for rank in range(size)])
RANKS = st.integers(0, 2)
NAMES = st.sampled_from(["a", "b"])
KEYS = st.sampled_from(["a", "a/x", "ab"])
VALUES = st.sampled_from([b"", b"7", b"text"])
MEMBERS = st.sampled_from([None, None, None, [0, 1], [1, 2], [0, 1, 2], [1, 0], [0, 3]])
ROOTS = st.sampled_from([None, None, None, 0, 1])
NUMBERS = st.integers(0, 2)
DEADLINES = st.sampled_from([0, 2000, 20_000])  # milliseconds
MISSING = st.sampled_from([None, None, [], [0], [2], [0, 1], [1, 2]])
STEP_SECONDS, LONGEST_SECONDS = 0.5, 21
MIN_RANKS = st.sampled_from([0, 0, 0, 1, 2, 3])
QUIET_STEPS = 8  # between two that end something: else most requests would meet a generation that has failed
ANSWERED = (Kind.JOIN, Kind.SET, Kind.GET, Kind.DELETE, Kind.EXCHANGE)

quietly = precondition(lambda self: self.quiet_steps >= QUIET_STEPS)
Seat = tuple[str, int]
Sent = dict[int, list[Any]]  # by connection


class CoreMachine(RuleBasedStateMachine):
    """Does the same with both, and compares what they send after each event."""

    core_class = Worlds

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.states: dict[int, str] = {}  # of processes
        self.seats: dict[Seat, int] = {}  # the connections of those that have joined
        self.rebuilding: dict[Seat, int] = {}  # their second ones, by which they wait for a rebuild
        self.replaced: set[int] = set()  # their first ones, once the world was rebuilt
        self.processes: dict[int, int] = {}  # of connections: a process is called by its first one
        self.closing: list[int] = []  # what the core has closed
        self.unanswered: set[tuple[int, int]] = set()
        self.connections = self.requests = self.quiet_steps = 0
        self.is_settled = True  # nothing has gone wrong yet
        self.out: tuple[Sent, Sent] = defaultdict(list), defaultdict(list)

    @initialize(
        are_formed=st.booleans(),
        min_ranks=st.sampled_from([1, 1, 2, 3]),
        respawns=st.booleans(),
        machines=st.sampled_from(["mmmm", "mmoo"]),
    )
    def begin(self, are_formed: bool, min_ranks: int, respawns: bool, machines: str) -> None:
        common: Any = {"machine": "m", "size": SIZES[""], "host": 0, "min_ranks": min_ranks, "respawns": respawns}
        tell: list[Any] = [
            {
                "on_lost": lambda number, *_, side=side: self.out[side][0].append(f"{number} is lost"),
                "on_rebuilt": lambda *what, side=side: self.out[side][0].append(f"rebuilt: {what}"),
            }
            for side in (0, 1)
        ]
        self.core = self.core_class(self.hear, self.closing.append, str, self.state_of, **common, **tell[0])
        self.model = Model(self.note, lambda _: None, self.state_of, **common, **tell[1])
        for world in SIZES if are_formed else ():
            self.join_all(world, machines)

    def teardown(self) -> None:
        """Nobody waits beyond its deadline."""
        if self.is_settled:
            self.pass_time(LONGEST_SECONDS, None, 0)
            assert not self.unanswered

    # Joining and ending.

    @rule(
        seat=SEATS,
        milliseconds=DEADLINES,
        machine=st.sampled_from("mmo"),
        wrong=st.sampled_from(["", "", "", "", "size", "rank"]),
    )
    def join(self, seat: Seat, milliseconds: int, machine: str, wrong: str) -> None:
        self.connections += 1
        size = SIZES[seat[0]]
        seat = (seat[0], size) if wrong == "rank" else seat
        self.join_by(self.connections, seat, milliseconds, machine, size + (wrong == "size"))

    @quietly
    @rule(seat=SEATS, other=SEATS)
    def join_again(self, seat: Seat, other: Seat) -> None:
        """By the same connection, which is refused."""
        if seat in self.seats:
            self.join_by(self.seats[seat], other, 20_000, "m", SIZES[other[0]])
            self.quiet_steps = 0

    @rule(world=st.sampled_from(list(SIZES)), machines=st.sampled_from(["mmmm", "mmmm", "mooo", "mmoo"]))
    def join_all(self, world: str, machines: str) -> None:
        for rank in range(SIZES[world]):
            if (world, rank) not in self.seats:
                self.join((world, rank), 20_000, machines[rank], "")

    # Rebuilding.

    @rule(
        seat=SEATS,
        min_ranks=MIN_RANKS,
        milliseconds=DEADLINES,
        machine=st.sampled_from("mmo"),
        wrong=st.sampled_from(["", "", "", "", "last", "size", "rank", "min_ranks"]),
    )
    def rebuild(self, seat: Seat, min_ranks: int, milliseconds: int, machine: str, wrong: str) -> None:
        """By a second connection of a process that has joined; or of one that was never there."""
        self.connections += 1
        size, first = SIZES[seat[0]], self.seats.get(seat, self.connections)
        self.processes[self.connections] = self.processes.get(first, first)
        found = self.model.find(first)
        last = (found[0].number if found else 1) + (wrong == "last")
        min_ranks = size + 1 if wrong == "min_ranks" else min_ranks
        if seat in self.seats and not wrong:
            self.rebuilding.setdefault(seat, self.connections)
        seat = (seat[0], size) if wrong == "rank" else seat
        size += wrong == "size"
        self.join_by(self.connections, seat, milliseconds, machine, size, last, min_ranks)

    @rule(world=st.sampled_from(list(SIZES)), but=st.none() | RANKS, min_ranks=MIN_RANKS, newcomer=st.none() | RANKS)
    def rebuild_all(self, world: str, but: int | None, min_ranks: int, newcomer: int | None) -> None:
        """All who are left, perhaps but one; one that is not may have been started again."""
        if newcomer is not None and (world, newcomer) not in self.seats:
            self.join((world, newcomer), 20_000, "m", "")
        for seat in [seat for seat in self.seats if seat[0] == world and seat[1] != but]:
            if seat not in self.rebuilding:
                self.rebuild(seat, min_ranks, 20_000, "m", "")

    @quietly
    @rule(seat=SEATS, how=st.sampled_from(["leaves", "fails", "ends"]))
    def stop_rebuilding(self, seat: Seat, how: str) -> None:
        """As after Ctrl-C: its first connection stays."""
        connection = self.rebuilding.get(seat)
        if connection is not None and how == "ends":
            self.lose(connection, False)
        elif connection is not None:
            fields = ("", None, 0) if how == "leaves" else ("KeyboardInterrupt", None)
            self.send(connection, Kind.LEAVE if how == "leaves" else Kind.FAIL, *fields)

    @quietly
    @rule(seat=SEATS, rebuilds_by=st.sampled_from(["neither", "the first", "the second"]))
    def die_with_both(self, seat: Seat, rebuilds_by: str) -> None:
        """A process ends; the server may hear of either connection first, and of what the others do between."""
        both = [self.seats.get(seat), self.rebuilding.get(seat)]
        for connection in both if rebuilds_by != "the second" else both[::-1]:
            if connection is not None:
                self.lose(connection, False)
                if rebuilds_by == "neither":
                    self.pass_time(0.5, None, 0)
        self.quiet_steps = 0

    @quietly
    @rule(seat=SEATS, other=RANKS, state=st.sampled_from("STZ"), comes=st.booleans())
    def stop_after_a_death(self, seat: Seat, other: int, state: str, comes: bool) -> None:
        """One dies, and another one is stopped before it comes to the rebuild, or while it waits there."""
        stopped = seat[0], other
        if seat in self.seats and stopped in self.seats and seat != stopped:
            self.lose(self.seats[seat], False)
            self.states[self.processes[self.seats[stopped]]] = state
            if comes:
                self.rebuild(stopped, 3, 20_000, "m", "")
            self.rebuild_all(seat[0], other, 0, None)
            self.pass_time(10, stopped, 0)
            self.quiet_steps = 0

    @rule(kind=st.sampled_from([Kind.GET, Kind.LEAVE, Kind.BEAT, None]))
    def end_what_was_replaced(self, kind: Kind | None) -> None:
        """It may say something before."""
        fields = {Kind.GET: ("a", None, 0), Kind.LEAVE: ("", None, 0), Kind.BEAT: ({"g": 1},)}
        for connection in sorted(self.replaced):
            if kind is None:
                self.lose(connection, False)
            else:
                self.send(connection, kind, *fields[kind])

    @quietly
    @rule(seat=SEATS, rank=RANKS, waits=st.booleans(), also_others=st.booleans())
    def leave(self, seat: Seat, rank: int, waits: bool, also_others: bool) -> None:
        """It may wait itself. Another reads what it never sets, and the keys of a group of which it was the last."""
        reader = seat[0], rank
        if waits:
            self.exchange(seat, "left", None, b"", None, 2000)
            self.get(seat, "left", None, 2000)
        others = [other for other in self.seats if other != seat and other[0] == seat[0]]
        self.ask(seat, Kind.SET, "group/key", b"1")
        for other in others:
            self.ask(other, Kind.LEAVE, "group", None, 1)
        reads = [("never", seat[1], 20_000), ("by anybody", None, 20_000)]
        for read in reads:
            self.get(reader, *read)
        for leaver in [seat, *(other for other in others if also_others and other != reader)]:
            self.ask(leaver, Kind.LEAVE, "", None, 0)
        for read in [*reads, ("group/key", None, 0)]:
            self.get(reader, *read)
        self.quiet_steps = 0

    @rule()
    def go_after_a_failure(self) -> None:
        """As ranks do; then the next generation forms."""
        for connection in list(self.seats.values()):
            found = self.model.find(connection)
            if found is not None and found[0].failure is not None:
                self.lose(connection, False)

    @rule(connection=st.integers(0, 20))
    def speak_without_having_joined(self, connection: int) -> None:
        if connection not in (*self.seats.values(), *self.rebuilding.values(), *self.replaced):
            self.both("received", connection, Message(Kind.SET, 1, ["a", b"1"]))

    @quietly
    @rule(seat=SEATS, is_silent=st.booleans())
    def die(self, seat: Seat, is_silent: bool) -> None:
        if seat in self.seats:
            self.lose(self.seats[seat], is_silent)
            self.quiet_steps = 0

    @quietly
    @rule(seat=SEATS, culprit=st.none() | st.integers(0, 3))
    def fail(self, seat: Seat, culprit: int | None) -> None:
        self.ask(seat, Kind.FAIL, "it failed", culprit)
        self.quiet_steps = 0

    @quietly
    @rule(rank=st.integers(0, SIZES[""] - 1), starts_again=st.booleans())
    def end_process(self, rank: int, starts_again: bool) -> None:
        self.both("process", rank, None, "ended with exit code 0")
        if starts_again:
            self.both("process", rank, 1)
        self.quiet_steps = 0

    @quietly
    @rule(seat=SEATS, state=st.sampled_from("STZ"), seconds=st.sampled_from([1, 10]))
    def fall_silent(self, seat: Seat, state: str, seconds: int) -> None:
        if seat in self.seats:
            self.states[self.processes[self.seats[seat]]] = state
            self.pass_time(seconds, seat, 0)
            self.quiet_steps = 0

    @rule(seconds=st.sampled_from([0.5, 2, 6]), silent=st.none() | SEATS, begun=NUMBERS)
    def pass_time(self, seconds: float, silent: Seat | None, begun: int) -> None:
        for _ in range(int(seconds / STEP_SECONDS)):
            self.now += STEP_SECONDS
            for seat, connection in [*self.seats.items(), *self.rebuilding.items()]:
                if seat != silent and connection in (self.seats.get(seat), self.rebuilding.get(seat)):
                    self.send(connection, Kind.BEAT, {"g": begun})
            self.settle()

    # Requests.

    @rule(seat=SEATS, key=KEYS, value=VALUES)
    def set(self, seat: Seat, key: str, value: bytes) -> None:
        self.ask(seat, Kind.SET, key, value)

    @rule(seat=SEATS, key=KEYS, setter=st.none() | st.integers(-1, 3), milliseconds=DEADLINES)
    def get(self, seat: Seat, key: str, setter: int | None, milliseconds: int) -> None:
        self.ask(seat, Kind.GET, key, setter, milliseconds)

    @rule(seat=SEATS, key=NAMES, below=KEYS)
    def delete(self, seat: Seat, key: str, below: str) -> None:
        """Deletes a key and what is under it; then it looks whether that has gone, or stayed."""
        self.ask(seat, Kind.SET, below, b"1")
        self.ask(seat, Kind.DELETE, key)
        self.ask(seat, Kind.GET, below, None, 0)

    @rule(
        seat=SEATS,
        name=NAMES,
        ranks=MEMBERS,
        value=VALUES,
        root=ROOTS,
        within=DEADLINES,
    )
    def exchange(
        self, seat: Seat, name: str, ranks: list[int] | None, value: bytes, root: int | None, within: int
    ) -> None:
        self.ask(seat, Kind.EXCHANGE, name, ranks, value, root, within)

    @rule(name=NAMES, value=VALUES, root=ROOTS, but=st.none() | RANKS, within=DEADLINES)
    def exchange_of_all(self, name: str, value: bytes, root: int | None, but: int | None, within: int) -> None:
        for seat in [seat for seat in self.seats if seat[1] != but]:
            self.exchange(seat, name, None, value and b"%d" % seat[1], root, within if but else 20_000)

    @rule(seats=st.just(()) | st.tuples(SEATS), name=NAMES, ranks=MEMBERS, begun=NUMBERS)
    def leave_group(self, seats: tuple[Seat, ...], name: str, ranks: list[int] | None, begun: int) -> None:
        for seat in seats or list(self.seats):
            self.ask(seat, Kind.LEAVE, name, ranks, begun)

    @rule(seat=SEATS, number=NUMBERS, missing=MISSING, is_over=st.booleans())
    def wait_in_a_collective(self, seat: Seat, number: int, missing: list[int] | None, is_over: bool) -> None:
        if not is_over or self.quiet_steps >= QUIET_STEPS:
            self.ask(seat, Kind.WAITING, "g", None, number, "all_reduce", 5000, missing, is_over)

    @rule(but=st.none() | SEATS, begun=st.tuples(NUMBERS, NUMBERS, NUMBERS))
    def answer(self, but: Seat | None, begun: tuple[int, ...]) -> None:
        """All, or all but one, say what they have begun."""
        for seat in list(self.seats):
            if seat != but:
                self.ask(seat, Kind.STATUS, {"g": [begun[seat[1] % len(begun)], []]}, "its report")

    @quietly
    @rule(
        seat=SEATS,
        waits=st.sampled_from(["a reader", "in it", ""]),
        rank=RANKS,
        missing=MISSING,
        begun=st.tuples(NUMBERS, NUMBERS, NUMBERS),
        state=st.sampled_from("STZ"),
    )
    def be_stuck(
        self, seat: Seat, waits: str, rank: int, missing: list[int] | None, begun: tuple[int, ...], state: str
    ) -> None:
        """Another waits elsewhere, or in the same collective; or it does not answer, and may be stopped."""
        other = seat[0], rank
        if waits == "a reader":
            self.get(other, "never", None, 20_000)
        elif waits == "in it":
            self.wait_in_a_collective(other, 2, None, False)
        self.wait_in_a_collective(seat, 2, missing, True)
        self.wait_in_a_collective(other, 1, [1], True)  # of which nobody hears
        self.answer(None if waits else other, begun)
        if other in self.seats and not waits:
            self.states[self.processes[self.seats[other]]] = state
            self.pass_time(6, None, 1)
        self.quiet_steps = 0

    # The world around the core.

    def join_by(
        self,
        connection: int,
        seat: Seat,
        milliseconds: int,
        machine: str,
        size: int,
        last: int | None = None,
        min_ranks: int = 0,
    ) -> None:
        if last is None:
            self.seats = {each: its for each, its in self.seats.items() if its != connection}
            self.seats.setdefault(seat, connection)
        process = self.processes.setdefault(connection, connection)
        self.send(connection, Kind.JOIN, *seat, size, last, min_ranks, machine, "host", process, milliseconds)

    def ask(self, seat: Seat, kind: Kind, *fields: Any) -> None:
        if seat in self.seats:
            self.send(self.seats[seat], kind, *fields)

    def send(self, connection: int, kind: Kind, *fields: Any) -> None:
        number = 0
        if kind in ANSWERED:
            number = self.requests = self.requests + 1
            self.unanswered.add((connection, number))
        self.both("received", connection, Message(kind, number, list(fields)))

    def both(self, event: str, *args: Any, **options: Any) -> None:
        self.is_settled = False
        for side in (self.core, self.model):
            getattr(side, event)(self.now, *args, **options)
        self.settle()
        self.is_settled = True

    def settle(self) -> None:
        """Lets happen what is due, compares, and ends the connections that the core has closed."""
        for _ in range(10):
            due_at = self.core.next_deadline()
            if due_at is None or due_at > self.now:
                break
            self.core.tick(self.now)
        assert due_at is None or due_at > self.now, "the core is never at rest"
        self.model.tick(self.now)
        said, promised = ({each: sorted(sent, key=repr) for each, sent in out.items()} for out in self.out)
        self.out = defaultdict(list), defaultdict(list)
        assert said == promised
        self.quiet_steps += 1
        for seat, connection in list(self.rebuilding.items()):
            found = self.model.find(connection)
            if found is not None and found[0].number:  # the new one takes the place of the old one
                self.replaced |= {self.seats[seat]} if seat in self.seats else set()
                self.seats[seat] = self.rebuilding.pop(seat)
        while self.closing:
            self.lose(self.closing.pop(), False)
        members = [*self.seats.values(), *self.rebuilding.values()]
        if not self.replaced and not any(self.model.find(connection) for connection in members):
            assert self.core.next_deadline() is None, "the core is woken, and nobody is there"

    def lose(self, connection: int, is_silent: bool) -> None:
        self.seats = {seat: its for seat, its in self.seats.items() if its != connection}
        self.rebuilding = {seat: its for seat, its in self.rebuilding.items() if its != connection}
        self.replaced.discard(connection)
        self.unanswered = {request for request in self.unanswered if request[0] != connection}
        self.both("lost", connection, "reset", is_silent=is_silent)

    def hear(self, connection: int, kind: Kind, request: int, *fields: Any) -> None:
        """What the core sends: it answers each request once."""
        if kind is Kind.REPLY and fields[1]:
            self.unanswered.remove((connection, request))
        elif kind is Kind.FAILED:
            self.unanswered = {each for each in self.unanswered if each[0] != connection}
        self.out[0][connection].append(without_texts(kind, request, *fields))

    def note(self, connection: int, *message: Any) -> None:
        """What the model says that the core is to send."""
        self.out[1][connection].append(without_texts(*message))

    def state_of(self, pid: int) -> str:
        return self.states.get(pid, "S")


def without_texts(kind: Kind, request: int, *fields: Any) -> Any:
    """Returns a message as it arrives, and as the model has it."""
    if kind is Kind.FAILED:
        fields = fields[:4]
    elif kind is Kind.REPLY and fields[0] != Status.OK:
        fields = fields[: {Status.FAILED: 6, Status.TIMED_OUT: 3}.get(fields[0], 2)]
    return [kind, request, *msgpack.unpackb(msgpack.packb(fields))]


# Time is no matter here: a busy machine may take long to draw an example.
SETTINGS = settings(max_examples=300, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow])
TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = SETTINGS
