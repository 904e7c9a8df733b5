"""Whether all ranks do the same. NCCL itself does not say: its kernels hang, or mix what does not belong together.

Before a launch the ranks can compare it through the rendezvous server; then nothing has moved if they differ. That
takes a round trip, and so only plans are compared, and under --debug everything. What was launched is compared
afterwards, on the device: all collectives of a communicator have gone into one number, of which the largest and the
smallest of all ranks must be the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from gradsync.communicators.agreement import OF_CALLBACK, Agreement, Description, mismatch
from gradsync.communicators.backend import Message
from gradsync.communicators.failures import FailureMonitor, exchange_descriptions, exchange_mismatch, raise_if_left
from gradsync.diagnostics import FlightRecorder
from gradsync.errors import GradsyncError, PlanMismatch, RankFailed
from gradsync.rendezvous.client import RendezvousClient

_BITS = 62  # so that the negative number is there, too
_FACTOR = 0x9E3779B97F4A7C15
_STRAYED = "launched other work than the others: "  # in the reason of an abort
_HISTORY = 1024  # collectives that are told of


class Verification:
    """What the ranks of one communicator do, and whether it is the same. One thread at a time may use it.

    Args:
        client: this rank's connection to the rendezvous server; the client's ranks are the communicator's ranks.
        recorder: the communicator's flight recorder.
        label: this rank's name in errors.
        timeout_seconds: how long a rank waits for the others.
        failures: the failures that the server reports.

    Attributes:
        launched: one number for all collectives that this rank has launched since the last comparison.
    """

    def __init__(
        self,
        client: RendezvousClient,
        recorder: FlightRecorder,
        label: str,
        timeout_seconds: float,
        failures: FailureMonitor,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._group = recorder.group
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._failures = failures
        self._compared = 0  # the number of comparisons
        self._messages: dict[tuple[int, int], int] = {}  # compared, by sender and receiver
        self._history: deque[Agreement] = deque(maxlen=_HISTORY)  # launched since take_launched() was called
        self._count = 0  # of collectives in `launched`
        self.launched = 0

    def add(self, agreement: Agreement) -> None:
        """Adds a collective that is about to be launched."""
        self.launched = (self.launched * _FACTOR + agreement.digest) % 2**_BITS
        self._history.append(agreement)
        self._count += 1

    # -- Before a launch -----------------------------------------------------------------------------------------

    def compare(self, agreement: Agreement) -> None:
        """Raises PlanMismatch on every rank unless all are about to do the same. The host waits for all ranks."""
        number, value = self.next_number(), agreement.digest.to_bytes(8, "little")

        def exchange(seconds: float) -> list[bytes]:
            return self._client.exchange(f"nccl/{self._group}/{number}", value, timeout_seconds=seconds)

        digests = self._failures.await_answer(exchange, self._timeout_seconds, self.raise_if_left)
        self.raise_if_different(digests, agreement, number)

    def next_number(self) -> int:
        """Returns the number of a comparison, the same on all ranks."""
        self._compared += 1
        return self._compared

    def raise_if_different(self, digests: Sequence[object], agreement: Agreement, number: int) -> None:
        """Raises PlanMismatch, on every rank, unless the ranks' digests are equal in comparison `number`."""
        if len(set(digests)) > 1:
            ranks = self._client.world_ranks
            raise exchange_mismatch(self._client, self._group, number, self._label, agreement, ranks)

    def compare_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Ends each message on which its two ranks disagree. The host waits for the other ranks of all of them."""
        client, own = self._client, self._client.rank
        ways = [(own, each.peer, each) for each in sends] + [(each.peer, own, each) for each in receives]
        keys = []
        for sender, receiver, message in ways:  # all are told before any answer is awaited
            number = self._messages[sender, receiver] = self._messages.get((sender, receiver), 0) + 1
            keys.append(f"nccl/{self._group}/message/{sender}-{receiver}/{number}")
            text = f"{message.agreement.digest} {message.agreement.described().to_text()}"
            client.set(f"{keys[-1]}/{own}", text.encode())
        for key, (_, _, message) in zip(keys, ways, strict=True):
            peer = message.peer

            def ask(seconds: float, key: str = f"{key}/{peer}") -> bytes:
                return self._client.get(key, timeout_seconds=seconds)

            theirs = self._failures.await_answer(ask, self._timeout_seconds, self.raise_if_left).decode()
            client.delete(f"{key}/{peer}")
            digest, _, text = theirs.partition(" ")
            if int(digest) != message.agreement.digest:
                ranks = client.world_ranks
                told = {ranks[own]: message.agreement.described(), ranks[peer]: Description.from_text(text)}
                message.end(mismatch(self._label, message.agreement, told))

    # -- After launches ------------------------------------------------------------------------------------------

    def take_launched(self) -> tuple[int, int, list[Agreement]]:
        """Returns the number for what was launched since the last call of this method, how many, and the last of it."""
        taken = self.launched, self._count, list(self._history)
        self.launched = self._count = 0
        self._history.clear()
        return taken

    def verdict(
        self, largest: int, smallest: int, number: int, count: int, history: Sequence[Agreement]
    ) -> PlanMismatch | None:
        """Returns the error if the numbers of the ranks differed, and exchanges what they had launched."""
        if largest == smallest:
            return None
        lines = tuple(map(_line, history))
        known = f", of which the last {len(lines)} are known" if count > len(lines) else ""
        mine = Description(f"launched {count} collectives since the last comparison{known}", lines)
        told = exchange_descriptions(self._client, self._group, number, mine.to_text(), self._client.world_ranks)
        return mismatch(self._label, Agreement(0, lambda: mine), told, broken=True)

    # -- A rank that strays: it alone knows, and others wait on their GPUs ---------------------------------------

    def reason(self, agreement: Agreement) -> str:
        """Returns the reason with which this rank ends the communicator, since it cannot launch what the others do."""
        where = f", in group {self._group!r}" if self._client.name else ""  # it ends the world, too
        return f"{_STRAYED}{agreement.described()}{where}"

    def strayed(self, agreement: Agreement) -> PlanMismatch:
        """Returns the error for a rank that strays."""
        rank = self._client.world_ranks[self._client.rank]
        return self._strayed(rank, str(agreement.described()), "the other ranks may have launched all of it")

    def explain(self, error: GradsyncError) -> GradsyncError:
        """Returns the error to raise for a failure that the server has reported."""
        _, is_found, theirs = str(error).partition(_STRAYED)
        if not isinstance(error, RankFailed) or error.rank is None or not is_found:
            return error
        last = self._recorder.last
        return self._strayed(error.rank, theirs, f"this rank: {'nothing yet' if last is None else last.title}")

    def _strayed(self, rank: int, theirs: str, own: str) -> PlanMismatch:
        return PlanMismatch(
            f"{self._label}: the ranks disagree on a step of which parts were launched, so that the communicator has "
            f"ended:\n  rank {rank}: {theirs}\n  {own}",
            descriptions={rank: theirs},
            broken=True,
        )

    # -- Ranks that have closed the communicator -----------------------------------------------------------------

    def announce_closed(self) -> None:
        """Tells the server that this rank has closed the communicator."""
        self._client.announce_left(f"nccl/{self._group}/closed", self._recorder.begun + 1)

    def raise_if_left(self, ranks: Sequence[int] | None = None, number: float | None = None) -> None:
        """Raises RankFailed if one of these world ranks (None: any) has closed it before collective `number`."""
        position = math.inf if number is None else number
        raise_if_left(self._client, f"nccl/{self._group}/closed", self._label, position, ranks)


def _line(agreement: Agreement) -> str:
    callback = agreement.describe().callback
    return f"{agreement.headline()}{callback and f'{OF_CALLBACK}{callback}'}"
