"""What a server's answer stands for at the client: a value, or the error that the caller gets.

Used by `request_channel` for answers, and by `inbox` for the failure of a whole generation.
"""

from __future__ import annotations

from typing import Any

from gradsync.errors import (
    CollectiveTimeout,
    GradsyncError,
    InvalidArgument,
    RankFailed,
    RendezvousError,
    RendezvousTimeout,
)
from gradsync.rendezvous.messages import ABSENCE, INVALID, SILENCE, FrameType, Message


def failure_of(message: Message, who: str, operation: str = "") -> GradsyncError:
    """Returns the error of a FAILED message.

    Args:
        message: of the type FAILED.
        who: this rank as messages name it, e.g. "rank 1/4".
        operation: the request that it answers, ending in ": "; empty for a whole generation.
    """
    _, kind, rank, phase, missing, text = message.fields
    if kind == ABSENCE:  # of a collective: the request of a rank that learned of it by chance says nothing
        ordered = tuple(sorted(missing, key=lambda each: (each != rank, each)))  # the one that is the cause comes first
        return CollectiveTimeout(f"{who}: {text}", missing_ranks=ordered)
    return RankFailed(f"{who}: {operation}{text}", rank=rank, phase=phase, was_silent=kind == SILENCE)


def result_of(message: Message, who: str, operation: str, timeout_seconds: float) -> Any:
    """Returns the value of an answer (of a verdict: also its position), or raises the error that it stands for.

    Args:
        message: the answer.
        who: this rank as messages name it.
        operation: what messages call the request.
        timeout_seconds: the deadline that messages name.

    Raises:
        RankFailed, CollectiveTimeout, RendezvousTimeout, InvalidArgument, RendezvousError: as the answer says.
    """
    if message.type is FrameType.REPLY:
        return message.fields[1]
    if message.type is FrameType.VERDICT:
        return message.fields[1:]
    if message.type is FrameType.FAILED:
        raise failure_of(message, who, f"{operation}: ")
    if message.type is FrameType.TIMED_OUT:
        _, missing, where = message.fields
        raise RendezvousTimeout(
            f"{who}: {operation} reached its deadline of {timeout_seconds:.3g} s; "
            + (f"missing: {where}" if missing else "no rank has set it"),
            missing_ranks=tuple(missing),
            missing=where if missing else "",
        )
    _, kind, text = message.fields
    error = InvalidArgument if kind == INVALID else RendezvousError
    raise error(f"{who}: {operation}: {text}")
