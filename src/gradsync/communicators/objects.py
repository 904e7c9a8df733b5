"""Collectives on Python objects, for settings, metrics and file names; not for gradients.

Objects are sent by pickle, and loading a pickle can run its author's code, so all ranks must trust each other. They do:
they share the run's secret. With a GPU backend the bytes stay in host memory, see HostPath in backend.py.

If a rank's object cannot be pickled, that rank still takes part and sends the reason instead. So all ranks get the
error, and none hangs.
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
    """Collectives on Python objects: `communicator.objects`.

    Every rank must call these methods and the communicator's other collectives in the same order, and with the same
    root. Any object that can be pickled is allowed, and sizes may differ between ranks. Each rank gets copies, also of
    its own object; only the root of a broadcast gets its own object back.

    Unpickling can run code: all ranks must trust each other.

    All methods raise:
        InvalidArgument: an object cannot be pickled: raised on every rank, with that rank's number and the cause. Or an
            object cannot be unpickled: raised on the ranks where it fails. The communicator stays usable.
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as Communicator.all_reduce.

    Args:
        backend: the communicator's backend.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._path: HostPath | None = None

    def all_gather(self, obj: Any) -> list[Any]:
        """Returns every rank's object, by rank.

        Args:
            obj: this rank's object.
        """
        return self.all_gather_for("objects.all_gather", obj)

    def all_gather_for(self, what: str, obj: Any) -> list[Any]:
        """Runs all_gather for the public function `what`; ranks that call different functions get PlanMismatch."""
        agreement = agreement_on(what, (), None, "")
        mine = self._parcel([obj])

        def move(path: HostPath, numbers: list[list[int]]) -> tuple[Array, Bounds]:
            bounds = _bounds([sizes[0] for sizes in numbers])
            return _gathered(path, _bytes_of(mine), bounds, agreement), bounds

        return self._unpack(*self._run(agreement, mine, 1, move), agreement)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Returns every rank's object, by rank, on the root, and None on the other ranks.

        Args:
            obj: this rank's object.
            root: the rank that gets the objects.
        """
        return self._gather_for("objects.gather", obj, root)

    def _gather_for(self, what: str, obj: Any, root: int = 0, argument: str = "root") -> list[Any] | None:
        """Runs gather for the public function `what`, which calls its root `argument`; see all_gather_for."""
        root = checked_rank(self._backend, what, argument, root)
        agreement = agreement_on(what, (), None, f"root {root}")
        mine = self._parcel([obj])

        def move(path: HostPath, numbers: list[list[int]]) -> tuple[Array | None, Bounds]:
            bounds = _bounds([sizes[0] for sizes in numbers])
            target = np.empty(bounds[-1], np.uint8) if self._backend.rank == root else None
            path.gather(_bytes_of(mine), target, bounds, root, agreement)
            return target, bounds

        gathered, bounds = self._run(agreement, mine, 1, move)
        return None if gathered is None else self._unpack(gathered, bounds, agreement)

    def broadcast(self, obj: Any = None, root: int = 0) -> Any:
        """Returns the root's object.

        Args:
            obj: the object, on the root; ignored on other ranks.
            root: the rank whose object all ranks get.
        """
        return self.broadcast_for("objects.broadcast", obj, root)

    def broadcast_for(self, what: str, obj: Any = None, root: int = 0) -> Any:
        """Runs broadcast for the public function `what`; see all_gather_for."""
        root = checked_rank(self._backend, what, "root", root)
        agreement = agreement_on(what, (), None, f"root {root}")
        is_root = self._backend.rank == root
        mine = self._parcel([obj] if is_root else [])

        def move(path: HostPath, numbers: list[list[int]]) -> Array:
            bounds = _bounds([sizes[0] for sizes in numbers])  # only the root's part is not empty
            return _gathered(path, _bytes_of(mine), bounds, agreement)

        data = self._run(agreement, mine, 1, move)
        return obj if is_root else self._unpickle(data, root, agreement)

    def scatter(self, objs: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Returns the object for this rank from the root's list.

        Args:
            objs: on the root a list or tuple with one object for each rank; otherwise every rank gets InvalidArgument.
                Ignored on other ranks.
            root: the rank that has the objects.
        """
        backend = self._backend
        root = checked_rank(backend, "objects.scatter", "root", root)
        agreement = agreement_on("objects.scatter", (), None, f"root {root}")
        mine = self._parcel_for_each(objs) if backend.rank == root else self._parcel([])

        def move(path: HostPath, numbers: list[list[int]]) -> Array:
            source = _bytes_of(mine) if backend.rank == root else None
            target = np.empty(numbers[root][backend.rank], np.uint8)
            path.scatter(source, target, _bounds(numbers[root]), root, agreement)
            return target

        data = self._run(agreement, mine, backend.world_size, move)
        return self._unpickle(data, root, agreement)

    def _run(
        self,
        agreement: Agreement,
        mine: _Parcel,
        count: int,
        move: Callable[[HostPath, list[list[int]]], T],
    ) -> T:
        """Runs one collective: exchanges the sizes of up to `count` objects, or refusals, then moves the objects."""
        refusals: dict[int, str] = {}
        with self._backend.lifetime.collective(agreement.describe().what, agreement):
            if self._path is None:
                self._path = self._backend.make_host_path()
            numbers = self._path.share_numbers(mine.numbers(count), agreement)
            if any(sizes[0] < 0 for sizes in numbers):
                refusals = _share_refusals(self._path, numbers, mine, agreement)
            else:
                result = move(self._path, numbers)
        if refusals:  # outside of the collective: an error within it ends the communicator
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
        """Pickles objects, before the collective begins, because this runs the objects' code."""
        pickles = []
        for number, obj in enumerate(objs):
            try:
                pickles.append(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit of the object's code too: the others wait for this rank
                which = "its object" if len(objs) == 1 else f"its object for rank {self._backend.ranks[number]}"
                return _Parcel.refuse(f"{which} does not pickle: {describe(error)}", error)
        return _Parcel(pickles)

    def _refused(self, refusals: dict[int, str], agreement: Agreement) -> InvalidArgument:
        texts = [f"rank {self._backend.ranks[rank]}: {text}" for rank, text in refusals.items()]
        more = [f"and {len(texts) - _SHOWN_REFUSALS} more ranks"] if len(texts) > _SHOWN_REFUSALS else []
        shown = "; ".join(texts[:_SHOWN_REFUSALS] + more)
        return InvalidArgument(f"{self._backend.label}: {agreement.describe().what} moved nothing: {shown}")

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
                f"{self._backend.label}: {agreement.describe().what} received an object from rank "
                f"{self._backend.ranks[sender]} that does not unpickle here: {describe(error)}; check that this rank "
                "can import the object's class"
            ) from error


