"""Silent processes: clocks of silence, looks at a process, and what follows from both.

Used by both ends: the server's core keeps one `Peers` table, a client keeps one `Peer` for the server. Heartbeats go
both ways. Silence proves nothing by itself: a long call that holds Python's lock is silent too. So a silent peer is
looked at, and only one that is found stopped, gone or out of reach, twice in a row, is lost.
"""

from __future__ import annotations

import enum
import os
import socket
import struct
from typing import NamedTuple

from gradsync.machine import read_stat

HEARTBEAT_SECONDS = 0.5
_MANY_RANKS = 257
_HEARTBEAT_SECONDS_OF_MANY = 1.25  # less than SILENT_AFTER_SECONDS: what is found, and when, stays the same
SILENT_AFTER_SECONDS = 1.5
SLOW_AFTER_SECONDS = 5.0
LATE_AFTER_SECONDS = 1.0  # who is so late to its own clock was itself not running, and has heard nobody
LOOK_EVERY_SECONDS = 0.5
# Seen at the third look, 2.5 s after the last word, so that the fourth, at 3 s, decides; and not at the second, be that
# late, or the last answer acknowledged late, by a fifth of a second.
_UNREACHABLE_AFTER_MS = 2250
# A line that is cut in one direction: what the peer sends again still comes, and acknowledges nothing new.
_UNREACHABLE_AFTER_RETRANSMITS = 3  # in a row, at least 1.4 s
# struct tcp_info: tcpi_retransmits, tcpi_unacked, tcpi_last_data_recv (of what is new) and tcpi_last_ack_recv, the last
# two in milliseconds. Source: include/uapi/linux/tcp.h.
_TCP_INFO_BYTES = 64
_TCP_INFO = struct.Struct("=2xB21xI24xII4x")


def heartbeat_seconds(world_size: int) -> float:
    """Returns how often each of so many ranks sends a heartbeat: one server hears them all."""
    return HEARTBEAT_SECONDS if world_size < _MANY_RANKS else _HEARTBEAT_SECONDS_OF_MANY


class ProcessState(enum.Enum):
    """What a look at a silent peer can find; the value says it of the peer, in words."""

    STOPPED = "was stopped (SIGSTOP?)"
    GONE = "is gone"
    UNREACHABLE = "cannot be reached"
    RUNNING = "runs"
    UNKNOWN = "may run"

    @property
    def is_fatal(self) -> bool:
        """Whether a peer in this state cannot take part any more."""
        return self in (ProcessState.STOPPED, ProcessState.GONE, ProcessState.UNREACHABLE)

    @property
    def detail(self) -> str:
        """The reason behind it, in words."""
        return _DETAILS[self]

    def lost_text(self, who: str, evidence: str, *, where: str = "") -> str:
        """Returns the sentence on a peer that is lost.

        Args:
            who: the peer.
            evidence: what it has missed.
            where: what the peer was in, e.g. " in phase 'running'".
        """
        return f"{who} {self.value}{where}: {self.detail}; {evidence}"

    def slow_text(self, who: str, silent_seconds: float) -> str:
        """Returns the sentence on a peer that is silent for long, although nothing is wrong with it."""
        return f"{who} has not been heard of for {silent_seconds:.0f} s, but {self.value} ({self.detail})"


_DETAILS = {
    ProcessState.STOPPED: "its process does not go on without SIGCONT",
    ProcessState.GONE: "its process has ended, though another one holds its connection open",
    ProcessState.UNREACHABLE: "its machine acknowledges nothing: it, or the network between, failed",
    ProcessState.RUNNING: "a long call that holds Python's lock?",
    ProcessState.UNKNOWN: "its machine is up, and its processes cannot be seen from here",
}


class Judgement(enum.Enum):
    """What follows from a look at a peer."""

    NONE = enum.auto()
    SLOW = enum.auto()  # silent for long, though nothing is found: worth a warning, once
    LOST = enum.auto()  # found in a fatal state, twice in a row


