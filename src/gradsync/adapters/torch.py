"""PyTorch: a wrapper for modules; when loss.backward() returns, the gradients are averaged over the ranks.

    model = Synchronised(model)

Write this line after gs.init_process_group(), in a script that `gradsync run`, torchrun, mpiexec or srun starts. The
forward and backward passes of the training loop need no change. An option that DistributedDataParallel has too has the
same purpose here, but its default may differ. There are two more differences from DistributedDataParallel. The names of
parameters do not change: state_dict() has no prefix. The forward pass does not communicate, so one rank may run a
forward pass alone, for example to evaluate.

gradsync passes CUDA tensors to NCCL through DLPack. Nobody has run this adapter on a GPU yet.

Autograd calls a hook for each parameter whose gradient it has accumulated. At the end of the pass, before
loss.backward() returns, autograd calls a callback. After an exception autograd drops this callback without calling it.
When Python then deletes the callback, the adapter knows that the pass has failed. The adapter then makes the pass fail
on the other ranks too, so that these ranks do not wait for this rank.

Python's garbage collector cannot follow the references from a parameter to its hooks. If an object has a reference to a
parameter, and the parameter's hook refers back to the object, Python never collects the two. So no hook has a strong
reference to the module or to one of its submodules.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gradsync.adapters import without
from gradsync.bucketing.callback import AllreduceCallback, Join
from gradsync.bucketing.lists import broadcast_named
from gradsync.bucketing.plan import list_of_names
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import group_or_world
from gradsync.errors import GradientCancelled, InvalidArgument, MissingGradient
from gradsync.reduction import dtype_of

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise without("PyTorch", "torch") from error

_BFLOAT16 = "bfloat16"  # PyTorch and NumPy exchange arrays of bfloat16 as 16-bit integers

# If the program deletes a Synchronised, but not its module, gradsync still synchronises the module's gradients.
_passes_by_module: WeakKeyDictionary[torch.nn.Module, _BackwardPasses] = WeakKeyDictionary()
_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Synchronised(torch.nn.Module):
    """A module whose backward passes average the gradients over all ranks, as with DistributedDataParallel.

    Every rank must wrap a module with the same parameters and buffers. All ranks begin with the values of rank 0. From
    then on, every backward pass outside no_sync() that reaches a parameter of the module synchronises the gradients,
    even if the program called the module without its wrapper; unwrap() ends this. All ranks must run the same backward
    passes. The wrapper passes each gradient to gradsync as soon as autograd has accumulated it. When backward()
    returns, `parameter.grad` holds the mean (with op="sum", the sum). backward() raises gradsync's errors, such as
    PlanMismatch, RankFailed and CollectiveTimeout.

    The wrapper has the parameters and the state_dict of the module, under the same names. Attributes that the wrapper
    does not have itself are those of the module. train() sets the mode of the wrapper and the module. copy.deepcopy and
    pickle copy only the wrapped module, without the wrapper.

    Args:
        module: the module, on the communicator's device. gradsync copies the parameters that need no gradient from rank
            0 at the beginning, and does not synchronise them later.
        communicator: the communicator of the ranks; None means the world communicator.
        op: "mean" or "sum". If `parameter.grad` still holds the result of an earlier pass, this result is reduced once
            more. With "mean", the second reduction changes the earlier result only by rounding errors, because it is
            equal on all ranks. With "sum", prescale, postscale or clip_norm, call zero_grad() before each pass, and
            accumulate within no_sync().
        find_unused_parameters: whether a pass may leave out parameters, on some ranks or on all. If True, gradsync uses
            zeros as the gradients of parameters that a rank has left out; if no rank has used a parameter, its gradient
            does not change. If True, each pass also needs one more small collective. If False, all ranks raise an error
            that names the parameters without a gradient.
        broadcast_buffers: whether every synchronising pass copies the buffers of rank 0, such as the statistics of
            BatchNorm, to all ranks.
        gradient_as_bucket_view: whether `parameter.grad` is a view of the bucket's memory. If autograd makes a gradient
            in other memory (after zero_grad(), which sets gradients to None), gradsync copies the gradient into its
            bucket. With one rank, this option has no effect.
        knobs: options of AllreduceCallback: threshold_bytes, nonfinite, clip_norm and others.

    Attributes:
        module: the wrapped module.
        callback: the AllreduceCallback of the wrapper, which has `norm`, `skip_step`, statistics and hooks.

    Raises:
        InvalidArgument: `module` is not a module, is or contains a Synchronised, has no parameter that needs a
            gradient, or is not on the communicator's device; or an option is wrong, see AllreduceCallback.
        PlanMismatch: the ranks' modules differ. The error's text names the first parameter or buffer that differs.
        RankFailed, CollectiveTimeout, CommunicatorClosed: a collective failed.

    Source: the interface and behaviour of torch.nn.parallel.DistributedDataParallel (Li et al., VLDB 2020).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        communicator: Communicator | None = None,
        *,
        op: str = "mean",
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        **knobs: Any,
    ) -> None:
        super().__init__()
        communicator = group_or_world(communicator, "Synchronised", "communicator")
        wanted = _parameters_to_synchronise(module, communicator)
        # The wrapper shares the dictionaries in which the module stores its parameters, buffers and submodules. So the
        # wrapper and the module have the same names.
        self.__dict__.update({name: module.__dict__[name] for name in _REGISTRIES}, module=module)
        self.training = module.training
        self._communicator = communicator
        self._may_miss = find_unused_parameters
        self._broadcast_state(0)
        in_buckets = gradient_as_bucket_view and communicator.world_size > 1
        self.callback = AllreduceCallback(
            op,
            communicator,
            parameters={name: (tuple(each.shape), _dtype_name_of(each)) for name, each in wanted.items()},
            missing="zero" if find_unused_parameters else "error",
            gradient_as_bucket_view=in_buckets,
            **knobs,
        )
        _release(module)
        self._passes = _passes_by_module[module] = _BackwardPasses(
            module,
            wanted,
            self.callback,
            communicator,
            in_buckets=in_buckets,
            may_miss=find_unused_parameters,
            broadcasts_buffers=broadcast_buffers,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            InvalidArgument: gradients are enabled, and a parameter that needs a gradient is new, or needed none when
                the module was wrapped, or is a tensor that torch.func.functional_call has put in place of a parameter.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # torch.compile would unroll the check
            self._passes.check_parameters()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context manager in which backward passes accumulate gradients on this rank only.

        The first backward pass after the block reduces the accumulated gradients. Every rank must run the same number
        of backward passes within the block.
        """
        before = self._passes.is_synchronising
        with self.callback.no_sync():
            self._passes.is_synchronising = False
            try:
                yield
            finally:
                self._passes.is_synchronising = before

    @contextmanager
    def join(self) -> Iterator[Join]:
        """Returns a context manager for a loop over batches in which ranks may have different numbers of batches.

        A rank whose loop has ended waits at the end of the block. This rank takes part in the collectives with zeros
        until all loops have ended. After the block, gradsync copies the parameters and buffers to all ranks from a rank
        that had a batch in the last step. Within the block gradsync does not broadcast buffers. See
        AllreduceCallback.join.

        Raises:
            InvalidArgument: find_unused_parameters is True; this option needs a collective that ranks without batches
                do not call.
        """
        if self._may_miss:
            raise InvalidArgument(f"{self._communicator.label}: join() does not work with find_unused_parameters=True")
        before, self._passes.broadcasts_buffers = self._passes.broadcasts_buffers, False
        try:
            with self.callback.join() as joined:
                yield joined
        finally:
            self._passes.broadcasts_buffers = before
        self._broadcast_state(joined.last_rank)

    def unwrap(self) -> torch.nn.Module:
        """Removes the hooks, and returns the module, which no longer synchronises.

        Without this call the module synchronises as long as it lives, even if the program deletes the Synchronised.
        """
        self._passes.remove()
        if _passes_by_module.get(self.module) is self._passes:  # otherwise the module was wrapped again
            del _passes_by_module[self.module]
        return self.module

    def train(self, mode: bool = True) -> Synchronised:
        """See torch.nn.Module."""
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state_dict of the module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state_dict into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"], name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain, (self.module,)

    def _broadcast_state(self, root: int) -> None:
        state = [*self.module.named_parameters(), *self.module.named_buffers()]
        _broadcast_tensors("Synchronised, parameters and buffers", state, root, self._communicator)


def _release(module: torch.nn.Module) -> None:
    """Removes the hooks of an earlier Synchronised of the module or a submodule, so that no hook reduces twice."""
    for part in module.modules():
        earlier = _passes_by_module.pop(part, None)
        if earlier is not None:
            earlier.remove()


def _plain(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module. copy and pickle call this function to copy a Synchronised."""
    return module


def _parameters_to_synchronise(module: Any, communicator: Communicator) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters that need gradients, the last one first: most backward passes have this order."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgument(
            f"{communicator.label}: Synchronised needs a torch.nn.Module, got {type(module).__name__}"
        )
    if any(isinstance(each, Synchronised) for each in module.modules()):
        raise InvalidArgument(
            f"{communicator.label}: Synchronised got a module that is synchronised already, at least in part, "
            "so each gradient would be reduced twice: call unwrap() first"
        )
    wanted = {name: each for name, each in reversed(list(module.named_parameters())) if each.requires_grad}
    if not wanted:
        raise InvalidArgument(f"{communicator.label}: Synchronised got a module in which no parameter needs a gradient")
    for name, parameter in wanted.items():
        if str(parameter.device) != communicator.device:
            raise InvalidArgument(
                f"{communicator.label}: Synchronised needs the module on {communicator.device}, the device of its "
                f"communicator ({communicator.backend}); parameter {name} is on {parameter.device}"
            )
    return wanted


