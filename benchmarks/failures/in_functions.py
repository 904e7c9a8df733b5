"""The script of a scene that calls a function on ranks: python -m failures.in_functions CALL [MEBIBYTES].

It prints its error, and writes a note.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import gradsync as gs
from failures import diary
from gradsync.errors import GradsyncError

RANKS = 2


class _Stubborn(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, batch: int, reason: str) -> None:
        super().__init__(f"batch {batch}: {reason}")


def raise_on_rank_1(error: str) -> None:
    with gs.init_process_group() as comm:
        comm.barrier()
        if comm.rank == 1:
            diary.note(diary.FAULT)
            raise _Stubborn(7, "bad") if error == "stubborn" else ValueError("no such batch")
        with diary.errors_noted():
            comm.barrier()


def return_value(kind: str) -> object:
    """Returns at once on rank 0, and something special on rank 1."""
    with gs.init_process_group() as comm:
        comm.barrier()
        rank = comm.rank
    if rank == 0:
        return "the result of rank 0"
    value: Any = threading.Lock() if kind == "lock" else b"x" * (int(kind) << 20)
    diary.note(diary.FAULT)
    return value


def call_what_does_not_pickle() -> list[Any]:
    lock = threading.Lock()
    diary.note(diary.FAULT)
    return gs.launch(lambda: lock, (), RANKS)


CALLS: dict[str, Callable[[], list[Any]]] = {
    "raise": lambda: gs.launch(raise_on_rank_1, "plain", RANKS),
    "raise-stubborn": lambda: gs.launch(raise_on_rank_1, "stubborn", RANKS),
    "unpicklable-function": call_what_does_not_pickle,
    "unpicklable-result": lambda: gs.launch(return_value, "lock", RANKS),
    "large-result": lambda: gs.launch(return_value, sys.argv[2], RANKS),
}


def main() -> int:
    try:
        results = CALLS[sys.argv[1]]()
    except GradsyncError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        print(f"kept: {getattr(error, 'results', {})}", file=sys.stderr, flush=True)
        return 1
    print(f"returned {[len(result) for result in results]}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
