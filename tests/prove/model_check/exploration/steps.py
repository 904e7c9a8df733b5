"""What a rank of the model does, one step after the other: it asks, tells, or leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradsync.rendezvous.frames import FrameType

ID = bytes(128)


class Ask(NamedTuple):
    """A request: the rank waits for its answer."""

    type: FrameType
    fields: tuple[Any, ...]


class Tell(NamedTuple):
    """A message that gets no answer."""

    type: FrameType
    fields: tuple[Any, ...]


class Leave(NamedTuple):
    """The orderly goodbye."""


Step = Ask | Tell | Leave
LEAVE = Leave()


def join(rank: int, world_size: int, pid: int = 0) -> Ask:
    return Ask(FrameType.JOIN, (rank, world_size, "machine", "host", pid))


def barrier(name: str = "b", *, ranks: tuple[int, ...] | None = None) -> Ask:
    return Ask(FrameType.EXCHANGE, (name, _listed(ranks), b""))


def exchange(value: bytes) -> Ask:
    return Ask(FrameType.EXCHANGE, ("x", None, value))


def set_key(key: str, value: bytes) -> Ask:
    return Ask(FrameType.SET, (key, value))


def get_key(key: str, from_rank: int | None = None) -> Ask:
    return Ask(FrameType.GET, (key, from_rank))


def delete(key: str) -> Ask:
    return Ask(FrameType.DELETE, (key,))


def leave(name: str) -> Tell:
    return Tell(FrameType.LEAVE, (name, None, 0))


def left_ranks(name: str) -> Ask:
    return Ask(FrameType.LEFT_RANKS, (name, None))


def report(reason: str, culprit: int | None = None) -> Tell:
    return Tell(FrameType.REPORT_FAILURE, (reason, culprit))


def waiting(position: int, missing: tuple[int, ...] | None = None) -> Tell:
    fields = ("g", None, position, f"all_reduce #{position}", 400, _listed(missing), False)
    return Tell(FrameType.STUCK, fields)


def absent(position: int, missing: tuple[int, ...] | None = None) -> Tell:
    fields = ("g", None, position, f"all_reduce #{position}", 1000, _listed(missing), True)
    return Tell(FrameType.STUCK, fields)


def _listed(ranks: tuple[int, ...] | None) -> list[int] | None:
    """Off the wire, ranks come as a list."""
    return None if ranks is None else list(ranks)
