"""Messages with tags, for gradsync.mpi: the receiver chooses among a rank's messages by tag, and learns their size.

Each message has a header: its tag, its size and the kind of its elements. From one rank to another, messages travel in
the order in which they were sent. A receiver that waits for another tag puts a message aside until it is asked for.

On the CPU the header is a message of its own, with the bytes of a small message in it; those of a large one follow.
When it has come, in any call that waits, the backend starts the receive of these bytes at once (`Message.after`). So
all legal programs of sends and receives end.

NCCL cannot do that: what a rank launches runs in this order on its stream, and each message there waits for the other
rank. So over NCCL the header travels through the rendezvous server, and so does the answer of the receiver that it is
about to receive. A rank that waits reads the headers that it has asked for, answers them, then looks for the answers to
its own headers, and launches all of these messages, both ways, in one group. So on every rank a message is launched
before another only if it was answered earlier, and no ranks wait for each other in a circle.
"""

from __future__ import annotations

import struct
import time
from collections import Counter, defaultdict, deque
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradsync.communicators.agreement import Agreement, Description, agreement_on, array_text
from gradsync.communicators.backend import Message
from gradsync.communicators.failures import FailureMonitor
from gradsync.communicators.groups import reporting_failures
from gradsync.communicators.messages import MessageWork
from gradsync.errors import Caller, InvalidArgument, RendezvousTimeout, caller, size_text
from gradsync.futures import DONE, Work, again

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradsync.communicators.communicator import Communicator
    from gradsync.rendezvous.client import RendezvousClient

ANY_TAG = -1
#: The kind of a pickled object.
OBJECT = "object"
_HEADER = struct.Struct("<qq8s")
_FIRST_BYTES = 4096  # on the CPU, of the message with the header; what fits travels in it, and costs one message only
_MOST_NAMED = 4  # of the messages put aside, in a report
_LOOK_SECONDS = 2e-3  # how long a look at one key of the server takes at least


class Header(NamedTuple):
    """What the sender says of a message: its tag, its size in bytes, and the kind of its elements, e.g. "<f8"."""

    tag: int
    size: int
    kind: str

    @classmethod
    def unpack(cls, data: bytes | memoryview[Any]) -> Header:
        """Returns the header that `pack` has made bytes of; more may follow."""
        tag, size, kind = _HEADER.unpack_from(data)
        return cls(tag, size, kind.rstrip(b"\0").decode())

    def pack(self) -> bytes:
        """Returns the header as bytes."""
        return _HEADER.pack(self.tag, self.size, self.kind.encode())

    def __str__(self) -> str:
        """Returns it for a report, e.g. "tag 3, float64[3]"."""
        if self.kind in ("", OBJECT):
            return f"tag {self.tag}, {size_text(self.size)}{' of a Python object' if self.kind else ''}"
        dtype = np.dtype(self.kind)
        return f"tag {self.tag}, {array_text(dtype, (self.size // dtype.itemsize,))}"


class Sending:
    """A message that this rank sends.

    Args:
        tagged: whose it is.
        work: what was begun; None: on a GPU, it is launched later.
        message, key: then, the bytes, and the key of the receiver's answer to the header.
    """

    def __init__(
        self, tagged: TaggedMessages, work: Work | None, message: Message | None = None, key: str = ""
    ) -> None:
        self.tagged = tagged
        self.work = work
        self.message = message
        self.key = key

    def wait(self) -> None:
        """Waits until the receiver has the message, on a GPU until it was launched. Raises its error."""
        if self.work is None:
            self.tagged.pump(lambda: self.work is not None)
        assert self.work is not None
        self.work.order("Send")

    def done(self) -> bool:
        """Whether the message has ended or failed. Moves all messages on."""
        if self.work is None:
            self.tagged.pump(lambda: self.work is not None, once=True)
        return self.work is not None and self.work.done()


