"""`gs.comm`: the functions of detectron2's `utils.comm`, under the same names.

A detectron2 script works with `from gradsync import comm`. All functions also work before init_process_group(), as in a
world of one. Python objects are sent by pickle, in host memory; all ranks must trust each other, see
communicators/objects.py.
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

_alone: Communicator | None = None  # the local group of a process without a process group


def get_world_size() -> int:
    """Returns the number of ranks; 1 if the process group is not initialised."""
    world = get_world()
    return 1 if world is None else world.world_size


def get_rank() -> int:
    """Returns this process's number among all ranks; 0 if the process group is not initialised."""
    world = get_world()
    return 0 if world is None else world.rank


def get_local_rank() -> int:
    """Returns this process's number among the ranks of its machine, by which to choose a GPU. 0 if not initialised.

    detectron2 needs create_local_process_group() first. Here it is not needed: without that group the number comes
    from the launcher, such as LOCAL_RANK of torchrun or `gradsync run` (see environment.py). If the launcher gives
    none, all ranks count as ranks of one machine.
    """
    group = _local_group()
    if group is not None:
        return group.rank
    return 0 if get_world() is None else place_on_machine()[0]


def get_local_size() -> int:
    """Returns the number of ranks on this machine, from the same source as get_local_rank(). 1 if not initialised."""
    group = _local_group()
    if group is not None:
        return group.world_size
    return 1 if get_world() is None else place_on_machine()[1]


def create_local_process_group(num_workers_per_machine: int) -> None:
    """Makes the group of the ranks of each machine. Every rank must call it, with the same number.

    Each machine must have consecutive ranks, as launchers number them: 0 to n - 1 on the first. A second call with the
    same number does nothing.

    Args:
        num_workers_per_machine: n; the number of ranks must be a multiple of it.

    Raises:
        InvalidArgument: the number of ranks is not a multiple of n, or the group was made with another number.
        PlanMismatch: the ranks pass different numbers.
    """
    global _alone
    n, world_size, rank = integer_of(num_workers_per_machine), get_world_size(), get_rank()
    who = f"rank {rank}/{world_size}: create_local_process_group"
    if n is None or n < 1 or world_size % n:
        raise InvalidArgument(
            f"{who} needs a divisor of the world size {world_size}, the number of ranks on each machine, "
            f"got {num_workers_per_machine!r}"
        )
    made = _local_group()
    if made is not None:
        if made.world_size == n:
            return
        raise InvalidArgument(
            f"{who} was called before with {made.world_size} ranks on each machine, now with {n}: "
            "use get_local_process_group() to get the group"
        )
    world = get_world()
    if world is None:
        _alone = local_communicator()
        return
    world._agree(agreement_on("create_local_process_group", (), None, f"{n} on each machine"))
    first = rank - rank % n
    world._tree.local_group = cast("Communicator", world.new_group(range(first, first + n)))  # this rank is a member


def get_local_process_group() -> Communicator:
    """Returns the group of this machine's ranks, for arguments named `group`.

    Raises:
        InvalidArgument: create_local_process_group() was not called.
    """
    group = _local_group()
    if group is None:
        raise InvalidArgument(
            "there is no local process group: call gs.comm.create_local_process_group(num_workers_per_machine) on "
            "every rank first, after gs.init_process_group()"
        )
    return group


def is_main_process() -> bool:
    """Whether this is rank 0, which prints and saves."""
    return get_rank() == 0


def synchronize() -> None:
    """Waits until every rank has called it; returns at once in a world of one."""
    if _ranks_of(None, "synchronize") is not None:
        group_barrier()


def all_gather(data: Any, group: Communicator | None = None) -> list[Any]:
    """Returns every rank's `data`, by rank. Every rank must call it.

    Args:
        data: any object that can be pickled. In a world of one the object itself is returned.
        group: the communicator; None is the world.

    Raises:
        InvalidArgument: a rank's data does not pickle (raised on every rank), or does not unpickle.
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as Communicator.all_reduce.
    """
    communicator = _ranks_of(group, "all_gather")
    return [data] if communicator is None else communicator.objects.all_gather_for("comm.all_gather", data)


def gather(data: Any, dst: int = 0, group: Communicator | None = None) -> list[Any]:
    """Returns every rank's `data`, by rank, on rank `dst`; an empty list on other ranks. Every rank must call it.

    Args:
        data: any object that can be pickled. In a world of one the object itself is returned.
        dst: a rank of the group. Ignored in a world of one.
        group: the communicator; None is the world.

    Raises:
        InvalidArgument: there is no rank `dst`, or as for all_gather.
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as Communicator.all_reduce.
    """
    communicator = _ranks_of(group, "gather")
    if communicator is None:
        return [data]
    return communicator.objects._gather_for("comm.gather", data, dst, "dst") or []


