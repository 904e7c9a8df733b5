"""What goes into the server's core and what comes out: events and actions, plain data.

`event_loop` turns sockets and the clock into events and carries the actions out; `protocol` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradsync.rendezvous.finding import Finding
from gradsync.rendezvous.messages import FrameType, Message


@dataclass(slots=True)  # not frozen, nor is Send: one is made for every message, and freezing triples what that costs
class Received:
    """An authenticated message came in."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class Lost:
    """A connection ended; `cause` says how, in words."""

    connection: int
    cause: str


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to a Probe: what was found of that peer."""

    connection: int
    finding: Finding


@dataclass(frozen=True, slots=True)
class Started:
    """A rank's process runs, as whoever started it knows: it can be looked at, joined or not."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Looked:
    """The answer to a Look: what was found of that rank's process."""

    rank: int
    finding: Finding


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's process has ended, as whoever started it knows; `how` in words: "ended with exit code 0"."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due deadlines are to be acted on."""


@dataclass(slots=True)
class Send:
    """Send this message. The fields stay out of the repr: they may hold an id, which is a capability."""

    connection: int
    type: FrameType
    fields: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Close:
    """Close this connection once everything sent to it has been written."""

    connection: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Look at this peer, and answer with Probed at once, unless the connection is lost.

    `pid` is its process where that runs on the server's machine, else None.
    """

    connection: int
    pid: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """Look at the process of a rank that has no connection yet, and answer with Looked at once."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Notice:
    """Tell the operator (the log)."""

    text: str


#: What becomes of a rank's process, as whoever started it or has looked at it tells.
OfProcess = Started | Looked | Ended
Event = Received | Lost | Probed | OfProcess | Tick
Action = Send | Close | Probe | Look | Notice
