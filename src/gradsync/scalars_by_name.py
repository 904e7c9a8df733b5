"""Scalars by name, of all ranks: what each tells the others, and the sum or mean of it; for comm.reduce_dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from gradsync.errors import InvalidArgument, PlanMismatch, describe
from gradsync.reduction import OPERATIONS_BY_DTYPE


class Told(NamedTuple):
    """What one rank tells the others in reduce_dict: its scalars, or why it has none to tell."""

    scalars: dict[Any, np.generic]
    refusal: str = ""


def tell(input_dict: Mapping[Any, Any]) -> Told:
    """Returns what a rank tells the others of its scalars; never raises."""
    if not isinstance(input_dict, Mapping):
        return Told({}, f"got a {type(input_dict).__name__}")
    try:
        return Told({name: _scalar(name, value) for name, value in input_dict.items()})
    except InvalidArgument as error:
        return Told({}, str(error))
    except Exception as error:  # the others wait to hear of this rank
        return Told({}, describe(error))


def reduce_told(mine: Told, by_rank: Mapping[int, Told], *, average: bool, label: str) -> dict[Any, np.generic]:
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
