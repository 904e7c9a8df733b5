"""A rank of the fault matrix: it reaches an exact point of a run, at which a fault happens to a rank.

    python -m failures.in_phases PHASE FAULT VICTIM [options]

All ranks do the same: a few steps of training, in which each checks the sums. Points inside the library are
reached by wrapping its methods in this process; the library itself knows nothing of them. A rank that gets an error
reports what it still holds once all is closed.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from chaos_proxy import ChaosProxy, Plan

import gradsync as gs
from belongings import Belongings
from failures import diary
from failures.in_ranks import exit_with_0, kill_myself, load_batch, raise_error, stop_myself
from failures.plans import plan_of
from failures.points import (
    AUTH,
    BARRIER,
    CLOSE,
    EXIT_0,
    EXIT_3,
    FAULTS,
    FIRST_BUCKET,
    HALF_OPEN,
    HELLO,
    INIT,
    JOINED,
    KILL,
    LAST_BUCKET,
    LAUNCHER,
    MIDDLE_BUCKET,
    PHASES,
    RAISE,
    SPAWN,
    STOP,
    TEARDOWN,
)
from gradsync import process_group
from gradsync.rendezvous import connection as connection_module
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.connection import Connection

_BUCKETS = 5
_ELEMENTS = 1000
_AT_STEP = 2  # the plan of the steps has been agreed and repeated by then
_STEPS_WITHOUT_END = 10**9
_PHASE_OF_BUCKET = {0: FIRST_BUCKET, _BUCKETS // 2: MIDDLE_BUCKET, _BUCKETS - 1: LAST_BUCKET}


class Part:
    """This process's part.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._is_victim = options.victim == str(self._rank)
        # A fault of the launcher's connections happens to each rank's, at its own end of a proxy.
        self._is_struck = self._is_victim or (options.victim == LAUNCHER and options.fault in (CLOSE, HALF_OPEN))
        self._waits_for_go = options.fault in FAULTS and (self._is_victim or options.victim == LAUNCHER)
        self._has_arrived = False
        self._stream: socket.socket | None = None
        self._proxy: ChaosProxy | None = None

    def play(self) -> None:
        with ExitStack() as stack:
            self._go_through_proxy(stack)
            self._arrive(SPAWN)
            self._wrap_library()
            if self._options.phase == JOINED and self._rank == self._laggard():
                self._keep_others_waiting()
            self._train_and_look()

    def _laggard(self) -> int:
        """The rank for which the others wait, once they have joined."""
        return max(rank for rank in range(self._size) if str(rank) != self._options.victim)

    def _keep_others_waiting(self) -> None:
        self._has_arrived = True
        diary.note(diary.READY, **self._facts())
        if self._options.victim != LAUNCHER:
            load_batch()
        diary.await_go()  # and notices that the launcher has ended

    # -- Faults -------------------------------------------------------------------------------

    def _arrive(self, phase: str) -> None:
        """Is called at each point that this rank passes; the fault happens at the wanted point, the first time."""
        if phase != self._options.phase or self._has_arrived:
            return
        self._has_arrived = True
        diary.note(diary.READY, **self._facts())
        if not self._waits_for_go:
            return
        diary.await_go()
        if self._is_struck:
            diary.note(diary.FAULT)
            self._strike()

    def _facts(self) -> dict[str, str]:
        return {"address": os.environ["GRADSYNC_ADDRESS"]} if self._proxy is None else {}

    def _strike(self) -> None:
        strikes: dict[str, Callable[[], None]] = {
            KILL: kill_myself,
            STOP: stop_myself,
            RAISE: raise_error,
            EXIT_0: exit_with_0,
            EXIT_3: lambda: os._exit(3),
            CLOSE: self._close,
            HALF_OPEN: self._drop,
        }
        strikes[self._options.fault]()

    def _close(self) -> None:
        """Closes the control connection: at the proxy, or else its descriptor in this process."""
        if self._proxy is not None:
            self._proxy.close_connections()
        else:
            assert self._stream is not None
            os.close(self._stream.fileno())

    def _drop(self) -> None:
        assert self._proxy is not None
        self._proxy.drop_everything()

    def _go_through_proxy(self, stack: ExitStack) -> None:
        options = self._options
        is_struck_outside = self._is_struck and (options.fault == HALF_OPEN or options.victim == LAUNCHER)
        if is_struck_outside or (options.plan and self._is_victim):
            plan = plan_of(options.plan) if options.plan else Plan()
            proxy = ChaosProxy(os.environ["GRADSYNC_ADDRESS"], plan, on_incident=lambda: diary.note(diary.FAULT))
            self._proxy = stack.enter_context(proxy)
            os.environ["GRADSYNC_ADDRESS"] = self._proxy.address

    def _wrap_library(self) -> None:
        _wrap(connection_module, "_shake_hands", before=self._come_to_hello, after=lambda *_: self._arrive(AUTH))
        _wrap(Connection, "_wait", before=self._come_to_joined)
        _wrap(process_group, "connect", before=lambda *_: self._arrive(INIT))
        _wrap(RendezvousClient, "close", before=lambda *_: self._arrive(TEARDOWN))

    def _come_to_hello(self, stream: socket.socket, *_: Any) -> None:
        self._stream = stream
        self._arrive(HELLO)

    def _come_to_joined(self, connection: Connection, request: Any, *_: Any) -> None:
        """Waits until this rank has its seat: in the thread that joins, as the one that reads is not to be struck."""
        while not connection.is_accepted and connection.failure is None and request.is_over.locked():
            time.sleep(0.001)
        self._arrive(JOINED)

    # -- Training ----------------------------------------------------------------------------------------------

    def _train_and_look(self) -> None:
        """Trains; after an error, notes what is still held once everything is closed, and raises the error."""
        before = Belongings.now()
        try:
            with diary.errors_noted():
                self._train()
            return
        except gs.GradsyncError as error:
            failure = error.with_traceback(None)  # whose frames would hold the communicator
            failure.__cause__ = failure.__context__ = None  # likewise
        if not self._is_victim and self._proxy is None:
            _tell_what_is_kept(before, Belongings.now())
        if self._is_victim and self._options.fault == HALF_OPEN:
            load_batch()  # its end would close the connection, and tell what the others are to find out
        raise failure

    def _train(self) -> None:
        options = self._options
        with gs.init_process_group(timeout_seconds=options.timeout, collective_timeout_seconds=30.0) as comm:
            sync = gs.AllreduceCallback("sum", comm, threshold_bytes=8 * _ELEMENTS)
            for step in range(options.steps or (_AT_STEP + 1 if options.phase == TEARDOWN else _STEPS_WITHOUT_END)):
                self._take_step(sync, step)
                if step == _AT_STEP:
                    self._arrive(BARRIER)
                comm.barrier()

    def _take_step(self, sync: gs.AllreduceCallback, step: int) -> None:
        with sync.backward():
            futures = []
            for bucket in range(_BUCKETS):
                if step == _AT_STEP and bucket in _PHASE_OF_BUCKET:
                    self._arrive(_PHASE_OF_BUCKET[bucket])
                futures.append(sync(f"layer {bucket}", np.full(_ELEMENTS, self._rank + step + bucket, np.float64)))
        for bucket, future in enumerate(futures):
            want = sum(rank + step + bucket for rank in range(self._size))
            if not (future.result() == want).all():
                raise ArithmeticError(f"step {step}, bucket {bucket}: {future.result()[0]} in place of {want}")


def _wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
) -> None:
    """Makes calls with the same arguments before and after a function of the library."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **keywords: Any) -> Any:
        before(*args)
        result = original(*args, **keywords)
        after(*args)
        return result

    setattr(owner, name, wrapped)


def _tell_what_is_kept(before: Belongings, after: Belongings) -> None:
    fields = zip(Belongings._fields, before.without_memory(), after.without_memory(), strict=False)
    for name, was, now in fields:
        if was != now:
            diary.note(diary.KEPT, held=f"{name}: {was} before, {now} after"[:400])


def main() -> None:
    parser = argparse.ArgumentParser(description="Play a rank's part in a cell of benchmarks/fault_matrix.py.")
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("fault", choices=[*FAULTS, "none"])
    parser.add_argument("victim", help=f"a rank, or {LAUNCHER}")
    parser.add_argument("--timeout", type=float, default=30.0, help="for all ranks to meet")
    parser.add_argument("--steps", type=int, help="of training [without end, where nothing else ends it]")
    parser.add_argument("--plan", help="what a proxy does to the victim's control connection")
    Part(parser.parse_args()).play()


if __name__ == "__main__":
    main()
