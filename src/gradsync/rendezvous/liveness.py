"""Liveness: how long a process has been silent, whether it still runs, and whether it counts as lost.

Server and client use this module: a `RendezvousCore` keeps one `Peers` table, a client keeps one `Peer` for the server.
A client sends heartbeats, and the server answers each heartbeat. Silence alone does not prove a failure: a process in a
long call that holds Python's lock (the GIL) is silent too. So when a process is silent for 1.5 s, its peer inspects the
process and the connection to it, every half second. The process counts as lost once two inspections in a row find that
the process is stopped (by SIGSTOP, for example), gone or unreachable.
"""

from __future__ import annotations

import enum
import os
import socket
import struct

from gradsync.machine import read_stat

HEARTBEAT_SECONDS = 0.5
_MANY_RANKS = 257
_HEARTBEAT_SECONDS_OF_MANY = 1.25  # less than SILENT_AFTER_SECONDS, so that failures are found as soon as with 0.5 s
SILENT_AFTER_SECONDS = 1.5
SLOW_AFTER_SECONDS = 5.0
LATE_AFTER_SECONDS = 1.0  # a process whose own timer fires this late counts as paused itself, by SIGSTOP for example
INSPECT_EVERY_SECONDS = 0.5
# The third inspection, 2.5 s after the last heartbeat, exceeds this limit, even if the last acknowledgement arrived
# 0.2 s late. So the fourth inspection, at 3 s, decides. The second inspection, at 2 s, does not exceed the limit, even
# if it is 0.2 s late.
_UNREACHABLE_AFTER_MS = 2250
# This limit is for a network that is cut in one direction only: the peer's retransmissions still arrive, and
# acknowledge nothing new.
_UNREACHABLE_AFTER_RETRANSMITS = 3  # in a row, which takes at least 1.4 s
# struct tcp_info: tcpi_retransmits, tcpi_unacked, tcpi_last_data_recv (new data only) and tcpi_last_ack_recv, the last
# two in milliseconds. Source: include/uapi/linux/tcp.h.
_TCP_INFO_BYTES = 64
_TCP_INFO = struct.Struct("=2xB21xI24xII4x")


def heartbeat_seconds(world_size: int) -> float:
    """Returns the interval between a rank's heartbeats, which is longer in large worlds to reduce the server's load."""
    return HEARTBEAT_SECONDS if world_size < _MANY_RANKS else _HEARTBEAT_SECONDS_OF_MANY


class ProcessState(enum.Enum):
    """The state of a silent peer's process; the value is the text for messages."""

    STOPPED = "was stopped (SIGSTOP?)"
    GONE = "is gone"
    UNREACHABLE = "cannot be reached"
    RUNNING = "runs"
    UNKNOWN = "may run"

    @property
    def is_fatal(self) -> bool:
        """Whether a peer in this state has failed."""
        return self in (ProcessState.STOPPED, ProcessState.GONE, ProcessState.UNREACHABLE)

    @property
    def detail(self) -> str:
        """The explanation of the state, in words."""
        return _DETAILS[self]

    def lost_text(self, who: str, evidence: str, *, when: str = "") -> str:
        """Returns the sentence about a lost peer.

        Args:
            who: the peer's name.
            evidence: the reason for the inspection, e.g. "no sign of life for 3.0 s".
            when: when the peer was lost, e.g. " while joining"; "" leaves out the time.
        """
        return f"{who} {self.value}{when}: {self.detail}; {evidence}"

    def slow_text(self, who: str, silent_seconds: float) -> str:
        """Returns the sentence about a peer that is silent for long although its process has not failed."""
        return f"{who} has sent nothing for {silent_seconds:.0f} s, but {self.value} ({self.detail})"


