"""The world's ranks over other backends than the world's own: its siblings, each made once it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gradsync.backend_choice import check_mpi, share_gpu_offers
from gradsync.communicators.base import Communicator
from gradsync.communicators.collectives.group_meeting import whom
from gradsync.communicators.lifetime import culprit_of
from gradsync.communicators.local import LocalCommunicator
from gradsync.communicators.shared_memory.layout import check_memory
from gradsync.communicators.shared_memory.platform_check import check_platform
from gradsync.environment import RankEnvironment
from gradsync.errors import BackendUnavailable, CommunicatorClosed, InvalidArgument, RendezvousTimeout, describe
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.group_client import GroupClient
from gradsync.world_connection import WorldSettings, connect_over

_MAX_REFUSAL_BYTES = 4096


class Siblings:
    """The communicators of the world's ranks over other backends."""

    def __init__(self) -> None:
        self._made: dict[str, Communicator] = {}  # by backend

    def over(
        self, backend: str, world: Communicator, settings: WorldSettings, meet: Callable[[], RendezvousClient]
    ) -> Communicator:
        """Returns the one over a backend; made at the first use, by all ranks.

        Args:
            backend: "nccl", "shm", "mpi" or "local"; not the world's.
            world: whose ranks they are.
            settings: of the world.
            meet: returns this rank's connection to the rendezvous server.

        Raises:
            InvalidArgument, BackendUnavailable: it cannot run here; on all ranks.
            CommunicatorClosed: it was made before, and has ended.
            BackendUnavailable, NcclError, RendezvousTimeout, RankFailed: from the connection; told to all ranks.
        """
        sibling = self._made.get(backend)
        if sibling is None:
            sibling = self._made[backend] = self._make(backend, world, settings, meet)
            world.family.add(sibling)
        # Not made anew: another rank may not know yet that it has ended, and would not come.
        if sibling.closed:
            raise CommunicatorClosed(
                f"{world.label}: override_backend({backend!r}): the communicator over it cannot be used any more: "
                f"{sibling.lifetime.ended_because}; there can be a new one when all ranks have called "
                "gs.destroy_process_group() and gs.init_process_group()"
            )
        return sibling

    def clear(self) -> None:
        """Forgets all."""
        self._made.clear()

    def _make(
        self, backend: str, world: Communicator, settings: WorldSettings, meet: Callable[[], RendezvousClient]
    ) -> Communicator:
        if backend == "local":
            if world.world_size != 1:
                raise InvalidArgument(
                    f"{world.label}: override_backend('local') is for one rank, there are {world.world_size}"
                )
            return LocalCommunicator()
        client = meet()
        place = backend, client, world.ranks, world.family.new_name(backend), settings
        is_possible = False
        try:
            _agree(*place)
            is_possible = True
            return _connect(*place)
        except BaseException as error:
            if is_possible or not isinstance(error, BackendUnavailable):  # that is raised on all ranks
                client.report_failure(f"in override_backend: {describe(error)}", culprit=culprit_of(error))
            raise


def _agree(backend: str, client: RendezvousClient, ranks: Sequence[int], name: str, settings: WorldSettings) -> None:
    """Makes sure that another backend can join the world's ranks; not for "local". Every rank must call it.

    What one rank alone finds out, all must know: they would wait for it otherwise.

    Args:
        backend: "nccl", "shm" or "mpi".
        client: this rank's connection.
        ranks: all ranks.
        name: of the communicator that is to be made, not used before.
        settings: of the world.

    Raises:
        BackendUnavailable: on all ranks, where one of them cannot use it.
        RendezvousTimeout, RankFailed: a rank did not come, or died.
    """
    asking = GroupClient(client, ranks, f"{name}/offers")
    try:
        if backend == "shm":
            _share_refusals(asking, backend, _why_not_shm(settings.place, asking), settings.timeout_seconds)
        elif backend == "mpi":
            _share_refusals(asking, backend, _why_not_mpi(settings.place), settings.timeout_seconds)
        else:
            device = _gpu_of(settings)
            share_gpu_offers(
                asking, settings.place, device, settings.timeout_seconds, allow_shared_gpu=settings.allow_shared_gpu
            )
    except RendezvousTimeout as error:
        raise RendezvousTimeout(
            f"{client.label}: override_backend({backend!r}) waited {settings.timeout_seconds:.3g} s: every rank of the "
            f"world must enter the block; missing: {whom(error)}",
            missing_ranks=error.missing_ranks,
        ) from error
    finally:
        asking.close()


def _connect(
    backend: str, client: RendezvousClient, ranks: Sequence[int], name: str, settings: WorldSettings
) -> Communicator:
    """Makes the communicator that _agree has found possible. Every rank must call it.

    Whoever calls it reports a failure to the other ranks, which would wait for this one otherwise.

    Raises:
        BackendUnavailable, NcclError, RendezvousTimeout, RankFailed: from the connection.
    """
    if backend == "nccl":
        settings = replace(settings, device=_gpu_of(settings))
    return connect_over(backend, GroupClient(client, ranks, name), settings, name)


def _gpu_of(settings: WorldSettings) -> str | None:
    return None if settings.device == "cpu" else settings.device


def _why_not_shm(place: RankEnvironment, client: GroupClient) -> str:
    """Returns why this rank cannot share memory with the others; empty where nothing is known against it."""
    try:
        check_platform()
        if place.local_world_size != place.world_size:
            raise BackendUnavailable(
                f"it joins the ranks of one host; of {place.world_size} ranks {place.local_world_size} are on this one"
            )
        if client.rank == 0:  # which makes the memory for all
            check_memory(client.world_size)
    except BackendUnavailable as error:
        return str(error)
    return ""


def _why_not_mpi(place: RankEnvironment) -> str:
    """Returns why MPI cannot join this rank with the others; empty where nothing is known against it."""
    try:
        check_mpi(place)
    except BackendUnavailable as error:
        return str(error)
    return ""


def _share_refusals(client: GroupClient, backend: str, refusal: str, timeout_seconds: float) -> None:
    """Raises what any rank has against a backend, on all of them."""
    client.set(f"refusal/{client.rank}", refusal.encode()[:_MAX_REFUSAL_BYTES])
    client.barrier("refusals", timeout_seconds=timeout_seconds)  # names who does not come
    refusals = [client.get(f"refusal/{rank}").decode(errors="replace") for rank in range(client.world_size)]
    told = [f"rank {client.world_ranks[rank]}: {text}" for rank, text in enumerate(refusals) if text]
    if told:
        same = len(set(refusals)) == 1
        raise BackendUnavailable(
            f"{client.label}: backend {backend!r} cannot join these ranks: {refusals[0] if same else told[0]}"
        )
