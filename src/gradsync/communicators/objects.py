"""Collectives on Python objects: settings, metrics, file names; not gradients.

Objects travel by pickle, and reading a pickle runs code of whoever wrote it: that is for trusted peers only. The ranks
of a run are that; they share its secret. On GPUs the bytes keep to the host, see HostPath in backend.py.

A rank's object may not pickle. That rank takes part all the same, with the reason in the place of its object; so the
others hear of it, and nothing hangs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gradsync.communicators.agreement import Agreement, agreement_on
from gradsync.communicators.backend import Backend, Bounds, HostPath, checked_rank
from gradsync.errors import InvalidArgument, describe
from gradsync.reduction import Array

_SHOWN_REFUSALS = 4
_MAX_REASON_CHARACTERS = 500

T = TypeVar("T")


class Objects:
    """What moves Python objects between the ranks of a communicator: `communicator.objects`.

    Every rank must call the same methods in the same order with the same root, beside the communicator's other
    collectives. Objects may be of any kind that pickles, and of any size, which need not be the same on all ranks. What
    a rank gets is a copy, of its own object too; the root of a broadcast gets back what it gave.

    Unpickling runs code: all ranks must trust each other.

    All methods raise:
        InvalidArgument: an object does not pickle: on every rank, with the rank whose object it is and the cause. Or an
            object does not unpickle: on the ranks where it does not. The communicator stays usable.
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as Communicator.all_reduce.

    Args:
        backend: of the communicator whose ranks take part.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._path: HostPath | None = None

    def all_gather(self, obj: Any) -> list[Any]:
        """Returns every rank's object, by rank.

        Args:
            obj: this rank's.
        """
        return self.all_gather_for("objects.all_gather", obj)

    def all_gather_for(self, what: str, obj: Any) -> list[Any]:
        """The same under another name, for what is built on it: ranks that call it differently get PlanMismatch."""
        agreement = agreement_on(what, (), None, "")
        mine = self._parcel([obj])

        def move(path: HostPath, numbers: list[list[int]]) -> tuple[Array, Bounds]:
            bounds = _bounds([sizes[0] for sizes in numbers])
            return path.all_gather(_bytes_of(mine), bounds, agreement), bounds

        return self._unpack(*self._run(agreement, mine, 1, move), agreement)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Returns every rank's object, by rank, on the root; None elsewhere.

        Args:
            obj: this rank's.
            root: the rank that gets them.
        """
        return self._gather_for("objects.gather", obj, root)

    def _gather_for(self, what: str, obj: Any, root: int = 0, argument: str = "root") -> list[Any] | None:
        """The same under another name, with another one for `root`; see all_gather_for."""
        root = checked_rank(self._backend, what, argument, root)
        agreement = agreement_on(what, (), None, f"root {root}")
        mine = self._parcel([obj])

        def move(path: HostPath, numbers: list[list[int]]) -> tuple[Array | None, Bounds]:
            bounds = _bounds([sizes[0] for sizes in numbers])
            return path.gather(_bytes_of(mine), bounds, root, agreement), bounds

        gathered, bounds = self._run(agreement, mine, 1, move)
        return None if gathered is None else self._unpack(gathered, bounds, agreement)

    def broadcast(self, obj: Any = None, root: int = 0) -> Any:
        """Returns the root's object.

        Args:
            obj: the object, on the root; not looked at elsewhere.
            root: the rank whose object all ranks get.
        """
        return self.broadcast_for("objects.broadcast", obj, root)

    def broadcast_for(self, what: str, obj: Any = None, root: int = 0) -> Any:
        """The same under another name; see all_gather_for."""
        root = checked_rank(self._backend, what, "root", root)
        agreement = agreement_on(what, (), None, f"root {root}")
        is_root = self._backend.rank == root
        mine = self._parcel([obj] if is_root else [])

        def move(path: HostPath, numbers: list[list[int]]) -> Array:
            bounds = _bounds([sizes[0] for sizes in numbers])  # the parts of all but the root are empty
            return path.all_gather(_bytes_of(mine), bounds, agreement)

        data = self._run(agreement, mine, 1, move)
        return obj if is_root else self._unpickle(data, root, agreement)

    def scatter(self, objs: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Returns this rank's of the root's objects.

        Args:
            objs: on the root a list or tuple of one object for each rank, else InvalidArgument on every rank; not
                looked at elsewhere.
            root: the rank whose objects they are.
        """
        backend = self._backend
        root = checked_rank(backend, "objects.scatter", "root", root)
        agreement = agreement_on("objects.scatter", (), None, f"root {root}")
        mine = self._parcel_for_each(objs) if backend.rank == root else self._parcel([])

        def move(path: HostPath, numbers: list[list[int]]) -> Array:
            source = _bytes_of(mine) if backend.rank == root else None
            return path.scatter(source, _bounds(numbers[root]), root, agreement)

        data = self._run(agreement, mine, backend.world_size, move)
        return self._unpickle(data, root, agreement)

    def _run(
        self,
        agreement: Agreement,
        mine: _Parcel,
        count: int,
        move: Callable[[HostPath, list[list[int]]], T],
    ) -> T:
        """Runs one collective: tells the sizes of up to `count` objects of each rank, and who can give none; moves."""
        refusals: dict[int, str] = {}
        with self._backend.lifetime.turn(_name_of(agreement), agreement):
            if self._path is None:
                self._path = self._backend.make_host_path()
            numbers = self._path.share_numbers(mine.numbers(count), agreement)
            if any(sizes[0] < 0 for sizes in numbers):
                refusals = _share_refusals(self._path, numbers, mine, agreement)
            else:
                result = move(self._path, numbers)
        if refusals:  # outside of the turn, which takes an error for the communicator's end
            raise self._refused(refusals, agreement) from mine.cause
        return result

    def _parcel_for_each(self, objs: Any) -> _Parcel:
        """Pickles a list of one object for each rank."""
        needed = self._backend.world_size
        if not isinstance(objs, (list, tuple)):
            return _Parcel.refuse(f"needs a list of {needed} objects, one for each rank, got {type(objs).__name__}")
        if len(objs) != needed:
            return _Parcel.refuse(f"needs a list of {needed} objects, one for each rank, got {len(objs)}")
        return self._parcel(objs)

    def _parcel(self, objs: Sequence[Any]) -> _Parcel:
        """Pickles objects, before the collective begins: this runs code of theirs."""
        pickles = []
        for number, obj in enumerate(objs):
            try:
                pickles.append(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too: it is the object's, and the others wait for this rank
                which = "its object" if len(objs) == 1 else f"its object for rank {self._backend.ranks[number]}"
                return _Parcel.refuse(f"{which} does not pickle: {describe(error)}", error)
        return _Parcel(pickles)

    def _refused(self, refusals: dict[int, str], agreement: Agreement) -> InvalidArgument:
        told = [f"rank {self._backend.ranks[rank]}: {text}" for rank, text in refusals.items()]
        more = [f"and {len(told) - _SHOWN_REFUSALS} more ranks"] if len(told) > _SHOWN_REFUSALS else []
        shown = "; ".join(told[:_SHOWN_REFUSALS] + more)
        return InvalidArgument(f"{self._backend.label}: {_name_of(agreement)} moved nothing: {shown}")

    def _unpack(self, data: Array, bounds: Bounds, agreement: Agreement) -> list[Any]:
        parts = enumerate(pairwise(bounds))
        return [self._unpickle(data[begin:end], rank, agreement) for rank, (begin, end) in parts]

    def _unpickle(self, data: Array, sender: int, agreement: Agreement) -> Any:
        try:
            return pickle.loads(data.data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            raise InvalidArgument(
                f"{self._backend.label}: {_name_of(agreement)} brought an object of rank {self._backend.ranks[sender]} "
                f"that does not unpickle here: {describe(error)}; can this rank import all that it is made of?"
            ) from error


class _Parcel(NamedTuple):
    """What one rank gives to a collective.

    Attributes:
        pickles: its objects, in order; none where it has none to give.
        refusal: why it cannot give them, or None.
        cause: the exception behind the refusal.
    """

    pickles: list[bytes]
    refusal: bytes | None = None
    cause: BaseException | None = None

    @classmethod
    def refuse(cls, reason: str, cause: BaseException | None = None) -> _Parcel:
        """Makes the parcel of a rank that cannot give its objects."""
        return cls([], reason[:_MAX_REASON_CHARACTERS].encode(errors="backslashreplace"), cause)

    def numbers(self, count: int) -> list[int]:
        """Returns what the others must know: the size of each object; below 0 where the reason comes in its place."""
        sizes = [len(data) for data in self.pickles] if self.refusal is None else [-len(self.refusal)]
        return sizes + [0] * (count - len(sizes))


def _share_refusals(path: HostPath, numbers: list[list[int]], mine: _Parcel, agreement: Agreement) -> dict[int, str]:
    """Returns the reasons of all ranks that gave one."""
    bounds = _bounds([max(0, -sizes[0]) for sizes in numbers])
    texts = path.all_gather(np.frombuffer(mine.refusal or b"", np.uint8), bounds, agreement).tobytes()
    parts = enumerate(pairwise(bounds))
    return {rank: texts[begin:end].decode() for rank, (begin, end) in parts if end > begin}


def _name_of(agreement: Agreement) -> str:
    """Returns "objects.gather" of "objects.gather(root 0)"."""
    return agreement.headline().partition("(")[0]


def _bytes_of(parcel: _Parcel) -> Array:
    pickles = parcel.pickles
    return np.frombuffer(pickles[0] if len(pickles) == 1 else b"".join(pickles), np.uint8)


def _bounds(sizes: Sequence[int]) -> Bounds:
    return [0, *accumulate(sizes)]
