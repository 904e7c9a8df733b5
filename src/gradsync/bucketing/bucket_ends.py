"""The ends of a step's buckets, for which their gradients' futures wait."""

from __future__ import annotations

from gradsync.futures import CollectiveEnd, Completion


class BucketEnds(dict[int, CollectiveEnd]):
    """By bucket number. A done-callback that ends in SystemExit keeps no other gradient from its end.

    Args:
        timeout_seconds: how long a future that is given no timeout waits for one.
    """

    def __init__(self, timeout_seconds: float = 0.0) -> None:
        super().__init__()
        self.timeout_seconds = timeout_seconds
        self._leaving: BaseException | None = None

    def __missing__(self, number: int) -> CollectiveEnd:
        end = self[number] = CollectiveEnd(self.timeout_seconds)
        return end

    def finish(self, number: int, completion: Completion | None) -> None:
        """Ends a bucket that was reduced, or whose reduction was launched; raise_leaving has to follow."""
        self._finish(self[number], None, completion)

    def postpone(self, completion: Completion) -> None:
        """Has the results that were launched be final at a later end than that of their reduction."""
        for end in self.values():
            end.completion = completion

    def fail(self, error: BaseException) -> None:
        """Ends the buckets that were not reduced."""
        ends = list(self.values())
        self.clear()
        for end in ends:
            self._finish(end, error, None)
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._leaving = None
        self.raise_leaving()

    def disown(self, error: BaseException) -> None:
        """Ends them in the child of a fork; see CollectiveEnd."""
        for end in self.values():
            end.disown(error)

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
