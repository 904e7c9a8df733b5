"""AllreduceCallback: takes the gradients of a step, averages them over the ranks at its end, and completes futures.

Programs use this class directly. step.py has the way of a gradient, bucket.py the plan, events.py what the ranks agree
on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from gradsync.arguments import is_number, refuse_words
from gradsync.backends import BACKENDS, unknown_backend
from gradsync.bucketing.bucket import BucketHook
from gradsync.bucketing.events import CallbackIdentity
from gradsync.bucketing.forgotten import watch
from gradsync.bucketing.gradient import key_of
from gradsync.bucketing.options import Options
from gradsync.bucketing.step import Step
from gradsync.communicators import world
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.lifetime import culprit_of
from gradsync.communicators.world import group_or_world
from gradsync.errors import FutureNotReady, GradientCancelled, InvalidArgument, PlanMismatch, describe
from gradsync.futures import GradientFuture
from gradsync.reduction import ReduceOp, parse_reduce_method
from gradsync.removed import no_attribute, refuse_removed

_FOREIGN = {
    "threshold": "threshold_bytes",
    "bucket_cap_mb": 'threshold_bytes="25 MB"',
    "op": "reduce_method",
    "average": 'reduce_method="mean" or reduce_method="sum"',
    "process_group": "group",
    "find_unused_parameters": 'parameters=... and missing="zero"',
}


class AllreduceCallback:
    """Averages or sums gradients over the ranks. Call this object with each gradient when the gradient is complete.

        sync = gs.AllreduceCallback("mean")
        for batch in batches:
            with sync.backward():
                futures = {name: sync(name, gradient) for name, gradient in gradients_of(batch)}
            for name, future in futures.items():
                weights[name] -= 0.1 * future.result()

    In each step every rank must hand over gradients of the same parameters, with the same shapes and dtypes. The order
    must be the same too, unless `parameters` is given. (With missing="zero" a rank may leave gradients out.) If the
    ranks differ in the next bucket to reduce, all of them raise PlanMismatch before they reduce this bucket.

    Gradients of one dtype fill a bucket. gradsync reduces the bucket when it has reached the threshold, or when the
    next gradient does not fit. flush() reduces the buckets that are not full. The future of a gradient gives the
    reduced values. gradsync writes these values into the array that was handed over, if the array is writeable and its
    elements share no memory. If gradients live in buckets, the values are in the bucket.

    Args:
        reduce_method: "sum" or "mean", in upper or lower case. "mean" needs floating or complex gradients.
        group: the communicator; None means the world communicator at the time of each call.
        backend: the backend that the communicator must have; None or "auto" allows any backend.
        name: the callback's name, the same on all ranks. If ranks use callbacks with different names, or in a different
            order, they raise PlanMismatch, which shows the names. The ranks identify a callback without a name by the
            lines of code that constructed it. So name each callback if ranks construct callbacks at different lines, or
            in threads.
        threshold_bytes: the largest size of a bucket of several gradients, in bytes or as text such as "25 MB"; 1 MB
            is 1024**2 bytes. A larger gradient gets a bucket of its own. None means 10 MB, or 64 MB for
            `gradient_as_bucket_view` on the CPU.
        parameters: the parameters that have a gradient in each step: a mapping of names to arrays or to (shape, dtype).
            If the program hands over gradients with arrays as `param`, the option is a list of these arrays. With this
            option, the gradients may arrive in any order, and in a different order on each rank; all ranks reduce the
            same buckets in the same order. If you pass arrays, pass the parameters themselves, because the ranks
            compare the arrays' bytes once, before the first step (in a fraction of a second for 100 MB). If the bytes
            differ, rank 0 logs a warning that names the first array that differs. If you do not have the parameters as
            arrays, pass (shape, dtype) instead.
        missing: the action of flush() if one of the `parameters` has no gradient. "error": flush() raises on all ranks,
            unless the step has no gradient at all. "zero": flush() reduces zeros for the parameter, and puts the result
            into results().
        gradient_as_bucket_view: whether gradients live inside the buckets; needs `parameters`. The futures then give
            views of the buckets, whose values are valid until the next step. See gradient_buffers().
        nonfinite: the action of flush() if a gradient, or the sum of the gradients, contains NaN or infinity. "off":
            gradsync does not check. "raise": flush() raises NonFiniteGradient on all ranks; the error names the
            parameters and ranks whose gradients contain NaN or infinity. "skip": flush() sets `skip_step` on all ranks,
            for loss scaling.
        clip_norm: the largest allowed Euclidean norm of all reduced gradients of a step together. If their norm is
            larger than clip_norm, flush() scales the gradients down to clip_norm. The attribute `norm` is the norm
            before clipping. With float("inf"), gradsync computes this norm, but does not clip. Clipping is the last
            action of flush(): a done-callback that runs earlier sees the unclipped gradient.

    Raises:
        InvalidArgument: an option has a wrong value, or lacks another option that it needs, or the group is not a
            communicator of this rank. destroy_process_group() also raises InvalidArgument if gradients were handed over
            but never reduced.
        UnsupportedDtype: the reduce method is not defined for the dtype of one of the `parameters`.

    Source: buckets as in PyTorch DDP (Li et al., VLDB 2020, section 3.2), filled in arrival order as in MegEngine.
    """

    def __init__(
        self,
        reduce_method: Literal["mean", "sum"] | str = "mean",
        group: Communicator | None = None,
        backend: str | None = None,
        *,
        name: str | None = None,
        threshold_bytes: int | str | None = None,
        parameters: Any = None,
        missing: Literal["error", "zero"] = "error",
        gradient_as_bucket_view: bool = False,
        nonfinite: Literal["off", "raise", "skip"] = "off",
        clip_norm: float | None = None,
        **removed: NoReturn,  # so that type checkers refuse misspelt options
    ) -> None:
        if removed:
            from inspect import signature  # imported here: only errors need it

            for word in removed:
                refuse_removed("AllreduceCallback", word)
            refuse_words("AllreduceCallback", removed, signature(AllreduceCallback).parameters, _FOREIGN)
        if isinstance(reduce_method, Iterable) and not isinstance(reduce_method, str):
            raise InvalidArgument(
                f'AllreduceCallback needs reduce_method to be "sum" or "mean", got {type(reduce_method).__name__}: '
                "pass the parameters as parameters=..."
            )
        self.op = parse_reduce_method(reduce_method, "reduce_method")
        if backend is not None and backend not in BACKENDS:
            raise InvalidArgument(unknown_backend(backend))
        if group is not None:
            group_or_world(group, "AllreduceCallback")
        self._backend = backend
        self._name = name
        options = Options(self.op, threshold_bytes, parameters, missing, gradient_as_bucket_view, nonfinite, clip_norm)
        self._group = group
        self._in_views = gradient_as_bucket_view
        self._step = Step(options, CallbackIdentity(name, group))
        self.statistics = self._step.statistics
        watch(self, self._step)
        if parameters is not None and (group is not None or world.current is not None):
            self._step.begin_with(self._communicator())  # so that wrong parameters raise an error here already

    def __getattr__(self, name: str) -> NoReturn:
        no_attribute("an AllreduceCallback", "'AllreduceCallback' object", name)

    @property
    def threshold_bytes(self) -> int:
        """The largest size of a bucket of several gradients, in bytes.

        With `gradient_as_bucket_view` and without `threshold_bytes`, the value depends on the communicator: 64 MB on
        the CPU, 10 MB on a GPU. Before the callback has a communicator, the value is 10 MB.
        """
        return self._step.threshold_bytes

    def __call__(self, param: Any, grad: Any) -> GradientFuture:
        """Hands over one gradient, and reduces the buckets that this gradient completes.

        Every rank must call it for the same parameters. Without the option `parameters` the order must be the same too.
        Until the future is done, the gradient belongs to gradsync: do not write to it. gradsync makes a NumPy gradient
        read-only until its bucket is reduced, so that a `gradient += ...` raises ValueError ("output array is
        read-only") instead of being averaged too, or lost. This lock holds only for arrays that gradsync can always
        unlock: arrays that own their memory, and views of such arrays. The base array of a gradient, and older views,
        can still be written to. Gradients that live in buckets are not locked.

        Args:
            param: the parameter: any hashable name, or an array. Within a rank, gradsync recognises an array by its
                id(). On different ranks, two arrays count as the same parameter if they have the same index in the
                order of the calls (or in `parameters`).
            grad: the gradient: an array of any shape and layout, or a NumPy scalar, float or complex (the future then
                gives a 0-d array). The callback's reduce method must support the gradient's dtype. The array must be on
                the communicator's device. On a GPU, the current stream must be the stream that computes the gradient.
                NCCL takes arrays in host memory too, and copies the results back to the host; but if gradients live in
                buckets, the futures give views on the device.

        Returns:
            A future of the reduced gradient. It is not done before gradsync has reduced the gradient's bucket. This
            happens in this call, in the call for a later gradient, or in flush().

        Raises:
            InvalidArgument: the parameter already has a gradient in this step, is not one of the `parameters`, or is
                not hashable; the gradient is not an array, does not fit `parameters`, shares memory with an earlier
                gradient of the step, or is in flight in another callback; another call of the callback is still
                running; or there is no process group.
            UnsupportedDtype: the reduce method is not defined for the gradient's dtype, e.g. the mean of integers.
            BackendUnavailable: gradients live in buckets, and there is not enough memory for the buckets.
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: a collective of the step has failed.
        """
        communicator = self._group or world.current
        if communicator is None or self._backend is not None:
            communicator = self._communicator()
        return self._step.take(param, grad, communicator)

    def __repr__(self) -> str:
        communicator, step = self._group or world.current, self._step
        where = "without a group" if communicator is None else f"on {communicator.label}"
        name = "" if self._name is None else f", name={self._name!r}"
        begun = f", {step.count} gradients of the next step" if step.count else ""
        return f'<AllreduceCallback("{self.op.value}"{name}) {where}: {self.statistics.steps} steps{begun}>'

    def gradient_buffers(self) -> Any:
        """Returns arrays inside the buckets, one for each gradient, so that gradsync need not copy gradients into them.

        Every rank must call it, between steps. In each step write the gradients into these arrays and hand the arrays
        over. gradsync copies a gradient from an array outside the buckets into its bucket. With the backend `shm` the
        ranks share the memory of the buckets: other ranks may write to an array from its hand-over until its future is
        done.

        After the communicator is closed, the arrays stay valid, but gradsync cannot reduce them any more. Arrays that
        an earlier call returned are treated like any other array: gradsync copies them.

        Returns:
            A mapping of names to arrays, or a list of arrays, like the option `parameters`. All elements are zero.

        Raises:
            InvalidArgument: the callback was constructed without gradient_as_bucket_view, the call is in the middle of
                a step, or there is no process group.
            BackendUnavailable: there is not enough memory for the buckets.
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
        """
        self._check_between_steps("gradient_buffers()")
        step = self._step
        if not self._in_views:
            raise InvalidArgument("gradient_buffers() needs AllreduceCallback(gradient_as_bucket_view=True)")
        with self._noting_errors():
            views = step.live_in_buckets(self._communicator())
        if isinstance(step.parameters, Mapping):
            return MappingProxyType({step.param_of(key): view for key, view in views.items()})
        return [views[key] for key in map(key_of, step.parameters)]

    def register_hook(self, hook: BucketHook | None) -> None:
        """Registers a hook that reduces the buckets, instead of an all-reduce.

            def in_half_precision(bucket):
                small = bucket.buffer.astype("float16")
                bucket.communicator.all_reduce(small, bucket.op)
                bucket.buffer[...] = small

            sync.register_hook(in_half_precision)

        gradsync calls the hook with each complete bucket, a gradsync.bucketing.bucket.GradientBucket: `buffer` is a
        flat array of the bucket's gradients, `op` is "sum" or "mean". The hook leaves the reduced values in `buffer`.
        Every rank must register a hook, between steps, and the hooks of all ranks must call the same collectives. If a
        hook raises an error, the step ends as with any other error. On a GPU, the hook works on the current stream.
        examples/hooks.py has some hooks.

        Args:
            hook: a function of one argument; None restores the all-reduce.

        Raises:
            InvalidArgument: the call is in the middle of a step, or the hook is not a function.
        """
        self._check_between_steps("register_hook()")
        if hook is not None and (isinstance(hook, type) or not callable(hook)):
            raise InvalidArgument(f"register_hook() needs a function that takes a bucket, got {hook!r}")
        self._step.use_hook(hook)

    @property
    def norm(self) -> float | None:
        """The norm of the last step's reduced gradients, before they were clipped.

        The norm is None without clip_norm, before the first step, and after a step that failed or had no gradients.
        """
        return self._step.norm

    @property
    def skip_step(self) -> bool:
        """Whether the last step's gradients, or their sums, had NaN or infinity; False unless nonfinite="skip"."""
        return self._step.skip_step

    @property
    def total_weight(self) -> float | None:
        """The sum of all ranks' weights in the last step; None if it had no weights. 0: no rank had a batch."""
        return self._step.total_weight

    def results(self) -> Any:
        """Returns the reduced gradients of the last step, until the next one ends.

        Returns:
            A dict from the names that were handed over to the reduced arrays: the objects that result() gives; with
            missing="zero", and with a weight of 0, also those that this rank did not hand over. If `parameters` is
            a list of arrays: a list in its order. Without `parameters`, arrays as names are given as text.

        Raises:
            FutureNotReady: a step has begun, and has not ended.
        """
        step = self._step
        if step.count:
            raise FutureNotReady(
                "results() is not ready: it gives the gradients of the last step, and a step has begun"
            )
        found = step.results()
        given = step.parameters
        if given is not None and not isinstance(given, Mapping):
            return [found[key] for key in map(key_of, given) if key in found]
        return {step.param_of(key): value for key, value in found.items()}

    def flush(self, *, weight: float | None = None) -> None:
        """Ends the backward pass: reduces all gradients of the step.

        Every rank must call it. On the CPU the futures of the step are done when flush() returns. On a GPU flush()
        makes the current stream wait for the reductions. The host waits too if gradients are in host memory, or if the
        option `nonfinite` or `clip_norm` is set.

        Args:
            weight: see backward(); only without `parameters`.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: a collective of the step has failed.
            MissingGradient, NonFiniteGradient: see the options `missing` and `nonfinite`.
            InvalidArgument: another call of the callback is still running, there is no process group, or the weight
                cannot be used.
        """
        if weight is not None:
            if self._step.parameters is not None:
                raise InvalidArgument(
                    "flush(weight=) is not for callbacks with parameters=, whose buckets may be launched before the "
                    "flush: pass the weight to backward(weight=)"
                )
            self._step.set_weight(self._checked_weight(weight))
        communicator = self._group or world.current
        if communicator is None or self._backend is not None:
            communicator = self._communicator()
        self._step.flush(communicator)

    @contextmanager
    def backward(self, *, weight: float | None = None) -> Iterator[None]:
        """A context manager for a backward pass; calls flush() at its end.

            with sync.backward(weight=len(batch)):
                sync("w", gradient_of(batch))

        If the program has called flush() in the block, and has handed over no gradient since then, backward() does not
        call flush() again.

        If the body or the flush raises, gradsync cancels the futures that are not done, and aborts the communicator, so
        that the other ranks raise RankFailed instead of waiting. Every rank raises a PlanMismatch or NonFiniteGradient
        of the callback's own collectives. So after these two errors the communicator stays usable.

        Args:
            weight: this rank's weight in the mean, such as the number of its samples: the results are the sum of
                weight * gradient over the ranks, divided by the sum of the weights. All ranks must pass a weight, or
                none. With 0 this rank has no batch: what it hands over is ignored, and it need not hand over anything
                if it knows the gradients from `parameters` or its last step. If all weights are 0, nothing is reduced,
                and `total_weight` is 0.

        Raises:
            InvalidArgument: the weight is not a finite number of at least 0, or the reduce method is "sum".
        """
        step = self._step
        if weight is not None:
            step.set_weight(self._checked_weight(weight))
        ended = step.ended
        try:
            yield
            # With missing="zero", a second flush would reduce a step of zeros.
            if step.ended == ended or step.count:
                self.flush()
        except BaseException as error:
            self._abandon(error)
            raise

    def _checked_weight(self, weight: Any) -> float:
        if not is_number(weight) or not math.isfinite(weight) or weight < 0:
            raise InvalidArgument(f"weight must be a finite number of at least 0, got {weight!r}")
        if self.op is not ReduceOp.MEAN:
            raise InvalidArgument(
                'weight= is for AllreduceCallback("mean"): multiply the gradients of a "sum" yourself'
            )
        return float(weight)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except PlanMismatch as error:
            self._step.raised_on_all = error
            raise

    def _check_between_steps(self, what: str) -> None:
        if self._step.count:
            raise InvalidArgument(
                f"{what} is not possible before handed-over gradients are reduced: call flush() first"
            )

    def _abandon(self, error: BaseException) -> None:
        """Cancels the step, and aborts the communicator unless every rank has raised this error."""
        try:
            self._step.fail(GradientCancelled(f"the backward pass ended with {describe(error)}"))
        finally:  # a done-callback may raise SystemExit
            communicator = self._group or world.current
            if communicator is not None and communicator.world_size > 1 and error is not self._step.raised_on_all:
                communicator.abort(f"in the backward pass: {describe(error)}", culprit=culprit_of(error))

    def _communicator(self) -> Communicator:
        communicator = self._group or world.current or group_or_world(None, "a callback for gradients")
        if self._backend is not None and self._backend not in ("auto", communicator.backend):
            raise InvalidArgument(
                f"{communicator.label}: the callback needs backend {self._backend!r}, "
                f"but its communicator has backend {communicator.backend!r}"
            )
        return communicator


make_allreduce_cb = AllreduceCallback
