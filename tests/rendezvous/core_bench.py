"""Drives the server's core with a virtual clock: messages in, messages out."""

from __future__ import annotations

from gradsync.rendezvous.events import (
    Close,
    Ended,
    Look,
    Looked,
    Lost,
    Notice,
    Probe,
    Probed,
    Received,
    Send,
    Started,
    Tick,
)
from gradsync.rendezvous.finding import Finding
from gradsync.rendezvous.messages import PROTOCOL_VERSION, FrameType, Message, check_fields
from gradsync.rendezvous.protocol import RendezvousCore

SERVER = ("this machine", 77)


class Bench:
    """Drives a core; connection numbers are chosen by the test, time moves only by `wait`."""

    def __init__(self, world_size: int, host: int | None = None) -> None:
        self.core = RendezvousCore(world_size, machine=SERVER[0], pid=SERVER[1], host=host)
        self.world_size = world_size
        self.now = 100.0
        self.inbox: dict[int, list[tuple]] = {}
        self.closed: list[int] = []
        self.notices: list[str] = []
        self.probes: list[tuple[int, int | None]] = []
        self.findings: dict[int, Finding] = {}  # what a look at a rank that has not joined finds, by its pid
        self.looks: list[tuple[float, int, int]] = []  # when, at which rank and process
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
            elif isinstance(action, Probe):
                self.probes.append((action.connection, action.pid))
            elif isinstance(action, Look):
                self.looks.append((self.now, action.rank, action.pid))
                self._do(Looked(action.rank, self.findings.get(action.pid, Finding.RUNNING)))

    def send(self, connection: int, frame_type: FrameType, *fields) -> int:
        self._sequence += 1
        self._do(Received(connection, Message(frame_type, self._sequence, fields)))
        return self._sequence

    def join(self, connection: int, rank: int, timeout_ms: int = 10_000, world_size: int = 0) -> int:
        size = world_size or self.world_size
        return self.send(connection, FrameType.JOIN, PROTOCOL_VERSION, rank, size, timeout_ms)

    def join_all(self, first_connection: int = 0) -> None:
        for rank in range(self.world_size):
            self.join(first_connection + rank, rank)
        self.inbox.clear()

    def lose(self, connection: int, cause: str = "reset") -> None:
        self._do(Lost(connection, cause))

    def start(self, rank: int, pid: int) -> None:
        """Says which process the rank is."""
        self._do(Started(rank, pid))

    def end(self, rank: int) -> None:
        """Says that the rank's process has ended well."""
        self._do(Ended(rank, "ended with exit code 0"))

    def find(self, connection: int, finding: Finding) -> None:
        """Answers a probe of the core."""
        self._do(Probed(connection, finding))

    def wait(self, seconds: float) -> None:
        """Lets time pass, ticking exactly when the core asks for it."""
        end = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self._do(Tick())
        self.now = end

    def take(self, connection: int) -> list[tuple]:
        return self.inbox.pop(connection, [])