class Receiving:
    """A message that this rank receives, or that has come and nobody has asked for.

    Args:
        tagged: whose it is.
        room: a flat array of bytes for it; None: an array in host memory is made when its size is known.
        tag: the tag that it needs, or ANY_TAG.
        kind: the kind of elements that it needs; "" if any will do.

    Attributes:
        tag, kind: see Args.
        header: the message's header, once known.
        data: the bytes that have come, once the message is done: the beginning of `room`, or the array that was made.
        work: what receives the bytes.
        error: why the receive failed.
    """

    def __init__(self, tagged: TaggedMessages, source: int, room: Any, tag: int, kind: str) -> None:
        self.tagged = tagged
        self.source = source
        self._room = room
        self.tag = tag
        self.kind = kind
        self.header: Header | None = None
        self.data: Any = None
        self.work: Work = DONE
        self._aside: Receiving | None = None  # it has come already, and is copied at the end
        self.error: BaseException | None = None

    def takes(self, tag: int) -> bool:
        """Whether a message with this tag may be this one."""
        return self.tag in (ANY_TAG, tag)

    def match(self, header: Header, label: str) -> Any:
        """Takes the header of the message; returns the array that receives its bytes."""
        self.header = header
        error = ""
        if self._room is not None and header.size > self._room.size:
            error = f"has {header.size} bytes, but the buffer of this rank has only {self._room.size}"
        elif self.kind and header.kind and self.kind != header.kind:
            error = f"has elements of {_kind_text(header.kind)}, this rank receives {_kind_text(self.kind)}"
        if error:
            self.error = InvalidArgument(
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
        self._aside, self.work = aside, aside.work
        if self.work.is_done and self.error is None:  # a rank's own: at once, as nobody may wait for this receive
            self._finish()

    @property
    def is_known(self) -> bool:
        """Whether its message is known, or it has failed."""
        return self.header is not None or self.error is not None

    def wait(self) -> Header:
        """Waits until the message has come, on a GPU until it was launched. Returns its header, or raises its error."""
        while not self.is_known:
            self.tagged.await_header(self)
        self.work.order("Recv")
        if self.error is not None:
            raise again(self.error)
        self._finish()
        assert self.header is not None
        return self.header

    def done(self) -> bool:
        """Whether the message has come or failed. Moves all messages on."""
        if not self.is_known:
            self.tagged.move_on(self)
        return self.is_known and self.work.done()

    def _finish(self) -> None:
        if self._aside is not None:
            self.tagged.copy(self._aside.data, self.data)
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
        self._rank, self._ranks = communicator.rank, communicator.ranks
        self._label = communicator.label
        self._sources: defaultdict[int, _FromRank] = defaultdict(_FromRank)
        # On a GPU: how many headers were sent to each rank, the messages that wait to be launched, and the failures.
        self._sent: Counter[int] = Counter()
        self._waiting: list[Sending] = []
        self._failures: FailureMonitor | None = None
        self._answers_within = _LOOK_SECONDS
        self.timeout_seconds = self._backend.timeout_seconds

    # -- Sending -------------------------------------------------------------------------------------------------

    def send(self, data: Any, dest: int, tag: int, kind: str) -> Sending:
        """Begins to send a flat array of bytes. To itself a rank sends a copy, at once."""
        header = Header(tag, data.size, kind)
        if dest == self._rank:
            self._lifetime.check_usable("Send")
            self._place(self._sources[dest], header, data.copy())
            return Sending(self, DONE)
        if not self._backend.on_gpu:
            return Sending(self, self._messages.begin(self._messages_of(header, data, dest), []))
        message = self._outgoing("Send", data, dest, None) if data.size else None
        key = self._tell(dest, header)
        if message is None:
            return Sending(self, DONE)
        self._waiting.append(Sending(self, None, message, key))
        return self._waiting[-1]

    def _messages_of(self, header: Header, data: Any, dest: int) -> list[Message]:
        """Returns the one or two messages, on the CPU, for a message with a tag."""
        first = np.empty(_FIRST_BYTES, np.uint8)
        first[: _HEADER.size] = np.frombuffer(header.pack(), np.uint8)
        agreement = self._agreement(self._rank, dest, header, caller())
        messages = [Message(dest, first, agreement)]
        if data.size <= _FIRST_BYTES - _HEADER.size:
            first[_HEADER.size : _HEADER.size + data.size] = data
        else:
            messages.append(Message(dest, data, agreement))
        return messages

    def _agreement(
        self, sender: int, receiver: int, known: Header | int, site: Caller | None = None, aside: Sequence[Header] = ()
    ) -> Agreement:
        """Returns what reports say of a message; `known`: its header, or the tag that this rank waits for."""
        way = f"rank {self._ranks[sender]} to rank {self._ranks[receiver]}"
        describe, summarise = partial(_described, way, known, site), partial(_summary, way, known, aside)
        return Agreement(_digest(way), describe, summarise, is_message=True)

    # -- Receiving -----------------------------------------------------------------------------------------------

    def receive(self, room: Any, source: int, tag: int, kind: str) -> Receiving:
        """Begins to receive a message into a flat array of bytes; see Receiving."""
        self._lifetime.check_usable("Recv")
        if room is not None:
            self._check_writable("Recv", room, "a buffer", "pass another one")
        receiving, of_source = Receiving(self, source, room, tag, kind), self._sources[source]
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

    def _place(self, of_source: _FromRank, header: Header, data: Any = None) -> Receiving:
        """Finds the receive that a message is for, or puts it aside. `data`: the bytes, where this rank has them."""
        receiving = next((each for each in of_source.posted if each.takes(header.tag)), None)
        if receiving is None:
            receiving = Receiving(self, self._rank, None, ANY_TAG, "")
            receiving.match(header, self._label)
            if data is not None:
                receiving.data = data
            of_source.aside.append(receiving)
            return receiving
        of_source.posted.remove(receiving)
        room = receiving.match(header, self._label)
        if data is not None:
            self.copy(data, room)
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
        room = np.empty(_FIRST_BYTES, np.uint8)
        tag, aside = of_source.posted[0].tag, [each.header for each in of_source.aside if each.header is not None]
        message = of_source.coming = Message(source, room, self._agreement(source, self._rank, tag, aside=aside))

        def after() -> Sequence[Message]:
            of_source.coming = None
            if message.error is not None:
                while of_source.posted:
                    of_source.posted.popleft().error = message.error
                return []
            following, header = [], Header.unpack(room.data)
            inside = room[_HEADER.size :][: header.size] if header.size <= _FIRST_BYTES - _HEADER.size else None
            receiving = self._place(of_source, header, inside)
            if inside is None:
                following.append(Message(source, receiving.data, self._agreement(source, self._rank, header)))
                receiving.work = MessageWork(self._messages, following[:])
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
            self._sources[self._rank].posted.remove(receiving)  # else it would swallow the next message
            raise InvalidArgument(
                f"{self._label}: this rank waits for a message from itself that it has not sent: it would wait for ever"
            )
        coming = self._sources[receiving.source].coming
        if coming is not None:
            self._messages.wait([coming])
        elif self._backend.on_gpu:
            self.pump(lambda: receiving.is_known)

    def move_on(self, receiving: Receiving) -> None:
        """Moves all messages on, without waiting for the header of a receive."""
        if self._backend.on_gpu:
            self.pump(lambda: receiving.is_known, once=True)
        else:
            self._messages.move_on()

    # -- On a GPU ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """On a GPU, launches all messages before a collective: NCCL runs in the order of the calls."""
        if self._backend.on_gpu:
            sources = [of_source for source, of_source in self._sources.items() if source != self._rank]
            self.pump(lambda: not self._waiting and not any(of_source.posted for of_source in sources))

    def pump(self, is_satisfied: Callable[[], bool], *, once: bool = False) -> None:
        """On a GPU, answers headers, and launches what can be, until is_satisfied(); or looks once at each."""
        began = time.monotonic()
        while not is_satisfied():
            came = [self._answer_headers(source) for source in self._sources if source != self._rank]
            answered = self._answered()
            if answered or any(came):
                for sending in answered:
                    assert sending.message is not None
                    self._waiting.remove(sending)
                    sending.work, sending.message = self._messages.begin([sending.message], []), None
                self._messages.move_on()
            elif once:
                break
            else:
                self._check(time.monotonic() - began)

    def _check(self, waited_seconds: float) -> None:
        """Raises the reason why a wait will not end, if there is one."""
        posted = [source for source, of_source in self._sources.items() if of_source.posted]
        unanswered = [sending.message.peer for sending in self._waiting if sending.message is not None]
        missing = sorted({*unanswered, *posted} - {self._rank})
        ranks = [self._backend.ranks[rank] for rank in missing]
        self._failures = self._failures or FailureMonitor(self._client, self._backend.recorder)
        with self._lifetime.turn("a message", None):
            self._failures.check()
            self._backend.raise_if_ended(missing)
            if waited_seconds >= self.timeout_seconds:
                self._failures.time_out(waited_seconds, ranks)
            self._failures.warn(waited_seconds, ranks)

    def _tell(self, dest: int, header: Header) -> str:
        """Sends a header; returns the key of its answer."""
        key = self._key(self._rank, dest, self._sent[dest])
        self._sent[dest] += 1
        self._set(key, header.pack())
        return f"{key}/answer"

    def _answer_headers(self, source: int) -> bool:
        """Reads the headers from a rank that are there, as long as this rank has asked for more, and answers them."""
        of_source, found = self._sources[source], False
        while of_source.posted:
            key = self._key(source, self._rank, of_source.begun)
            data = self._look(key, source)
            if data is None:
                break
            found = True
            of_source.begun += 1
            receiving = self._place(of_source, Header.unpack(data))
            if receiving.data.size:
                message = self._incoming("Recv", "array", receiving.data, source, None)
                receiving.work = self._messages.begin([], [message])
                self._set(f"{key}/answer", b"")
            else:
                self._client.delete(key)
        return found

    def _answered(self) -> list[Sending]:
        """Returns the messages of this rank that were answered. A rank answers those of another in their order."""
        answered, others = [], set()
        for sending in self._waiting:
            assert sending.message is not None
            peer = sending.message.peer
            if peer not in others and self._look(sending.key, peer) is not None:
                answered.append(sending)
                self._client.delete(sending.key.removesuffix("/answer"))
            else:
                others.add(peer)
        return answered

    @property
    def _client(self) -> RendezvousClient:
        assert self._backend.client is not None
        return self._backend.client

    def _set(self, key: str, value: bytes) -> None:
        began = time.monotonic()
        with reporting_failures(self._backend, self._lifetime, "a message"):
            self._client.set(key, value)
        self._answers_within = max(_LOOK_SECONDS, 20 * (time.monotonic() - began))

    def _look(self, key: str, rank: int) -> bytes | None:
        """Returns the value of a key, or None if it is not there.

        The server answers once it is there, so a look waits for a moment: many times as long as the last answer took.
        """
        try:
            return self._client.get(key, from_rank=rank, timeout_seconds=self._answers_within)
        except RendezvousTimeout:
            return None

    def _key(self, source: int, dest: int, number: int) -> str:
        return f"tags/{self._backend.recorder.group}/{source}-{dest}/{number}"


@lru_cache(maxsize=1024)
def _digest(way: str) -> int:
    return agreement_on("message with a tag", (), None, way, is_message=True).digest


def _described(way: str, known: Header | int, site: Caller | None) -> Description:
    text = known if isinstance(known, Header) else _tag_text(known)
    return Description(f"message with a tag ({way}, {text})", call_site=f"at {site}" if site else "")


def _summary(way: str, known: Header | int, aside: Sequence[Header]) -> str:
    if isinstance(known, Header):
        return f"message({way}) {known}"
    named = [str(each) for each in aside[:_MOST_NAMED]]
    named += [f"{len(aside) - len(named)} more"] if len(aside) > len(named) else []
    return f"message({way}) {_tag_text(known)}{'; put aside: ' if named else ''}{'; '.join(named)}"


def _tag_text(tag: int) -> str:
    return "any tag" if tag == ANY_TAG else f"tag {tag}"


def _kind_text(kind: str) -> str:
    return "Python objects" if kind == OBJECT else str(np.dtype(kind))