_DETAILS = {
    ProcessState.STOPPED: "its process needs a SIGCONT to continue",
    ProcessState.GONE: "its process has ended, but another process holds its connection open",
    ProcessState.UNREACHABLE: "its machine acknowledges nothing; the machine or the network failed",
    ProcessState.RUNNING: "perhaps in a long call that holds Python's lock",
    ProcessState.UNKNOWN: "its machine is up, but its process cannot be seen from here",
}


class Judgement(enum.Enum):
    """The result of the inspection of a peer."""

    NONE = enum.auto()
    SLOW = enum.auto()  # silent for long, but not failed: warn once
    LOST = enum.auto()  # failed in two inspections in a row


class Peer:
    """One watched process: when it last showed a sign of life, and the result of the last inspection.

    Args:
        now: monotonic seconds.
        is_connected: whether the process has joined, and sends heartbeats. A process that has not joined is inspected
            every half second, and counts as alive unless the process is stopped (SIGSTOP).

    Attributes:
        last_seen_at: the time of the last sign of life, in monotonic seconds.
        last_state: the state that the last inspection found; None if the peer was not inspected since its last sign of
            life.
    """

    __slots__ = ("_inspect_at", "_is_connected", "_is_reported", "_judged_state", "last_seen_at", "last_state")

    def __init__(self, now: float, *, is_connected: bool = True) -> None:
        self.last_seen_at = now
        self._is_connected = is_connected
        self._inspect_at = now if is_connected else now + INSPECT_EVERY_SECONDS
        self.last_state: ProcessState | None = None
        self._judged_state: ProcessState | None = None  # the result of the last inspection after 1.5 s of silence
        self._is_reported = False

    def note_alive(self, now: float) -> bool:
        """Records a sign of life; returns whether this sign ends a silence that was reported as SLOW."""
        self.last_seen_at = now
        self.last_state = self._judged_state = None
        was_reported, self._is_reported = self._is_reported, False
        return was_reported

    def reset(self, now: float) -> None:
        """Resets the silence timer, for example because this process itself was paused and could receive nothing."""
        self.last_seen_at = now
        self._inspect_at = now if self._is_connected else now + INSPECT_EVERY_SECONDS
        self.last_state = self._judged_state = None

    def due_at(self) -> float:
        """Returns when to inspect the peer if it stays silent, in monotonic seconds."""
        return (
            max(self.last_seen_at + SILENT_AFTER_SECONDS, self._inspect_at) if self._is_connected else self._inspect_at
        )

    def note_inspection(self, now: float) -> None:
        """Records an inspection of the peer now; the next inspection is due half a second later."""
        self._inspect_at = now + INSPECT_EVERY_SECONDS

    def judge(self, now: float, state: ProcessState) -> Judgement:
        """Returns the judgement on a peer whose process was found in this state."""
        if not self._is_connected and state is not ProcessState.STOPPED:
            self.note_alive(now)  # if the process has ended, its launcher reports how
            return Judgement.NONE
        self.last_state = state
        if now < self.last_seen_at + SILENT_AFTER_SECONDS:
            return Judgement.NONE
        previous, self._judged_state = self._judged_state, state
        if state.is_fatal:
            return Judgement.LOST if previous is not None and previous.is_fatal else Judgement.NONE
        if self._is_reported or now < self.last_seen_at + SLOW_AFTER_SECONDS:
            return Judgement.NONE
        self._is_reported = True
        return Judgement.SLOW


def process_key(rank: int) -> int:
    """Returns the key of a rank's process that has not joined. Called with such a key, this function returns the rank.

    The key is negative. A joined rank has the number of its connection as its key, which is not negative.
    """
    return -1 - rank