class Peer:
    """One process that is listened for: when it was heard of last, and what was found since.

    Args:
        now: monotonic seconds.
        is_connected: whether it sends heartbeats. One that does not is looked at all the time; to be found running is
            its sign of life.

    Attributes:
        heard_at: when it was heard of last.
    """

    __slots__ = ("_is_connected", "_is_reported", "_is_suspect", "_look_at", "heard_at")

    def __init__(self, now: float, *, is_connected: bool = True) -> None:
        self.heard_at = now
        self._is_connected = is_connected
        self._look_at = now if is_connected else now + LOOK_EVERY_SECONDS
        self._is_suspect = False
        self._is_reported = False

    def hear(self, now: float) -> bool:
        """Notes a sign of life; returns whether it ends a silence that was worth a warning."""
        self.heard_at = now
        self._is_suspect = False
        was_reported, self._is_reported = self._is_reported, False
        return was_reported

    def restart(self, now: float) -> None:
        """Begins anew: this side was not running, and may have heard nothing because of that."""
        self.heard_at = now
        self._look_at = now if self._is_connected else now + LOOK_EVERY_SECONDS
        self._is_suspect = False

    def due_at(self) -> float:
        """Returns when to look at the peer, should nothing be heard of it until then."""
        return max(self.heard_at + SILENT_AFTER_SECONDS, self._look_at) if self._is_connected else self._look_at

    def looked(self, now: float) -> None:
        """Notes that the peer is looked at now: the next look is due a moment later."""
        self._look_at = now + LOOK_EVERY_SECONDS

    def judge(self, now: float, state: ProcessState) -> Judgement:
        """Takes what a look at the peer has found."""
        if not self._is_connected and state is not ProcessState.STOPPED:
            self.hear(now)  # its launcher reports its end, and knows how
            return Judgement.NONE
        if now < self.heard_at + SILENT_AFTER_SECONDS:
            return Judgement.NONE
        was_suspect, self._is_suspect = self._is_suspect, state.is_fatal
        if state.is_fatal:
            return Judgement.LOST if was_suspect else Judgement.NONE
        if self._is_reported or now < self.heard_at + SLOW_AFTER_SECONDS:
            return Judgement.NONE
        self._is_reported = True
        return Judgement.SLOW


def process_key(rank: int) -> int:
    """Returns the key of a process that has not joined: no connection's number is negative. Its own inverse."""
    return -1 - rank


class Peers:
    """The one table of processes to look at: joined ranks by connection, others by `process_key`."""

    def __init__(self) -> None:
        self._peers: dict[int, Peer] = {}
        # When to look through them next. Whoever is heard of meanwhile moves further off, so it never is too late.
        self._due_at: float | None = None

    def begin(self, key: int, now: float) -> None:
        """Begins to listen for a peer."""
        self._peers[key] = peer = Peer(now, is_connected=key >= 0)
        self._due_at = peer.due_at() if self._due_at is None else min(self._due_at, peer.due_at())

    def end(self, key: int) -> None:
        """Stops listening for a peer; nothing where it was not listened for."""
        if self._peers.pop(key, None) is not None and not self._peers:
            self._due_at = None

    def end_processes(self) -> None:
        """Stops looking at processes that have not joined."""
        for key in [key for key in self._peers if key < 0]:
            self.end(key)
        if self._peers:
            self._set_due()

    def hear(self, key: int, now: float) -> bool:
        """Notes a sign of life; returns whether it ends a silence that was worth a warning."""
        peer = self._peers.get(key)
        return peer is not None and peer.hear(now)

    def silent_seconds(self, key: int, now: float) -> float:
        """Returns how long a peer has been silent."""
        return now - self._peers[key].heard_at

    def next_deadline(self) -> float | None:
        """Returns when `take_due` is to be called, or None."""
        return self._due_at

    def restart_if_late(self, now: float) -> None:
        """Restarts all clocks when nobody looked at them in time: this side was not running."""
        if self._due_at is None or now - self._due_at <= LATE_AFTER_SECONDS:
            return
        for peer in self._peers.values():
            peer.restart(now)
        self._set_due()

    def take_due(self, now: float) -> list[int]:
        """Returns the peers that are silent and to be looked at now."""
        if self._due_at is None or now < self._due_at:
            return []
        due = [key for key, peer in self._peers.items() if peer.due_at() <= now]
        for key in due:
            self._peers[key].looked(now)
        self._set_due()
        return due

    def judge(self, key: int, now: float, state: ProcessState) -> Judgement:
        """Takes what a look at a peer has found."""
        peer = self._peers.get(key)
        return Judgement.NONE if peer is None else peer.judge(now, state)

    def _set_due(self) -> None:
        self._due_at = min(peer.due_at() for peer in self._peers.values())


class LostProcess(NamedTuple):
    """A process that stands still before it has joined."""

    state: ProcessState
    seconds: float


def look_at(pid: int | None, stream: socket.socket | None) -> ProcessState:
    """Returns what can be found out about a peer, without waiting.

    Args:
        pid: its process, or None when it runs on another machine.
        stream: the connection to it, if there is one.
    """
    state = ProcessState.UNKNOWN if pid is None else look_at_process(pid)
    if not state.is_fatal and stream is not None and _is_unreachable(stream):
        return ProcessState.UNREACHABLE
    return state


def look_at_process(pid: int) -> ProcessState:
    """Returns whether a process of this machine is stopped, gone or running; one that a debugger holds is running."""
    stat = read_stat(pid)
    if stat is None:
        return ProcessState.RUNNING if _exists(pid) else ProcessState.GONE
    if stat.state == "T":
        return ProcessState.STOPPED
    return ProcessState.GONE if stat.state in ("Z", "X") else ProcessState.RUNNING


def _exists(pid: int) -> bool:
    """Returns whether there is such a process: /proc may hide those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_unreachable(stream: socket.socket) -> bool:
    """Returns whether the peer's kernel has left unacknowledged what it was sent, for seconds."""
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
