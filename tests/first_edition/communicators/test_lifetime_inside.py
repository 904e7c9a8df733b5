"""Lifetime: one collective at a time, and an end that Ctrl-C cannot prevent, whenever it comes."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators import lifetime
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.local import LocalBackend
from gradsync.diagnostics import recorder as flight_recorder

WAIT = 30.0
TURN = "all_reduce", agreement_on("all_reduce", (), None, "")


class _Noting(LocalBackend):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def announce_close(self) -> None:
        self.heard.append("closed")

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        self.heard.append(f"aborted: {reason}")

    def release(self) -> None:
        self.heard.append("released")


class Noting(Communicator):
    """Notes what the other ranks would hear, and its release."""

    def __init__(self) -> None:
        backend = _Noting()
        super().__init__(backend)
        self.heard = backend.heard


def in_another_thread(function: Callable[[], Any]) -> Any:
    """Calls a function; returns what it returned or raised."""
    answers: list[Any] = []

    def call() -> None:
        try:
            answers.append(function())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(WAIT)
    return answers[0]


# -- One at a time ---------------------------------------------------------------------------------------------------


def test_another_thread_inside_is_no_accident() -> None:
    comm = Noting()
    with comm.lifetime.turn(*TURN):
        assert "another thread is inside all_reduce" in str(in_another_thread(comm.barrier))
    comm.barrier()
    assert comm.heard == []


def test_who_comes_again_from_within_is_refused_and_does_not_end_it() -> None:
    """A signal's handler, for one, runs on top of the collective."""
    comm = Noting()
    with comm.lifetime.turn(*TURN), pytest.raises(gs.InvalidArgument, match="one thread at a time"):
        comm.barrier()
    comm.barrier()
    comm.close()
    assert comm.heard == ["closed", "released"]


@pytest.mark.parametrize("end", [Communicator.close, lambda comm: comm.abort("the disk is full")])
def test_an_end_from_within_leaves_the_release_to_the_one_inside(end: Callable[[Any], None]) -> None:
    comm = Noting()
    with comm.lifetime.turn(*TURN):
        end(comm)
        assert "released" not in comm.heard
    assert comm.heard[-1] == "released"


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------

FILES = {module.__file__ for module in (lifetime, flight_recorder)}


class Interruption:
    """Raises KeyboardInterrupt where the communicator's own bookkeeping begins its n-th line, or calls or returns.

    Not on the lines of a `with`: the interpreter lets no signal in between what such a line does on its way out.
    """

    def __init__(self, number: int) -> None:
        self._left = number
        self.where = ""

    def __enter__(self) -> Interruption:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event in ("call", "line", "return") and not line_of(frame).startswith("with "):
            self._left -= 1
            if self._left == 0:
                self.where = f"{event} of {frame.f_code.co_name}: {line_of(frame)}"
                raise KeyboardInterrupt
        return self._trace


def line_of(frame: FrameType) -> str:
    lines, first = inspect.getsourcelines(frame.f_code)
    return lines[max(frame.f_lineno - first, 0)].strip()


def interruptions(run: Callable[[Noting], Any]) -> list[tuple[Noting, str]]:
    """Runs something on as many new communicators as it has moments, and interrupts each at another one."""
    cut_off = []
    while True:
        comm, interruption = Noting(), Interruption(len(cut_off) + 1)
        try:
            with interruption:
                run(comm)
        except KeyboardInterrupt:
            cut_off.append((comm, interruption.where))
        else:
            assert len(cut_off) > 10
            return cut_off


def reduce(comm: Noting) -> None:
    comm.all_reduce(np.ones(3))


def fail_inside(comm: Noting) -> None:
    with contextlib.suppress(gs.RankFailed), comm.lifetime.turn(*TURN):
        raise gs.RankFailed("rank 1 died")


def is_released(comm: Noting) -> bool:
    """Once, and last; what is cut off in the middle of it, is not tried again."""
    return comm.heard.count("released") <= 1 and "released" not in comm.heard[:-1] and comm.lifetime._released


def go_on(comm: Noting) -> None:
    """The next collective works, or says that the communicator has ended."""
    try:
        comm.barrier()
    except gs.CommunicatorClosed:
        assert comm.heard[0].startswith("aborted")
        assert is_released(comm)
    else:
        assert comm.heard == []


def go_on_in_another_thread(comm: Noting) -> None:
    assert not isinstance(in_another_thread(lambda: go_on(comm)), Exception)


def close(comm: Noting) -> None:
    comm.close()


def abort(comm: Noting) -> None:
    comm.abort("the disk is full")


NEXT = [go_on, go_on_in_another_thread, close, abort]


@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("run", [reduce, fail_inside])
def test_ctrl_c_in_a_collective_leaves_nobody_inside(run: Callable[[Noting], Any], then: Callable[..., Any]) -> None:
    for comm, where in interruptions(run):
        then(comm)
        comm.close()
        assert is_released(comm), where
        assert comm.heard[0].partition(":")[0] in ("closed", "aborted"), where
        assert set(comm.heard[1:]) <= {comm.heard[0], "released"}, where
        with pytest.raises(gs.CommunicatorClosed):
            comm.barrier()


@pytest.mark.parametrize("then", [go_on, close, abort])
def test_a_failure_whose_end_is_cut_off_is_told_by_the_next_call(then: Callable[[Noting], Any]) -> None:
    for comm, where in interruptions(fail_inside):
        then(comm)
        comm.close()
        before = any(f" of {name}" in where for name in ("turn", "__enter__", "enter", "begin"))
        assert comm.heard[0].startswith("aborted") or before, where


@pytest.mark.parametrize("then", [close, abort, lambda comm: in_another_thread(comm.close)])
@pytest.mark.parametrize("run", [close, abort])
def test_ctrl_c_in_the_end_leaves_the_rest_to_the_next(run: Callable[..., Any], then: Callable[..., Any]) -> None:
    for comm, where in interruptions(run):
        then(comm)
        assert comm.heard[0] != "released", where
        assert is_released(comm), where
