"""Messages with tags, for gradsync.mpi: the receiver chooses among a rank's messages by tag, and learns their size.

Each message has a header: its tag, its size and the kind of its elements. From one rank to another, messages travel in
the order in which they were sent. A receiver that waits for another tag puts a message aside until it is asked for.

On the CPU the header is a message of its own before the bytes. When it has come, in any call that waits, the backend
starts the receive of the bytes at once (`Message.after`). So all legal programs of sends and receives end.

NCCL cannot do that: its messages occupy the stream in the order of their launches, and the host would wait for each
header. There the header travels through the rendezvous server, before the bytes are launched. A rank that waits for
any message first waits for the headers of all that it has asked for, and then launches all in one group. Otherwise two
ranks that both send and receive could launch their halves in different orders, and hang.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradsync.communicators.backend import Message
from gradsync.communicators.groups import reporting_failures
from gradsync.communicators.messages import MessageWork
from gradsync.errors import InvalidArgument
from gradsync.futures import DONE, Work, again

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradsync.communicators.communicator import Communicator

ANY_TAG = -1
#: The kind of a pickled object.
OBJECT = "object"
_HEADER = struct.Struct("<qq8s")
_BLOCK = 64  # the headers of so many messages are removed from the server at once


class Header(NamedTuple):
    """What the sender says of a message: its tag, its size in bytes, and the kind of its elements, e.g. "<f8"."""

    tag: int
    size: int
    kind: str

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Returns the header that `pack` has made bytes of."""
        tag, size, kind = _HEADER.unpack(data)
        return cls(tag, size, kind.rstrip(b"\0").decode())

    def pack(self) -> bytes:
        """Returns the header as bytes."""
        return _HEADER.pack(self.tag, self.size, self.kind.encode())


class Sending:
    """A message that this rank sends."""

    def __init__(self, tagged: TaggedMessages, work: Work) -> None:
        self._tagged = tagged
        self._work = work

    def wait(self) -> None:
        """Waits until the receiver has the message, on a GPU until it was launched. Raises its error."""
        self._tagged.settle()
        self._work.order("Send")

    def done(self) -> bool:
        """Whether the message has ended or failed."""
        self._tagged.settle()
        return self._work.done()


class Receiving:
    """A message that this rank receives, or that has come and nobody has asked for.

    Args:
        tagged: whose it is.
        room: a flat array of bytes for it; None: an array in host memory is made when its size is known.
        tag: the tag that it needs, or ANY_TAG.
        kind: the kind of elements that it needs; "" if any will do.

    Attributes:
        header: the message's header, once known.
        data: the bytes that have come, once the message is done: the beginning of `room`, or the array that was made.
    """

    def __init__(self, tagged: TaggedMessages, source: int, room: Any, tag: int, kind: str) -> None:
        self._tagged = tagged
        self.source = source
        self._room = room
        self._tag = tag
        self._kind = kind
        self.header: Header | None = None
        self.data: Any = None
        self._work: Work = DONE
        self._aside: Receiving | None = None  # it has come already, and is copied at the end
        self._error: BaseException | None = None

    def takes(self, tag: int) -> bool:
        """Whether a message with this tag may be this one."""
        return self._tag in (ANY_TAG, tag)

    def match(self, header: Header, label: str) -> Any:
        """Takes the header of the message; returns the array that receives its bytes."""
        self.header = header
        error = ""
        if self._room is not None and header.size > self._room.size:
            error = f"has {header.size} bytes, but the buffer of this rank has only {self._room.size}"
        elif self._kind and header.kind and self._kind != header.kind:
            error = f"has elements of {_kind_text(header.kind)}, this rank receives {_kind_text(self._kind)}"
        if error:
            self._error = InvalidArgument(
                f"{label}: the message with tag {header.tag} from rank {self.source} {error}; it is lost"
            )
        if self._room is None or error:
            self.data = np.empty(header.size, np.uint8)
        else:
            self.data = self._room[: header.size]
        return self.data

    def take(self, aside: Receiving, label: str) -> None:
        """Takes a message that has come before."""
        assert aside.header is not None
        self.match(aside.header, label)
        self._aside, self._work = aside, aside._work

    def start(self, work: Work) -> None:
        """Sets what receives the bytes."""
        self._work = work

    def fail(self, error: BaseException) -> None:
        """Ends the receive because its header could not be received."""
        self._error = error

    @property
    def is_known(self) -> bool:
        """Whether its message is known, or it has failed."""
        return self.header is not None or self._error is not None

    def wait(self) -> Header:
        """Waits until the message has come, on a GPU until it was launched. Returns its header, or raises its error."""
        while not self.is_known:
            self._tagged.await_header(self)
        self._tagged.settle()
        self._work.order("Recv")
        if self._error is not None:
            raise again(self._error)
        self._finish()
        assert self.header is not None
        return self.header

    def done(self) -> bool:
        """Whether the message has come or failed. Moves all messages on."""
        self._tagged.settle()
        if not self.is_known:
            self._tagged.move_on()
        return self.is_known and self._work.done()

    def _finish(self) -> None:
        if self._aside is not None:
            self._tagged.copy(self._aside.data, self.data)
            self._aside = None


