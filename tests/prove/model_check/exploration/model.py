"""What each move makes of a state."""

from __future__ import annotations

from typing import Any

from exploration import network
from exploration.configuration import Configuration, Move
from exploration.core_side import CoreSide, Violation
from exploration.ledger import Ledger
from exploration.moves import DELIVERIES, next_step, open_moves
from exploration.state_invariants import STATE_INVARIANTS
from exploration.steps import Ask, join, report
from exploration.world import FIRST_PID, Life, RankModel, Wire, World, new_core
from gradsync.rendezvous.frames import THE_WORLD, TO_GENERATION, FrameType, Lost, Message, Received, Tick

_LATE_SECONDS = 2.0  # that the server did not run, beyond what its clocks make allowance for
_IMPOSTOR = 90  # its connection's number is its rank's beside this
_LAST_SEQUENCE = 10**6  # of a message that is nobody's


class Model:
    """Plays a configuration.

    Args:
        configuration: what is played.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self._core = CoreSide(self)

    @property
    def story(self) -> list[str]:
        """What the core heard and did in the last move."""
        return self._core.story()

    def start(self) -> World:
        """Returns the state that everything begins in."""
        size = len(self.configuration.programs)
        core = new_core(size, host=self.configuration.host)
        world = World(core, [RankModel(rank) for rank in range(size)], dict(self.configuration.rare), Ledger(size))
        if self.configuration.is_formed:
            for rank in range(size):
                self.make(world, ("join", rank))
            while world.wires and any(wire.to_server or wire.to_client for wire in world.wires.values()):
                self.make(world, next(move for move in open_moves(self.configuration, world) if move[0] in DELIVERIES))
        return world

    def make(self, world: World, move: Move) -> None:
        """Changes the state by a move, and checks all invariants.

        Raises:
            Violation: one does not hold.
        """
        self._core.turns.clear()
        what, number = move
        if what.split()[0] in network.TAMPERINGS:
            world.left["tamper"] -= 1
            network.tamper(world.wires[number], what)
        else:
            if what in world.left:
                world.left[what] -= 1
            getattr(self, f"_{what}")(world, number)
        for invariant in STATE_INVARIANTS:
            complaint = invariant(world)
            if complaint:
                raise Violation(f"{invariant.__name__}: {complaint}")

    def check_that_deadlines_end_every_wait(self, world: World) -> None:
        """Has each rank cancel what it waits for, in a state of its own.

        Raises:
            Violation: a request stays open.
        """
        for connection, by_sequence in list(world.ledger.open.items()):
            for sequence in list(by_sequence):
                if sequence in world.ledger.open.get(connection, {}):
                    message = Message(FrameType.CANCEL, _LAST_SEQUENCE, (sequence,))
                    self._core.happen(world, Received(connection, message))
        if world.ledger.open:
            raise Violation(f"nobody_waits_for_ever: cancels do not end {world.ledger.open}")

    # Steps of a rank.

    def _join(self, world: World, rank: int) -> None:
        attempts = world.ranks[rank].attempts + 1
        fresh = RankModel(rank, connection=10 * attempts + rank, attempts=attempts, life=Life.READY)
        world.ranks[rank] = fresh
        if self.configuration.has_frames:
            world.wires[fresh.connection] = Wire()
        size = len(world.ranks)
        self._ask(world, fresh, join(rank, size, FIRST_PID + rank if self.configuration.listens else 0))

    def _step(self, world: World, rank: int) -> None:
        model = world.ranks[rank]
        step = next_step(self.configuration, model)
        model.next_step += 1
        if isinstance(step, Ask):
            self._ask(world, model, step)
        elif step is not None:
            self._say(world, model, step.type, step.fields)

    def _answer(self, world: World, rank: int) -> None:
        model = world.ranks[rank]
        model.is_asked = False
        self._say(
            world,
            model,
            FrameType.STATUS,
            ({g: (n, []) for g, n in _progress(world, model).items()}, "busy"),
        )

    def _goodbye(self, world: World, rank: int) -> None:
        model = world.ranks[rank]
        self._say(world, model, FrameType.LEAVE, (THE_WORLD, None, 0))
        model.life = Life.LEFT

    _leave = _goodbye

    def _cancel(self, world: World, rank: int) -> None:
        """Comes to its deadline; it may have been answered, and the rank has not read that yet."""
        model = world.ranks[rank]
        given_up, model.last_asked = model.last_asked, None
        self._say(world, model, FrameType.CANCEL, (given_up,))

    def _report(self, world: World, rank: int) -> None:
        said = report("it went wrong")
        self._say(world, world.ranks[rank], said.type, said.fields)

    def _beat(self, world: World, rank: int) -> None:
        model = world.ranks[rank]
        self._say(world, model, FrameType.HEARTBEAT, (_progress(world, model),))

    def _ask(self, world: World, model: RankModel, ask: Ask) -> None:
        model.waits_for = model.next_sequence
        model.last_asked = model.waits_for
        model.life = Life.OVER if model.life is Life.OVER else Life.WAITING
        self._say(world, model, ask.type, ask.fields)

    def _say(self, world: World, model: RankModel, frame_type: FrameType, fields: tuple[Any, ...]) -> None:
        sequence = model.next_sequence
        model.next_sequence += 1
        message = Message(frame_type, sequence, fields)
        if self.configuration.has_frames:
            network.send_to_server(world, model.connection, message)
        else:
            self._core.happen(world, Received(model.connection, message))

    # What befalls a rank.

    def _crash(self, world: World, rank: int) -> None:
        self._end_stream(world, world.ranks[rank], Life.DEAD)

    def _reset(self, world: World, rank: int) -> None:
        self._end_stream(world, world.ranks[rank], Life.OUT)

    def _end_stream(self, world: World, model: RankModel, life: Life) -> None:
        model.life, model.is_stopped = life, False
        if self.configuration.has_frames:
            world.wires[model.connection].to_server.append(None)
            world.wires[model.connection].to_client.clear()
        else:
            self._core.happen(world, Lost(model.connection, "connection closed"))

    def _vanish(self, world: World, rank: int) -> None:
        """Ends without the end of its stream: its machine is gone, or another process holds the connection."""
        world.ranks[rank].life = Life.DEAD

    def _stop(self, world: World, rank: int) -> None:
        world.ranks[rank].is_stopped = True

    def _resume(self, world: World, rank: int) -> None:
        world.ranks[rank].is_stopped = False

    def _impostor(self, world: World, rank: int) -> None:
        """Another connection joins as a rank that is there already."""
        connection = _IMPOSTOR + rank
        ask = join(rank, len(world.ranks))
        self._core.happen(world, Received(connection, Message(ask.type, 2, ask.fields)))
        if connection in world.ledger.seats:  # it came as the next generation's, or after the other had gone
            self._core.happen(world, Lost(connection, "connection closed"))

    # Time, and the network.

    def _time(self, world: World, _: int) -> None:
        due = world.core.next_deadline()
        assert due is not None
        world.now = max(world.now, due)
        self._core.happen(world, Tick())

    def _late(self, world: World, _: int) -> None:
        due = world.core.next_deadline()
        assert due is not None
        world.now = max(world.now, due) + _LATE_SECONDS
        self._core.happen(world, Tick())

    def _take(self, world: World, connection: int) -> None:
        taken = network.take_at_server(world, connection)
        if isinstance(taken, Message):
            self._core.happen(world, Received(connection, taken))
        else:
            self._end_at_server(world, connection)
            self._core.happen(world, Lost(connection, taken))

    def _hand(self, world: World, connection: int) -> None:
        message = network.take_at_client(world, connection)
        model = world.rank_of(connection)
        if message is not None:
            self._read_message(world, connection, message.type, message.fields)
        elif model is not None:
            self._end_stream(world, model, Life.DEAD)

    def _end_at_server(self, world: World, connection: int) -> None:
        wire = world.wires[connection]
        wire.to_server.clear()
        wire.to_client.append(None)

    # What the ranks hear.

    def hear(self, world: World, connection: int, frame_type: FrameType, fields: tuple[Any, ...]) -> None:
        """Takes in what the server has sent: at once, or as a frame."""
        if self.configuration.has_frames:
            network.send_to_client(world, connection, frame_type, fields)
        else:
            self._read_message(world, connection, frame_type, fields)

    def hear_end(self, world: World, connection: int) -> None:
        """Takes in that the server has closed the connection."""
        model = world.rank_of(connection)
        if connection in world.wires:
            self._end_at_server(world, connection)
        elif model is not None and model.life is not Life.LEFT:
            model.life = Life.OUT

    def _read_message(self, world: World, connection: int, frame_type: FrameType, fields: tuple[Any, ...]) -> None:
        model = world.rank_of(connection)
        if model is None:
            return
        if frame_type is FrameType.STATUS_REQUEST:
            model.is_asked = True
        elif frame_type is FrameType.FAILED and fields[0] == TO_GENERATION:
            model.life, model.waits_for = Life.OVER, None
        elif fields and fields[0] == model.waits_for:
            _take_answer(model, frame_type, fields)


def _take_answer(model: RankModel, frame_type: FrameType, fields: tuple[Any, ...]) -> None:
    model.waits_for = None
    is_joining = not model.joined
    if is_joining and frame_type is FrameType.REPLY:
        model.joined = fields[1][0]
    if model.life is Life.WAITING:
        model.life = Life.READY


def _progress(world: World, model: RankModel) -> dict[str, int]:
    """How far a rank says it has come: as far as the collective in which it said that it waits."""
    era, _ = world.ledger.seats.get(model.connection, (None, 0))
    return {} if era is None or model.rank not in era.begun else {"g": era.begun[model.rank]}
