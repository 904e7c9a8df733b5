"""The messages that `communicator.asynchronous` has begun.

They are pending until this rank waits. Every blocking call on the communicator starts all that wait to be started, and
the backend moves on all that were started while it waits. So each message ends by itself, and programs of sends and
receives in any legal order end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gradsync.communicators.backend import Backend, Message
from gradsync.errors import CollectiveTimeout, GradsyncError
from gradsync.futures import Work, again, refuse_wait_in_callback

if TYPE_CHECKING:
    from gradsync.communicators.lifetime import Lifetime


class Messages:
    """The messages of one communicator.

    Args:
        backend: the communicator's backend.
        lifetime: the communicator's lifetime, which starts the messages at each call.

    Attributes:
        unstarted: the messages that no call has started, sends and receives, by asynchronous call.
    """

    def __init__(self, backend: Backend, lifetime: Lifetime) -> None:
        self._backend = backend
        self._lifetime = lifetime
        self.unstarted: list[tuple[Sequence[Message], Sequence[Message]]] = []
        self._begun: list[Message] = []  # that may not be over
        lifetime.messages = self

    def begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> MessageWork:
        """Adds messages, which the next blocking call starts."""
        self._begun = [message for message in self._begun if not message.is_over]
        self._begun += [*sends, *receives]
        self.unstarted.append((sends, receives))
        return MessageWork(self, [*sends, *receives])

    def start(self) -> None:
        """Hands all that wait to the backend. Call it within a turn of the communicator."""
        groups, self.unstarted = self.unstarted, []
        sends = [message for of_call, _ in groups for message in of_call]
        receives = [message for _, of_call in groups for message in of_call]
        self._backend.exchange(sends, receives)

    def wait(self, awaited: Sequence[Message], seconds: float | None = None) -> None:
        """Moves all messages on until some are over; returns after `seconds` too. With none, it does not wait."""
        with self._lifetime.turn("a message", awaited[0].agreement if awaited else None):
            self._backend.exchange([], [], awaited, seconds)

    def wait_for_all(self) -> None:
        """Waits until all messages are over; their futures have their errors."""
        left = [message for message in self._begun if not message.is_over]
        if left and self._lifetime.ended_because is None:
            with suppress(GradsyncError):
                self.wait(left)

    def check_usable(self) -> None:
        """Raises an error if the communicator has ended."""
        self._lifetime.check_usable("a message")

    def end(self) -> None:
        """Fails the messages that are not over, because the communicator has ended."""
        left, self._begun, self.unstarted = self._begun, [], []
        for message in left:
            if not message.is_over:
                try:
                    self.check_usable()
                except GradsyncError as error:
                    message.end(error)


class MessageWork(Work):
    """The messages of one asynchronous call: one, or the two of an exchange."""

    is_done = False

    def __init__(self, messages: Messages, own: Sequence[Message]) -> None:
        self._messages = messages
        self._own = own

    @property
    def _are_over(self) -> bool:
        return all(message.is_over for message in self._own)

    def done(self) -> bool:
        """See Work. Moves all messages on, without waiting."""
        if not self._are_over:
            with suppress(GradsyncError):  # in a done-callback, or while another thread uses the communicator
                self._messages.wait([])
        return self._are_over and all(message.work.done() for message in self._own)

    def order(self, name: str = "", stream: Any = None, timeout_seconds: float | None = None) -> None:
        """See Work."""
        if not self._are_over:
            refuse_wait_in_callback(name)
            self._messages.wait(self._own, timeout_seconds)
        if not self._are_over:
            raise CollectiveTimeout(
                f"{name} did not end within {timeout_seconds:g} s; it goes on: call result() again, or wait longer"
            )
        for message in self._own:
            if message.error is not None:
                raise again(message.error)
            message.work.order(name, stream)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See Work."""
        self.order(timeout_seconds=timeout_seconds)
        for message in self._own:
            message.work.wait(timeout_seconds)

    def failure(self) -> BaseException | None:
        """See Work."""
        errors = [message.error or message.work.failure() for message in self._own]
        return next((error for error in errors if error is not None), None)

    def when_done(self, function: Callable[[], None]) -> None:
        """See Work."""
        first, *others = self._own
        if others:
            first.when_over(lambda: others[0].when_over(function))
        else:
            first.when_over(function)
