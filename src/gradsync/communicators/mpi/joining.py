"""How ranks come to a communicator of MPI of their own."""

from __future__ import annotations

import time
import zlib
from typing import Any

from gradsync.communicators.mpi.library import to_mpi_error
from gradsync.communicators.mpi.unfinished import keep_for_ever
from gradsync.errors import CollectiveTimeout
from gradsync.machine import run_with_timeout
from gradsync.rendezvous.client import RendezvousClient


def make_communicator(mpi: Any, client: RendezvousClient, name: str, timeout_seconds: float) -> Any:
    """Returns a communicator of MPI of the client's ranks, in their order. Every one of them must call it.

    MPI's call waits for all of them and cannot be interrupted: they enter it when all stand before it.

    Args:
        mpi: the module mpi4py.MPI.
        client: the way of these ranks to the rendezvous server; its world is MPI's.
        name: not used before in this generation.
        timeout_seconds: for all of it.

    Raises:
        MpiError: MPI failed.
        RendezvousTimeout, CollectiveTimeout, RankFailed: a rank did not come, or died.
    """
    deadline = time.monotonic() + timeout_seconds
    client.barrier(f"mpi/{name}/ready", timeout_seconds=timeout_seconds)
    world = mpi.COMM_WORLD
    members = world.Get_group().Incl(list(client.world_ranks))
    tag = zlib.crc32(name.encode()) % 32768  # every MPI has tags up to there

    inside = [members]  # as long as MPI is at work, which a deadline, or Ctrl-C, leaves to itself

    def create() -> Any:
        try:
            return world.Create_group(members, tag)
        except mpi.Exception as error:
            raise to_mpi_error(error, client.label) from error
        finally:
            inside.clear()
            members.Free()

    try:
        seconds = max(0.0, deadline - time.monotonic())
        return run_with_timeout(create, "gradsync-mpi-join", seconds, client.check)
    except TimeoutError as error:
        raise CollectiveTimeout(
            f"{client.label}: MPI_Comm_create_group did not return within {timeout_seconds:.3g} s, although all ranks "
            "had come to it"
        ) from error
    finally:
        if inside:
            keep_for_ever((), inside)
