"""What a rank tells the others about its end, and what it hears of theirs: closed, aborted, failed, too late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gradsync.communicators.failures import (
    CAUSE_SECONDS,
    VERDICT_SECONDS,
    FailureMonitor,
    await_cause,
    closed_failure,
)
from gradsync.communicators.shared_memory.compiled import fence
from gradsync.communicators.shared_memory.memory import (
    ABORTED,
    ABORTED_AT,
    ARRIVED,
    CULPRIT,
    STATE,
    TEXT_BEGIN,
    TEXT_END,
    Shared,
)
from gradsync.errors import CollectiveTimeout, RankFailed, RendezvousError

# The states of a rank. ABORTED_BY_SERVER: it aborted because of a failure that the server sends to all ranks.
# CLOSED_AFTER_FAILURE: it closed after it had received such a failure. In these two states every other rank has the
# failure too, or gets it soon: the server tells the ranks one after the other. That failure names the cause.
_OPEN, _CLOSED, _ABORTED, _ABORTED_BY_SERVER, _CLOSED_AFTER_FAILURE = 0, 1, 2, 3, 4

ANY_ROUND = 2**64 - 1  # larger than the number of any round


class Peers:
    """The states of the ranks of a communicator, in shared memory: each rank writes its own, and reads the others.

    Args:
        shared: the shared memory.
        ranks: the world ranks of all members, for errors and for reports to the server. Methods number the ranks as the
            communicator does, unless they say "world rank".
        label: this rank's name in errors.
        timeout_seconds: how long a rank waits for another one.
        failures: it gets failures from the server, and reports long waits.
    """

    def __init__(
        self, shared: Shared, ranks: Sequence[int], label: str, timeout_seconds: float, failures: FailureMonitor
    ) -> None:
        self._words = shared.words
        self._lines = shared.lines
        self._rank = shared.rank
        self._shared = shared
        self._ranks = ranks
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._failures = failures
        self._round, self._began = 0, 0.0  # the round that this rank waits for, and since when

    # -- This rank's end ---------------------------------------------------------------------------------------

    def announce_closed(self) -> None:
        """Announces that this rank has closed the communicator. Its arrivals at earlier rounds remain valid."""
        state = _CLOSED_AFTER_FAILURE if self._failures.has_failed() else _CLOSED
        fence()
        self._words[self._lines[self._rank] + STATE] = state

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        """Makes every other rank that waits, now or later, raise RankFailed with the reason, or the server's error."""
        state = _ABORTED_BY_SERVER if self._failures.was_raised else _ABORTED
        self._announce(state, reason, self._ranks[self._rank] if culprit is None else culprit)

    def _announce(self, state: int, reason: str, culprit: int) -> None:
        words, line = self._words, self._lines[self._rank]
        size_bytes = 8 * (TEXT_END - TEXT_BEGIN)
        data = reason.encode(errors="backslashreplace")[:size_bytes].ljust(size_bytes, b"\0")
        words[line + TEXT_BEGIN : line + TEXT_END] = memoryview(data).cast("Q")
        # A rank that is in an earlier round has all that it needs, and may complete it.
        words[line + ABORTED_AT] = self._shared.rounds + 1
        words[line + CULPRIT] = culprit
        fence()
        words[line + STATE] = state
        fence()
        words[ABORTED] = 1

    # -- The ends of others ------------------------------------------------------------------------------------

    def look_in_round(self) -> None:
        """`look` of a rank that waits in the barrier, or that was told of an abort there."""
        words, number = self._words, self._shared.rounds + 1
        if number != self._round:
            self._round, self._began = number, time.monotonic()

        def missing() -> list[int]:
            return [rank for rank, line in enumerate(self._lines) if words[line + ARRIVED] < number]

        self.look(missing, time.monotonic() - self._began, number)

    def look(self, missing: Callable[[], list[int]], waited_seconds: float, number: int) -> None:
        """Raises an error if the awaited ranks cannot come any more, or if the deadline has passed.

        Args:
            missing: a function that returns the ranks for which this rank waits at the time of the call.
            waited_seconds: how long this rank has waited.
            number: the round in which this rank waits; see check_for_aborts.

        Raises:
            RankFailed: a rank closed or aborted the communicator, or died.
            CollectiveTimeout: the missing ranks did not come before the deadline.
            RendezvousError: the rendezvous server is gone, and a rank is missing.
        """
        awaited = missing()
        if self._words[self._lines[self._rank] + STATE] != _OPEN:  # another thread closed or aborted the communicator
            raise RankFailed(
                f"{self._label}: the communicator was closed or aborted during a collective",
                rank=self._ranks[self._rank],
                phase="collective",
            )
        try:
            self._failures.check()
        except (RankFailed, CollectiveTimeout, RendezvousError):
            # If all came before the failure, this wait succeeds, and the next one raises the error.
            if missing():
                raise
        for rank in awaited:
            state = self._words[self._lines[rank] + STATE]
            fence()  # a rank may come and then close, so `missing` is called again after the state was read
            if state in (_CLOSED, _CLOSED_AFTER_FAILURE) and rank in missing():
                if state == _CLOSED_AFTER_FAILURE:
                    await_cause(CAUSE_SECONDS, self._failures.check)
                raise closed_failure(self._label, self._ranks[rank], self._failures.awaited_message)
        self.check_for_aborts(number)
        if awaited:
            self._check_deadline([self._ranks[rank] for rank in awaited], waited_seconds)

    def check_for_aborts(self, number: int) -> None:
        """Raises RankFailed if another rank has aborted in this round or in an earlier one.

        It does even if the other rank had arrived at the round before it aborted.

        Args:
            number: the round in which this rank waits; ANY_ROUND if an abort in any round is an error.
        """
        words = self._words
        if not words[ABORTED]:
            return
        fence()
        # A rank that aborts because of another one passes on what it has heard. The one that began comes first.
        of_their_own = [words[line + CULPRIT] == rank for rank, line in zip(self._ranks, self._lines, strict=True)]
        for rank, line in sorted(enumerate(self._lines), key=lambda each: not of_their_own[each[0]]):
            state = words[line + STATE]
            fence()
            if rank != self._rank and state in (_ABORTED, _ABORTED_BY_SERVER) and words[line + ABORTED_AT] <= number:
                if state == _ABORTED_BY_SERVER:
                    await_cause(VERDICT_SECONDS, self._failures.check)
                self._failures.check()  # raises the server's error if there is one, because all ranks raise that
                data = words[line + TEXT_BEGIN : line + TEXT_END].tobytes()
                reason = data.rstrip(b"\0").decode(errors="replace")
                text = f"{self._label}: rank {self._ranks[rank]} aborted: {reason}"
                raise RankFailed(text, rank=words[line + CULPRIT], phase="collective")

    def _check_deadline(self, awaited: list[int], waited_seconds: float) -> None:
        if waited_seconds >= self._timeout_seconds:
            # The abort is announced before the timeout is reported: a rank that arrives now must not continue as if the
            # round were complete.
            self._announce(_ABORTED_BY_SERVER, f"waited {waited_seconds:.3g} s for ranks {awaited}", awaited[0])
            self._failures.time_out(waited_seconds, awaited)
        self._failures.warn(waited_seconds, awaited)
