"""Messages between two ranks of a shared-memory communicator: their order, what two ranks disagree on, and the waits.

Nothing here waits for one message alone: whoever waits moves all messages on that have been started. So pairs and rings
of sends and receives end in whatever order a program starts them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Collection, Sequence

from gradsync.communicators.agreement import mismatch
from gradsync.communicators.backend import Message
from gradsync.communicators.failures import FailureMonitor, exchange_descriptions, publish_description
from gradsync.communicators.shared_memory import channels, kernels
from gradsync.communicators.shared_memory.channels import Channel
from gradsync.communicators.shared_memory.memory import Shared
from gradsync.communicators.shared_memory.peers import ANY_ROUND, Peers
from gradsync.errors import GradsyncError, PlanMismatch

CHECK_SECONDS = 5e-3  # how often a rank that waits looks for failures


class Messages:
    """The messages that this rank has started.

    Args:
        shared: the shared memory.
        peers: the states of the other ranks.
        ranks: the world ranks of all members.
        label: this rank's name in errors.
        failures: for its client and the communicator's name.
    """

    def __init__(
        self, shared: Shared, peers: Peers, ranks: Sequence[int], label: str, failures: FailureMonitor
    ) -> None:
        self._shared = shared
        self._peers = peers
        self._ranks = ranks
        self._label = label
        self._failures = failures
        self._queues: dict[tuple[int, bool], _Queue] = {}  # by peer, and whether this rank sends
        self._started: list[_Queue] = []  # those that have messages, and some that have none any more

    @property
    def is_idle(self) -> bool:
        """Whether all messages that were started are over."""
        # Not any(...): if Ctrl-C strikes at the end of its generator, Python drops the KeyboardInterrupt.
        for queue in self._started:  # noqa: SIM110
            if queue.messages:
                return False
        return True

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], awaited: Collection[Message], seconds: float | None
    ) -> None:
        to_self = [message for message in sends if message.peer == self._shared.rank]
        from_self = [message for message in receives if message.peer == self._shared.rank]
        for sent, received in zip(to_self, from_self, strict=True):  # each came in one call, which compared them
            received.flat[...] = sent.flat
            received.end()
            sent.end()
        for message in receives:  # receives first, so that a peer can begin while this rank copies its message
            self._start(message, is_send=False)
        for message in sends:
            self._start(message, is_send=True)
        if not self._are_over(awaited):
            self._wait(awaited, math.inf if seconds is None else seconds)
        if awaited:
            self._peers.check_for_aborts(ANY_ROUND)  # a rank may have sent a message and then aborted

    def advance(self) -> bool:
        """Moves each message on by one piece, if possible. Returns whether that was possible for any; never waits."""
        self._started = [queue for queue in self._started if queue.messages]
        moved = False
        for queue in self._started:
            moved = self._advance(queue) or moved
        return moved

    def release(self) -> None:
        """Drops the references to the shared memory."""
        self._queues.clear()
        self._started.clear()

    def _start(self, message: Message, *, is_send: bool) -> None:
        if message.is_over:  # this rank sent it to itself
            return
        queue = self._queues.get((message.peer, is_send))
        if queue is None:
            rank = self._shared.rank
            sender, receiver = (rank, message.peer) if is_send else (message.peer, rank)
            name = f"{self._failures.group}/{sender}-{receiver}"
            queue = self._queues[message.peer, is_send] = _Queue(self._shared.channel(sender, receiver), name)
        queue.messages.append(message)
        if len(queue.messages) == 1:
            queue.post_next()
        if queue not in self._started:
            self._started.append(queue)

    # -- Waiting -----------------------------------------------------------------------------------------------

    def _are_over(self, awaited: Collection[Message]) -> bool:
        """Moves all messages on until those awaited are over, or that needs another rank. Returns whether they are."""
        while self.advance():
            if awaited and _all_over(awaited):
                break
        return _all_over(awaited)

    def _wait(self, awaited: Collection[Message], seconds: float) -> None:
        began = time.monotonic()

        def is_over() -> bool:
            return self._are_over(awaited) or time.monotonic() - began >= seconds

        def missing() -> list[int]:
            self._are_over(awaited)
            return list({message.peer: None for message in awaited if not message.is_over})

        def check() -> float:
            self._peers.look(missing, time.monotonic() - began, ANY_ROUND)
            return CHECK_SECONDS

        kernels.wait(is_over, check)

    # -- One message -------------------------------------------------------------------------------------------

    def _advance(self, queue: _Queue) -> bool:
        channel = queue.channel
        if queue.dispute is None:
            result = channels.advance(channel)
            if result == channels.OVER:
                self._end(queue)
            elif result == channels.DIFFERS:
                self._dispute(queue)
            return result != channels.IDLE
        # Each side first tells the server its description of the message, and then the other side that it is there.
        if channel.words[channel.other + channels.TOLD] < channel.number:
            return False
        both = self._ranks[self._shared.rank], self._ranks[queue.messages[0].peer]
        client, text = self._failures.client, queue.dispute
        descriptions = exchange_descriptions(client, queue.name, channel.number, text, both)
        self._end(queue, mismatch(self._label, queue.messages[0].agreement, descriptions))
        return True

    def _end(self, queue: _Queue, error: PlanMismatch | None = None) -> None:
        for message in queue.end(error):
            self._start(message, is_send=False)

    def _dispute(self, queue: _Queue) -> None:
        channel = queue.channel
        queue.dispute = queue.messages[0].agreement.described().to_text()
        with contextlib.suppress(GradsyncError):  # the other rank then raises its error without this description
            publish_description(self._failures.client, queue.name, channel.number, queue.dispute)
        channel.words[channel.own + channels.TOLD] = channel.number


class _Queue:
    """The messages of one channel that this rank has started. The first one is posted; `name` is for disputes."""

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel = channel
        self.name = name
        self.messages: deque[Message] = deque()
        self.dispute: str | None = None  # this rank's description of the first message, if the two ranks disagree

    def post_next(self) -> None:
        message = self.messages[0]
        channels.post(self.channel, message.flat, message.agreement.digest)

    def end(self, error: PlanMismatch | None = None) -> Sequence[Message]:
        """Ends the first message, and posts the next one. Returns the receives to start."""
        self.dispute = None
        message = self.messages.popleft()
        channels.forget(self.channel)
        if self.messages:
            self.post_next()
        return message.end(error)


def _all_over(messages: Collection[Message]) -> bool:
    for message in messages:  # noqa: SIM110 - see is_idle
        if not message.is_over:
            return False
    return True
