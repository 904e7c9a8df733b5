"""A look at a peer that is silent: is its process stopped or gone, does its machine still answer?

Used by both ends of a control connection, `event_loop` for ranks and `liveness` for the server. Silence itself proves
nothing (a long call that holds Python's lock is silent too); what is found here may.
"""

from __future__ import annotations

import os
import socket
import struct

from gradsync.machine import read_stat
from gradsync.rendezvous.events import Look, Looked, Probe, Probed
from gradsync.rendezvous.finding import Finding

# Seen at the third look, 2.5 s after the last word, so that the fourth, at 3 s, is the verdict; and not at the second,
# be that late, or the last answer acknowledged late, by a fifth of a second.
_UNREACHABLE_AFTER_MS = 2250
# struct tcp_info: tcpi_unacked, and tcpi_last_ack_recv in milliseconds; Source: include/uapi/linux/tcp.h.
_TCP_INFO_BYTES = 64
_UNACKED = struct.Struct("=24xI")
_LAST_ACK = struct.Struct("=56xI")


def answer_probe(probe: Probe, stream: socket.socket) -> Probed:
    """Returns what can be found out about a silent rank.

    Args:
        probe: asks for it.
        stream: the connection to it.
    """
    return Probed(probe.connection, look_at(probe.pid, stream))


def answer_look(look: Look) -> Looked:
    """Returns what can be found out about a rank that has no connection yet."""
    return Looked(look.rank, look_at_process(look.pid))


def look_at(pid: int | None, stream: socket.socket) -> Finding:
    """Returns what can be found out about a peer, without waiting.

    Args:
        pid: its process, or None when it runs on another machine.
        stream: the connection to it.
    """
    finding = Finding.UNKNOWN if pid is None else look_at_process(pid)
    if not finding.is_fatal and _is_unreachable(stream):
        return Finding.UNREACHABLE
    return finding


def look_at_process(pid: int) -> Finding:
    """Returns whether a process of this machine is stopped, gone or running; one that a debugger holds is running."""
    stat = read_stat(pid)
    if stat is None:
        return Finding.RUNNING if _exists(pid) else Finding.GONE
    if stat.state == "T":
        return Finding.STOPPED
    return Finding.GONE if stat.state in ("Z", "X") else Finding.RUNNING


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
    return bool(_UNACKED.unpack_from(info)[0]) and _LAST_ACK.unpack_from(info)[0] > _UNREACHABLE_AFTER_MS
