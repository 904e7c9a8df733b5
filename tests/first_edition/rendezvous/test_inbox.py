"""The client's inbox over a socket pair: messages that come together, in parts, or for nobody."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from rendezvous_ranks import run_threads

from gradsync.errors import RankFailed, RendezvousError, RendezvousTimeout
from gradsync.rendezvous import request_channel
from gradsync.rendezvous.client_connection import ClientConnection
from gradsync.rendezvous.inbox import Inbox, Pending
from gradsync.rendezvous.messages import DEATH, PROTOCOL_VERSION, FrameType, Message
from gradsync.rendezvous.request_channel import RequestChannel
from gradsync.rendezvous.wire import FrameReader, Session

KEY = b"k" * 32


def session(*, is_server: bool) -> Session:
    return Session(send_key=KEY, receive_key=KEY, send_sequence=1, receive_sequence=1, is_server=is_server)


class Wire:
    """A client's inbox, and the server's end of its connection."""

    def __init__(self) -> None:
        self.server, stream = socket.socketpair()
        stream.setblocking(False)
        self.connection = ClientConnection(stream, "server:1")
        self.connection._session = session(is_server=False)
        self.questions: list[tuple[str, int]] = []
        self.inbox = Inbox(self.connection, "rank 0/2", lambda push: self.questions.append(push.fields))
        self._session = session(is_server=True)

    def seal(self, *messages: tuple) -> bytes:
        return b"".join(self._session.seal(*message) for message in messages)

    def await_answer(self, sequence: int, seconds: float = 30.0):
        pending = Pending()
        self.inbox.expect(pending, sequence)
        try:
            return self.inbox.await_answer(pending, time.monotonic() + seconds)
        finally:
            self.inbox.forget(pending)


@pytest.fixture
def wire():
    made = Wire()
    yield made
    made.connection.close()
    made.server.close()


REPLY = (FrameType.REPLY, 5, b"value")
ASKED = (FrameType.ASKED, "g", 7)
FAILED = (FrameType.FAILED, 0, DEATH, 1, "forward", (), "rank 1/2 died")


def test_what_comes_behind_an_answer_is_not_left_lying(wire) -> None:
    wire.server.sendall(wire.seal(REPLY, ASKED, ASKED))
    assert wire.await_answer(5).fields == (5, b"value")
    assert wire.questions == [("g", 7)] * 2


def test_failure_behind_an_answer_is_known_at_once(wire) -> None:
    wire.server.sendall(wire.seal(REPLY, FAILED))
    assert wire.await_answer(5).fields == (5, b"value")
    with pytest.raises(RankFailed, match="rank 0/2: rank 1/2 died") as caught:
        wire.inbox.raise_failure()
    assert (caught.value.rank, caught.value.phase) == (1, "forward")


def test_poll_reads_all_that_is_there(wire) -> None:
    wire.server.sendall(wire.seal(REPLY, ASKED, FAILED))  # nobody waits for the reply
    wire.inbox.poll()
    question, (*_, failure) = wire.questions  # of a failure, who answers pushes hears too
    assert (question, failure) == (("g", 7), "rank 1/2 died")
    assert isinstance(wire.inbox.failure, RankFailed)


def test_message_in_parts(wire) -> None:
    sealed = wire.seal(ASKED, REPLY)
    wire.server.sendall(sealed[:20])
    wire.inbox.poll()
    assert wire.await_answer(5, seconds=0.01) is None
    wire.server.sendall(sealed[20:])
    assert wire.await_answer(5).fields == (5, b"value")
    assert wire.questions == [("g", 7)]


def test_question_is_told_before_the_answer_that_came_behind_it(wire) -> None:
    wire.server.sendall(wire.seal(ASKED, REPLY))
    assert wire.await_answer(5).fields == (5, b"value")
    assert wire.questions == [("g", 7)]


def test_question_does_not_wait_for_the_one_before_it(wire) -> None:
    told_second = threading.Event()

    def tell(question: Message) -> None:
        if question.fields == ("g", 8):
            told_second.set()
        else:
            assert told_second.wait(30)

    wire.inbox._answer_push = tell
    waits = [lambda: wire.await_answer(5), lambda: wire.await_answer(6)]
    questions = [ASKED, (FrameType.ASKED, "g", 8)]

    def serve():
        wire.server.sendall(wire.seal(*questions))
        assert told_second.wait(30)
        wire.server.sendall(wire.seal(REPLY, (FrameType.REPLY, 6, None)))

    first, second, failure = run_threads([*waits, serve])
    assert failure is None
    assert (first.fields, second.fields) == ((5, b"value"), (6, None))


def test_a_join_says_at_once_who_joins(wire, monkeypatch) -> None:
    """The server does not miss a rank that it does not know: one that is stopped as soon as it has joined, too."""
    monkeypatch.setattr(request_channel, "_GRACE_SECONDS", 0.0)
    with pytest.raises(RendezvousTimeout):
        RequestChannel(wire.connection, "rank 0/2").ask("joining", 0.0, FrameType.JOIN, PROTOCOL_VERSION, 0, 2)
    reader = FrameReader()
    reader.feed(wire.server.recv(65536))
    joining, introduction = (wire._session.open(reader.next_frame()) for _ in range(2))
    assert (joining.type, introduction.type) == (FrameType.JOIN, FrameType.INTRODUCE)
    assert introduction.fields[2] == os.getpid()


def test_a_descriptor_that_was_closed_elsewhere_is_no_untyped_error(wire) -> None:
    os.close(wire.connection._stream.fileno())
    with pytest.raises(RendezvousError, match="Bad file descriptor"):
        wire.inbox.poll()
    wire.connection.shut_down()
    wire.connection.close()


@pytest.mark.parametrize("bytes_sent", [b"", b"\0" * 100])
def test_end_and_garbage_are_sticky(wire, bytes_sent: bytes) -> None:
    wire.server.sendall(bytes_sent)
    wire.server.close()
    for _ in range(2):
        with pytest.raises(RendezvousError, match="rank 0/2: the rendezvous server at server:1 is gone"):
            wire.inbox.poll() if wire.inbox.failure is None else wire.inbox.raise_failure()
    with pytest.raises(RendezvousError, match="is gone"):
        wire.await_answer(5)