def shared_random_seed() -> int:
    """Returns a random number of 31 bits, equal on all ranks and new at every call. Every rank must call it.

    All ranks can seed a generator with it, for example of a shuffling sampler, and then draw the same numbers. It is
    rank 0's next `np.random.randint(2**31)`, as in detectron2: a program that calls `np.random.seed` gets the same
    seeds in each run. Every rank draws a number, so that equal generators stay equal.
    """
    seed = int(np.random.randint(2**31))  # the global generator, because programs seed that
    world = _ranks_of(None, "shared_random_seed")
    return seed if world is None else int(world.objects.broadcast_for("shared_random_seed", seed))


def reduce_dict(input_dict: Mapping[Any, Any], average: bool = True) -> dict[Any, Any]:
    """Reduces scalars by name over all ranks, for logging. Every rank must call it; every rank gets the results.

    The results have the same bits on all ranks. In detectron2 only rank 0 has the right results.

    Args:
        input_dict: scalars by name: numbers of Python or NumPy, or 0-d arrays of NumPy, CuPy or any library with
            DLPack. All ranks need the same names, in any order.
        average: whether to return the mean over the ranks instead of the sum.

    Returns:
        NumPy scalars (`.item()` gives Python's) in the order of input_dict. Floating and complex numbers keep their
        precision. The sum of integers is a 64-bit integer; their mean is a float64, from the exact sum.

    Raises:
        PlanMismatch: the ranks have different names, or differ in `average`; raised on every rank, with the names that
            each rank lacks.
        InvalidArgument: a value is not a scalar, a sum of integers needs more than 64 bits, or the ranks' types have no
            common type; raised on every rank.
        RankFailed, CollectiveTimeout, CommunicatorClosed: as Communicator.all_reduce.
    """
    mine = _contribution(input_dict)
    world = _ranks_of(None, "reduce_dict")
    what = f"reduce_dict({'mean' if average else 'sum'})"
    everything = [mine] if world is None else world.objects.all_gather_for(what, mine)
    label, ranks = ("rank 0/1", (0,)) if world is None else (world.label, world.ranks)
    return _reduce_contributions(mine, dict(zip(ranks, everything, strict=True)), average=bool(average), label=label)


def _ranks_of(group: Communicator | None, what: str) -> Communicator | None:
    """Returns the communicator of a group, the world's for None; None if it has only one rank."""
    communicator = get_world() if group is None else group_or_world(group, what)
    if pending:
        check_may_call("rank 0/1" if communicator is None else communicator.label, what)
    return None if communicator is None or communicator.world_size == 1 else communicator


def _local_group() -> Communicator | None:
    """Returns the group of this machine's ranks, also within override_backend(); None if it was not made."""
    world = get_world()
    return _alone if world is None else world._tree.local_group


class _Contribution(NamedTuple):
    """One rank's contribution to reduce_dict: its scalars, or the reason why it has none."""

    scalars: dict[Any, np.generic]
    refusal: str = ""


def _contribution(input_dict: Mapping[Any, Any]) -> _Contribution:
    """Returns a rank's contribution to reduce_dict; never raises."""
    if not isinstance(input_dict, Mapping):
        return _Contribution({}, f"got a {type(input_dict).__name__}")
    try:
        return _Contribution({name: _scalar(name, value) for name, value in input_dict.items()})
    except InvalidArgument as error:
        return _Contribution({}, str(error))
    except Exception as error:  # the others wait for this rank's contribution
        return _Contribution({}, describe(error))


def _reduce_contributions(
    mine: _Contribution, by_rank: Mapping[int, _Contribution], *, average: bool, label: str
) -> dict[Any, np.generic]:
    """Reduces the contributions of all ranks; gives the same results on each, in the order of `mine`.

    Raises:
        PlanMismatch: the ranks have different names.
        InvalidArgument: a rank has no scalars, or a result cannot be computed.
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
    """Returns a NumPy scalar of the value's precision; waits for the GPU if the value is there."""
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
    """Returns NumPy's dtype of the same name ("torch.float32"); None, which lets NumPy choose, if there is none."""
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
        types = ", ".join(f"{scalar.dtype} on rank {rank}" for rank, scalar in by_rank.items())
        raise InvalidArgument(
            f"reduce_dict: {name!r} is {types}: these types have no common type; use the same type on all ranks"
        ) from error
    values = np.array(scalars, dtype)
    with np.errstate(all="ignore"):  # overflow and NaN show in the result
        total = np.sum(values, dtype=np.complex128 if dtype.kind == "c" else np.float64)
        result = np.asarray(total / len(values) if average else total).astype(dtype)
    return cast("np.generic", result[()])


def _reduce_integers(name: Any, scalars: Sequence[np.generic], *, average: bool) -> np.generic:
    """Reduces integers as Python integers, which do not overflow: counts of samples or nanoseconds may be large."""
    total: int = sum(scalar.item() for scalar in scalars)
    if average:
        return cast("np.generic", np.float64(total / len(scalars)))
    are_unsigned = all(scalar.dtype.kind == "u" for scalar in scalars)
    for dtype in (np.uint64,) if are_unsigned else (np.int64, np.uint64):
        if np.iinfo(dtype).min <= total <= np.iinfo(dtype).max:
            return cast("np.generic", dtype(total))
    raise InvalidArgument(f"reduce_dict: the sum of {name!r} over the ranks, {total}, does not fit into 64 bits")
