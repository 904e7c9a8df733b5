"""What a training script asks about its ranks, under the names of detectron2's `utils.comm`: `gs.comm`.

A script that came from there runs on with `from gradsync import comm`. All functions work when nothing is initialised:
this process is then a world of one. Python objects travel by pickle and keep off the GPU; see communicators/objects.py
for what that means (peers that trust each other).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.base import Communicator
from gradsync.communicators.local import LocalCommunicator
from gradsync.communicators.world import get_initial_world, get_world, group_or_world
from gradsync.errors import InvalidArgument, PlanMismatch, describe
from gradsync.process_group import group_barrier, place_on_machine
from gradsync.reduction import OPERATIONS_BY_DTYPE

_SEED_BYTES, _SEED_BITS = 4, 31

_local_group: Communicator | None = None
_local_group_of: Communicator | None = None  # the world that it belongs to; None: nothing was initialised


def get_world_size() -> int:
    """Returns the number of ranks; 1 when nothing is initialised."""
    world = get_world()
    return 1 if world is None else world.world_size


def get_rank() -> int:
    """Returns this process's number among all ranks; 0 when nothing is initialised."""
    world = get_world()
    return 0 if world is None else world.rank


def get_local_rank() -> int:
    """Returns this process's number among the ranks of its machine: the one to pick a GPU by. 0 when not initialised.

    detectron2 wants create_local_process_group() first. Here that is not needed: the launcher's word counts until then,
    LOCAL_RANK of torchrun or `gradsync run`, or its like (see environment.py). Where there is no such word, all ranks
    count as those of one machine.
    """
    if _has_local_group():
        return get_local_process_group().rank
    return 0 if get_world() is None else place_on_machine()[0]


def get_local_size() -> int:
    """Returns the number of ranks on this machine, known as in get_local_rank(). 1 when not initialised."""
    if _has_local_group():
        return get_local_process_group().world_size
    return 1 if get_world() is None else place_on_machine()[1]


def create_local_process_group(num_workers_per_machine: int) -> None:
    """Makes the group of the ranks of each machine. Every rank must call it, once, with the same number.

    Machines are taken to hold consecutive ranks, as launchers number them: 0 to n - 1 on the first.

    Args:
        num_workers_per_machine: n, by which the number of ranks must divide evenly.

    Raises:
        InvalidArgument: it does not divide, or the group exists already.
        PlanMismatch: the ranks pass different numbers.
    """
    global _local_group, _local_group_of
    n, world_size, rank = num_workers_per_machine, get_world_size(), get_rank()
    who = f"rank {rank}/{world_size}: create_local_process_group"
    if _has_local_group():
        raise InvalidArgument(f"{who} was called before: get_local_process_group() gives the group")
    if not isinstance(n, int) or isinstance(n, bool) or n < 1 or world_size % n:
        raise InvalidArgument(
            f"{who} needs the same number of ranks on each machine: one that divides the {world_size} of the world, "
            f"got {n!r}"
        )
    world = get_world()
    if world is None:
        _local_group, _local_group_of = LocalCommunicator(), None
        return
    world.agree(agreement_on("create_local_process_group", (), None, f"{n} on each machine"))
    first = rank - rank % n
    _local_group, _local_group_of = world.new_group(range(first, first + n)), get_initial_world()


def get_local_process_group() -> Communicator:
    """Returns the group of the ranks of this machine, to be passed as `group`.

    Raises:
        InvalidArgument: it was not made.
    """
    if _local_group is None or not _has_local_group():
        raise InvalidArgument(
            "there is no local process group: call gs.comm.create_local_process_group(num_workers_per_machine) on "
            "every rank first, after gs.init_process_group()"
        )
    return _local_group


def is_main_process() -> bool:
    """Whether this is rank 0: the one that prints and saves."""
    return get_rank() == 0


def synchronize() -> None:
    """Returns once every rank has called it; at once in a world of one."""
    if get_world_size() > 1:
        group_barrier()


def all_gather(data: Any, group: Communicator | None = None) -> list[Any]:
    """Returns every rank's `data`, by rank. Every rank must call it.

    Args:
        data: anything that pickles. In a world of one it comes back as it is, and need not.
        group: whose ranks take part; None is the world.

    Raises:
        InvalidArgument: a rank's data does not pickle (on every rank), or does not unpickle.
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as Communicator.all_reduce.
    """
    communicator = _ranks_of(group)
    return [data] if communicator is None else communicator.objects.all_gather(data)


def gather(data: Any, dst: int = 0, group: Communicator | None = None) -> list[Any]:
    """Returns every rank's `data`, by rank, on rank `dst`, and an empty list elsewhere. Every rank must call it.

    Args:
        data: anything that pickles. In a world of one it comes back as it is, and need not.
        dst: a rank of the group, as the group counts.
        group: whose ranks take part; None is the world.

    Raises:
        InvalidArgument: there is no rank `dst`; or as all_gather.
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as Communicator.all_reduce.
    """
    communicator = _ranks_of(group)
    if communicator is None:
        if dst != 0:
            raise InvalidArgument(f"rank 0/1: gather needs dst to be 0, the only rank, got {dst!r}")
        return [data]
    return communicator.objects.gather(data, dst) or []


