"""The training steps of steady_cost.py, and functions that leave a part of them out, or add one, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

import gradsync as gs
from gradsync.bench.models import resnet50
from gradsync.bucketing.guard import GradientGuard
from gradsync.communicators.agreement import Agreement, Description
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.diagnostics import tracing
from gradsync.rendezvous.connection import Connection

USUAL = "as ever"
ALL_THREE = "all three"


class Model:
    """A training step whose gradients are those of a model.

    Args:
        shapes: of the gradients, in the order in which they come.
        work: how often a matrix is multiplied for each gradient, to overlap with communication.
        width: of that matrix.
    """

    def __init__(self, shapes: list[tuple[int, ...]], work: int, width: int) -> None:
        self._gradients = [np.ones(shape, np.float32) for shape in shapes]
        self._matrix = np.full((width, width), 1e-3, np.float32)
        self._product = np.empty_like(self._matrix)
        self._work = work
        self.sync = gs.AllreduceCallback("mean")

    def step(self) -> None:
        """Computes, and synchronises each gradient once it exists."""
        with self.sync.backward():
            for number, gradient in enumerate(self._gradients):
                for _ in range(self._work):
                    np.matmul(self._matrix, self._matrix, out=self._product)
                self.sync(number, gradient)


def small_model() -> Model:
    """A perceptron of three layers, some milliseconds a step."""
    return Model([(10,), (512, 10), (512,), (512, 512), (512,), (784, 512)], work=4, width=160)


def large_model() -> Model:
    """The gradients of ResNet-50, 102 MB, last layer first."""
    return Model(list(reversed(resnet50())), work=3, width=200)


MODELS: dict[str, Callable[[], Model]] = {"three layers": small_model, "ResNet-50": large_model}


class _NoRecorder:
    """Replaces the flight recorder, and records nothing."""

    def begin(self, what: object) -> None:
        pass

    def end(self, failed: bool = False) -> None:
        pass


@contextlib.contextmanager
def without_recorder(comm: gs.Communicator, _model: Model) -> Iterator[None]:
    """Switches the flight recorder off."""
    recorder, comm._lifetime._recorder = comm._lifetime._recorder, _NoRecorder()
    try:
        yield
    finally:
        comm._lifetime._recorder = recorder


@contextlib.contextmanager
def without_agreement(comm: gs.Communicator, model: Model) -> Iterator[None]:
    """Switches agreement off: ranks wait for each other without comparing their collectives."""
    agreements, agree = model.sync._step.reducer.events, SharedBarrier.agree
    nothing = Agreement(0, lambda: Description("nothing"))

    def only_wait(barrier: SharedBarrier, _agreement: Agreement) -> None:
        barrier.arrive()
        barrier.await_round(barrier.round)

    agreements.next = lambda *_: nothing
    comm._agree = lambda _agreement: None
    SharedBarrier.agree = only_wait
    try:
        yield
    finally:
        SharedBarrier.agree = agree
        del agreements.next, comm._agree


@contextlib.contextmanager
def without_heartbeats(_comm: gs.Communicator, _model: Model) -> Iterator[None]:
    """Switches this rank's heartbeats off. The server's still come, every half second."""
    beat, Connection._beat = Connection._beat, lambda *_, **__: None
    try:
        yield
    finally:
        Connection._beat = beat


@contextlib.contextmanager
def without_all(comm: gs.Communicator, model: Model) -> Iterator[None]:
    """All three at once."""
    with without_recorder(comm, model), without_agreement(comm, model), without_heartbeats(comm, model):
        yield


@contextlib.contextmanager
def as_ever(_comm: gs.Communicator, _model: Model) -> Iterator[None]:
    """Changes nothing."""
    yield


@contextlib.contextmanager
def debugging(comm: gs.Communicator, model: Model) -> Iterator[None]:
    """Switches on the debug mode's check for gradients that change, without its agreement before each collective."""
    step = model.sync._step
    step._guard, step._is_watched = GradientGuard(comm), True
    try:
        yield
    finally:
        step._guard, step._is_watched = None, False


@contextlib.contextmanager
def being_traced(_comm: gs.Communicator, _model: Model) -> Iterator[None]:
    """Switches tracing on."""
    tracing.start()
    try:
        yield
    finally:
        tracing.stop()


WITHOUT = {
    "recorder": without_recorder,
    "agreement": without_agreement,
    "heartbeats": without_heartbeats,
    ALL_THREE: without_all,
}
WITH = {"debug mode": debugging, "tracing": being_traced}
CONTENDERS = {USUAL: as_ever, **WITHOUT, **WITH}
SILENT = ("heartbeats", ALL_THREE)
