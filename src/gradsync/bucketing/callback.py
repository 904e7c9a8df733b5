"""AllreduceCallback: takes the gradients of a step, averages them over the ranks at its end, and completes futures.

Programs use this class directly. step.py has the way of a gradient, bucket.py the plan, events.py what the ranks agree
on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from gradsync.backends import BACKENDS, unknown_backend
from gradsync.bucketing.bucket import BucketHook
from gradsync.bucketing.events import CallbackIdentity
from gradsync.bucketing.forgotten import watch
from gradsync.bucketing.gradient import key_of
from gradsync.bucketing.options import CHECK_EVERY, Options, checked_weight
from gradsync.bucketing.step import Step
from gradsync.communicators import world
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.lifetime import culprit_of
from gradsync.communicators.world import group_or_world
from gradsync.errors import GradientCancelled, InvalidArgument, PlanMismatch, describe
from gradsync.futures import GradientFuture
from gradsync.reduction import parse_reduce_method
from gradsync.words import no_attribute, refuse_keywords


class AllreduceCallback:
    """Averages or sums gradients over the ranks. Call it with each gradient; at the end of the block all are averaged.

        sync = gs.AllreduceCallback("mean")
        for batch in batches:
            with sync.backward():
                for name, gradient in gradients_of(batch):
                    sync(name, gradient)
            for name, gradient in sync.results().items():
                weights[name] -= 0.1 * gradient

    In each step all ranks hand over gradients of the same names, shapes and dtypes, in any order. The ranks compare the
    whole step before anything moves. If they differ, all raise PlanMismatch, no gradient has changed, and they can
    repeat the step. (On a GPU with `parameters`, buckets that were complete are reduced already.)

    Gradients of one dtype are reduced together, in buckets. The result is written into the array that was handed over.
    A read-only array, and one whose elements share memory, is left alone: then only results(), and the future that each
    call returns, have the result.

    Args:
        reduce_method: "mean" or "sum". "mean" needs floating or complex gradients.
        group: the communicator; None means the world communicator at the time of each call.
        backend: the backend that the communicator must have; None or "auto" allows any backend.
        name: the callback's name, the same on all ranks. Without a name the ranks know it by the line that made it,
            such as "gan/train.py:17". So name callbacks that the ranks make at different lines, and each of several
            that one line makes, in a loop or a helper: a second one that looks like one alive is refused at its first
            use. (Those that live one after the other look alike too, and the ranks must use them in one order.)
        threshold_bytes: the largest bucket of several gradients, in bytes or as text such as "25 MB"; 1 MB is 1024**2
            bytes. A larger gradient has a bucket of its own. None means 10 MB.
        parameters: the parameters that have a gradient in each step: a mapping of names to arrays or to (shape, dtype),
            or a list of arrays, which are then handed over as `param`. Buckets are cut in this order. On a GPU a bucket
            is reduced as soon as it and all before it are complete, beside the backward pass, so begin with the
            parameters whose gradients come first.
        missing: what happens if one of the `parameters` has no gradient. "error": all ranks raise MissingGradient, or
            PlanMismatch if they lack different ones; a step without any gradient is fine. "zero": zeros are reduced
            in its place, and results() has the result.
        gradient_as_bucket_view: whether gradients live inside the buckets; needs `parameters`. Results are then views
            of the buckets, valid until the next step. See gradient_buffers().
        nonfinite: what happens if a reduced gradient has NaN or infinity. "off": nothing, it is not checked. "raise":
            all ranks raise NonFiniteGradient, which names the parameters. "skip": `skip_step` is True on all ranks, for
            loss scaling.
        clip_norm: the largest Euclidean norm of all reduced gradients together; if theirs is larger, all are scaled
            down to it. `norm` is the norm before. float("inf") computes the norm, and does not clip.
        check_every: the ranks compare the parameters' values before the first two steps (on a GPU the first), and every
            so many, by a digest of 8 bytes each; 0 means never. They can compare only what the callback knows as
            arrays: `parameters`, or arrays as `param`. Pass the parameters themselves, and update them in place.
            Read-only arrays are not compared. If no parameter is known, and nothing was broadcast before the first
            step, rank 0 says so once.
        diverged: what happens if the values differ. "warn": rank 0 logs which parameter differs, and since when.
            "raise": all ranks raise PlanMismatch, and no gradient has changed.

    Raises:
        InvalidArgument: an option has a wrong value, or lacks another option that it needs, or the group is not a
            communicator of this rank. destroy_process_group() raises it too, if gradients were never reduced.
        UnsupportedDtype: the reduce method is not defined for the dtype of one of the `parameters`.

    Source: buckets as in PyTorch DDP (Li et al., VLDB 2020, section 3.2); futures that resolve at the flush as in
    MegEngine.
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
        check_every: int = CHECK_EVERY,
        diverged: Literal["warn", "raise"] = "warn",
        **removed: NoReturn,  # so that type checkers refuse misspelt options
    ) -> None:
        if removed:
            from inspect import signature  # imported here: only errors need it

            refuse_keywords("AllreduceCallback", removed, signature(AllreduceCallback).parameters)
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
        options = Options(
            self.op,
            threshold_bytes,
            parameters,
            missing,
            gradient_as_bucket_view,
            nonfinite,
            clip_norm,
            check_every,
            diverged,
        )
        self._group = group
        self._unused_weight: float | None = None  # of a backward() without `with`
        self._in_views = gradient_as_bucket_view
        self._step = Step(options, CallbackIdentity(name, group))
        self.statistics = self._step.statistics
        watch(self, self._step)
        if parameters is not None and (group is not None or world.current is not None):
            self._step.check_parameters(self._communicator())  # so that wrong ones raise an error here already

    def __getattr__(self, name: str) -> NoReturn:
        no_attribute("an AllreduceCallback", "'AllreduceCallback' object", name, dir(AllreduceCallback))

    @property
    def threshold_bytes(self) -> int:
        """The largest size of a bucket of several gradients, in bytes."""
        return self._step.threshold_bytes

    def __call__(self, param: Any, grad: Any) -> GradientFuture:
        """Hands over one gradient.

            future = sync("weights", gradient)

        In each step every rank must call it for the same parameters, in any order. The values at the end of the block
        count: you may still write to the array. (On a GPU with `parameters`, the values at the hand-over count: do not
        write to it until the end of the block.) Gradients of one step must not share memory.

        Args:
            param: the parameter's name: any hashable value whose repr() is the same on all ranks, such as text, a
                number, a tuple, an Enum or a dataclass. Or the parameter itself, an array: the ranks know it by its
                index in the list `parameters`, and without that option by its shape, dtype and bytes at its first use.
            grad: the gradient: an array of any shape and layout, or a NumPy scalar, float or complex (the result is
                then a 0-d array). It must be on the communicator's device, and the current stream of a GPU must be the
                stream that computes it. NCCL takes arrays in host memory too, and copies the results back.

        Returns:
            A future of the reduced gradient, which is done at the end of the block, or of flush().

        Raises:
            InvalidArgument: the parameter already has a gradient in this step, is not one of the `parameters`, or has a
                name that differs between ranks; the gradient is not an array, or does not fit `parameters`; the ranks
                could take this callback for another one of the same line; another call of the callback is still
                running; or there is no process group.
            UnsupportedDtype: the reduce method is not defined for the gradient's dtype, e.g. the mean of integers.
            BackendUnavailable: gradients live in buckets, and there is not enough memory for the buckets.
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: a bucket was launched on a GPU, or the
                buckets' memory was allocated, and this failed.
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

    def __reduce__(self) -> NoReturn:
        # The ranks could not tell a copy from the original.
        raise TypeError("an AllreduceCallback cannot be copied or pickled: make another one, with a name of its own")

    def gradient_buffers(self) -> Any:
        """Returns arrays inside the buckets, one for each gradient, so that none need be copied there.

            buffers = sync.gradient_buffers()
            with sync.backward():
                np.matmul(x.T, error, out=buffers["weights"])
                sync("weights", buffers["weights"])

        Every rank must call it, between steps. In each step write the gradients into these arrays, and hand the arrays
        over. Another array is copied into its bucket, and the result is in the bucket. The mapping is read-only: write
        `buffers["w"][...] = gradient`.

        They stay the same after gs.rebuild(). After the communicator is closed, you can read the arrays, but not reduce
        them. Those of an earlier call are copied, as any other array.

        Returns:
            A read-only mapping of names to arrays, or a list of arrays, as in `parameters`; all zeros.

        Raises:
            InvalidArgument: the callback has no gradient_as_bucket_view, a step has begun, or there is no process
                group.
            BackendUnavailable: there is not enough memory for the buckets.
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
        """
        self._check_between_steps("gradient_buffers()")
        step = self._step
        if not self._in_views:
            raise InvalidArgument("gradient_buffers() needs AllreduceCallback(gradient_as_bucket_view=True)")
        try:
            views = step.live_in_buckets(self._communicator())
        except PlanMismatch as error:
            step.note(error)
            raise
        if isinstance(step.parameters, Mapping):
            return MappingProxyType(step.by_param(views))
        return [views[key] for key in map(key_of, step.parameters)]

    def register_hook(self, hook: BucketHook | None) -> None:
        """Has a hook reduce the buckets, in place of an all-reduce.

            def in_half_precision(bucket):
                small = bucket.buffer.astype("float16")
                bucket.communicator.all_reduce(small, bucket.op)
                bucket.buffer[...] = small

            sync.register_hook(in_half_precision)

        At the end of a step the hook is called with each bucket, a gradsync.bucketing.bucket.GradientBucket: `buffer`
        is a flat array of its gradients, and `op` is "sum" or "mean". The hook leaves the reduced values in `buffer`.
        In a step with unequal weights the values are weighted already, and `op` is "sum". Every rank must register a
        hook, between steps, and the hooks of all ranks must call the same collectives. An error in a hook ends the
        step, as any other. gs.rebuild() calls the method reset() of a hook that has one. On a GPU a hook works on the
        current stream. examples/hooks.py has some.

        Args:
            hook: a function of one argument; None brings the all-reduce back.

        Raises:
            InvalidArgument: a step has begun, or the hook is no function.
        """
        self._check_between_steps("register_hook()")
        if hook is not None and (isinstance(hook, type) or not callable(hook)):
            raise InvalidArgument(f"register_hook() needs a function that takes a bucket, got {hook!r}")
        self._step.use_hook(hook)

    @property
    def norm(self) -> float | None:
        """The norm of the last step's reduced gradients, before they were clipped.

        None without clip_norm, before the first step, and after one that failed or had no gradients.
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
        """Returns the reduced gradients of the last step, until the next backward().

        It is empty after a step that failed, and after one whose weights were all 0.

        Returns:
            A dict from the names that were handed over to the reduced arrays, which are those that result() gives. With
            missing="zero", and with a weight of 0, it has also what this rank did not hand over. If `parameters` is a
            list of arrays, a list in its order. Without `parameters`, arrays as names are given as text.

        Raises:
            FutureNotReady: a step has begun, and has not ended.
        """
        step = self._step
        found = step.results()
        given = step.parameters
        if given is not None and not isinstance(given, Mapping):
            return [found[key] for key in map(key_of, given) if key in found]
        return step.by_param(found)

    def flush(self, *, weight: float | None = None) -> None:
        """Reduces all gradients of the step, and ends it. The end of `with sync.backward():` calls it.

        Every rank must call it. The futures of the step are done when it returns. On a GPU the current stream waits for
        the reductions, and the host only if gradients are in host memory, or with `nonfinite` or `clip_norm`.

        Args:
            weight: see backward(). With `parameters` pass it to backward(), whose buckets may go before the flush.

        Raises:
            PlanMismatch: the ranks' steps differ.
            MissingGradient, NonFiniteGradient: see the options `missing` and `nonfinite`.
            InvalidArgument: two gradients share memory, the weight cannot be used, another call of the callback is
                still running, or there is no process group.
            RankFailed, CollectiveTimeout, CommunicatorClosed: a collective of the step has failed.
        """
        if weight is not None:
            if self._step.parameters is not None:
                raise InvalidArgument(
                    "flush(weight=) is not for callbacks with parameters=, whose buckets may be launched before the "
                    "flush: pass the weight to backward(weight=)"
                )
            weight = checked_weight(weight, self.op)
        if self._unused_weight is not None:
            unused, self._unused_weight = self._unused_weight, None
            raise InvalidArgument(
                f"backward(weight={unused:.6g}) was called without `with`, so that no step has this weight: write "
                "`with sync.backward(weight=...):`, and hand the gradients over in its block"
            )
        self._step.flush(self._communicator(), weight)

    def backward(self, *, weight: float | None = None) -> AbstractContextManager[None]:
        """A block for a backward pass; its end calls flush().

            with sync.backward(weight=len(batch)):
                sync("w", gradient_of(batch))

        If the program has called flush() in the block, and has handed over no gradient since, the end does nothing. If
        the body or the flush raises, the futures are cancelled, and the communicator is aborted, so that the other
        ranks raise RankFailed instead of waiting. Errors that every rank raises are the exception: after a caught
        PlanMismatch or NonFiniteGradient of this callback, the communicator stays usable.

        Args:
            weight: this rank's weight in the mean, usually the number of its samples. The results are
                sum(weight * gradient) / sum(weight) over the ranks. All ranks pass a weight in a step, or none does.
                With 0 this rank has no batch: what it hands over is ignored, and it need not hand over anything if it
                knows the gradients from `parameters` or from its last step. If all weights are 0, nothing is reduced,
                `total_weight` is 0, and the futures raise GradientCancelled.

        Raises:
            InvalidArgument: the weight is not a finite number of at least 0, or the reduce method is "sum".
        """
        self._unused_weight = checked_weight(weight, self.op)
        return self._block(self._unused_weight)

    @contextmanager
    def _block(self, weight: float | None) -> Iterator[None]:
        self._unused_weight = None
        step = self._step
        step.begin_pass(weight)
        ended = step.ended
        try:
            yield
            # With missing="zero", a second flush would reduce a step of zeros.
            if step.ended == ended or step.count:
                self.flush()
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            step.end_pass()

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
            is_alone = communicator is None or (not communicator.closed and communicator.world_size == 1)
            if communicator is not None and not is_alone and not self._step.is_raised_on_all(error):
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
