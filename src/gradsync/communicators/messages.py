"""The messages that `communicator.asynchronous` has begun.

They are pending until this rank waits. Every blocking call on the communicator starts all that wait to be started, and
the backend moves on all that were started while it waits. So each message ends by itself, and programs of sends and
receives in any legal order end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gradsync.communicators.backend import Backend, Message
from gradsync.errors import CollectiveTimeout, GradsyncError, InvalidArgument, RankFailed, count, describe
from gradsync.futures import Work, again, refuse_wait_in_callback

if TYPE_CHECKING:
    from gradsync.communicators.lifetime import Lifetime

_MOST_NAMED = 4  # messages in a report

_log = logging.getLogger("gradsync")


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

    def begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> MessageWork:
        """Adds messages, which the next call starts. It is refused as a collective is, e.g. beside another thread's."""
        for message in sends:
            message.is_sent = True
        with self._lifetime.turn("a message", None):
            self._begun = [*self._left(), *sends, *receives]
            self.unstarted.append((sends, receives))
        return MessageWork(self, [*sends, *receives])

    def follow(self, message: Message) -> None:
        """Adds a message that the backend starts by itself; see Message.after."""
        self._begun.append(message)

    def start(
        self,
        sends: Sequence[Message] = (),
        receives: Sequence[Message] = (),
        awaited: Sequence[Message] = (),
        seconds: float | None = None,
    ) -> None:
        """Hands all that wait, and these, to the backend; see Backend.exchange. Call it within a turn."""
        groups, self.unstarted = self.unstarted, []
        all_sends = [message for of_call, _ in groups for message in of_call] + [*sends]
        all_receives = [message for _, of_call in groups for message in of_call] + [*receives]
        self._backend.exchange(all_sends, all_receives, awaited, seconds)

    def wait(self, awaited: Sequence[Message], seconds: float | None = None) -> None:
        """Moves all messages on until some are over; returns after `seconds` too."""
        with self._lifetime.turn("a message", awaited[0].agreement):
            self.start(awaited=awaited, seconds=seconds)

    def move_on(self, seconds: float = 0.0) -> bool:
        """Moves all messages on for some seconds, or until they are over; returns whether there were any.

        Raises:
            RankFailed, CollectiveTimeout, ...: a failure has ended the communicator.
        """
        left, backend = self._left(), self._backend
        if not left:
            return False
        with self._lifetime.turn("a message", None):
            self.start()
            if seconds:
                backend.exchange([], [], left, seconds)
            left = self._left()
            if left and backend.client is not None:  # else who only looks would look for ever
                backend.client.check()
                try:
                    backend.raise_if_ended([message.peer for message in left])
                except RankFailed:
                    self.start()  # the other rank may have ended these messages, and then closed
                    if left := self._left():
                        backend.raise_if_ended([message.peer for message in left])
        return True

    def wait_for_all(self, seconds: float | None = None) -> None:
        """Waits until all messages are over; their futures have their errors, and a failure is logged.

        If some are not over after `seconds`, it aborts the communicator.
        """
        left = self._left()
        if left and self._lifetime.ended_because is None:
            try:
                self.wait(left, seconds)
                if left := self._left():
                    _log.warning("%s", self._lost_text(left))
                    number = count(len(left), "message")
                    self._lifetime.abort(f"the program ended with {number} under way: wait for their futures", None)
            except InvalidArgument:
                pass  # another thread uses the communicator, or a done-callback closes it
            except RankFailed as error:
                _log.warning("%s\n%s", self._lost_text(left), describe(error))
            except GradsyncError as error:
                _log.warning("%s", describe(error))

    def _lost_text(self, messages: Sequence[Message]) -> str:
        """Returns which messages the other ranks have not taken, or not sent, one a line."""
        lines = [f"{self._lifetime.label}: the program ended with {count(len(messages), 'message')} under way:"]
        for each in messages[:_MOST_NAMED]:
            peer, site = self._backend.ranks[each.peer], each.agreement.describe().call_site
            what = f"rank {peer} has not {'received' if each.is_sent else 'sent'} {each.agreement.headline()}"
            lines.append(f"  {what}, begun {site}" if site else f"  {what}")
        if len(messages) > _MOST_NAMED:
            lines.append(f"  and {len(messages) - _MOST_NAMED} more")
        return "\n".join(lines)

    def _left(self) -> list[Message]:
        return [message for message in self._begun if not message.is_over]

    def end(self, error: BaseException) -> None:
        """Fails the messages that are not over, because the communicator has ended."""
        self.unstarted = []
        with suppress(IndexError):  # two threads may end them; and where Ctrl-C stops one, the next call goes on
            while True:
                message = self._begun.pop(0)
                if not message.is_over:
                    message.end(error)

    def disown(self, error: BaseException) -> None:
        """Fails them in a forked child, which they do not concern; calls no callbacks."""
        for message in self._left():
            message.error, message.is_over = error, True


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
            try:
                self._messages.move_on()
            except InvalidArgument:  # in a done-callback, or while another thread uses the communicator
                return False
            except GradsyncError:  # it has ended the communicator, and this work
                return self._are_over
        return self.has_ended()

    def has_ended(self) -> bool:
        return self._are_over and all(message.work.done() for message in self._own)

    def order(self, name: str = "", stream: Any = None, timeout_seconds: float | None = None) -> None:
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
            message.work.order(name, stream, timeout_seconds)

    def wait(self, timeout_seconds: float | None = None) -> None:
        self.order(timeout_seconds=timeout_seconds)
        for message in self._own:
            message.work.wait(timeout_seconds)

    def failure(self) -> BaseException | None:
        errors = [message.error or message.work.failure() for message in self._own]
        return next((error for error in errors if error is not None), None)

    def when_done(self, function: Callable[[], None]) -> None:
        first, *others = self._own
        if others:
            first.when_over(lambda: others[0].when_over(function))
        else:
            first.when_over(function)
