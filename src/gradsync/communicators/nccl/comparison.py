"""Compares each collective and message of a communicator through the rendezvous server, before NCCL launches it.

NCCL's collectives cannot carry a digest. So the ranks first exchange their digests through the server. If the digests
differ, every rank raises PlanMismatch before data moves, and the communicator stays usable. All ranks of a communicator
compare its collectives. For a message, only the sender and the receiver compare.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

from gradsync.communicators.agreement import Agreement, mismatch, on_behalf
from gradsync.communicators.failures import FailureMonitor, exchange_descriptions, raise_if_left
from gradsync.errors import PlanMismatch
from gradsync.rendezvous.client import RendezvousClient

#: The sender and the receiver of messages, by their numbers in the communicator; one of them is this rank.
Direction = tuple[int, int]


class _Comparer:
    """The ranks that compare, through their client, and the number of their next comparison.

    Args:
        client: this rank's connection to the rendezvous server; the client's ranks compare.
        group: the name of the comparisons, the same on all ranks.
    """

    def __init__(self, client: RendezvousClient, group: str) -> None:
        self.client = client
        self.group = group
        self.number = 0


class Comparison:
    """Compares the collectives and messages of one communicator.

    Args:
        client: this rank's connection to the rendezvous server; the client's ranks are the communicator's ranks.
        group: the communicator's name, the same on all ranks.
        label: this rank's name in errors; errors name other ranks by their world ranks.
        timeout_seconds: how long a rank waits for the other ranks.
        failures: the failures that the server reports.
    """

    def __init__(
        self, client: RendezvousClient, group: str, label: str, timeout_seconds: float, failures: FailureMonitor
    ) -> None:
        self._client = client
        self._group = group
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._failures = failures
        self._departures = f"nccl/{group}/closed"
        self._of_all = _Comparer(client, group)
        self._of_messages: dict[Direction, _Comparer] = {}

    def compare(self, agreement: Agreement) -> None:
        """Returns when all ranks are about to launch the same collective.

        Raises:
            PlanMismatch: the ranks are about to launch different collectives.
            RankFailed, CollectiveTimeout: a rank died, closed the communicator, or did not arrive.
            RendezvousError: the server is gone.
        """
        self._compare(self._of_all, agreement, None)

    def compare_messages(self, agreements: Mapping[Direction, Agreement]) -> Iterator[Direction]:
        """Compares one or two messages, and yields each direction whose message this rank may launch now.

        The caller launches each message on its own, before it requests the next one: NCCL connects two ranks in the
        first NCCL group that has a message between them, and both ranks must launch the same messages in that group.
        Source: NCCL, src/transport.cc, ncclTransportP2pSetup. The call blocks until the other rank launches the message
        too. So all ranks launch their messages in one order, the order in which the server answers; otherwise ranks
        might wait for each other in a circle.

        Raises:
            PlanMismatch: this rank and its peer disagree on a message. The method raises the error after it has yielded
                the other message, because the peer of the other message waits for it.
            RankFailed, CollectiveTimeout, RendezvousError: as for `compare`.
        """
        if len(agreements) == 1:
            [(direction, agreement)] = agreements.items()
            self._compare(self._between(direction), agreement, direction)
            yield direction
            return
        ended: SimpleQueue[tuple[Direction, BaseException | None]] = SimpleQueue()
        arrivals: list[Any] = []  # in the order of the server's answers; the threads may wake in a different order
        launching = threading.get_ident()

        # Both are compared at the same time, because other ranks may compare the same messages in a different order.
        def compare(direction: Direction, agreement: Agreement) -> None:
            on_behalf.thread = launching
            try:
                self._compare(self._between(direction), agreement, direction, (arrivals, direction))
                ended.put((direction, None))
            except BaseException as error:
                ended.put((direction, error))

        for message in agreements.items():
            threading.Thread(target=compare, args=message, name="gradsync-nccl-comparison", daemon=True).start()
        errors: dict[Direction, PlanMismatch | None] = {}
        given = 0
        while given < len(agreements):
            direction, error = ended.get()
            if error is not None and not isinstance(error, PlanMismatch):
                raise error  # without waiting for the other answer
            errors[direction] = error
            while given < len(arrivals) and arrivals[given] in errors:
                if errors[arrivals[given]] is None:
                    yield arrivals[given]
                given += 1
        for error in errors.values():
            if error is not None:
                raise error

    def announce_closed(self) -> None:
        """Reports to the server that this rank has closed the communicator, and takes part in no later comparison."""
        self._client.announce_left(self._departures, 0)

    def raise_if_closed(self, ranks: Iterable[int] | None = None) -> None:
        """Raises RankFailed if one of the given ranks (numbers in the communicator; None: any) has closed it."""
        needed = None if ranks is None else [self._client.world_ranks[rank] for rank in ranks]
        raise_if_left(self._client, self._departures, self._label, math.inf, needed)

    def close(self) -> None:
        """Ends the comparisons of messages."""
        for between in self._of_messages.values():
            between.client.close()

    def _between(self, direction: Direction) -> _Comparer:
        found = self._of_messages.get(direction)
        if found is None:
            client = self._client.group(direction, "{}/{}-{}".format(self._group, *direction))
            found = self._of_messages[direction] = _Comparer(client, "messages")
        return found

    def _compare(
        self,
        comparer: _Comparer,
        agreement: Agreement,
        needed: Iterable[int] | None,
        arriving: tuple[list[object], object] | None = None,
    ) -> None:
        """Compares this rank's digest with the digests of the comparer's other ranks.

        Args:
            comparer: the ranks that compare.
            agreement: the digest and the description of this rank's collective or message.
            needed: the numbers of these ranks in the communicator; None for all ranks.
            arriving: see RendezvousClient.exchange.
        """
        self._failures.check()
        client, group, number = comparer.client, comparer.group, comparer.number
        comparer.number += 1
        # The name has a number, so that a rank that has missed an answer cannot take part in a later comparison.
        name, digest = f"{group}/compared/{number}", agreement.digest.to_bytes(8, "little")

        def exchange(seconds: float) -> list[bytes]:
            return client.exchange(name, digest, timeout_seconds=seconds, arriving=arriving)

        check = partial(self.raise_if_closed, needed)
        digests = self._failures.await_answer(exchange, self._timeout_seconds, check)
        if len(set(digests)) > 1:
            text = agreement.described().to_text()
            descriptions = exchange_descriptions(client, group, number, text, client.world_ranks)
            raise mismatch(self._label, agreement, descriptions)