class Peers:
    """The table of watched processes: joined ranks by connection, other processes by `process_key`."""

    def __init__(self) -> None:
        self._peers: dict[int, Peer] = {}
        # The time of the next search of the table. A search is never too late, because a sign of life only moves the
        # time of a peer's inspection to a later time.
        self._due_at: float | None = None

    def begin(self, key: int, now: float) -> None:
        """Begins to watch a peer."""
        self._peers[key] = peer = Peer(now, is_connected=key >= 0)
        self._due_at = peer.due_at() if self._due_at is None else min(self._due_at, peer.due_at())

    def end(self, key: int) -> None:
        """Ends the watch of a peer, if there is one."""
        if self._peers.pop(key, None) is not None and not self._peers:
            self._due_at = None

    def end_processes(self) -> None:
        """Ends the watch of the processes that have not joined yet; joined ranks stay watched."""
        for key in [key for key in self._peers if key < 0]:
            self.end(key)
        if self._peers:
            self._set_due()

    def note_alive(self, key: int, now: float) -> bool:
        """Records a sign of life; returns whether this sign ends a silence that was reported as SLOW."""
        peer = self._peers.get(key)
        return peer is not None and peer.note_alive(now)

    def silent_seconds(self, key: int, now: float) -> float:
        """Returns how long a peer has been silent."""
        return now - self._peers[key].last_seen_at

    def last_state(self, key: int) -> ProcessState | None:
        """Returns the state that the last inspection of a silent peer found, or None."""
        return self._peers[key].last_state if key in self._peers else None

    def next_deadline(self) -> float | None:
        """Returns when to call `due_peers`, in monotonic seconds, or None."""
        return self._due_at

    def reset_if_late(self, now: float) -> None:
        """Resets all silence timers if this call is more than 1 s late, because then this process itself was paused."""
        if self._due_at is None or now - self._due_at <= LATE_AFTER_SECONDS:
            return
        for peer in self._peers.values():
            peer.reset(now)
        self._set_due()

    def due_peers(self, now: float) -> list[int]:
        """Returns the keys of the silent peers to inspect now."""
        if self._due_at is None or now < self._due_at:
            return []
        due = [key for key, peer in self._peers.items() if peer.due_at() <= now]
        for key in due:
            self._peers[key].note_inspection(now)
        self._set_due()
        return due

    def judge(self, key: int, now: float, state: ProcessState) -> Judgement:
        """Returns the judgement on a peer whose process was found in this state."""
        peer = self._peers.get(key)
        return Judgement.NONE if peer is None else peer.judge(now, state)

    def _set_due(self) -> None:
        self._due_at = min(peer.due_at() for peer in self._peers.values())


def inspect_peer(pid: int | None, stream: socket.socket | None) -> ProcessState:
    """Returns the state of a peer's process, as far as this process can see it; never waits.

    Args:
        pid: the peer's process id; None if it is not known, or the peer runs on another machine.
        stream: the connection to the peer, if there is one.
    """
    state = ProcessState.UNKNOWN if pid is None else inspect_process(pid)
    if not state.is_fatal and stream is not None and _is_unreachable(stream):
        return ProcessState.UNREACHABLE
    return state


def inspect_process(pid: int) -> ProcessState:
    """Returns whether a process of this machine is stopped, gone or running; a traced process counts as running."""
    stat = read_stat(pid)
    if stat is None:
        return ProcessState.RUNNING if _exists(pid) else ProcessState.GONE
    if stat.state == "T":
        return ProcessState.STOPPED
    return ProcessState.GONE if stat.state in ("Z", "X") else ProcessState.RUNNING


def _exists(pid: int) -> bool:
    """Asks the kernel whether a process exists, because /proc may hide the processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_unreachable(stream: socket.socket) -> bool:
    """Whether the peer's kernel has acknowledged no sent data for seconds."""
    try:
        info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return False
    if len(info) < _TCP_INFO_BYTES:
        return False
    retransmits, unacked, last_data_ms, last_ack_ms = _TCP_INFO.unpack(info)
    if not unacked:
        return False
    if retransmits >= _UNREACHABLE_AFTER_RETRANSMITS and last_data_ms > _UNREACHABLE_AFTER_MS:
        return True
    return bool(last_ack_ms > _UNREACHABLE_AFTER_MS)
