"""Chooses the backend for all ranks, and makes their communicator. backends.py has the table of all backends.

One that init_process_group() or GRADSYNC_BACKEND names, each rank checks before it joins the others. For "auto" rank 0
chooses once all have joined: before, nobody knows whether every rank has a GPU of its own. If none suits the ranks that
have joined, all raise the error, so that nobody waits.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from gradsync.backends import TABLE
from gradsync.communicators.backend import Backend
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.lifetime import culprit_of
from gradsync.environment import BACKEND
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, describe
from gradsync.launchers import SOURCES_WITH_MPI, RankEnvironment, WorldSettings
from gradsync.machine import count_gpus

if TYPE_CHECKING:
    from gradsync.rendezvous.client import RendezvousClient

# An offer is "+" and the identity of the rank's GPU (nothing on the CPU), or "-" and why it cannot use the backend.
_YES, _NO = "+", "-"
_MAX_OFFER_BYTES = 4096
_MPIEXEC = "mpiexec -n 8 -hosts a,b python train.py"
_DEVICE = r"cpu|cuda(:\d+)?"
NOT_AGREED = InvalidArgument, BackendUnavailable  #: all ranks raise these errors if they agree on no backend
_ERRORS: dict[str, type[GradsyncError]] = {error.__name__: error for error in NOT_AGREED}

_log = logging.getLogger("gradsync")


class BackendModule(Protocol):
    """What each backend's module defines."""

    def check(self, place: RankEnvironment, /) -> None:
        """Checks, before the ranks join, that this process can use the backend.

        Raises:
            BackendUnavailable, InvalidArgument: it cannot, and why.
        """

    def offer(self, settings: WorldSettings, /) -> str:
        """Checks, after the ranks have joined, that this rank can use the backend; sends nothing to the others.

        Returns:
            The identity of the GPU that this rank will use, by which rank 0 sees whether two ranks have the same one;
            "" without GPUs.

        Raises:
            BackendUnavailable, InvalidArgument: it cannot, and why.
        """

    def connect(self, client: Any, settings: WorldSettings, group: str, /) -> Backend:
        """Connects the ranks of a RendezvousClient, and returns their backend. All ranks pass the same `group`.

        Args:
            client: the rendezvous client of the ranks; None for the backend "local".
            settings: the settings of the world.
            group: the communicator's name, unique since the last init_process_group().
        """


def load(backend: str) -> BackendModule:
    """Imports a backend's module."""
    return cast("BackendModule", importlib.import_module(TABLE[backend].module))


# -- Before the ranks join --------------------------------------------------------------------------------------------