class _FromRank:
    """What one rank sends to this one.

    Attributes:
        posted: the receives whose message is not known yet, in the order of the calls.
        aside: the messages that have come, or come now, and that nobody has asked for.
        coming: on the CPU, the message that receives the next header; None if no header is asked for.
        begun: on a GPU, how many headers were read.
    """

    def __init__(self) -> None:
        self.posted: deque[Receiving] = deque()
        self.aside: list[Receiving] = []
        self.coming: Message | None = None
        self.begun = 0


class TaggedMessages:
    """The messages with tags of one communicator. All of gradsync.mpi's messages on it go through one such object."""

    def __init__(self, communicator: Communicator) -> None:
        self._backend = communicator._backend
        self._arrays = communicator._arrays
        self._lifetime = communicator._lifetime
        self._messages = communicator._messages
        self._outgoing, self._incoming = communicator._outgoing, communicator._incoming
        self._check_writable = communicator._check_writable
        self._rank = communicator.rank
        self._label = communicator.label
        self._sources: dict[int, _FromRank] = {}
        self._sent: dict[int, int] = {}  # on a GPU, how many headers were sent to each rank

    # -- Sending -------------------------------------------------------------------------------------------------

    def send(self, data: Any, dest: int, tag: int, kind: str) -> Sending:
        """Begins to send a flat array of bytes. To itself a rank sends a copy, at once."""
        header = Header(tag, data.size, kind)
        if dest == self._rank:
            self._lifetime.check_usable("Send")
            self._place(self._from(dest), header, data.copy())
            return Sending(self, DONE)
        messages = [self._outgoing("Send", data, dest, None)] if data.size else []
        if self._backend.on_gpu:
            self._tell(dest, header)
        else:
            messages.insert(0, self._outgoing("Send", np.frombuffer(header.pack(), np.uint8), dest, None))
        return Sending(self, self._messages.begin(messages, []) if messages else DONE)

    # -- Receiving -----------------------------------------------------------------------------------------------

    def receive(self, room: Any, source: int, tag: int, kind: str) -> Receiving:
        """Begins to receive a message into a flat array of bytes; see Receiving."""
        self._lifetime.check_usable("Recv")
        if room is not None:
            self._check_writable("Recv", room, "a buffer", "pass another one")
        receiving, of_source = Receiving(self, source, room, tag, kind), self._from(source)
        for aside in of_source.aside:
            assert aside.header is not None
            if receiving.takes(aside.header.tag):
                of_source.aside.remove(aside)
                receiving.take(aside, self._label)
                return receiving
        of_source.posted.append(receiving)
        if source != self._rank and not self._backend.on_gpu and of_source.coming is None:
            self._messages.begin([], [self._next_header(of_source, source)])
        return receiving

    def _from(self, source: int) -> _FromRank:
        return self._sources.setdefault(source, _FromRank())

    def _place(self, of_source: _FromRank, header: Header, data: Any = None) -> Receiving:
        """Finds the receive that a message is for, or puts it aside. `data`: the bytes, where this rank has them."""
        receiving = next((each for each in of_source.posted if each.takes(header.tag)), None)
        if receiving is not None:
            of_source.posted.remove(receiving)
        if receiving is None or data is not None:
            aside = Receiving(self, self._rank, None, ANY_TAG, "")
            aside.match(header, self._label)
            if data is not None:
                aside.data = data
            if receiving is None:
                of_source.aside.append(aside)
                return aside
            receiving.take(aside, self._label)
        else:
            receiving.match(header, self._label)
        return receiving

    def copy(self, source: Any, target: Any) -> None:
        """Copies bytes from one flat array to another; each may be in host memory, or on the communicator's GPU."""
        if self._arrays.is_viewed_flat(target):
            self._arrays.assign(source, target)
        elif isinstance(source, np.ndarray):
            np.copyto(target, source)
        else:
            self._arrays.write_back(source, target)

    # -- On the CPU ----------------------------------------------------------------------------------------------

    def _next_header(self, of_source: _FromRank, source: int) -> Message:
        room = np.empty(_HEADER.size, np.uint8)
        message = of_source.coming = self._incoming("Recv", "array", room, source, None)

        def after() -> Sequence[Message]:
            of_source.coming = None
            if message.error is not None:
                while of_source.posted:
                    of_source.posted.popleft().fail(message.error)
                return []
            following = []
            receiving = self._place(of_source, Header.unpack(room.tobytes()))
            if receiving.data.size:
                following.append(self._incoming("Recv", "array", receiving.data, source, None))
                receiving.start(MessageWork(self._messages, following[:]))
            if of_source.posted:
                following.append(self._next_header(of_source, source))
            for each in following:
                self._messages.follow(each)
            return following

        message.after = after
        return message

    def await_header(self, receiving: Receiving) -> None:
        """Waits for the next header from the rank of a receive."""
        if receiving.source == self._rank:
            raise InvalidArgument(
                f"{self._label}: this rank waits for a message from itself that it has not sent: it would wait for ever"
            )
        coming = self._from(receiving.source).coming
        if coming is not None:
            self._messages.wait([coming])
        elif self._backend.on_gpu:
            self.settle()

    def move_on(self) -> None:
        """Moves all messages on, without waiting."""
        self._messages.move_on()

    # -- On a GPU ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """On a GPU, waits for the headers of all receives, and begins to receive their bytes. A call that waits, and a
        collective, then launches these together with what this rank sends. On the CPU there is nothing to do.
        """
        if not self._backend.on_gpu:
            return
        for source, of_source in self._sources.items():
            while of_source.posted and source != self._rank:
                receiving = self._place(of_source, self._read_header(source, of_source))
                if receiving.data.size:
                    message = self._incoming("Recv", "array", receiving.data, source, None)
                    receiving.start(self._messages.begin([], [message]))

    def _tell(self, dest: int, header: Header) -> None:
        number = self._sent.get(dest, 0)
        self._sent[dest] = number + 1
        assert self._backend.client is not None
        with reporting_failures(self._backend, self._lifetime, "Send"):
            self._backend.client.set(self._key(self._rank, dest, number), header.pack())

    def _read_header(self, source: int, of_source: _FromRank) -> Header:
        client, number = self._backend.client, of_source.begun
        assert client is not None
        with reporting_failures(self._backend, self._lifetime, "Recv"):
            self._lifetime.check_usable("Recv")
            key = self._key(source, self._rank, number)
            data = client.get(key, from_rank=source, timeout_seconds=self._backend.timeout_seconds)
            of_source.begun += 1
            if of_source.begun % _BLOCK == 0:
                client.delete(key.rpartition("/")[0])
        return Header.unpack(data)

    def _key(self, source: int, dest: int, number: int) -> str:
        return f"tags/{self._backend.recorder.group}/{source}-{dest}/{number // _BLOCK}/{number}"


def _kind_text(kind: str) -> str:
    return "Python objects" if kind == OBJECT else str(np.dtype(kind))
