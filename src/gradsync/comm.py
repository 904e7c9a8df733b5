"""`gs.comm`: the functions of detectron2's `utils.comm`, under the same names: `from gradsync import comm`.

Before init_process_group() all work as in a world of one rank; but where a launcher has started several ranks, what
needs the others raises InvalidArgument. Objects are sent by pickle, so the ranks must trust each other
(communicators/objects.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import numpy as np

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import compare
from gradsync.communicators.local import local_communicator
from gradsync.communicators.world import get_initial_world, get_world, group_or_world, refuse_alone
from gradsync.errors import InvalidArgument, PlanMismatch, describe
from gradsync.futures import refuse_in_callback
from gradsync.process_group import group_barrier, place_on_machine
from gradsync.reduction import OPERATIONS_BY_DTYPE
from gradsync.words import no_attribute

_alone: Communicator | None = None  # the local group of a process that has no process group
_local_groups: WeakKeyDictionary[Communicator, Communicator] = WeakKeyDictionary()  # by the world


def __getattr__(name: str) -> NoReturn:
    no_attribute("gradsync.comm", "module 'gradsync.comm'", name, [each for each in globals() if each[0] != "_"])


def get_world_size() -> int:
    """Returns the number of ranks; 1 without a process group."""
    world = get_world()
    return 1 if world is None else world.world_size


def get_rank() -> int:
    """Returns this process's rank in the world; 0 without a process group."""
    world = get_world()
    return 0 if world is None else world.rank


def get_local_rank() -> int:
    """Returns this process's rank on its machine, for example to choose a GPU; 0 without a process group.

    It is that at launch, also after gs.rebuild(): the GPU stays.

    Unlike in detectron2, create_local_process_group() need not be called before: without it, the launcher tells (such
    as by LOCAL_RANK), and where it does not, all ranks are taken to be on one machine.
    """
    group = _local_group()
    return place_on_machine()[0] if group is None else group.rank


def get_local_size() -> int:
    """Returns the number of ranks on this machine, known as for get_local_rank(); 1 without a process group."""
    group = _local_group()
    return place_on_machine()[1] if group is None else group.world_size


