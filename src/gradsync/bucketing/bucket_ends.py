"""The ends of a step's buckets, for which their gradients' futures wait."""

from __future__ import annotations

import logging

from gradsync.bucketing.gradient_lock import Holder, Lock, put_back, register
from gradsync.collective_end import CollectiveEnd
from gradsync.completion import Completion
from gradsync.errors import InvalidArgument

_log = logging.getLogger("gradsync")


class BucketEnd(CollectiveEnd):
    """The end of one bucket, and the gradients in it that are locked until then.

    Args:
        holder: of the callback.

    Attributes:
        locks: those gradients.
    """

    __slots__ = ("_holder", "locks")

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self._holder = holder
        self.locks: list[Lock] = []

    def put_back(self) -> None:
        """Makes the gradients writeable again.

        Raises:
            InvalidArgument: one stays read-only, or its memory is in flight elsewhere too; the others are writeable.
        """
        try:
            for lock in self.locks:
                lock.set_writeable(True)
        except ValueError:
            locks = self.locks.copy()
            self.locks.clear()
            put_back(locks, self._holder)
        else:
            self.locks.clear()  # last: who is interrupted puts all of them back once more


class BucketEnds(dict[int, BucketEnd]):
    """By bucket number. A done-callback that ends in SystemExit keeps no other gradient from its end.

    Attributes:
        label: begins errors.
        whose: names the callback in errors of others; see gradient_lock.Holder.
    """

    def __init__(self, label: str = "", whose: str = "another callback") -> None:
        super().__init__()
        self.label = label
        self.whose = whose
        self._leaving: BaseException | None = None
        register(self)

    def __missing__(self, number: int) -> BucketEnd:
        end = self[number] = BucketEnd(self)
        return end

    def locked(self) -> list[Lock]:
        """Returns the gradients that are locked now; see gradient_lock.Holder."""
        return [lock for end in list(self.values()) for lock in list(end.locks)]

    def unlock(self, number: int, completion: Completion | None) -> None:
        """Makes the gradients of a bucket writeable again that was reduced; of one that was launched, at its end.

        Raises:
            InvalidArgument: see BucketEnd.put_back.
        """
        end = self[number]
        if completion is None:
            end.put_back()
        elif end.locks:
            completion.before_done(end.put_back)

    def unlock_waiting(self) -> None:
        """Makes those gradients writeable again whose bucket nobody will reduce. Any thread may call it."""
        for end in list(self.values()):
            if not end.is_pending:
                continue
            # Another thread may be locking one now: that one finds them all here when its step fails.
            locks = end.locks.copy()
            if end.is_completed_by_caller():
                end.locks.clear()
            try:
                put_back(locks, self)
            except InvalidArgument as error:
                _log.error("%s", error)

    def finish(self, number: int, completion: Completion | None) -> None:
        """Ends a bucket that was reduced, or whose reduction was launched; raise_leaving has to follow."""
        self._finish(self[number], None, completion)

    def postpone(self, completion: Completion) -> None:
        """Has the results that were launched be final at a later end than that of their reduction."""
        for end in self.values():
            end.completion = completion

    def fail(self, error: BaseException) -> None:
        """Ends the buckets that were not reduced."""
        self.unlock_waiting()
        ends = list(self.values())
        self.clear()
        for end in ends:
            self._finish(end, error, None)
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._leaving = None
        self.raise_leaving()

    def raise_leaving(self) -> None:
        """Raises the first SystemExit, or the like, that a done-callback has ended in."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            raise leaving

    def _finish(self, end: CollectiveEnd, error: BaseException | None, completion: Completion | None) -> None:
        try:
            end.finish(None, error, completion)
        except BaseException as leaving:
            self._leaving = self._leaving or leaving
