"""Drives the server's core with a virtual clock: messages in, messages out."""

from __future__ import annotations

from gradsync.rendezvous.frames import (
    THE_WORLD,
    Close,
    Ended,
    FrameType,
    Inspect,
    Inspected,
    Lost,
    Message,
    Notice,
    Received,
    Send,
    Started,
    Tick,
    check_fields,
)
from gradsync.rendezvous.liveness import ProcessState, process_key
from gradsync.rendezvous.protocol import RendezvousCore

SERVER = "this machine"


class Bench:
    """Drives a core; connection numbers are chosen by the test, time moves only by `wait`."""

    def __init__(self, world_size: int, host: int | None = None) -> None:
        self.core = RendezvousCore(world_size, machine=SERVER, host=host)
        self.world_size = world_size
        self.now = 100.0
        self.inbox: dict[int, list[tuple]] = {}
        self.closed: list[int] = []
        self.notices: list[str] = []
        self.probes: list[tuple[int, int | None]] = []
        self.states: dict[int, ProcessState] = {}  # what a look at a rank that has not joined finds, by its pid
        self.looks: list[tuple[float, int, int | None]] = []  # when, at which rank and process
        self._sequence = 1

    def _do(self, event) -> None:
        for action in self.core.handle(self.now, event):
            if isinstance(action, Send):
                check_fields(action.type, action.fields)
                self.inbox.setdefault(action.connection, []).append((action.type, *action.fields))
            elif isinstance(action, Close):
                self.closed.append(action.connection)
            elif isinstance(action, Notice):
                self.notices.append(action.text)
            elif isinstance(action, Inspect) and action.peer < 0:
                self.looks.append((self.now, process_key(action.peer), action.pid))
                self._do(Inspected(action.peer, self.states.get(action.pid, ProcessState.RUNNING)))
            elif isinstance(action, Inspect):
                self.probes.append((action.peer, action.pid))

    def send(self, connection: int, frame_type: FrameType, *fields) -> int:
        self._sequence += 1
        self._do(Received(connection, Message(frame_type, self._sequence, fields)))
        return self._sequence

    def join(
        self,
        connection: int,
        rank: int,
        world_size: int = 0,
        *,
        pid: int = 0,  # a process that nobody looks at
        machine: str = SERVER,
    ) -> int:
        size = world_size or self.world_size
        return self.send(connection, FrameType.JOIN, rank, size, machine, "node7", pid)

    def cancel(self, connection: int, sequence: int) -> None:
        """What a client does at its deadline."""
        self.send(connection, FrameType.CANCEL, sequence)

    def leave(self, connection: int) -> None:
        self.send(connection, FrameType.LEAVE, THE_WORLD, None, 0)

    def join_all(self, first_connection: int = 0, first_pid: int = 0, machine: str = SERVER) -> None:
        for rank in range(self.world_size):
            self.join(first_connection + rank, rank, pid=first_pid and first_pid + rank, machine=machine)
        self.inbox.clear()

    def lose(self, connection: int, cause: str = "reset") -> None:
        self._do(Lost(connection, cause))

    def start(self, rank: int, pid: int) -> None:
        """Says which process the rank is."""
        self._do(Started(rank, pid))

    def end(self, rank: int) -> None:
        """Says that the rank's process has ended well."""
        self._do(Ended(rank, "ended with exit code 0"))

    def find(self, connection: int, state: ProcessState) -> None:
        """Answers a look of the core at a connection."""
        self._do(Inspected(connection, state))

    def wait(self, seconds: float) -> None:
        """Lets time pass, ticking exactly when the core asks for it."""
        end = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self._do(Tick())
        self.now = end

    def take(self, connection: int) -> list[tuple]:
        return self.inbox.pop(connection, [])