def choose_before_joining(wanted: str, settings: WorldSettings) -> str:
    """Returns the backend if it is known before the ranks join, as the user has named it or is alone; else "auto".

    Checks that this process can use it; for "auto" and ranks on several hosts, that it can use MPI if it sees no GPU.

    Args:
        wanted: what the user asks for, one of BACKENDS; "auto" with a CUDA device means "nccl".
        settings: the world's.

    Raises:
        InvalidArgument: the device has a wrong form or is not for this backend, or it is "local" for several ranks.
        BackendUnavailable: this process cannot use the backend, or none can connect the ranks; and why.
    """
    place, device = settings.place, settings.device
    if device is not None and not (isinstance(device, str) and re.fullmatch(_DEVICE, device)):
        raise InvalidArgument(f"device needs to be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if wanted == "auto" and device is not None and device != "cpu":
        wanted = "nccl"
    if wanted != "auto":
        if not TABLE[wanted].on_gpus and device not in (None, "cpu"):
            raise InvalidArgument(f"backend {wanted!r} needs device 'cpu', got {device!r}")
        load(wanted).check(place)
    elif place.world_size == 1:
        wanted, reason = suitable_backend([_offer_of_gpu(settings)], settings)
        _log_choice(place, wanted, reason)
    elif place.local_world_size != place.world_size and count_gpus() == 0:
        _check_mpi_instead(place, "no GPU is visible")
    return wanted


def suitable_backend(offers: Sequence[str], settings: WorldSettings) -> tuple[str, str]:
    """Returns the best backend for the ranks of the world, and why it is.

    Args:
        offers: each rank's: its GPU, or why it cannot use NCCL.
        settings: the world's.

    Raises:
        BackendUnavailable: none can connect these ranks, and why.
    """
    place = settings.place
    no_gpus = _why_not(offers, settings)
    if not no_gpus:
        return "nccl", "each rank has a GPU"
    if place.world_size == 1:
        return "local", f"one rank; {no_gpus}"
    if place.local_world_size != place.world_size:
        _check_mpi_instead(place, no_gpus)
        return "mpi", f"{place.source} has started ranks on several hosts; {no_gpus}"
    load("shm").check(place)
    return "shm", f"all ranks are on this host; {no_gpus}"


def _check_mpi_instead(place: RankEnvironment, no_gpus: str) -> None:
    """Checks that this process can use MPI, for ranks on several hosts without NCCL."""
    instead = f"start the ranks with mpiexec or srun, as in {_MPIEXEC}; if all are on one machine, set {BACKEND}=shm"
    if place.source in SOURCES_WITH_MPI:
        try:
            load("mpi").check(place)
            return
        except BackendUnavailable as error:
            instead = str(error)
    raise BackendUnavailable(
        f"no backend can connect these {place.world_size} ranks, of which {place.local_world_size} are on this host: "
        f"NCCL needs a GPU for each rank ({no_gpus}); on the CPU, ranks of several hosts communicate over MPI: "
        f"{instead}"
    )


# -- After the ranks have joined --------------------------------------------------------------------------------------


def agree_on_backend(client: RendezvousClient, wanted: str, settings: WorldSettings, *, is_checked: bool = True) -> str:
    """Returns the backend on which all ranks agree. Every rank must call it after joining.

    Args:
        client: a rendezvous client of the ranks, for one agreement only.
        wanted: what this rank asks for, or "auto".
        settings: the world's.
        is_checked: whether choose_before_joining() has checked that this rank can use it.

    Raises:
        InvalidArgument: the ranks ask for different backends. All raise it.
        BackendUnavailable: it cannot connect the ranks; for "auto", none can. All raise it.
        RendezvousTimeout, RankFailed: a rank did not call it, or died.
    """
    mine = _offer_of_gpu(settings) if wanted == "auto" else _YES if is_checked else _offer(wanted, settings)
    offer = f"{wanted}\n{mine}".encode()[:_MAX_OFFER_BYTES]
    offers = client.exchange("backend/offers", offer, root=0, timeout_seconds=settings.timeout_seconds)
    if client.rank == 0:
        try:
            decision = "\n".join(("", *_decide([each.decode(errors="replace") for each in offers], wanted, settings)))
        except (InvalidArgument, BackendUnavailable) as error:
            decision = f"{type(error).__name__}\n{error}"
        client.set("backend", decision.encode())
    else:
        decision = client.get("backend", from_rank=0, timeout_seconds=settings.timeout_seconds).decode()
    refused, _, text = decision.partition("\n")
    if refused:
        raise _ERRORS[refused](f"{client.label}: {text}")
    chosen, _, reason = text.partition("\n")
    _log_choice(settings.place, chosen, reason)
    return chosen


def _decide(offers: Sequence[str], wanted: str, settings: WorldSettings) -> tuple[str, str]:
    """Returns the backend for all ranks, and why: rank 0's part of agree_on_backend.

    `offers` has what each rank wants, and its offer, on separate lines. `wanted` and `settings` are rank 0's.
    """
    own_offers = []
    for rank, (its_wanted, own_offer) in enumerate(offer.split("\n", 1) for offer in offers):
        if its_wanted != wanted:
            raise InvalidArgument(
                f"rank {rank} asks for backend {its_wanted!r}, rank 0 for {wanted!r}: all ranks need the same "
                f"value, set by init_process_group or {BACKEND}"
            )
        own_offers.append(own_offer)
    if wanted == "auto":
        return suitable_backend(own_offers, settings)
    if reason := _why_not(own_offers, settings):
        raise BackendUnavailable(f"backend {wanted!r} cannot connect these ranks: {reason}")
    return wanted, "asked for"


def _offer(backend: str, settings: WorldSettings) -> str:
    """Returns this rank's offer for a backend: _YES and the identity of its GPU, or _NO and a reason."""
    try:
        return f"{_YES}{load(backend).offer(settings)}"
    except GradsyncError as error:
        return f"{_NO}{error}"


def _offer_of_gpu(settings: WorldSettings) -> str:
    """Returns this rank's offer for NCCL; loads CuPy, which takes long, only if this rank may have a GPU."""
    if settings.device == "cpu":
        return f"{_NO}device='cpu' was asked for"
    if count_gpus() == 0:
        return f"{_NO}no GPU is visible"
    return _offer("nccl", settings)


def _why_not(offers: Sequence[str], settings: WorldSettings) -> str:
    """Returns why a backend cannot connect the ranks that made these offers; "" if it can."""
    for rank, offer in enumerate(offers):
        if not offer.startswith(_YES):
            reason = offer.removeprefix(_NO)
            return reason if len(set(offers)) == 1 else f"rank {rank}: {reason}"
    gpus = [offer for offer in offers if offer != _YES]
    if len(set(gpus)) < len(gpus) and not settings.allow_shared_gpu:
        return f"{len(gpus)} ranks for {len(set(gpus))} visible GPUs"
    return ""


def agree_and_connect(
    where: str, client: RendezvousClient, wanted: str, settings: WorldSettings, group: str, *, is_checked: bool = True
) -> Communicator:
    """Agrees on a backend and connects the ranks over it; reports a failure of this rank alone to the others.

    Args:
        where: the public function, in reports.
        client, wanted, settings, group, is_checked: see agree_on_backend and connect.
    """
    with reporting(where, client, raised_by_all=NOT_AGREED):
        chosen = agree_on_backend(client, wanted, settings, is_checked=is_checked)
    with reporting(where, client):
        return connect(chosen, client, settings, group)


@contextlib.contextmanager
def reporting(
    where: str, client: RendezvousClient, *, raised_by_all: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Reports an exception of this rank in the block to the other ranks, unless its type is in `raised_by_all`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, raised_by_all):
            client.report_failure(f"in {where}: {describe(error)}", culprit=culprit_of(error))
        raise


def connect(backend: str, client: RendezvousClient | None, settings: WorldSettings, group: str) -> Communicator:
    """Connects the ranks of a rendezvous client over a backend, and returns their communicator.

    Args:
        backend: one that all of them can use.
        client: the ranks' rendezvous client; None for "local".
        settings: the world's.
        group: the communicator's name, unique since the last init_process_group().

    Raises:
        BackendUnavailable, NcclError, MpiError, RendezvousTimeout, CollectiveTimeout, RankFailed: the ranks could not
            connect.
    """
    return Communicator(load(backend).connect(client, settings, group))


def _log_choice(place: RankEnvironment, chosen: str, reason: str) -> None:
    # A warning if "auto" has not chosen NCCL although rank 0 sees a GPU.
    unused_gpu = chosen != "nccl" and reason != "asked for" and place.rank == 0 and count_gpus() > 0
    level = logging.WARNING if unused_gpu else logging.INFO
    _log.log(level, "rank %d/%d: backend %s (%s)", place.rank, place.world_size, chosen, reason)
