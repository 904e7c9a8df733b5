"""The backend of a world of one rank: it copies inputs to outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gradsync.arguments import DEFAULT_COLLECTIVE_TIMEOUT_SECONDS
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Backend, Bounds, Message
from gradsync.communicators.communicator import Communicator
from gradsync.errors import InvalidArgument
from gradsync.launchers import RankEnvironment, WorldSettings
from gradsync.reduction import Array, ReduceOp


def local_communicator() -> Communicator:
    """Returns a communicator of one rank; see LocalBackend."""
    return Communicator(LocalBackend())


def check(place: RankEnvironment) -> None:
    """See BackendModule in backend_choice.py. Raises InvalidArgument if the world has several ranks."""
    if place.world_size != 1:
        raise InvalidArgument(f"backend 'local' needs a world_size of 1, got {place.world_size}")


def offer(_settings: WorldSettings) -> str:
    """See BackendModule."""
    return ""


def connect(_client: None, settings: WorldSettings, _group: str) -> LocalBackend:
    """See BackendModule."""
    return LocalBackend(settings.collective_timeout_seconds)


class LocalBackend(Backend):
    """The backend of a world of one rank: the result of every reduction is its input.

    Args:
        timeout_seconds: how long a thread waits for the future of a gradient that another thread reduces; nothing else
            waits here.
    """

    name = "local"

    def __init__(self, timeout_seconds: float = DEFAULT_COLLECTIVE_TIMEOUT_SECONDS) -> None:
        super().__init__(None, "local", timeout_seconds)

    def all_reduce(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        agreement: Agreement,
        factor: float = 1.0,
    ) -> None:
        if factor != 1.0:
            self.arrays.multiply_in_place(sources, factor)
        for source, target in zip(sources, targets, strict=True):
            _copy(source, target)

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        _copy(source, target)

    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        pass  # the root is the only rank

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        _copy(source, target)

    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        _copy(source, target)

    def barrier(self, agreement: Agreement) -> None:
        pass

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        awaited: Collection[Message] = (),
        seconds: float | None = None,
    ) -> None:
        for send, receive in zip(sends, receives, strict=True):  # the only rank exchanges with itself
            _copy(send.flat, receive.flat)
            send.end()
            receive.end()

    def connect_group(self, members: tuple[int, ...], name: str) -> LocalBackend:
        return LocalBackend(self.timeout_seconds)

    def announce(self, aborted_because: str | None = None, culprit: int | None = None) -> None:
        pass  # there is nobody to tell

    def release(self) -> None:
        pass


def _copy(source: Array, target: Array) -> None:
    """Copies the source to the target, unless both are the same array."""
    if target is not source:
        np.copyto(target, source)
