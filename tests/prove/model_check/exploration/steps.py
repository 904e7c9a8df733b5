"""What a rank of the model does, one step after the other: it asks, tells, goes ahead, or leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradsync.rendezvous.messages import PROTOCOL_VERSION, UNIQUE_ID_BYTES, FrameType

SHORT_MS, LONG_MS = 400, 1000  # beside each other and beside the silences of the core: every order of ends comes up
ID = bytes(UNIQUE_ID_BYTES)


class Ask(NamedTuple):
    """A request: the rank waits for its answer."""

    type: FrameType
    fields: tuple[Any, ...]


class Tell(NamedTuple):
    """A message that gets no answer."""

    type: FrameType
    fields: tuple[Any, ...]


class Launch(NamedTuple):
    """A collective that the rank expects to be the same on all: it goes ahead, unless it was asked about it before."""

    group: str
    position: int
    digest: int
    timeout_ms: int = LONG_MS


class Leave(NamedTuple):
    """The orderly goodbye."""


Step = Ask | Tell | Launch | Leave
LEAVE = Leave()


def join(rank: int, world_size: int, timeout_ms: int) -> Ask:
    return Ask(FrameType.JOIN, (PROTOCOL_VERSION, rank, world_size, timeout_ms))


def barrier(name: str = "b", *, ranks: tuple[int, ...] | None = None, timeout_ms: int = LONG_MS) -> Ask:
    return Ask(FrameType.BARRIER, (name, _listed(ranks), timeout_ms))


def agree(position: int, digest: int, *, group: str = "g", timeout_ms: int = LONG_MS) -> Ask:
    return Ask(FrameType.AGREE, (group, position, digest, None, timeout_ms))


def put_id(root: int) -> Ask:
    return Ask(FrameType.PUT_ID, ("g", root, None, ID))


def get_id(root: int, *, timeout_ms: int = LONG_MS) -> Ask:
    return Ask(FrameType.GET_ID, ("g", root, None, timeout_ms))


def set_key(key: str, value: bytes) -> Ask:
    return Ask(FrameType.SET, (key, value))


def get_key(key: str, *, timeout_ms: int = LONG_MS) -> Ask:
    return Ask(FrameType.GET, (key, timeout_ms))


def add(key: str, amount: int = 1) -> Ask:
    return Ask(FrameType.ADD, (key, amount))


def delete(key: str) -> Ask:
    return Ask(FrameType.DELETE, (key,))


def forget(scope: str) -> Tell:
    return Tell(FrameType.FORGET, (scope, None))


def report(reason: str, culprit: int | None = None) -> Ask:
    return Ask(FrameType.REPORT_FAILURE, (reason, culprit))


def introduce(pid: int) -> Tell:
    return Tell(FrameType.INTRODUCE, ("machine", "host", pid))


def waiting(position: int, missing: tuple[int, ...] | None = None) -> Tell:
    return Tell(FrameType.WAITING, ("g", None, position, f"all_reduce #{position}", 400, _listed(missing)))


def absent(position: int, missing: tuple[int, ...] | None = None) -> Ask:
    return Ask(FrameType.ABSENT, ("g", None, position, f"all_reduce #{position}", 1000, _listed(missing)))


def _listed(ranks: tuple[int, ...] | None) -> list[int] | None:
    """Off the wire, ranks come as a list."""
    return None if ranks is None else list(ranks)