class _Parcel(NamedTuple):
    """One rank's contribution to a collective.

    Attributes:
        pickles: its pickled objects, in order; may be empty.
        refusal: the reason why it cannot send them, or None.
        cause: the exception behind the refusal.
    """

    pickles: list[bytes]
    refusal: bytes | None = None
    cause: BaseException | None = None

    @classmethod
    def refuse(cls, reason: str, cause: BaseException | None = None) -> _Parcel:
        """Makes the parcel of a rank that cannot send its objects."""
        return cls([], reason[:_MAX_REASON_CHARACTERS].encode(errors="backslashreplace"), cause)

    def numbers(self, count: int) -> list[int]:
        """Returns the size of each object; for a refusal, minus the length of its text."""
        sizes = [len(data) for data in self.pickles] if self.refusal is None else [-len(self.refusal)]
        return sizes + [0] * (count - len(sizes))


def _share_refusals(path: HostPath, numbers: list[list[int]], mine: _Parcel, agreement: Agreement) -> dict[int, str]:
    """Exchanges the reasons of all refusals; returns them by rank."""
    bounds = _bounds([max(0, -sizes[0]) for sizes in numbers])
    texts = _gathered(path, np.frombuffer(mine.refusal or b"", np.uint8), bounds, agreement).tobytes()
    parts = enumerate(pairwise(bounds))
    return {rank: texts[begin:end].decode() for rank, (begin, end) in parts if end > begin}


def _gathered(path: HostPath, source: Array, bounds: Bounds, agreement: Agreement) -> Array:
    """Returns the parts of all ranks; `source` is this rank's part."""
    target = np.empty(bounds[-1], np.uint8)
    path.all_gather(source, target, bounds, agreement)
    return target


def _bytes_of(parcel: _Parcel) -> Array:
    pickles = parcel.pickles
    return np.frombuffer(pickles[0] if len(pickles) == 1 else b"".join(pickles), np.uint8)


def _bounds(sizes: Sequence[int]) -> Bounds:
    return [0, *accumulate(sizes)]