# -- Its backward passes ---------------------------------------------------------------------------------------------


class _BackwardPasses:
    """Passes the gradients of parameters from autograd's hooks to the callback.

    The hooks have only weak references to this object.

    Args:
        module: the module, to which this object has only a weak reference.
        parameters: the parameters by name, in the order of the callback's option `parameters`.
        callback: the callback that takes the gradients.
        communicator: the callback's communicator.
        in_buckets: whether gradients are views of the buckets' memory.
        may_miss: whether a pass may have no gradient for some parameters, on all ranks or on some.
        broadcasts_buffers: whether each synchronising pass copies the buffers of rank 0 to all ranks.

    Attributes:
        is_synchronising: whether this object passes gradients to the callback; if False, gradients stay on this rank.
        broadcasts_buffers: see Args.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: dict[str, torch.nn.Parameter],
        callback: AllreduceCallback,
        communicator: Communicator,
        *,
        in_buckets: bool,
        may_miss: bool,
        broadcasts_buffers: bool,
    ) -> None:
        self.is_synchronising = True
        self.broadcasts_buffers = broadcasts_buffers
        self._module = weakref.ref(module)
        self._parameters = parameters
        self._callback = callback
        self._communicator = communicator
        self._may_miss = may_miss
        self._known = set(map(id, parameters.values()))
        self._arrays: dict[str, Any] = callback.gradient_buffers() if in_buckets else {}
        self._views = {name: _tensor_of(array) for name, array in self._arrays.items()}
        self._with_gradient: set[str] = set()  # parameters with a gradient in this pass
        self._with_local_gradient: set[str] = set()  # the same, in local passes since the last synchronising pass
        self._kept: dict[str, torch.Tensor] = {}  # earlier gradients, restored if no rank has a new one
        self._failed: BaseException | None = None
        self._pass: weakref.ref[_Pass] | None = None  # only autograd has a strong reference
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_call_back, weakref.ref(self), name))
            for name, parameter in parameters.items()
        ]
        self._remove = weakref.finalize(self, _remove_all, hooks)
        self._remove.atexit = False

    def remove(self) -> None:
        """Removes the hooks. The gradients stay in the same memory."""
        self._remove()

    def accumulated(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Hands a parameter's gradient over to the callback; in a local pass, only records the parameter's name."""
        if not self._is_under_way():
            self._begin()
        if not self.is_synchronising:
            self._with_local_gradient.add(name)
            return
        try:
            self._hand_over(name, parameter)
        except BaseException as error:
            self._failed = error
            raise

    def _is_under_way(self) -> bool:
        # _is_under_way is a separate method, because the traceback of an error in _hand_over contains the frame of
        # accumulated(). The traceback would keep alive a _Pass in a variable of that frame.
        one = None if self._pass is None else self._pass()
        return one is not None and not one.is_over

    def _begin(self) -> None:
        one = _Pass(self)
        self._pass = weakref.ref(one)
        self._with_gradient.clear()
        self._failed = None
        torch.autograd.Variable._execution_engine.queue_callback(one)

    @torch.no_grad()
    def _hand_over(self, name: str, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:  # another hook ran earlier and removed the gradient
            raise InvalidArgument(f"{self._communicator.label}: another hook has removed the gradient of {name!r}")
        if gradient.is_conj() or gradient.is_neg():  # autograd has only set a flag, and not computed the values
            gradient = parameter.grad = gradient.resolve_conj().resolve_neg()
        self._with_gradient.add(name)
        view = self._views.get(name)
        with _on_stream_of_torch(self._communicator):
            if view is None:
                self._callback(name, _array_of(gradient))
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
                f"{gradient.device}, but was {view.dtype}{list(view.shape)} on {view.device} when the module was "
                "wrapped: convert or move the module before you wrap it"
            )
        _array_of(gradient)  # raises for sparse tensors and the like

    def end(self) -> None:
        """Ends a pass: reduces the remaining gradients, and puts the results into `.grad`."""
        if not self.is_synchronising:
            self._callback.flush()  # makes the callback count the local pass
            return
        with _on_stream_of_torch(self._communicator):
            used = self._flush()
            if used is not None:
                self._take_filled(used)
        self._with_local_gradient.clear()
        module = self._module()
        if self.broadcasts_buffers and module is not None:
            _broadcast_tensors("Synchronised, buffers", module.named_buffers(), 0, self._communicator)

    def _flush(self) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Reduces the remaining gradients.

        Returns:
            The result of _complete() if parameters may be missing; otherwise None.
        """
        try:
            with self._callback.backward():
                self.check_parameters()
                return self._complete() if self._may_miss else None
        except MissingGradient as error:
            missing = [name for name in self._parameters if name not in self._with_gradient]
            raise MissingGradient(
                f"{self._communicator.label}: the backward pass made no gradient for {list_of_names(missing)}, on any "
                "rank: if that is intended, wrap the module with find_unused_parameters=True; with activation "
                "checkpointing, use_reentrant=False makes autograd compute all gradients in one pass"
            ) from error

    def abandon(self) -> None:
        """Ends a pass that raised an error. Except after a local pass, the other ranks then fail too."""
        if not self.is_synchronising:
            return
        failed = self._failed or GradientCancelled("autograd did not finish the backward pass")
        self._failed = None
        try:
            with suppress(BaseException), self._callback.backward():
                raise failed
        finally:
            del failed  # its traceback contains this frame

    def check_parameters(self) -> None:
        """Checks that every parameter that needs a gradient needed one when the module was wrapped.

        Raises:
            InvalidArgument: a parameter is new or needed no gradient before, or torch.func.functional_call has replaced
                a parameter by a tensor.
        """
        module = self._module()
        if module is None or not self._remove.alive:  # the program has called unwrap(), or wrapped the module again
            return
        if all(
            each is None or id(each) in self._known or not each.requires_grad
            for part in module.modules()
            for each in part._parameters.values()
        ):
            return
        late = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._known
        }
        if not late:  # the module overrides named_parameters(), and hides these parameters
            return
        label, names = self._communicator.label, list_of_names([*late])
        if any(isinstance(each, torch.nn.Parameter) for each in late.values()):
            raise InvalidArgument(
                f"{label}: the module has parameters that it did not have, or that needed no gradient, when it was "
                f"wrapped, and that gradsync would not synchronise: {names}; call unwrap(), and wrap the module again"
            )
        raise InvalidArgument(
            f"{label}: torch.func.functional_call has replaced {names} by tensors, and gradsync would not synchronise "
            "their gradients: call the plain module, model.module, and average the gradients with "
            "gs.average_gradients()"
        )

    def _complete(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Passes the gradients of local passes to the callback.

        The method does not pass older gradients, because an earlier synchronising pass has already reduced them.

        Returns:
            For each parameter: 1 if it has a gradient of this pass or of the local passes before it, otherwise 0.
        """
        for name, parameter in self._parameters.items():
            if name in self._with_local_gradient and name not in self._with_gradient and parameter.grad is not None:
                self._hand_over(name, parameter)
        # The copies keep these gradients, because the callback writes zeros to their memory in the buckets.
        self._kept = {
            name: view.clone()
            for name, view in self._views.items()
            if name not in self._with_gradient and self._parameters[name].grad is view
        }
        return np.array([name in self._with_gradient for name in self._parameters], np.uint8)

    def _take_filled(self, used: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Sets the gradients of parameters that only other ranks used; restores the gradients that no rank used."""
        self._communicator.all_reduce(used, "max")
        is_used = dict(zip(self._parameters, used, strict=True))
        for name, result in self._callback.filled.items():
            if is_used[name]:
                self._parameters[name].grad = self._views[name] if name in self._views else _tensor_of(result)
            elif name in self._kept:
                self._views[name].copy_(self._kept[name])
        self._kept.clear()


def _call_back(passes: weakref.ref[_BackwardPasses], name: str, parameter: torch.nn.Parameter) -> None:
    """The hook that autograd calls when it has accumulated the gradient of a parameter."""
    alive = passes()
    if alive is not None:
        alive.accumulated(name, parameter)


def _remove_all(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class _Pass:
    """One backward pass. Autograd calls this object at the end of the pass, or drops it if the pass fails."""

    def __init__(self, passes: _BackwardPasses) -> None:
        self._passes: _BackwardPasses | None = passes

    @property
    def is_over(self) -> bool:
        """Whether the pass has ended. After an error, a traceback may keep the object of an ended pass alive."""
        return self._passes is None

    def __call__(self) -> None:
        passes, self._passes = self._passes, None
        if passes is not None:
            passes.end()

    def __del__(self) -> None:
        passes, self._passes = self._passes, None  # first: a traceback may keep this object alive
        if passes is not None:
            passes.abandon()


# -- Tensors as arrays -----------------------------------------------------------------------------------------------


def _dtype_name_of(tensor: torch.Tensor) -> str:
    """Returns the name of a tensor's dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def _array_of(tensor: torch.Tensor) -> Any:
    """Returns a tensor as an array for a communicator: a NumPy array on the CPU, otherwise an object with DLPack.

    Raises:
        InvalidArgument: the tensor is sparse, or its memory holds conjugated or negated values.
    """
    if tensor.layout is not torch.strided:
        raise InvalidArgument(
            f"a tensor of layout {tensor.layout} cannot be synchronised: use a dense tensor "
            "(for nn.Embedding, pass sparse=False)"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(
            "the memory of the tensor holds conjugated or negated values: call resolve_conj() or resolve_neg() first"
        )
    plain = tensor.detach()
    if plain.device.type != "cpu":
        return plain
    if _dtype_name_of(plain) == _BFLOAT16:
        return plain.view(torch.int16).numpy().view(dtype_of(_BFLOAT16))
    return plain.numpy()


def _tensor_of(array: Any) -> torch.Tensor:
    """Returns a tensor that shares the memory of a NumPy or CuPy array."""
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if array.dtype.name == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _broadcast_tensors(
    what: str, named: Iterable[tuple[str, torch.Tensor]], root: int, communicator: Communicator
) -> None:
    """Copies the root's tensors in place into the tensors of all ranks, as one collective.

    On the other ranks, the function marks the tensors as changed. Autograd then raises an error if a graph still needs
    the old values.

    Raises:
        PlanMismatch: the ranks' tensors differ in names, shapes or dtypes; no data was sent.
        RankFailed, CollectiveTimeout, CommunicatorClosed: the collective failed.
    """
    tensors = dict(named)
    if not tensors or communicator.world_size == 1:
        return
    with _on_stream_of_torch(communicator):
        natives = [(name, communicator._native_array(_array_of(each), name)) for name, each in tensors.items()]
        broadcast_named(what, natives, root, communicator)
    if communicator.rank != root:
        for tensor in tensors.values():
            torch.autograd.graph.increment_version(tensor)


def _on_stream_of_torch(communicator: Communicator) -> AbstractContextManager[Any]:
    """Returns a context manager that makes PyTorch's current stream CuPy's current stream, which gradsync uses."""
    if communicator.device == "cpu":
        return nullcontext()
    import cupy

    stream = torch.cuda.current_stream()
    external: AbstractContextManager[Any] = cupy.cuda.ExternalStream(stream.cuda_stream, stream.device.index)
    return external
