"""One state of the model: the core, the ranks around it, what lies between them, and what has been told so far."""

from __future__ import annotations

import enum
import pickle
from dataclasses import dataclass, field

from exploration.ledger import Ledger
from gradsync.rendezvous.protocol import RendezvousCore

MACHINE = "machine"
FIRST_PID = 100  # of rank 0; the other ranks' follow


class Life(enum.Enum):
    """Where a rank is in its life."""

    OUT = enum.auto()  # not connected
    READY = enum.auto()  # connected; what it does next is its own choice
    WAITING = enum.auto()  # for an answer
    OVER = enum.auto()  # its generation has failed, or it was turned away
    LEFT = enum.auto()
    DEAD = enum.auto()


@dataclass(slots=True)
class RankModel:
    """One rank as the model of a client: what it does next, and what it waits for."""

    rank: int
    life: Life = Life.OUT
    connection: int = 0
    next_step: int = 0
    next_sequence: int = 2  # the handshake has used up two
    waits_for: int | None = None  # the sequence of its request
    last_asked: int | None = None  # of the request before, which it may give up before it has read the answer
    joined: int = 0  # the number of its generation
    attempts: int = 0  # how often it has tried to join
    is_stopped: bool = False
    is_asked: bool = False  # the server has requested its status

    @property
    def is_connected(self) -> bool:
        """Whether the server may hear of it."""
        return self.life in (Life.READY, Life.WAITING, Life.OVER)

    @property
    def may_act(self) -> bool:
        """Whether it can do anything by itself."""
        return self.is_connected and not self.is_stopped


@dataclass(slots=True)
class Wire:
    """The frames under way on one connection, and how far each end has counted."""

    to_server: list[bytes | None] = field(default_factory=list)  # None: the end of the stream
    to_client: list[bytes | None] = field(default_factory=list)
    sent_to_client: int = 1
    taken_by_server: int = 2
    taken_by_client: int = 1


@dataclass(slots=True)
class World:
    """A state: everything that what happens next depends on, and what the invariants have to remember."""

    core: RendezvousCore
    ranks: list[RankModel]
    left: dict[str, int]  # how often the environment may still do what it does rarely
    ledger: Ledger
    wires: dict[int, Wire] = field(default_factory=dict)
    now: float = 0.0

    def packed(self) -> bytes:
        """Returns a copy that lies in memory without moving."""
        return pickle.dumps(self, 5)

    @classmethod
    def unpacked(cls, packed: bytes) -> World:
        """Returns the state that was packed, new objects throughout."""
        world = pickle.loads(packed)
        assert isinstance(world, cls)
        return world

    def rank_of(self, connection: int) -> RankModel | None:
        """Returns the rank that holds a connection, or None."""
        return next((r for r in self.ranks if r.connection == connection and r.is_connected), None)


def new_core(world_size: int, *, formed: int = 0, host: int | None = None) -> RendezvousCore:
    """Returns a core that can be copied."""
    core = RendezvousCore(world_size, machine=MACHINE, host=host)
    core.formed_count = formed
    return core
