"""Frame types, their schemas, and the events and actions of the server's core.

`wire` checks every message against its schema, in both directions, before the core or the client handles it. A new
frame type needs a number and a schema here, and a handler in `protocol` or `connection`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsync.rendezvous.liveness import ProcessState

PROTOCOL_VERSION = 14  # below 256: HELLO and CHALLENGE have one byte for it

MAX_VALUE_BYTES = 60 * 1024  # leaves room in a 64 KiB frame for the longest key
MAX_EXCHANGED_BYTES = 512 * 1024  # all members' values together: each member receives all of them
MAX_NAME_BYTES = 1024  # of names, and of other short texts
MAX_GROUP_BYTES = MAX_NAME_BYTES - 64  # `event_key` adds the position and the rank to the group's name
MAX_EVENT_BYTES = 48 * 1024
MAX_REASON_BYTES = 4096
MAX_TEXT_BYTES = 8192
MAX_FAILURE_BYTES = 48 * 1024  # the report of a stuck collective holds the stacks of the ranks
MAX_REPORT_BYTES = 16 * 1024
MAX_STATUS_GROUPS = 16
MAX_STATUS_CALLS = 128
MAX_CALL_BYTES = 200
MAX_WAITED_MS = 10**12
MAX_RANKS = 16_384

OF_MESSAGES = 0  # in place of a collective's number, which starts at 1: the rank waits in a send or receive
TO_GENERATION = 0  # in place of a request's sequence: the message goes to all members and answers no request
THE_WORLD = ""  # as the name in LEAVE: the rank leaves the generation
INVALID = 0  # a kind of refusal: the caller made a mistake
REFUSED = 1  # a kind of refusal: the state of the run forbids the request
DEATH = 0  # a kind of failure: a rank died, failed or left
STUCK = 1  # a kind of failure: a rank did not arrive at a collective in time
SILENCE = 2  # a kind of failure: a rank is silent, and its process is paused (SIGSTOP), gone or unreachable


#: A rank's last collectives by group: for each collective its number, digest, description, and whether it runs.
Calls = Mapping[str, Sequence[tuple[int, int, str, bool]]]


class FieldError(ValueError):
    """A message's fields do not fit its schema. The text leaves out the content of a refused text or bytes object."""


class FrameType(enum.IntEnum):
    """The type of a frame. 1-15: handshake; 16-63: client to server; from 64: server to client."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3

    JOIN = 16
    SET = 17
    GET = 18
    DELETE = 20
    EXCHANGE = 22
    REPORT_FAILURE = 25
    CANCEL = 26
    LEAVE = 27
    HEARTBEAT = 31
    STUCK = 33
    STATUS = 34
    LEFT_RANKS = 35

    REPLY = 64
    REFUSED = 65
    TIMED_OUT = 66
    FAILED = 67
    PULSE = 71
    STATUS_REQUEST = 72
    VALUES = 74

    @property
    def from_server(self) -> bool:
        """Whether only the server may send this type, after the handshake."""
        return self >= FrameType.REPLY


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: its name, its allowed values in words, and the function that checks a value."""

    name: str
    needed: str
    accepts: Callable[[Any], bool]


