"""How ranks of an MPI job meet without being told where: they share short texts over MPI, before they have met.

What MPI carries is not encrypted, and neither is the run's secret on this way: whoever can read the network of an MPI
job can read its gradients too.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsync.communicators.mpi.library import check_place, load_mpi, loaded_mpi, to_mpi_error
from gradsync.communicators.mpi.unfinished import keep_for_ever
from gradsync.environment import RankEnvironment
from gradsync.errors import BackendUnavailable, RendezvousTimeout

if TYPE_CHECKING:
    from gradsync.rendezvous.hosting import Share

_TEXT_BYTES = 512  # room for an address and a secret made for the meeting, or for some addresses
_LOOK_EVERY_SECONDS = 1e-3

_own_comm: Any = None  # apart from what the program does on MPI_COMM_WORLD; lasts as long as MPI


def mpi_place() -> RankEnvironment | None:
    """Returns this process's place as MPI has it, where no launcher has left it in the environment.

    Raises:
        BackendUnavailable: there is no mpi4py.
    """
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    if world.Get_size() == 1:
        return None  # not started by mpiexec
    local = world.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        local_rank, local_world_size = local.Get_rank(), local.Get_size()
    finally:
        local.Free()
    return RankEnvironment(world.Get_rank(), world.Get_size(), local_rank, local_world_size, source="MPI")


def share_over_mpi(place: RankEnvironment) -> Share | None:
    """Returns what gives every rank a short text of each, where MPI joins exactly the ranks of the run; initialises it.

    Every rank must call that, and call it alike. It raises RendezvousTimeout where a rank does not come.
    """
    try:
        check_place(load_mpi(), place.rank, place.world_size)
    except BackendUnavailable:
        return None
    return partial(_share, place)


def _share(place: RankEnvironment, text: bytes, deadline: float) -> list[bytes]:
    global _own_comm
    if _own_comm is None:
        made, request = load_mpi().COMM_WORLD.Idup()
        _finish(request, place, deadline)
        _own_comm = made
    row = np.frombuffer(text.ljust(_TEXT_BYTES, b"\0"), np.uint8).copy()
    rows = np.zeros((place.world_size, _TEXT_BYTES), np.uint8)
    _finish(_own_comm.Iallgather(row, rows), place, deadline, row, rows)
    return [found.tobytes().rstrip(b"\0") for found in rows]


def _finish(request: Any, place: RankEnvironment, deadline: float, *memory: object) -> None:
    mpi = loaded_mpi()
    try:
        while not request.Test():
            if time.monotonic() > deadline:
                raise RendezvousTimeout(
                    f"rank {place.rank}/{place.world_size}: not all ranks of the MPI job came to init_process_group "
                    "before the deadline"
                )
            time.sleep(_LOOK_EVERY_SECONDS)
    except BaseException as error:  # Ctrl-C too: MPI goes on
        keep_for_ever([request], memory)
        if isinstance(error, mpi.Exception):
            raise to_mpi_error(error, f"rank {place.rank}/{place.world_size}") from error
        raise
