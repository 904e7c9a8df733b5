"""Messages: the types a frame may carry, and what the fields of each may hold.

The vocabulary of the rendezvous, used by `wire` (which checks every message against its schema, in both
directions), by the server's core and by the client. A later frame type needs a number and a schema here, and
nothing in `wire`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PROTOCOL_VERSION = 6

MAX_VALUE_BYTES = 60 * 1024  # leaves room in a 64 KiB frame for the longest key beside it
MAX_NAME_BYTES = 1024
MAX_GROUP_BYTES = MAX_NAME_BYTES - 64  # the name of a group that agrees becomes part of its events' keys
MAX_EVENT_BYTES = 48 * 1024
MAX_PHASE_BYTES = 16
MAX_REASON_BYTES = 4096
MAX_TEXT_BYTES = 8192
MAX_VERDICT_BYTES = 48 * 1024  # of a failure: an absence is told with the reports of the ranks
MAX_REPORT_BYTES = 16 * 1024
MAX_WHAT_BYTES = 1024
MAX_MACHINE_BYTES = 256
MAX_TOLD_GROUPS = 16
MAX_TOLD_CALLS = 128
MAX_CALL_BYTES = 200
MAX_TIMEOUT_MS = 10**12
MAX_RANKS = 16_384
UNIQUE_ID_BYTES = 128

OF_MESSAGES = 0  # in place of a collective's number, which counts from 1: the rank waits in a message
TO_GENERATION = 0  # as a request sequence: a push to all members, in answer to no request
INVALID = 0  # kinds of refusal: the caller's mistake ...
REFUSED = 1  # ... or a state of the run that forbids it
DEATH = 0  # kinds of failure: a rank died, failed or left ...
ABSENCE = 1  # ... or did not come to a collective in time ...
SILENCE = 2  # ... or was found stopped, gone or out of reach


class FieldError(ValueError):
    """A message's field does not fit its schema; the text says which, what it needs, and what came."""


class FrameType(enum.IntEnum):
    """What a frame says. 1-15: handshake; 16-63: client to server; from 64: server to client."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3

    JOIN = 16
    SET = 17
    GET = 18
    ADD = 19
    DELETE = 20
    BARRIER = 21
    PUT_ID = 22
    GET_ID = 23
    REPORT_FAILURE = 25
    CANCEL = 26
    BYE = 27
    AGREE = 28
    PASSED = 29
    INTRODUCE = 30
    HEARTBEAT = 31
    WAITING = 32
    ABSENT = 33
    STATUS = 34
    FORGET = 35
    HISTORY = 36

    REPLY = 64
    REFUSED = 65
    TIMED_OUT = 66
    FAILED = 67
    SEATED = 68
    ASKED = 69
    VERDICT = 70
    PULSE = 71
    INQUIRE = 72

    @property
    def from_server(self) -> bool:
        """Whether only the server may send this type."""
        return self >= FrameType.REPLY


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: its name, what it needs in words, and the check."""

    name: str
    needed: str
    accepts: Callable[[Any], bool]


