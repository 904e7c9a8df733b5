"""How an NCCL communicator ends where nobody calls close(): what other threads call, without keeping it alive."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from gradsync.communicators.nccl.agreements import NcclAgreements
from gradsync.communicators.nccl.watcher import Watcher
from gradsync.errors import GradsyncError
from gradsync.rendezvous.client import RendezvousClient


def call_if_alive(method: weakref.WeakMethod[Any], error: GradsyncError) -> None:
    """Calls a communicator's method with what has ended it, unless it has been collected."""
    bound = method()
    if bound is not None:
        bound(error)


def tell_others(client: RendezvousClient, reason: str | None, culprit: int | None, told: threading.Event) -> None:
    """Reports a failure that only this rank knows of; the event says that the server has heard it."""
    try:
        if reason is not None and client.world_size > 1:
            client.report_failure(reason, culprit=culprit)
    finally:
        told.set()


def end_rest(watcher: Watcher, agreements: NcclAgreements, client: RendezvousClient) -> None:
    """Ends what a collected communicator has left behind, beside NCCL's own."""
    watcher.stop()
    agreements.close()
    if client.name:  # of a group: the world goes on
        client.close()
