"""AllreduceCallback: takes gradients one by one, reduces them bucket by bucket, resolves their futures.

Here is the state of one backward pass: gradients arrive, the planner says which buckets are complete, a complete
bucket is reduced at once, the flush reduces the rest. Every bucket, and the flush, is an event on which the ranks agree
before data moves: that is in step_reduction.py, and what happens when ranks run out of batches in join.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradsync.bucketing.backward_pass import BackwardPass, tell_forgotten
from gradsync.bucketing.future import GradientFuture
from gradsync.bucketing.join import Join
from gradsync.bucketing.options import DEFAULT_THRESHOLD_BYTES, Options
from gradsync.bucketing.pending import display_name
from gradsync.bucketing.shapes_file import write_shapes
from gradsync.collective_end import CollectiveEnd
from gradsync.communicators.base import Communicator
from gradsync.communicators.world import get_world, group_or_world
from gradsync.environment import BACKENDS
from gradsync.errors import GradientCancelled, InvalidArgument, PlanMismatch, describe
from gradsync.reduction import parse_reduce_method

_REDUCED = CollectiveEnd()  # of what needs no reduction
_REDUCED.finish(None, None)


class AllreduceCallback:
    """Registers in a training loop: call it with each gradient, flush at the end of the backward pass.

    Every rank hands over the same gradients in the same order; ranks that differ get PlanMismatch, all of them, before
    data moves (on NCCL, ranks that leave a plan which they have repeated find out too late: PlanMismatch.broken).
    Gradients of one dtype are packed until the threshold is reached; the bucket's all-reduce then starts at once. The
    reduced values are written into the gradient that was handed over, unless it is read-only.

    Args:
        reduce_method: "sum" or "mean", in any case. "mean" needs floating or complex gradients.
        group: the communicator; None is the world's, looked up at each call.
        backend: None or "auto", or the backend that the communicator must have.
        threshold_bytes: size that a bucket of several gradients never exceeds; a larger gradient goes alone.

    Raises:
        InvalidArgument: unknown reduce method or backend, a threshold below 1, or a group that is no Communicator.

    Source: bucketing as in PyTorch DDP (Li et al., VLDB 2020, section 3.2), with the arrival order of MegEngine.
    """

    def __init__(
        self,
        reduce_method: str = "mean",
        group: Communicator | None = None,
        backend: str | None = None,
        *,
        threshold_bytes: int = DEFAULT_THRESHOLD_BYTES,
        first_bucket_bytes: int | None = None,
        strategy: str = "flat",
    ) -> None:
        self.op = parse_reduce_method(reduce_method)
        if backend is not None and backend not in BACKENDS:
            raise InvalidArgument(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")
        if group is not None:
            group_or_world(group, "AllreduceCallback")
        self._group = group
        self._backend = backend
        self._backward = BackwardPass(Options(self.op, threshold_bytes, first_bucket_bytes, strategy))
        self._step = self._backward.reduction
        self.statistics = self._step.statistics
        self._synchronising = True
        weakref.finalize(self, tell_forgotten, self._backward)

    @property
    def threshold_bytes(self) -> int:
        """Size that a bucket of several gradients never exceeds."""
        return self._step.planner.threshold_bytes

    def __call__(self, param: Any, grad: Any) -> GradientFuture:
        """Hands over one gradient; reduces the bucket that it completes.

        Every rank must call it for the same parameters in the same order. Until the future is done the gradient
        belongs to gradsync: do not write to it.

        Args:
            param: whose gradient it is: any hashable name, or an array (known by identity, and across ranks by its
                place in the order).
            grad: array of any shape and layout, with a dtype that the reduce method is defined for, on the
                communicator's device and made by work on the current stream; NCCL takes host arrays too, and brings
                their results back.

        Returns:
            A future that gives the reduced gradient; not ready until the bucket is full or flushed.

        Raises:
            InvalidArgument: the parameter was handed over before in this step, is not hashable, no array came, or
                one that shares memory with an earlier gradient of the step.
            UnsupportedDtype: e.g. the mean of integers.
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: from the bucket's all-reduce.
        """
        communicator = self._communicator()
        if not self._synchronising:
            return self._keep_local(param, grad, communicator)
        return self._backward.hand_over(param, grad, communicator)

    def flush(self) -> None:
        """Ends the backward pass: reduces what is left, and resolves every future of the step.

        Every rank must call it. Inside no_sync() it only counts a local pass. On a GPU the current stream waits for
        the reductions; the host does so only where gradients came from host memory.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: from the all-reduces.
        """
        if not self._synchronising:
            self._step.agreements.local_passes += 1
            return
        self._backward.flush(self._communicator())

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surrounds a backward pass: flushes at its end.

        When the body raises, the futures that are not done are cancelled, and the communicator is aborted, so that
        the other ranks get RankFailed instead of waiting; after PlanMismatch, which every rank gets, it stays usable,
        unless the error says `broken`.
        """
        try:
            yield
            self.flush()
        except BaseException as error:
            self._give_up("the backward pass", error)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Surrounds passes whose gradients stay local, for accumulation.

        Futures are done at once and give the caller's own arrays; adding up is the caller's. Every rank must make the
        same number of local passes: the next step's agreement includes it.

        Raises:
            InvalidArgument: in the middle of a step: flush first.
        """
        self._check_between_steps("no_sync()")
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    @contextmanager
    def join(self, parameters: Any = None) -> Iterator[Join]:
        """Surrounds a loop over batches of which the ranks may have different numbers, or none.

        A rank that leaves the block takes part in the steps of the others, with zeros, until all have left it; the mean
        is that over the ranks that handed over gradients. (Where some are absent, half precision is added up and
        divided in two roundings.) Each rank repeats the gradients of its last step, in their order. What a rank has
        accumulated in no_sync() and not handed over is left out.

        The parameters of a rank that leaves early stay behind. Afterwards all can take those of a rank that did not:

            with sync.join() as joined:
                for batch in batches:
                    ...
            gs.bcast_list_(parameters, root=joined.last_rank)

        Every rank must enter it; inside, ranks must not call collectives but those of this callback. When the body
        raises, nobody stands in for this rank: the communicator is aborted, as in backward().

        Args:
            parameters: names -> array or (shape, dtype), in the order in which gradients are handed over; or a list of
                arrays, where gradients are handed over by those. Only for ranks that may not have a single batch.

        Raises:
            InvalidArgument: in the middle of a step, or inside another join() of this callback.
            PlanMismatch: the others' step is not the one that this rank repeats, or it knows none; on all ranks.
            RankFailed, CollectiveTimeout, CommunicatorClosed: from the collectives.
        """
        self._check_between_steps("join()")
        if self._step.roll_call is not None:
            raise InvalidArgument(
                f"{self._communicator().label}: join() inside another join() of the same callback: one block surrounds "
                "the whole loop over batches; leave it before the next begins"
            )
        joined = self._step.roll_call = Join(self._backward, self._communicator(), parameters)
        try:
            yield joined
            self._check_between_steps("the end of join()")
            joined.stand_in()
        except BaseException as error:
            self._give_up("join()", error)
            raise
        finally:
            self._step.roll_call = None
            self._step.begin_step()

    def dump_shapes(self, path: str | Path) -> None:
        """Writes the last step's gradients to a JSON file, in arrival order: for `gradsync bench thresholds --model`.

        Not collective: call it on one rank, after a flush.

        Raises:
            InvalidArgument: in the middle of a step, or no step has ended well yet.
            OSError: the file cannot be written.
        """
        self._check_between_steps("dump_shapes()")
        specs = self._backward.arrivals.specs
        if not specs:
            raise InvalidArgument("dump_shapes() before any step: hand over the gradients of one, and flush")
        write_shapes(path, specs)

    def _check_between_steps(self, what: str) -> None:
        if self._backward.is_under_way:
            raise InvalidArgument(f"{what} in the middle of a backward pass: flush first")

    def _give_up(self, what: str, error: BaseException) -> None:
        """Cancels the step, and wakes the ranks that wait for this one; after PlanMismatch, which all get, none."""
        self._backward.fail(GradientCancelled(f"{what} ended with {describe(error)}"))
        communicator = self._group or get_world()
        told = communicator is None or communicator.world_size == 1 or isinstance(error, PlanMismatch)
        if self._synchronising and communicator is not None and not told:
            communicator.abort(f"in {what}: {describe(error)}")

    def _communicator(self) -> Communicator:
        communicator = self._group or group_or_world(None, "a callback for gradients")
        if self._backend is not None and self._backend not in ("auto", communicator.backend):
            raise InvalidArgument(
                f"{communicator.label}: the callback wants backend {self._backend!r}, "
                f"its communicator is {communicator.backend!r}"
            )
        return communicator

    def _keep_local(self, param: Any, grad: Any, communicator: Communicator) -> GradientFuture:
        """Checks a gradient of a local pass, and gives it back."""
        self._backward.check(param, grad, communicator)
        self._step.agreements.local_gradients += 1
        return GradientFuture(display_name(param, 0), _REDUCED, grad)


make_allreduce_cb = AllreduceCallback