def _integer(name: str, low: int, high: int) -> Field:
    return Field(name, f"an integer from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def _text(name: str, max_bytes: int) -> Field:
    def accepts(value: Any) -> bool:
        # A character takes at most 4 bytes: short texts need no encoding to be known to fit.
        return type(value) is str and (len(value) * 4 <= max_bytes or _utf8_length(value) <= max_bytes)

    return Field(name, f"text of at most {max_bytes} bytes in UTF-8", accepts)


def _utf8_length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _data(name: str, low: int, high: int) -> Field:
    size = f"{low}" if low == high else f"{low} to {high}"
    return Field(name, f"bytes of length {size}", lambda v: type(v) is bytes and low <= len(v) <= high)


def _is_rank_list(value: Any) -> bool:
    if type(value) not in (list, tuple) or len(value) > MAX_RANKS:
        return False
    previous = -1
    for rank in value:
        if type(rank) is not int or not previous < rank < MAX_RANKS:
            return False
        previous = rank
    return True


def _ranks(name: str, *, optional: bool) -> Field:
    if not optional:
        return Field(name, "distinct ranks in ascending order", _is_rank_list)
    return Field(name, "distinct ranks in ascending order, or nil", lambda v: v is None or _is_rank_list(v))


def _is_result(value: Any) -> bool:
    if value is None or type(value) is bool:
        return True
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is bytes and len(value) <= MAX_VALUE_BYTES


def _is_progress(value: Any) -> bool:
    if type(value) is not dict or len(value) > MAX_TOLD_GROUPS:
        return False
    return all(_GROUP.accepts(group) and _POSITION.accepts(begun) for group, begun in value.items())


def _is_history(value: Any) -> bool:
    if type(value) is not dict or len(value) > MAX_TOLD_GROUPS:
        return False
    calls = [call for of_group in value.values() if type(of_group) in (list, tuple) for call in of_group]
    are_lists = all(type(of_group) in (list, tuple) for of_group in value.values())
    return are_lists and len(calls) <= MAX_TOLD_CALLS and all(map(_GROUP.accepts, value)) and all(map(_is_call, calls))


def _is_call(value: Any) -> bool:
    return (
        type(value) in (list, tuple)
        and len(value) == len(_CALL)
        and all(rule.accepts(part) for rule, part in zip(_CALL, value, strict=True))
    )


_KEY = _text("key", MAX_NAME_BYTES)
_NAME = _text("name", MAX_NAME_BYTES)
_RANK = _integer("rank", 0, MAX_RANKS - 1)
_MEMBERS = _ranks("ranks", optional=True)
_TIMEOUT = _integer("timeout_ms", 0, MAX_TIMEOUT_MS)
_REQUEST = _integer("request sequence", 0, 2**63 - 1)
_GROUP = _text("group", MAX_GROUP_BYTES)
_POSITION = _integer("position", 0, 2**63 - 1)
_DIGEST = _integer("digest", 0, 2**64 - 1)
_PROGRESS = Field("progress", f"at most {MAX_TOLD_GROUPS} groups with the collectives begun in each", _is_progress)
_INQUIRY = _integer("inquiry", 0, 2**63 - 1)
# Number, digest, what it is, and whether the rank is inside.
_CALL = (_POSITION, _DIGEST, _text("call", MAX_CALL_BYTES), Field("runs", "a boolean", lambda v: type(v) is bool))
_HISTORY = Field("history", f"the calls of at most {MAX_TOLD_GROUPS} groups, {MAX_TOLD_CALLS} together", _is_history)
_MACHINE = _text("machine", MAX_MACHINE_BYTES)
_PID = _integer("pid", 0, 2**31)
_MISSING = _ranks("missing ranks", optional=True)
_CULPRIT = Field("culprit", "a rank, or nil", lambda v: v is None or _RANK.accepts(v))
_WAITED = _integer("waited_ms", 0, MAX_TIMEOUT_MS)
_WAIT = (_GROUP, _MEMBERS, _POSITION, _text("what", MAX_WHAT_BYTES), _WAITED, _MISSING)

SCHEMAS: dict[FrameType, tuple[Field, ...]] = {
    # The form of JOIN is the same in every protocol version: versions meet here, and are compared first.
    FrameType.JOIN: (
        _integer("protocol version", 0, 2**31),
        _integer("rank", 0, 2**31),
        _integer("world_size", 0, 2**31),
        _TIMEOUT,
    ),
    FrameType.SET: (_KEY, _data("value", 0, MAX_VALUE_BYTES)),
    FrameType.GET: (_KEY, _TIMEOUT),
    FrameType.ADD: (_KEY, _integer("amount", -(2**63), 2**63 - 1)),
    FrameType.DELETE: (_KEY,),
    FrameType.BARRIER: (_NAME, _MEMBERS, _TIMEOUT),
    FrameType.PUT_ID: (_NAME, _RANK, _MEMBERS, _data("unique id", UNIQUE_ID_BYTES, UNIQUE_ID_BYTES)),
    FrameType.GET_ID: (_NAME, _RANK, _MEMBERS, _TIMEOUT),
    FrameType.REPORT_FAILURE: (_text("reason", MAX_REASON_BYTES), _CULPRIT),
    FrameType.CANCEL: (_REQUEST,),
    FrameType.BYE: (),
    FrameType.AGREE: (_GROUP, _POSITION, _DIGEST, _MEMBERS, _TIMEOUT),
    FrameType.PASSED: (_GROUP, _POSITION, _DIGEST, _text("description", MAX_EVENT_BYTES)),
    FrameType.INTRODUCE: (_MACHINE, _text("host", MAX_MACHINE_BYTES), _PID),
    FrameType.HEARTBEAT: (_PROGRESS,),
    FrameType.WAITING: _WAIT,
    FrameType.ABSENT: _WAIT,
    FrameType.FORGET: (_NAME, _MEMBERS),
    FrameType.STATUS: (_INQUIRY, _PROGRESS, _text("report", MAX_REPORT_BYTES)),
    FrameType.HISTORY: (_INQUIRY, _HISTORY),
    FrameType.REPLY: (_REQUEST, Field("value", "nil, a boolean, an integer or bytes", _is_result)),
    FrameType.REFUSED: (_REQUEST, _integer("kind", 0, 1), _text("text", MAX_TEXT_BYTES)),
    FrameType.TIMED_OUT: (_REQUEST, _ranks("missing ranks", optional=False), _text("text", MAX_TEXT_BYTES)),
    FrameType.SEATED: (_REQUEST, _MACHINE, _PID),
    FrameType.ASKED: (_GROUP, _POSITION),
    FrameType.VERDICT: (_REQUEST, _integer("verdict", 0, 2), _POSITION),
    FrameType.PULSE: (),
    FrameType.INQUIRE: (_INQUIRY,),
    FrameType.FAILED: (
        _REQUEST,
        _integer("kind", 0, 2),
        _RANK,
        _text("phase", MAX_PHASE_BYTES),
        _ranks("missing ranks", optional=False),
        _text("text", MAX_VERDICT_BYTES),
    ),
}


@dataclass(slots=True)  # not frozen: one is made for every frame, and freezing triples what that costs
class Message:
    """One authenticated message, never changed. Its fields stay out of the repr: they may hold an id, a capability."""

    type: FrameType
    sequence: int
    fields: tuple[Any, ...] = field(repr=False)


def clip_text(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Returns the text shortened to so many bytes in UTF-8, with what cannot be encoded replaced."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 4].decode("utf-8", "ignore") + " ..."


def check_fields(frame_type: FrameType, fields: tuple[Any, ...]) -> None:
    """Checks a message's fields against the schema of its type.

    Raises:
        FieldError: a field is missing, too many, or not of the kind its schema needs.
    """
    schema = SCHEMAS[frame_type]
    if len(fields) != len(schema):
        raise FieldError(f"{frame_type.name} needs {len(schema)} fields, got {len(fields)}")
    for rule, value in zip(schema, fields, strict=True):
        if not rule.accepts(value):
            raise FieldError(f"{rule.name} needs to be {rule.needed}, got {_describe(value)}")


def _describe(value: Any) -> str:
    """Names a refused value without showing its content, which may be secret or long."""
    if type(value) is int:
        return str(value) if -(2**64) <= value <= 2**64 else "a larger integer"
    if isinstance(value, (bytes, str, list, tuple)):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__
