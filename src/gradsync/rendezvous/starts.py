"""The server's core, without I/O, for a run on several machines whose launchers and ranks use the same server.

Two objects of `RendezvousCore` share one port: one serves the launchers, the other serves the ranks of the current
start. A start is one start or restart of all ranks. The launchers announce each start, and report which of the ranks'
processes have started and ended. Each launcher also inspects processes on its own machine, because the server cannot
see them.
"""

from __future__ import annotations

from gradsync.rendezvous.frames import (
    INVALID,
    REFUSED,
    Action,
    Close,
    Ended,
    Event,
    FrameType,
    Inspect,
    Inspected,
    Lost,
    MakeRoom,
    Message,
    Received,
    Send,
    Started,
)
from gradsync.rendezvous.liveness import ProcessState, process_key
from gradsync.rendezvous.protocol import RendezvousCore

_OF_LAUNCHERS = (FrameType.BEGIN_START, FrameType.STARTED, FrameType.ENDED, FrameType.INSPECTED)


class LaunchersCore:
    """Passes each event to the core of the launchers or to the core of the ranks, and returns the actions.

    Args:
        nnodes: the number of launchers. The launcher of node 0 hosts the server.
        machine: the identity of the server's machine, see `RendezvousCore`.
    """

    def __init__(self, nnodes: int, *, machine: str = "") -> None:
        self._machine = machine
        self._launchers = RendezvousCore(nnodes, machine=machine, noun="node", host=0)
        self._start = ""  # the name of the current start or restart of all ranks; "" before the first
        self._world_size = 0  # the number of ranks of the current start
        self._ranks: RendezvousCore | None = None  # the core of the ranks of the current start
        self._rank_connections: set[int] = set()
        self._launcher_of: dict[int, int] = {}  # rank -> connection of the launcher that has started it

    def handle(self, now: float, event: Event) -> list[Action]:
        """Handles one event and returns the actions, as `RendezvousCore.handle`."""
        if isinstance(event, Received):
            connection, message = event.connection, event.message
            if connection in self._rank_connections:
                return self._pass_to_ranks(now, event)
            is_of_rank = message.type is FrameType.JOIN and message.fields[-1] is not None
            if is_of_rank and not self._launchers.has_member(connection):
                return self._join(now, connection, message)
            if message.type in _OF_LAUNCHERS and self._launchers.has_running_member(connection):
                return self._handle_launcher(now, connection, message)
        elif isinstance(event, Lost) and event.connection in self._rank_connections:
            self._rank_connections.discard(event.connection)
            return self._pass_to_ranks(now, event)
        elif isinstance(event, Inspected) and event.peer in self._rank_connections:
            return self._pass_to_ranks(now, event)
        elif not isinstance(event, (Lost, Inspected)):  # a Tick goes to both cores
            return [*self._launchers.handle(now, event), *self._pass_to_ranks(now, event)]
        return self._launchers.handle(now, event)

    def next_deadline(self) -> float | None:
        """Returns when the next Tick is due, in monotonic seconds, or None."""
        due = [self._launchers.next_deadline(), None if self._ranks is None else self._ranks.next_deadline()]
        return min((time_due for time_due in due if time_due is not None), default=None)

    def _pass_to_ranks(self, now: float, event: Event) -> list[Action]:
        """Passes an event to the core of the ranks. A request to inspect a process goes to its launcher."""
        if self._ranks is None:
            return []
        actions: list[Action] = []
        for action in self._ranks.handle(now, event):
            if isinstance(action, Inspect) and action.peer < 0:
                rank = process_key(action.peer)
                action = Send(self._launcher_of[rank], FrameType.INSPECT, (rank, action.pid))
            actions.append(action)
        return actions

    def _join(self, now: float, connection: int, message: Message) -> list[Action]:
        """Handles the join of a rank, which must belong to the current start of all ranks."""
        if self._ranks is None or message.fields[-1] != self._start:
            text = f"rank {message.fields[0]} belongs to another start or restart of this run, not to the current one"
            return [Send(connection, FrameType.REFUSED, (message.sequence, REFUSED, text)), Close(connection)]
        self._rank_connections.add(connection)
        return self._pass_to_ranks(now, Received(connection, message))

    def _handle_launcher(self, now: float, connection: int, message: Message) -> list[Action]:
        if message.type is FrameType.BEGIN_START:
            return self._begin(connection, message.sequence, *message.fields)
        rank, what = message.fields
        if rank >= self._world_size:
            text = f"got {message.type.name} for rank {rank}; the current start of the run has {self._world_size} ranks"
            return [Send(connection, FrameType.REFUSED, (message.sequence, INVALID, text))]
        if message.type is FrameType.STARTED:
            self._launcher_of[rank] = connection
            return self._pass_to_ranks(now, Started(rank, what))
        if message.type is FrameType.ENDED:
            return self._pass_to_ranks(now, Ended(rank, what))
        return self._pass_to_ranks(now, Inspected(process_key(rank), ProcessState[what]))

    def _begin(self, connection: int, sequence: int, start: str, world_size: int) -> list[Action]:
        """Begins a start of all ranks when the first launcher announces it; closes the previous start's connections."""
        actions: list[Action] = []
        if self._ranks is None or start != self._start:
            actions += [Close(rank_connection) for rank_connection in sorted(self._rank_connections)]
            self._start, self._world_size = start, world_size
            self._ranks = RendezvousCore(world_size, machine=self._machine)
            self._rank_connections.clear()
            self._launcher_of.clear()
            actions.append(MakeRoom(world_size))
        return [*actions, Send(connection, FrameType.REPLY, (sequence, None))]
