"""check_consistency: checks that all ranks have the same arrays, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import arrays_of
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument, PlanMismatch
from gradsync.reduction import Array


class _Fingerprint(NamedTuple):
    """What check_consistency compares of an array."""

    shape: tuple[int, ...]
    dtype: str
    digest: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} with digest {self.digest:016x}"


_Fingerprints = dict[str, _Fingerprint]


def check_consistency(named_arrays: Any, communicator: Communicator | None = None) -> None:
    """Checks that all ranks have the same arrays: names, shapes, dtypes and values, bit for bit.

    Every rank must call it. The ranks compare a 64-bit digest of each array; -0.0 and 0.0 differ, and so do NaNs of
    other bits. Names are sent by pickle, so all ranks must trust each other. An AllreduceCallback that knows the
    parameters as arrays compares them by itself: see its option `check_every`.

    Args:
        named_arrays: a mapping of names to arrays, or a list of (name, array) pairs, in any order; or a list of arrays,
            which are named "#0", "#1" and so on. Any shape, layout and dtype except Python objects, on the
            communicator's device or the host.
        communicator: whose ranks compare; None means the world communicator.

    Raises:
        PlanMismatch: an array differs. All ranks raise it, with the first that differs, and how. The communicator stays
            usable.
        InvalidArgument: `named_arrays` is not a mapping or list, a value is not an array, or two have one name.
        UnsupportedDtype: the elements of an array are Python objects.
        RankFailed, CollectiveTimeout, CommunicatorClosed: the exchange of digests failed.
    """
    communicator = group_or_world(communicator, "check_consistency", "communicator")
    fingerprints = {
        name: _fingerprint_of(native, communicator) for name, native in _named(named_arrays, communicator).items()
    }
    by_rank: list[_Fingerprints] = communicator.objects.all_gather_for("check_consistency", fingerprints)
    names = list(dict.fromkeys(name for of_rank in by_rank for name in of_rank))
    different = [name for name in names if len({of_rank.get(name) for of_rank in by_rank}) > 1]
    if different:
        raise _difference(communicator, different, len(names), by_rank)


def _named(named_arrays: Any, communicator: Communicator) -> dict[str, Array]:
    """Returns a dict from name to array; converts the names to str."""
    who = f"{communicator.label}: check_consistency"
    if hasattr(named_arrays, "dtype") or isinstance(named_arrays, str) or not isinstance(named_arrays, Iterable):
        raise InvalidArgument(
            f"{who} needs a mapping of names to arrays, (name, array) pairs, or a list of arrays, "
            f"got {type(named_arrays).__name__}"
        )
    entries = list(named_arrays.items() if isinstance(named_arrays, Mapping) else named_arrays)
    natives: dict[str, Array] = {}
    for position, entry in enumerate(entries):
        name, array = entry if isinstance(entry, tuple) and len(entry) == 2 else (f"#{position}", entry)
        if str(name) in natives:
            raise InvalidArgument(f"{who} got two arrays of the name {str(name)!r}")
        natives[str(name)] = communicator.native_array(array, f"check_consistency, array {str(name)!r}")
    return natives


def _fingerprint_of(native: Array, communicator: Communicator) -> _Fingerprint:
    return _Fingerprint(native.shape, str(native.dtype), arrays_of(communicator).digest(native))


def _difference(
    communicator: Communicator, different: list[str], count: int, by_rank: list[_Fingerprints]
) -> PlanMismatch:
    """Returns the error for arrays that differ between ranks; only the rank's label differs between ranks."""
    name = different[0]
    shown = {
        rank_in_world: str(of_rank[name]) if name in of_rank else "(no array of this name)"
        for rank_in_world, of_rank in zip(communicator.ranks, by_rank, strict=True)
    }
    lines = "".join(f"\n  rank {rank}: {text}" for rank, text in shown.items())
    how_many = "" if len(different) == 1 else f"; {len(different)} of {count} arrays differ"
    return PlanMismatch(
        f"{communicator.label}: the ranks' arrays differ; {name!r} {_how(name, by_rank)}{how_many}:{lines}",
        descriptions=shown,
    )


def _how(name: str, by_rank: list[_Fingerprints]) -> str:
    """Returns how the ranks' arrays of this name differ, such as "has different shapes"."""
    present = [of_rank[name] for of_rank in by_rank if name in of_rank]
    if len(present) < len(by_rank):
        return "is missing on some ranks"
    of_ranks = zip(("shapes", "dtypes", "values"), zip(*present, strict=True), strict=True)
    return next(f"has different {field}" for field, values in of_ranks if len(set(values)) > 1)
