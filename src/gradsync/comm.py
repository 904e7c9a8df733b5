"""What a training script asks about its ranks, under the names of detectron2's `utils.comm`: `gs.comm`.

A script that came from there runs on with `from gradsync import comm`. All functions work when nothing is initialised:
this process is then a world of one. Python objects travel by pickle and keep off the GPU; see communicators/objects.py
for what that means (peers that trust each other).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.local import local_communicator
from gradsync.communicators.world import get_world, group_or_world
from gradsync.errors import InvalidArgument, PlanMismatch, describe
from gradsync.futures import check_may_call, pending
from gradsync.process_group import group_barrier, place_on_machine
from gradsync.reduction import OPERATIONS_BY_DTYPE

_alone: Communicator | None = None  # the local group of a process that has initialised nothing


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
    group = _local_group()
    if group is not None:
        return group.rank
    return 0 if get_world() is None else place_on_machine()[0]


def get_local_size() -> int:
    """Returns the number of ranks on this machine, known as in get_local_rank(). 1 when not initialised."""
    group = _local_group()
    if group is not None:
        return group.world_size
    return 1 if get_world() is None else place_on_machine()[1]


def create_local_process_group(num_workers_per_machine: int) -> None:
    """Makes the group of the ranks of each machine. Every rank must call it, with the same number.

    Machines are taken to hold consecutive ranks, as launchers number them: 0 to n - 1 on the first. A second call with
    the same number does nothing.

    Args:
        num_workers_per_machine: n, by which the number of ranks must divide evenly.

    Raises:
        InvalidArgument: it does not divide, or the group was made with another number.
        PlanMismatch: the ranks pass different numbers.
    """
    global _alone
    n, world_size, rank = integer_of(num_workers_per_machine), get_world_size(), get_rank()
    who = f"rank {rank}/{world_size}: create_local_process_group"
    if n is None or n < 1 or world_size % n:
        raise InvalidArgument(
            f"{who} needs the same number of ranks on each machine: one that divides the {world_size} of the world, "
            f"got {num_workers_per_machine!r}"
        )
    made = _local_group()
    if made is not None:
        if made.world_size == n:
            return
        raise InvalidArgument(
            f"{who} was called before with {made.world_size} ranks on each machine, now with {n}: "
            "get_local_process_group() gives the group"
        )
    world = get_world()
    if world is None:
        _alone = local_communicator()
        return
    world.agree(agreement_on("create_local_process_group", (), None, f"{n} on each machine"))
    first = rank - rank % n
    world.family.local_group = cast("Communicator", world.new_group(range(first, first + n)))  # this rank is in it


def get_local_process_group() -> Communicator:
    """Returns the group of the ranks of this machine, to be passed as `group`.

    Raises:
        InvalidArgument: it was not made.
    """
    group = _local_group()
    if group is None:
        raise InvalidArgument(
            "there is no local process group: call gs.comm.create_local_process_group(num_workers_per_machine) on "
            "every rank first, after gs.init_process_group()"
        )
    return group


def is_main_process() -> bool:
    """Whether this is rank 0: the one that prints and saves."""
    return get_rank() == 0


def synchronize() -> None:
    """Returns once every rank has called it; at once in a world of one."""
    if _ranks_of(None, "synchronize") is not None:
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
    communicator = _ranks_of(group, "all_gather")
    return [data] if communicator is None else communicator.objects.all_gather_for("comm.all_gather", data)


def gather(data: Any, dst: int = 0, group: Communicator | None = None) -> list[Any]:
    """Returns every rank's `data`, by rank, on rank `dst`, and an empty list elsewhere. Every rank must call it.

    Args:
        data: anything that pickles. In a world of one it comes back as it is, and need not.
        dst: a rank of the group, as the group counts. Not looked at in a world of one.
        group: whose ranks take part; None is the world.

    Raises:
        InvalidArgument: there is no rank `dst`; or as all_gather.
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as Communicator.all_reduce.
    """
    communicator = _ranks_of(group, "gather")
    if communicator is None:
        return [data]
    return communicator.objects._gather_for("comm.gather", data, dst, "dst") or []


def shared_random_seed() -> int:
    """Returns a random number of 31 bits, the same on all ranks and another one at every call. Every rank must call it.

    All ranks that seed a generator with it draw the same numbers: for a sampler that shuffles, say. It is rank 0's next
    `np.random.randint(2**31)`, as in detectron2: a program that calls `np.random.seed` gets the same seeds in each run,
    another one fresh ones. Every rank draws, so that generators that were in step stay so.
    """
    seed = int(np.random.randint(2**31))  # the global generator, as that is what programs seed
    world = _ranks_of(None, "shared_random_seed")
    return seed if world is None else int(world.objects.broadcast_for("shared_random_seed", seed))


def reduce_dict(input_dict: Mapping[Any, Any], average: bool = True) -> dict[Any, Any]:
    """Reduces scalars by name over all ranks, for logging. Every rank must call it; every rank gets the results.

    The results are the same on all ranks to the last bit. detectron2 has them right on rank 0 only.

    Args:
        input_dict: scalars by name: Python numbers, NumPy's, or 0-d arrays of NumPy, CuPy or any library that speaks
            DLPack. All ranks have the same names, in any order.
        average: the mean over the ranks, else the sum.

    Returns:
        NumPy scalars (`.item()` makes Python's) in the order of input_dict. Floating and complex numbers keep their
        precision; the sum of integers is an integer, of 64 bits, and their mean a float64, made of the exact sum.

    Raises:
        PlanMismatch: the ranks have different names, or differ in `average`: on every rank, with what each one lacks.
        InvalidArgument: a value is no scalar, a sum of integers needs more than 64 bits, or the ranks' types have none
            in common: on every rank.
        RankFailed, CollectiveTimeout, CommunicatorClosed: as Communicator.all_reduce.
    """
    told = _tell(input_dict)
    world = _ranks_of(None, "reduce_dict")
    what = f"reduce_dict({'mean' if average else 'sum'})"
    everything = [told] if world is None else world.objects.all_gather_for(what, told)
    label, ranks = ("rank 0/1", (0,)) if world is None else (world.label, world.ranks)
    return _reduce_told(told, dict(zip(ranks, everything, strict=True)), average=bool(average), label=label)


def _ranks_of(group: Communicator | None, what: str) -> Communicator | None:
    """Returns the communicator of a group, the world's for None; None where it is one rank alone."""
    communicator = get_world() if group is None else group_or_world(group, what)
    if pending:
        check_may_call("rank 0/1" if communicator is None else communicator.label, what)
    return None if communicator is None or communicator.world_size == 1 else communicator


def _local_group() -> Communicator | None:
    """Returns the group of this machine's ranks, where it was made; the same one within override_backend()."""
    world = get_world()
    return _alone if world is None else world.family.local_group


class _Told(NamedTuple):
    """What one rank tells the others in reduce_dict: its scalars, or why it has none to tell."""

    scalars: dict[Any, np.generic]
    refusal: str = ""


def _tell(input_dict: Mapping[Any, Any]) -> _Told:
    """Returns what a rank tells the others of its scalars; never raises."""
    if not isinstance(input_dict, Mapping):
        return _Told({}, f"got a {type(input_dict).__name__}")
    try:
        return _Told({name: _scalar(name, value) for name, value in input_dict.items()})
    except InvalidArgument as error:
        return _Told({}, str(error))
    except Exception as error:  # the others wait to hear of this rank
        return _Told({}, describe(error))


def _reduce_told(mine: _Told, by_rank: Mapping[int, _Told], *, average: bool, label: str) -> dict[Any, np.generic]:
    """Reduces what all ranks have told; gives the same on each, in the order of `mine`.

    Raises:
        PlanMismatch: the ranks have different names.
        InvalidArgument: a rank has told why it has no scalars, or a result cannot be had.
    """
    refusals = [f"rank {rank}: {theirs.refusal}" for rank, theirs in by_rank.items() if theirs.refusal]
    if refusals:
        raise InvalidArgument(f"{label}: reduce_dict needs scalars by name: {'; '.join(refusals)}")
    _check_names(label, {rank: list(theirs.scalars) for rank, theirs in by_rank.items()})
    try:
        return {
            name: _reduce(name, {rank: theirs.scalars[name] for rank, theirs in by_rank.items()}, average=average)
            for name in mine.scalars
        }
    except InvalidArgument as error:
        raise InvalidArgument(f"{label}: {error}") from error


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


def _check_names(label: str, names_by_rank: Mapping[int, list[Any]]) -> None:
    every_name = dict.fromkeys(name for names in names_by_rank.values() for name in names)
    if all(len(names) == len(every_name) for names in names_by_rank.values()):
        return
    described = {rank: f"has {_listed(names)}" for rank, names in names_by_rank.items()}
    for rank, names in names_by_rank.items():
        lacking = [name for name in every_name if name not in names]
        if lacking:
            described[rank] += f", lacks {_listed(lacking)}"
    shown = "".join(f"\n  rank {rank} {text}" for rank, text in described.items())
    raise PlanMismatch(
        f"{label}: reduce_dict needs the same names on all ranks; nothing was reduced:{shown}", descriptions=described
    )


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _reduce(name: Any, by_rank: Mapping[int, np.generic], *, average: bool) -> np.generic:
    """Reduces one value of each rank, in the order of the ranks, so that the result is the same everywhere."""
    scalars = list(by_rank.values())
    if all(scalar.dtype.kind in "biu" for scalar in scalars):
        return _reduce_integers(name, scalars, average=average)
    try:
        dtype = np.result_type(*[scalar.dtype for scalar in scalars])
    except TypeError as error:
        told = ", ".join(f"{scalar.dtype} on rank {rank}" for rank, scalar in by_rank.items())
        raise InvalidArgument(
            f"reduce_dict: {name!r} is {told}: these have no common type; convert it to one on all ranks"
        ) from error
    values = np.array(scalars, dtype)
    with np.errstate(all="ignore"):  # overflow and NaN are the caller's business
        total = np.sum(values, dtype=np.complex128 if dtype.kind == "c" else np.float64)
        result = np.asarray(total / len(values) if average else total).astype(dtype)
    return cast("np.generic", result[()])


def _reduce_integers(name: Any, scalars: Sequence[np.generic], *, average: bool) -> np.generic:
    """Reduces integers as Python's, which do not overflow: counts of samples and nanoseconds may be large."""
    total: int = sum(scalar.item() for scalar in scalars)
    if average:
        return cast("np.generic", np.float64(total / len(scalars)))
    are_unsigned = all(scalar.dtype.kind == "u" for scalar in scalars)
    for dtype in (np.uint64,) if are_unsigned else (np.int64, np.uint64):
        if np.iinfo(dtype).min <= total <= np.iinfo(dtype).max:
            return cast("np.generic", dtype(total))
    raise InvalidArgument(f"reduce_dict: the sum of {name!r} over the ranks, {total}, is no integer of 64 bits")
