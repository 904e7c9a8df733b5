"""Collectives on Python objects, for settings, metrics and file names; not for gradients.

Objects are pickled. Unpickling can run code of the sender, so all ranks must trust each other: only processes that know
the run's secret can be ranks. The bytes travel as arrays of uint8, between GPUs over NCCL.

A rank whose object cannot be pickled still takes part, and sends the reason in its place: all ranks raise it, and none
waits for the deadline.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradsync.communicators.agreement import Agreement, agreement_on
from gradsync.communicators.backend import Message, bounds_of, checked_rank
from gradsync.errors import InvalidArgument, describe
from gradsync.reduction import Array

if TYPE_CHECKING:
    from gradsync.communicators.communicator import Communicator

_SHOWN_REFUSALS = 4
_MAX_REASON_CHARACTERS = 500


class Objects:
    """The collectives on Python objects, e.g. `communicator.objects.all_gather(obj)`.

    Every rank must call them, and the communicator's other collectives, in the same order and with the same root. An
    object may be anything that can be pickled, of any size on each rank. Each rank gets copies, of its own object too;
    only the root of a broadcast gets its object back. Unpickling can run code of the sender, so all ranks must trust
    each other.

    All methods raise the errors of Communicator's collectives, and:
        InvalidArgument: an argument is wrong; or a rank's object cannot be pickled, which all ranks raise, with the
            rank and the cause; or it cannot be unpickled here, which only this rank raises. The communicator stays
            usable.

    Args:
        communicator: whose ranks take part.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._backend = communicator._backend

    def all_gather(self, obj: Any) -> list[Any]:
        """Returns the objects of all ranks, in rank order.

        Args:
            obj: this rank's object.
        """
        return self.all_gather_for("objects.all_gather", obj)

    def all_gather_for(self, what: str, obj: Any) -> list[Any]:
        """all_gather for the public function `what`: ranks that call another one raise PlanMismatch."""
        agreement = agreement_on(what, (), None, "")
        return self._unpack(*self._run(agreement, self._parcel([obj])), agreement)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks, in rank order, on the root; elsewhere None.

        Args:
            obj: this rank's object.
            root: the rank that gets the objects.
        """
        return self.gather_for("objects.gather", obj, root)

    def gather_for(self, what: str, obj: Any, root: int = 0, argument: str = "root") -> list[Any] | None:
        """Gather for the public function `what`, whose parameter `argument` is the root."""
        root = checked_rank(self._backend, what, argument, root)
        agreement = agreement_on(what, (), None, f"root {root}")
        data, sizes = self._run(agreement, self._parcel([obj]), root=root)
        return None if self._backend.rank != root else self._unpack(data, sizes, agreement)

    def broadcast(self, obj: Any = None, root: int = 0) -> Any:
        """Returns the root's object, on every rank.

        Args:
            obj: on the root, the object to send; ignored elsewhere.
            root: the rank whose object all ranks get.
        """
        return self.broadcast_for("objects.broadcast", obj, root)

    def broadcast_for(self, what: str, obj: Any = None, root: int = 0) -> Any:
        """Broadcast for the public function `what`."""
        root = checked_rank(self._backend, what, "root", root)
        agreement = agreement_on(what, (), None, f"root {root}")
        is_root = self._backend.rank == root
        data, _ = self._run(agreement, self._parcel([obj] if is_root else []))
        return obj if is_root else self._unpickle(data, root, agreement)

    def scatter(self, objs: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Returns this rank's object of the root's list. Each rank receives only its own.

        Args:
            objs: on the root, a list or tuple with one object for each rank (else all raise InvalidArgument); ignored
                elsewhere.
            root: the rank that has the list.
        """
        backend = self._backend
        root = checked_rank(backend, "objects.scatter", "root", root)
        agreement = agreement_on("objects.scatter", (), None, f"root {root}")
        mine = self._parcel_for_each(objs) if backend.rank == root else self._parcel([])
        data, _ = self._run(agreement, mine, backend.world_size, sender=root)
        return self._unpickle(data, root, agreement)

    def send(self, obj: Any, dest: int) -> None:
        """Sends an object to one other rank, which must call objects.recv. Returns when that rank has begun to receive.

        Args:
            obj: the object.
            dest: the rank that receives it; not this rank.
        """
        dest = checked_rank(self._backend, "objects.send", "dest", dest, is_self_allowed=False)
        mine = self._parcel([obj])
        data = mine.pickles[0] if mine.refusal is None else mine.refusal
        agreement = self._message_agreement(self._backend.rank, dest)
        size = np.array([len(data) if mine.refusal is None else -len(data)], np.int64)
        for array in (size.view(np.uint8), np.frombuffer(data, np.uint8)):
            self._exchange("objects.send", [Message(dest, self._backend.arrays.flat(array), agreement)], [])
        if mine.refusal is not None:
            raise self._refused({self._backend.rank: mine.refusal.decode()}, agreement) from mine.cause

    def recv(self, source: int) -> Any:
        """Returns the object that another rank sends with objects.send.

        Args:
            source: the rank that sends it; not this rank.
        """
        source = checked_rank(self._backend, "objects.recv", "source", source, is_self_allowed=False)
        agreement = self._message_agreement(source, self._backend.rank)
        size = np.empty(1, np.int64)
        self._receive(size.view(np.uint8), source, agreement)
        data = np.empty(abs(int(size[0])), np.uint8)
        self._receive(data, source, agreement)
        if size[0] < 0:
            raise self._refused({source: data.tobytes().decode()}, agreement)
        return self._unpickle(data, source, agreement)

    def _receive(self, array: Array, source: int, agreement: Agreement) -> None:
        flat = self._communicator._flat_target(array)
        self._exchange("objects.recv", [], [Message(source, flat, agreement, array)])

    def _exchange(self, what: str, sends: list[Message], receives: list[Message]) -> None:
        [message] = [*sends, *receives]
        message.mark = self._backend.mark_work()
        self._communicator._send_and_receive(what, sends, receives, None, None)

    def _message_agreement(self, sender: int, receiver: int) -> Agreement:
        ranks = self._backend.ranks
        way = f"rank {ranks[sender]} to rank {ranks[receiver]}"
        return agreement_on("objects.send", (), None, way, is_message=True)

    def _run(
        self,
        agreement: Agreement,
        mine: _Parcel,
        count: int = 1,
        root: int | None = None,
        sender: int | None = None,
    ) -> tuple[Array, list[list[int]]]:
        """Runs one collective: exchanges the sizes of the objects, then moves the pickled objects.

        Args:
            agreement: what the ranks compare.
            mine: this rank's pickled objects, or why it cannot send them.
            count: how many objects one rank can send.
            root: the only rank that gets the objects; None if all do.
            sender: the only rank that sends objects, one to each; None if each rank sends its own.

        Returns:
            The pickled objects that this rank gets, one after the other in rank order; and the sizes of each rank's.
        """
        backend, rank = self._backend, self._backend.rank
        what = agreement.describe().what
        backend.checked_stream(None, what)
        with self._communicator._lifetime.turn(what, agreement):
            shared = backend.share_numbers(mine.numbers(count), agreement)
            is_refused = any(sizes[0] < 0 for sizes in shared)
            if is_refused:  # all ranks get the reasons in place of objects
                sent, root, sender = mine.refusal or b"", None, None
                shared = [[max(0, -sizes[0])] for sizes in shared]
            else:
                sent = mine.pickles[0] if len(mine.pickles) == 1 else b"".join(mine.pickles)
            bounds = bounds_of(list(map(sum, shared)) if sender is None else shared[sender], 1)
            size = bounds[-1] if root in (None, rank) else 0
            data = np.empty(size if sender is None else shared[sender][rank], np.uint8)
            # On the communicator's own stream, so that the host need not wait for the work on the caller's stream.
            with backend.launching(None, []) as launch:
                source = backend.arrays.flat(np.frombuffer(sent, np.uint8))
                target = self._communicator._flat_target(data)
                launch.keep(source, target)
                if sender is not None:
                    backend.scatter(source if rank == sender else None, target, bounds, sender, agreement)
                elif root is None:
                    backend.all_gather(source, target, bounds, agreement)
                else:
                    backend.gather(source, target if rank == root else None, bounds, root, agreement)
                launch.write_back(target, data)
            launch.wait()
        if is_refused:  # after the collective: within it an error would end the communicator
            parts = enumerate(pairwise(bounds))
            reasons = {rank: data[begin:end].tobytes().decode() for rank, (begin, end) in parts if end > begin}
            raise self._refused(reasons, agreement) from mine.cause
        return data, shared

    def _parcel_for_each(self, objs: Any) -> _Parcel:
        """Pickles what scatter got: a list with one object for each rank."""
        needed = self._backend.world_size
        if not isinstance(objs, (list, tuple)):
            return _Parcel.refuse(f"needs a list of {needed} objects, one for each rank, got {type(objs).__name__}")
        if len(objs) != needed:
            return _Parcel.refuse(f"needs a list of {needed} objects, one for each rank, got {len(objs)}")
        return self._parcel(objs)

    def _parcel(self, objs: Sequence[Any]) -> _Parcel:
        """Pickles objects: before the collective begins, because it runs code of theirs."""
        pickles = []
        for number, obj in enumerate(objs):
            try:
                pickles.append(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too: the other ranks wait for this one
                which = "its object" if len(objs) == 1 else f"its object for rank {self._backend.ranks[number]}"
                return _Parcel.refuse(f"{which} cannot be pickled: {describe(error)}", error)
        return _Parcel(pickles)

    def _refused(self, refusals: dict[int, str], agreement: Agreement) -> InvalidArgument:
        texts = [f"rank {self._backend.ranks[rank]}: {text}" for rank, text in refusals.items()]
        more = [f"and {len(texts) - _SHOWN_REFUSALS} more ranks"] if len(texts) > _SHOWN_REFUSALS else []
        shown = "; ".join(texts[:_SHOWN_REFUSALS] + more)
        return InvalidArgument(f"{self._backend.label}: {agreement.describe().what} moved nothing: {shown}")

    def _unpack(self, data: Array, sizes: Sequence[Sequence[int]], agreement: Agreement) -> list[Any]:
        parts = enumerate(pairwise(bounds_of([size for [size] in sizes], 1)))
        return [self._unpickle(data[begin:end], rank, agreement) for rank, (begin, end) in parts]

    def _unpickle(self, data: Array, sender: int, agreement: Agreement) -> Any:
        try:
            return pickle.loads(data.data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit
            raise InvalidArgument(
                f"{self._backend.label}: {agreement.describe().what} received an object from rank "
                f"{self._backend.ranks[sender]} that cannot be unpickled on this rank: {describe(error)}; check that "
                "this rank can import the object's class"
            ) from error


class _Parcel(NamedTuple):
    """The pickled objects that one rank sends in a collective, or why it cannot.

    Attributes:
        pickles: the pickled objects, in order; may be empty.
        refusal: why the rank cannot send its objects, as UTF-8 text; None if it can.
        cause: the exception that is the reason, if there is one.
    """

    pickles: list[bytes]
    refusal: bytes | None = None
    cause: BaseException | None = None

    @classmethod
    def refuse(cls, reason: str, cause: BaseException | None = None) -> _Parcel:
        """Returns the parcel of a rank that cannot send its objects."""
        return cls([], reason[:_MAX_REASON_CHARACTERS].encode(errors="backslashreplace"), cause)

    def numbers(self, count: int) -> list[int]:
        """Returns the size of each pickled object, then zeros, `count` in all; a refusal has a negative one first."""
        sizes = [len(data) for data in self.pickles] if self.refusal is None else [-len(self.refusal)]
        return sizes + [0] * (count - len(sizes))
