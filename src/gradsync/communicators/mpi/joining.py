"""How ranks come to a communicator of MPI of their own, and so to one of ours."""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING, Any

from gradsync.communicators.deadline_call import call_with_deadline
from gradsync.communicators.mpi.library import check_place, load_mpi, to_mpi_error
from gradsync.communicators.mpi.unfinished import keep_for_ever
from gradsync.errors import CollectiveTimeout
from gradsync.rendezvous.group_client import CommunicatorClient

if TYPE_CHECKING:
    from gradsync.communicators.mpi.communicator import MpiCommunicator


def connect_mpi(
    client: CommunicatorClient,
    *,
    group: str = "world",
    timeout_seconds: float = 120.0,
    collective_timeout_seconds: float = 300.0,
) -> MpiCommunicator:
    """Builds the communicator of all ranks of a rendezvous. Every rank must call it with the same group.

    Whoever calls it reports a failure to the other ranks, which would wait for this one otherwise.

    Args:
        client: this rank's connection, joined.
        group: a name not used before in this generation.
        timeout_seconds: for meeting the others.
        collective_timeout_seconds: how long a collective waits for a rank.

    Raises:
        BackendUnavailable: no mpi4py, or these are not the ranks that mpiexec or srun has started.
        MpiError: MPI failed.
        RendezvousTimeout, CollectiveTimeout, RankFailed: a rank did not come, or died.
    """
    from gradsync.communicators.mpi.communicator import MpiCommunicator

    mpi = load_mpi()
    check_place(mpi, client.rank, client.world_size)
    comm = make_communicator(mpi, client, group, timeout_seconds)
    return MpiCommunicator(mpi, comm, client, group, collective_timeout_seconds)


def make_communicator(mpi: Any, client: CommunicatorClient, name: str, timeout_seconds: float) -> Any:
    """Returns a communicator of MPI of the client's ranks, in their order. Every one of them must call it.

    MPI's call waits for all of them and cannot be interrupted: they enter it when all stand before it.

    Args:
        mpi: the module mpi4py.MPI.
        client: the way of these ranks to the rendezvous server; its world is MPI's.
        name: not used before in this generation.
        timeout_seconds: for all of it.

    Raises:
        As for connect_mpi.
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
        return call_with_deadline(create, "gradsync-mpi-join", seconds, client.check)
    except TimeoutError as error:
        raise CollectiveTimeout(
            f"{client.label}: MPI_Comm_create_group did not return within {timeout_seconds:.3g} s, although all ranks "
            "had come to it"
        ) from error
    finally:
        if inside:
            keep_for_ever((), inside)