def _integer(name: str, low: int, high: int) -> Field:
    return Field(name, f"an integer from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def _text(name: str, max_bytes: int = MAX_NAME_BYTES) -> Field:
    def accepts(value: Any) -> bool:
        # A character takes at most 4 bytes, so a short text fits without being encoded.
        return type(value) is str and (len(value) * 4 <= max_bytes or _utf8_length(value) <= max_bytes)

    return Field(name, f"text of at most {max_bytes} bytes in UTF-8", accepts)


def _utf8_length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _flag(name: str) -> Field:
    return Field(name, "a boolean", lambda v: type(v) is bool)


def _ranks(name: str) -> Field:
    return Field(name, "distinct ranks in ascending order", _is_rank_list)


def _list(name: str, needed: str, item: Field, max_items: int = 2 * MAX_RANKS) -> Field:
    return Field(
        name,
        needed,
        lambda v: type(v) in (list, tuple) and len(v) <= max_items and all(map(item.accepts, v)),
    )


def _record(name: str, *rules: Field) -> Field:
    def accepts(value: Any) -> bool:
        fits = type(value) in (list, tuple) and len(value) == len(rules)
        return fits and all(rule.accepts(part) for rule, part in zip(rules, value, strict=True))

    return Field(name, f"{len(rules)} values", accepts)


def _by_group(name: str, needed: str, of_group: Field) -> Field:
    def accepts(value: Any) -> bool:
        fits = type(value) is dict and len(value) <= MAX_STATUS_GROUPS
        return fits and all(_GROUP.accepts(group) and of_group.accepts(v) for group, v in value.items())

    return Field(name, f"at most {MAX_STATUS_GROUPS} groups, each with {needed}", accepts)


def _optional(rule: Field) -> Field:
    return Field(rule.name, f"{rule.needed}, or nil", lambda v: v is None or rule.accepts(v))


def _is_value(value: Any) -> bool:
    return type(value) is bytes and len(value) <= MAX_VALUE_BYTES


def _is_rank_list(value: Any) -> bool:
    if type(value) not in (list, tuple) or len(value) > MAX_RANKS:
        return False
    previous = -1
    for rank in value:
        if type(rank) is not int or not previous < rank < MAX_RANKS:
            return False
        previous = rank
    return True


def _is_result(value: Any) -> bool:
    return value is None or _is_value(value) or _NUMBERS.accepts(value)


_KEY = _text("key")
_NAME = _text("name")
_RANK = _integer("rank", 0, MAX_RANKS - 1)
_MEMBERS = _optional(_ranks("ranks"))
_REQUEST = _integer("request sequence", 0, 2**63 - 1)
_GROUP = _text("group", MAX_GROUP_BYTES)
_POSITION = _integer("position", 0, 2**63 - 1)
_DIGEST = _integer("digest", 0, 2**64 - 1)
PROGRESS = _by_group("progress", "the number of collectives begun there", _POSITION)
_VALUE = Field("value", f"bytes of length 0 to {MAX_VALUE_BYTES}", _is_value)
_NUMBERS = _list("numbers", "a list of numbers", _POSITION)
_CALL = _record("call", _POSITION, _DIGEST, _text("call in words", MAX_CALL_BYTES), _flag("runs"))
_CALLS = _list("calls", "a list of collectives", _CALL, MAX_STATUS_CALLS)
_BEGUN_AND_CALLS = _record("collectives", _POSITION, _CALLS)
_STATUS = _by_group("status", "the number of collectives begun there, and the last ones", _BEGUN_AND_CALLS)
_PID = _integer("pid", 0, 2**31 - 1)  # the largest pid_t

SCHEMAS: dict[FrameType, tuple[Field, ...]] = {
    FrameType.JOIN: (
        _integer("rank", 0, 2**31),  # the core refuses a rank that is too large, and names the allowed ones
        _integer("world_size", 0, 2**31),
        _text("machine"),
        _text("host"),
        _PID,
    ),
    FrameType.SET: (_KEY, _VALUE),
    FrameType.GET: (_KEY, _optional(_integer("from_rank", 0, MAX_RANKS - 1))),
    FrameType.DELETE: (_KEY,),
    FrameType.EXCHANGE: (_NAME, _MEMBERS, _VALUE),
    FrameType.REPORT_FAILURE: (
        _text("reason", MAX_REASON_BYTES),
        _optional(_integer("culprit", 0, MAX_RANKS - 1)),
    ),
    FrameType.CANCEL: (_REQUEST,),
    FrameType.LEAVE: (_NAME, _MEMBERS, _POSITION),
    FrameType.LEFT_RANKS: (_NAME, _MEMBERS),
    FrameType.HEARTBEAT: (PROGRESS,),
    FrameType.STUCK: (
        _GROUP,
        _MEMBERS,
        _POSITION,
        _text("what"),
        _integer("waited_ms", 0, MAX_WAITED_MS),
        _optional(_ranks("missing ranks")),
        _flag("is over"),
    ),
    FrameType.STATUS: (_STATUS, _text("report", MAX_REPORT_BYTES)),
    FrameType.REPLY: (_REQUEST, Field("value", "nil, bytes or a list of numbers", _is_result)),
    FrameType.REFUSED: (_REQUEST, _integer("kind", 0, 1), _text("text", MAX_TEXT_BYTES)),
    FrameType.TIMED_OUT: (_REQUEST, _ranks("missing ranks"), _text("text", MAX_TEXT_BYTES)),
    FrameType.VALUES: (_REQUEST, _flag("is last"), _list("values", "a list of values", _VALUE)),
    FrameType.PULSE: (),
    FrameType.STATUS_REQUEST: (),
    FrameType.FAILED: (
        _REQUEST,
        _integer("kind", 0, 2),
        _RANK,
        _text("phase"),
        _ranks("missing ranks"),
        _text("text", MAX_FAILURE_BYTES),
    ),
}


def event_key(group: str, position: int, rank: int) -> str:
    """Returns the key for the description of a rank's collective, which the ranks read if their collectives differ.

    Each rank sets its own key.
    """
    return f"{event_prefix(group, rank)}/{position}"


def event_prefix(group: str, rank: int) -> str:
    """Returns the common beginning of a rank's keys for all positions, which the rank deletes together."""
    return f"{group}/agree/{rank}"


def is_under(name: str, prefix: str) -> bool:
    """Whether a name is the prefix itself, or begins with "prefix/"."""
    return name == prefix or name.startswith(f"{prefix}/")


@dataclass(slots=True)  # not frozen: every frame makes one, and a frozen object takes three times as long to make
class Message:
    """One authenticated message; treat it as immutable. The repr leaves out the fields, which may hold a secret id."""

    type: FrameType
    sequence: int
    fields: tuple[Any, ...] = field(repr=False)


def clip_text(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Returns the text shortened to `max_bytes` in UTF-8; characters that cannot be encoded are replaced."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 4].decode("utf-8", "ignore") + " ..."


def check_fields(frame_type: FrameType, fields: tuple[Any, ...]) -> None:
    """Checks a message's fields against the schema of its type.

    Raises:
        FieldError: the number of fields is wrong, or a field does not fit its schema.
    """
    schema = SCHEMAS[frame_type]
    if len(fields) != len(schema):
        raise FieldError(f"{frame_type.name} needs {len(schema)} fields, got {len(fields)}")
    for rule, value in zip(schema, fields):  # noqa: B905 - equal lengths; `strict` takes as long as a check
        if not rule.accepts(value):
            raise FieldError(f"{rule.name} needs to be {rule.needed}, got {_describe(value)}")


def _describe(value: Any) -> str:
    """Describes a refused value without its content, which may be secret or long."""
    if type(value) is int:
        return str(value) if -(2**64) <= value <= 2**64 else "a larger integer"
    if isinstance(value, (bytes, str, list, tuple)):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__


# The server's core takes events and returns actions. Events and actions are plain data. The server makes events from
# sockets and the clock, and carries out the actions.


@dataclass(slots=True)  # not frozen, for the reason that is given at Message
class Received:
    """An authenticated message arrived."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class Lost:
    """A connection has ended; `cause` is the reason in words."""

    connection: int
    cause: str


@dataclass(frozen=True, slots=True)
class Started:
    """A launcher has started a rank's process; the rank may not have joined yet."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A launcher reports that a rank's process has ended; `how` is e.g. "ended with exit code 0"."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """The result of an `Inspect`: the state of the peer's process and connection."""

    peer: int
    state: ProcessState


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; the core does the work that is due."""


@dataclass(slots=True)
class Send:
    """Asks the server to send this message. The repr leaves out the fields, which may hold a secret id."""

    connection: int
    type: FrameType
    fields: tuple[Any, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Close:
    """Asks the server to write the queued bytes, for at most a second, and then to close the connection."""

    connection: int


@dataclass(frozen=True, slots=True)
class Inspect:
    """Asks the server to inspect this peer's process and connection, and to answer with `Inspected` at once.

    Attributes:
        peer: the number of the connection, or the `liveness.process_key` of a process that has not joined.
        pid: the process id on the server's machine; None on another machine.
    """

    peer: int
    pid: int | None


@dataclass(frozen=True, slots=True)
class Notice:
    """Asks the server to write this text to the log."""

    text: str


Event = Received | Lost | Started | Ended | Inspected | Tick
Action = Send | Close | Inspect | Notice
