"""The backward passes of a PyTorch module: each gradient is handed over once autograd has it, the end is the flush.

Autograd calls a hook for each parameter whose gradient it has accumulated, and a callback when the whole pass has
ended, before loss.backward() returns. A pass that ends with an exception never calls that; but autograd drops it then,
which tells as much, at once, so that the other ranks do not wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from gradsync.adapters.torch_tensors import array_of, on_stream_of_torch, tensor_of
from gradsync.bucketing.callback import AllreduceCallback
from gradsync.bucketing.plan import list_of_names
from gradsync.communicators.communicator import Communicator
from gradsync.errors import GradientCancelled, InvalidArgument, MissingGradient


class BackwardPasses:
    """Has autograd hand over the gradients of parameters, until it is collected: the hooks do not keep it alive.

    Args:
        parameters: by name, in the order in which their gradients are expected; the callback knows them already.
        frozen: parameters that need no gradient, likewise.
        callback: what gets them.
        communicator: the callback's.
        in_buckets: whether gradients live in the buckets.
        may_miss: whether a pass may bring no gradient for some, on all ranks or on some.
        check: called at the end of each pass that is synchronised; what it raises all ranks hear of.
        at_end: called at the end of each pass that was synchronised.

    Attributes:
        is_synchronising: whether gradients are handed over; else they stay local.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        frozen: dict[str, torch.nn.Parameter],
        callback: AllreduceCallback,
        communicator: Communicator,
        *,
        in_buckets: bool,
        may_miss: bool,
        check: Callable[[], None],
        at_end: Callable[[], None],
    ) -> None:
        self.is_synchronising = True
        self._parameters = parameters
        self._frozen = frozen
        self._callback = callback
        self._communicator = communicator
        self._may_miss = may_miss
        self._check = check
        self._at_end = at_end
        self._arrays: dict[str, Any] = callback.gradient_buffers() if in_buckets else {}
        self._views = {name: tensor_of(array) for name, array in self._arrays.items()}
        self._come: set[str] = set()
        self._come_locally: set[str] = set()  # in passes since the last that was synchronised
        self._kept: dict[str, torch.Tensor] = {}  # earlier gradients in the buckets, which this pass may leave alone
        self._failed: BaseException | None = None
        self._pass: weakref.ref[_Pass] | None = None  # autograd holds it
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_hear, weakref.ref(self), name))
            for name, parameter in parameters.items()
        ]
        self._remove = weakref.finalize(self, _remove_all, hooks)
        self._remove.atexit = False

    def remove(self) -> None:
        """Takes the hooks away; the gradients stay where they are."""
        self._remove()

    def accumulated(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Hears from autograd that a parameter's gradient is there."""
        if not self._is_under_way():
            self._begin()
        if not self.is_synchronising:
            self._come_locally.add(name)
            return
        try:
            self._hand_over(name, parameter)
        except BaseException as error:
            self._failed = error
            raise

    def _is_under_way(self) -> bool:
        # Not where hand-over may fail: the error is kept, its traceback holds that frame, and the pass would never be
        # deleted, nor another one begin.
        one = None if self._pass is None else self._pass()
        return one is not None and not one.is_over

    def _begin(self) -> None:
        one = _Pass(self)
        self._pass = weakref.ref(one)
        self._come.clear()
        self._failed = None
        torch.autograd.Variable._execution_engine.queue_callback(one)

    @torch.no_grad()
    def _hand_over(self, name: str, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:  # an earlier hook, which is not ours, has taken it
            raise InvalidArgument(
                f"{self._communicator.label}: the gradient of {name!r} was taken away by another hook"
            )
        if gradient.is_conj() or gradient.is_neg():  # autograd leaves it at a note that it is to be conjugated
            gradient = parameter.grad = gradient.resolve_conj().resolve_neg()
        self._come.add(name)
        view = self._views.get(name)
        with on_stream_of_torch(self._communicator):
            if view is None:
                self._callback(name, array_of(gradient))
                return
            if gradient is not view:
                self._check_unchanged(name, gradient, view)
                view.copy_(gradient)
                parameter.grad = view
            self._callback(name, self._arrays[name])

    def _check_unchanged(self, name: str, gradient: torch.Tensor, view: torch.Tensor) -> None:
        if (gradient.shape, gradient.dtype, gradient.device) != (view.shape, view.dtype, view.device):
            raise InvalidArgument(
                f"{self._communicator.label}: the gradient of {name!r} is {gradient.dtype}{list(gradient.shape)} on "
                f"{gradient.device}, and was {view.dtype}{list(view.shape)} on {view.device} when the module was "
                "wrapped: convert or move it before"
            )
        array_of(gradient)  # refuses what is no plain tensor

    def end(self) -> None:
        """Ends a pass: reduces what is left, and leaves the results where optimisers look for them."""
        if not self.is_synchronising:
            self._callback.flush()  # counts the local pass
            return
        with on_stream_of_torch(self._communicator):
            used = self._flush()
            if used is not None:
                self._take_filled(used)
        self._come_locally.clear()
        self._at_end()

    def _flush(self) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Reduces what is left; returns what _complete() does, where parameters may be missing."""
        try:
            with self._callback.backward():
                self._check_frozen()
                self._check()
                return self._complete() if self._may_miss else None
        except MissingGradient as error:
            missing = [name for name in self._parameters if name not in self._come]
            raise MissingGradient(
                f"{self._communicator.label}: the backward pass made no gradient for {list_of_names(missing)}, on any "
                "rank: where that is meant, wrap the module with find_unused_parameters=True; where it is "
                "checkpointed, use_reentrant=False lets autograd make all of them in one pass"
            ) from error

    def abandon(self) -> None:
        """Ends a pass that was left by an exception: the others are told, unless all have it or the pass was local."""
        if not self.is_synchronising:
            return
        failed = self._failed or GradientCancelled("autograd did not come to the end of the backward pass")
        self._failed = None
        try:
            with suppress(BaseException), self._callback.backward():
                raise failed
        finally:
            del failed  # whose traceback holds this frame

    def _check_frozen(self) -> None:
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            raise InvalidArgument(
                f"{self._communicator.label}: {list_of_names(thawed)} needed no gradient when the module was wrapped, "
                "and would not be synchronised: unwrap() it, and wrap it again"
            )

    def _complete(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Hands over what earlier, local passes have left; returns which parameters have a gradient on this rank.

        A gradient that was there before them has been reduced already.
        """
        for name, parameter in self._parameters.items():
            if name in self._come_locally and name not in self._come and parameter.grad is not None:
                self._hand_over(name, parameter)
        # Their places in the buckets are filled with zeros.
        self._kept = {
            name: view.clone()
            for name, view in self._views.items()
            if name not in self._come and self._parameters[name].grad is view
        }
        return np.array([name in self._come for name in self._parameters], np.uint8)

    def _take_filled(self, used: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Gives parameters that other ranks have used the result; those that none has keep what they had."""
        self._communicator.all_reduce(used, "max")
        is_used = dict(zip(self._parameters, used, strict=True))
        for name, result in self._callback.filled.items():
            if is_used[name]:
                self._parameters[name].grad = self._views[name] if name in self._views else tensor_of(result)
            elif name in self._kept:
                self._views[name].copy_(self._kept[name])
        self._kept.clear()


def _hear(passes: weakref.ref[BackwardPasses], name: str, parameter: torch.nn.Parameter) -> None:
    """The hook of a parameter."""
    alive = passes()
    if alive is not None:
        alive.accumulated(name, parameter)


def _remove_all(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class _Pass:
    """One backward pass: called at its end; where it has none, deleted without having been called."""

    def __init__(self, passes: BackwardPasses) -> None:
        self._passes: BackwardPasses | None = passes

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not; the traceback of its error may hold it for long."""
        return self._passes is None

    def __call__(self) -> None:
        passes, self._passes = self._passes, None
        if passes is not None:
            passes.end()

    def __del__(self) -> None:
        passes, self._passes = self._passes, None  # first: a traceback may keep this alive, and the pass is over
        if passes is not None:
            passes.abandon()