def shared_random_seed() -> int:
    """Returns a random number of 31 bits, the same on all ranks and another one at every call. Every rank must call it.

    All ranks that seed a generator with it draw the same numbers: for a sampler that shuffles, say. It is fresh from
    the operating system, whatever generators have been seeded with.
    """
    seed = int.from_bytes(os.urandom(_SEED_BYTES), "little") >> (8 * _SEED_BYTES - _SEED_BITS)
    world = _ranks_of(None)
    return seed if world is None else int(world.objects.broadcast(seed, what="shared_random_seed"))


def reduce_dict(input_dict: Mapping[Any, Any], average: bool = True) -> dict[Any, Any]:
    """Reduces scalars by name over all ranks, for logging. Every rank must call it; every rank gets the results.

    The results are the same on all ranks to the last bit. detectron2 has them right on rank 0 only.

    Args:
        input_dict: scalars by name: Python numbers, NumPy's, or 0-d arrays of NumPy, CuPy or any library that speaks
            DLPack. All ranks have the same names, in any order.
        average: the mean over the ranks, else the sum.

    Returns:
        NumPy scalars (`.item()` makes Python's) in the order of input_dict. Floating and complex numbers keep their
        precision; the sum of integers is an integer, of 64 bits, and their mean a float64.

    Raises:
        PlanMismatch: the ranks have different names, or differ in `average`: on every rank, with what each one lacks.
        InvalidArgument: a value is no scalar: on every rank.
        RankFailed, CollectiveTimeout, CommunicatorClosed: as Communicator.all_reduce.
    """
    told = _tell(input_dict)
    world = _ranks_of(None)
    what = f"reduce_dict({'mean' if average else 'sum'})"
    everything = [told] if world is None else world.objects.all_gather(told, what=what)
    label = "rank 0/1" if world is None else world.label
    refusals = [f"rank {rank}: {theirs.refusal}" for rank, theirs in enumerate(everything) if theirs.refusal]
    if refusals:
        raise InvalidArgument(f"{label}: reduce_dict needs scalars by name: {'; '.join(refusals)}")
    _check_names(label, [list(theirs.scalars) for theirs in everything])
    return {
        name: _reduce([theirs.scalars[name] for theirs in everything], average=bool(average)) for name in told.scalars
    }


class _Told(NamedTuple):
    """What one rank tells the others in reduce_dict: its scalars, or why it has none to tell."""

    scalars: dict[Any, np.generic]
    refusal: str = ""


def _ranks_of(group: Communicator | None) -> Communicator | None:
    """Returns the communicator of a group, the world's for None; None where it is one rank alone."""
    communicator = get_world() if group is None else group_or_world(group)
    return None if communicator is None or communicator.world_size == 1 else communicator


def _has_local_group() -> bool:
    return _local_group is not None and _local_group_of is get_initial_world()


def _tell(input_dict: Mapping[Any, Any]) -> _Told:
    if not isinstance(input_dict, Mapping):
        return _Told({}, f"got a {type(input_dict).__name__}")
    try:
        return _Told({name: _scalar(name, value) for name, value in input_dict.items()})
    except InvalidArgument as error:
        return _Told({}, str(error))
    except Exception as error:  # the others wait to hear of this rank
        return _Told({}, describe(error))


def _scalar(name: Any, value: Any) -> np.generic:
    """Returns a NumPy scalar of the value's precision; waits for the GPU where it is there."""
    if isinstance(value, (bool, int, float, complex, np.generic, np.ndarray)):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__") and not tuple(value.shape):
        array = np.asarray(value.item(), _numpy_dtype(value.dtype)) if hasattr(value, "item") else np.from_dlpack(value)
    else:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise InvalidArgument(f"{name!r} is a {type(value).__name__}{shape}")
    if array.shape:
        raise InvalidArgument(f"{name!r} is an array of shape {array.shape}")
    if array.dtype.name not in OPERATIONS_BY_DTYPE:
        raise InvalidArgument(f"{name!r} has dtype {array.dtype}")
    return cast("np.generic", array[()])


def _numpy_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Returns NumPy's dtype of the same name ("torch.float32"); None, NumPy's own choice, where it has none."""
    try:
        return np.dtype(str(dtype).rpartition(".")[2])
    except TypeError:
        return None


def _check_names(label: str, names_by_rank: Sequence[list[Any]]) -> None:
    if all(set(names) == set(names_by_rank[0]) for names in names_by_rank):
        return
    every_name = dict.fromkeys(name for names in names_by_rank for name in names)
    described = {rank: f"has {_listed(names)}" for rank, names in enumerate(names_by_rank)}
    for rank, names in enumerate(names_by_rank):
        lacking = [name for name in every_name if name not in names]
        if lacking:
            described[rank] += f", lacks {_listed(lacking)}"
    shown = "".join(f"\n  rank {rank} {text}" for rank, text in described.items())
    raise PlanMismatch(
        f"{label}: reduce_dict needs the same names on all ranks; nothing was reduced:{shown}", descriptions=described
    )


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _reduce(scalars: Sequence[np.generic], *, average: bool) -> np.generic:
    """Reduces one value of each rank, in the order of the ranks, so that the result is the same everywhere."""
    dtype = np.result_type(*[scalar.dtype for scalar in scalars])
    values = np.array(scalars, dtype)
    if dtype.kind in "biu":
        total = np.sum(values)
        return np.float64(total / len(values)) if average else cast("np.generic", total)
    with np.errstate(all="ignore"):  # overflow and NaN are the caller's business
        total = np.sum(values, dtype=np.complex128 if dtype.kind == "c" else np.float64)
        result = np.asarray(total / len(values) if average else total).astype(dtype)
    return cast("np.generic", result[()])