def create_local_process_group(num_workers_per_machine: int) -> None:
    """Makes a group of the ranks on each machine. Every rank must call it with the same number.

    The ranks of a machine must be consecutive: 0 to n - 1 on the first machine, the next n on the second, and so on. A
    later call with the same number does nothing.

    Args:
        num_workers_per_machine: the number of ranks on each machine, n, which divides the world size.

    Raises:
        InvalidArgument: n does not divide the world size, or an earlier call passed another number.
        PlanMismatch: the ranks pass different numbers.
        RendezvousTimeout, BackendUnavailable, ...: the group cannot be made; see Communicator.new_group.
    """
    global _alone
    n, world_size, rank = integer_of(num_workers_per_machine), get_world_size(), get_rank()
    who = f"rank {rank}/{world_size}: create_local_process_group"
    if n is None or n < 1 or world_size % n:
        raise InvalidArgument(
            f"{who} needs a number of ranks per machine that divides the world size {world_size}, "
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
    compare(world, agreement_on("create_local_process_group", (), None, f"{n} on each machine"))
    first = rank - rank % n
    group = world.new_group(range(first, first + n))
    _local_groups[get_initial_world() or world] = cast("Communicator", group)  # this rank is a member


def get_local_process_group() -> Communicator:
    """Returns the communicator of this machine's ranks, to pass as `group`.

    Raises:
        InvalidArgument: this process has not called create_local_process_group().
    """
    group = _local_group()
    if group is None:
        raise InvalidArgument(
            "there is no local process group: call gs.comm.create_local_process_group(num_workers_per_machine) on "
            "every rank first, after gs.init_process_group()"
        )
    return group


def is_main_process() -> bool:
    """Returns whether this is rank 0, which usually prints and saves for all."""
    return get_rank() == 0


def synchronize() -> None:
    """Waits until every rank has called it; returns at once in a world of one rank.

    Raises:
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
    """
    if _ranks_of(None, "synchronize") is not None:
        group_barrier()


def all_gather(data: Any, group: Communicator | None = None) -> list[Any]:
    """Returns the `data` of all ranks, in rank order. Every rank must call it.

    Args:
        data: any object that can be pickled. With one rank, the list has this object itself, not a copy.
        group: the communicator of the ranks; None means the world communicator.

    Raises:
        InvalidArgument: a rank's data cannot be pickled (all ranks raise it) or not be unpickled here (only this rank
            does), or `group` is not a communicator.
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
    """
    communicator = _ranks_of(group, "all_gather")
    return [data] if communicator is None else communicator.objects.all_gather_for("comm.all_gather", data)


def gather(data: Any, dst: int = 0, group: Communicator | None = None) -> list[Any]:
    """Returns the `data` of all ranks, in rank order, on rank `dst`; an empty list elsewhere. Every rank must call it.

    Args:
        data: any object that can be pickled. With one rank, the list has this object itself, not a copy.
        dst: the rank in the group that gets the data. Ignored with one rank.
        group: the communicator of the ranks; None means the world communicator.

    Raises:
        InvalidArgument: there is no rank `dst`, or as for all_gather.
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
    """
    communicator = _ranks_of(group, "gather")
    if communicator is None:
        return [data]
    return communicator.objects.gather_for("comm.gather", data, dst, "dst") or []


def shared_random_seed() -> int:
    """Returns a random number of 31 bits, the same on all ranks and another in each call. Every rank must call it.

    Seed a sampler's generator with it, and all ranks draw alike. It is rank 0's next `np.random.randint(2**31)`, as in
    detectron2, so that `np.random.seed` makes it repeatable. Every rank draws one, so that equal states of `np.random`
    stay equal.

    Raises:
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
    """
    seed = int(np.random.randint(2**31))  # of NumPy's global generator, which programs seed
    world = _ranks_of(None, "shared_random_seed")
    return seed if world is None else int(world.objects.broadcast_for("shared_random_seed", seed))


def reduce_dict(input_dict: Mapping[Any, Any], average: bool = True) -> dict[Any, Any]:
    """Reduces scalars by name over all ranks, for logging. Every rank must call it, and gets the same bits.

    (In detectron2 only rank 0 gets the right results.)

    Args:
        input_dict: the scalars, by name: an int, float, complex or bool, a number of NumPy, or a 0-d array of NumPy,
            CuPy or any library with DLPack. All ranks need the same names, in any order.
        average: whether to return the mean over the ranks instead of the sum.

    Returns:
        The results by name, in the order of input_dict, as NumPy scalars; `.item()` makes one a Python number. Floating
        and complex numbers keep their precision; where the ranks have several types, it is NumPy's common one. A sum of
        integers has 64 bits; their mean is exact up to its rounding to float64.

    Raises:
        PlanMismatch: the ranks have different names (the error lists what each lacks), or another `average`. All ranks
            raise it.
        InvalidArgument: input_dict is not a mapping, a value is masked or not a scalar of at most 64 bits (128 if
            complex), a sum of integers needs more than 64 bits, or types have nothing in common: all ranks raise it. Or
            `average` is no bool.
        RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
    """
    if not isinstance(average, (bool, np.bool_, int)):  # reduce_dict(losses, "sum") would be a mean
        raise InvalidArgument(
            f"reduce_dict needs average to be True or False, got {average!r}: average=False gives the sum"
        )
    world = _ranks_of(None, "reduce_dict")
    mine = _contribution(input_dict)
    what = f"reduce_dict({'mean' if average else 'sum'})"
    everything = [mine] if world is None else world.objects.all_gather_for(what, mine)
    label, ranks = ("rank 0/1", (0,)) if world is None else (world.label, world.ranks)
    by_rank = dict(zip(ranks, everything, strict=True))
    refusals = [f"rank {rank}: {theirs}" for rank, theirs in by_rank.items() if isinstance(theirs, str)]
    if isinstance(mine, str) or refusals:
        raise InvalidArgument(f"{label}: reduce_dict needs scalars by name: {'; '.join(refusals)}")
    _check_names(label, by_rank)
    try:
        return {
            name: _reduce(name, {rank: theirs[name] for rank, theirs in by_rank.items()}, average=bool(average))
            for name in mine
        }
    except InvalidArgument as error:
        raise InvalidArgument(f"{label}: {error}") from error


def _ranks_of(group: Communicator | None, what: str) -> Communicator | None:
    """Returns `group`, or the world if it is None; None if there is only one rank."""
    communicator = get_world() if group is None else group_or_world(group, what)
    if communicator is None:
        refuse_alone(what, "see this rank alone")
    refuse_in_callback("rank 0/1" if communicator is None else communicator.label, what)
    return None if communicator is None or communicator.world_size == 1 else communicator


def _local_group() -> Communicator | None:
    """Returns the group of this machine's ranks, even within override_backend(); None if there is no such group."""
    world = get_world()
    return _alone if world is None else _local_groups.get(get_initial_world() or world)


def _contribution(input_dict: Mapping[Any, Any]) -> dict[Any, np.generic] | str:
    """Returns this rank's scalars for reduce_dict, or why they cannot be reduced."""
    if not isinstance(input_dict, Mapping):
        return f"got {type(input_dict).__name__}"
    try:
        return {name: _scalar(name, value) for name, value in input_dict.items()}
    except InvalidArgument as error:
        return str(error)
    except Exception as error:  # the other ranks wait for this one all the same
        return describe(error)


def _scalar(name: Any, value: Any) -> np.generic:
    """Returns a value as a NumPy scalar of the same precision; waits for a GPU that has it."""
    if isinstance(value, np.ma.MaskedArray):  # its hidden value would count
        raise InvalidArgument(f"{name!r} is masked: pass a number that counts, or leave the name out on all ranks")
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
    """Returns NumPy's dtype for one such as torch.float32; None if it has none of this name."""
    try:
        return np.dtype(str(dtype).rpartition(".")[2])
    except TypeError:
        return None


def _check_names(label: str, names_by_rank: Mapping[int, Collection[Any]]) -> None:
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


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _reduce(name: Any, by_rank: Mapping[int, np.generic], *, average: bool) -> np.generic:
    """Reduces one value of each rank, in rank order, so that the result is the same on all ranks."""
    scalars = list(by_rank.values())
    if all(scalar.dtype.kind in "biu" for scalar in scalars):
        return _reduce_integers(name, scalars, average=average)
    try:
        dtype = np.result_type(*[scalar.dtype for scalar in scalars])
    except TypeError as error:
        types = ", ".join(f"{scalar.dtype} on rank {rank}" for rank, scalar in by_rank.items())
        raise InvalidArgument(
            f"reduce_dict: {name!r} has dtype {types}: these dtypes have no common dtype; use one dtype on all ranks"
        ) from error
    values = np.array(scalars, dtype)
    with np.errstate(all="ignore"):  # overflow and NaN are visible in the result
        total = np.sum(values, dtype=np.complex128 if dtype.kind == "c" else np.float64)
        result = np.asarray(total / len(values) if average else total).astype(dtype)
    return cast("np.generic", result[()])


def _reduce_integers(name: Any, scalars: Sequence[np.generic], *, average: bool) -> np.generic:
    """Returns the sum or mean of integers, added as Python's, which do not overflow."""
    total: int = sum(scalar.item() for scalar in scalars)
    if average:
        return cast("np.generic", np.float64(total / len(scalars)))
    are_unsigned = all(scalar.dtype.kind == "u" for scalar in scalars)
    for dtype in (np.uint64,) if are_unsigned else (np.int64, np.uint64):
        if np.iinfo(dtype).min <= total <= np.iinfo(dtype).max:
            return cast("np.generic", dtype(total))
    raise InvalidArgument(f"reduce_dict: the sum of {name!r} over the ranks, {total}, does not fit into 64 bits")
