"""How ranks of an MPI job meet without being told where: rank 0 hosts, and tells the others over MPI.

What MPI carries is not encrypted, and neither is the run's secret on this way: whoever can read the network of an MPI
job can read its gradients too.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gradsync.communicators.mpi.library import check_place, load_mpi, loaded_mpi, to_mpi_error
from gradsync.communicators.mpi.unfinished import keep_for_ever
from gradsync.environment import RankEnvironment
from gradsync.errors import BackendUnavailable, RendezvousTimeout
from gradsync.machine import address_towards, own_addresses
from gradsync.meeting_file import Meeting
from gradsync.reduction import Array

_TEXT_BYTES = 512  # room for an address and a secret made for the meeting, or for this many addresses
_TOLD_ADDRESSES = 8
_LOOK_EVERY_SECONDS = 1e-3
_ANY_PORT = 9  # nothing is sent there

_own_comm: Any = None  # apart from what the program does on MPI_COMM_WORLD; lasts as long as MPI


def mpi_place() -> RankEnvironment | None:
    """Returns this process's place as MPI tells it, where no launcher has left it in the environment.

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


def can_meet_over_mpi(place: RankEnvironment) -> bool:
    """Whether MPI joins exactly the ranks of the run, and is there; initialises it."""
    try:
        check_place(load_mpi(), place.rank, place.world_size)
    except BackendUnavailable:
        return False
    return True


def own_host(place: RankEnvironment, deadline: float) -> str:
    """Returns the address of this machine at which the other ranks reach it. Every rank must call it.

    The one from which this machine would send to another one of the job; loopback where there is no other.

    Raises:
        BackendUnavailable: no such address is found: the text says what to set.
        RendezvousTimeout: a rank did not come.
    """
    if place.local_world_size == place.world_size:
        return "127.0.0.1"
    mine = own_addresses()[:_TOLD_ADDRESSES]
    others = [address for row in _share(" ".join(mine).encode(), place, deadline) for address in row.split()]
    for other in dict.fromkeys(others):
        address = address_towards(other, _ANY_PORT)
        if other not in mine and address in mine:
            return address
    raise BackendUnavailable(
        f"rank {place.rank}/{place.world_size}: this machine ({', '.join(mine) or 'no address'}) has no way to any "
        f"other one of the job ({', '.join(dict.fromkeys(others)) or 'no addresses'}): name an address that rank 0 can "
        "bind in GRADSYNC_ADDRESS=host:port, with GRADSYNC_SECRET_FILE, on every rank"
    )


def tell_meeting(meeting: Meeting | None, place: RankEnvironment, deadline: float) -> Meeting:
    """Returns what rank 0 has passed. Every rank must call it; the others pass None.

    Raises:
        RendezvousTimeout: rank 0 did not come.
    """
    text = b"" if meeting is None else f"{meeting.address}\n{meeting.secret.hex()}".encode()
    buffer = _padded(text)
    comm = _comm(place, deadline)
    _finish(comm.Ibcast(buffer, 0), place, deadline, buffer)
    address, secret = buffer.tobytes().rstrip(b"\0").decode().split("\n")
    return Meeting(address, bytes.fromhex(secret))


def _share(mine: bytes, place: RankEnvironment, deadline: float) -> list[str]:
    """Returns a short text of every rank, by rank."""
    row = _padded(mine)
    rows = np.zeros((place.world_size, _TEXT_BYTES), np.uint8)
    _finish(_comm(place, deadline).Iallgather(row, rows), place, deadline, row, rows)
    return [found.tobytes().rstrip(b"\0").decode(errors="replace") for found in rows]


def _padded(text: bytes) -> Array:
    """Returns a short text as the array that MPI moves."""
    array: Array = np.frombuffer(text.ljust(_TEXT_BYTES, b"\0"), np.uint8).copy()
    return array


def _comm(place: RankEnvironment, deadline: float) -> Any:
    global _own_comm
    if _own_comm is None:
        made, request = load_mpi().COMM_WORLD.Idup()
        _finish(request, place, deadline)
        _own_comm = made
    return _own_comm


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
