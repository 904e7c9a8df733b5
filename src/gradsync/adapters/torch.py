"""PyTorch: a module whose gradients are averaged over the ranks by the time loss.backward() returns.

    model = Synchronised(model)

is all that a training loop needs, under `gradsync run`, torchrun, mpiexec or srun; the optimiser stays as it is. What
DistributedDataParallel does is meant here by the same names. Otherwise than there, the names of parameters do not
change (state_dict() has no prefix), and all that happens happens in the backward pass: a forward pass, such as an
evaluation on one rank, is nobody else's business.

CUDA tensors go to NCCL through DLPack; that has not been run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from gradsync.adapters import without
from gradsync.bucketing.callback import AllreduceCallback
from gradsync.bucketing.join import Join
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise without("PyTorch", "torch") from error

from gradsync.adapters.torch_backward import BackwardPasses
from gradsync.adapters.torch_module import BufferBroadcast, ParameterWatch, broadcast_state
from gradsync.adapters.torch_tensors import dtype_name_of

# Where the module lives on and its Synchronised does not, it goes on being synchronised.
_passes_by_module: WeakKeyDictionary[torch.nn.Module, BackwardPasses] = WeakKeyDictionary()
_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Synchronised(torch.nn.Module):
    """A module, whose backward passes average the gradients over all ranks, as with DistributedDataParallel.

    Every rank must make one, of modules with the same parameters and buffers; all begin with those of rank 0. From then
    on every backward pass that reaches a parameter of the module synchronises, also where the module itself was called,
    and every rank must make the same passes. Each gradient is reduced beside its bucket's others as soon as autograd
    has accumulated it, and `parameter.grad` holds the mean when backward() returns. Errors come out of backward() as
    what they are: PlanMismatch, RankFailed, CollectiveTimeout.

    What can be asked of the module can be asked of this one: parameters, state_dict, attributes, train(). The names
    are the module's. A copy, by copy.deepcopy or pickle, is a plain module.

    Args:
        module: on the communicator's device; parameters that need no gradient are left alone.
        communicator: None is the world's.
        op: "mean" or "sum". What a gradient holds of an earlier pass that synchronised is reduced once more: with the
            mean that changes nothing, as it is the same on all ranks; with "sum", prescale, postscale or clip_norm call
            zero_grad() before each pass, and accumulate within no_sync().
        find_unused_parameters: passes may leave out parameters, on some ranks or on all: zeros take part for them, and
            parameters that no rank has used keep what they had. Costs one small collective a pass. Otherwise they are
            an error, on all ranks, which names them.
        broadcast_buffers: buffers, such as the statistics of BatchNorm, become those of rank 0 with every pass that
            synchronises.
        gradient_as_bucket_view: `parameter.grad` lives in the buckets. Gradients that autograd makes elsewhere
            (after zero_grad(), which sets them to None) are copied there once; that is the only copy.
        knobs: for AllreduceCallback: threshold_bytes, compression, nonfinite, clip_norm, prescale, and others.

    Attributes:
        module: what was given.
        callback: the AllreduceCallback, for its hooks, `norm`, `skip_step` and statistics.

    Raises:
        InvalidArgument: no module, one that is synchronised already, one without parameters that need gradients, or on
            another device.
        PlanMismatch: the ranks' modules differ; the text names the first parameter or buffer where they do.
        RankFailed, CollectiveTimeout, CommunicatorClosed: from the collectives.

    Source: the interface and what it does of torch.nn.parallel.DistributedDataParallel (Li et al., VLDB 2020).
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
        # The module's own registers: so its parameters, modules and buffers are this one's, under the same names.
        self.__dict__.update({name: module.__dict__[name] for name in _REGISTRIES}, module=module)
        self.training = module.training
        self._communicator = communicator
        self._may_miss = find_unused_parameters
        self._broadcast_buffers = BufferBroadcast(module, communicator, is_on=broadcast_buffers)
        self._broadcast_state(0)
        in_buckets = gradient_as_bucket_view and communicator.world_size > 1
        self.callback = AllreduceCallback(
            op,
            communicator,
            parameters={name: (tuple(each.shape), dtype_name_of(each)) for name, each in wanted.items()},
            missing="zero" if find_unused_parameters else "error",
            gradient_as_bucket_view=in_buckets,
            **knobs,
        )
        _release(module)
        self._watch = ParameterWatch(module, module.parameters(), communicator)
        self._passes = _passes_by_module[module] = BackwardPasses(
            wanted,
            {name: each for name, each in module.named_parameters() if name not in wanted},
            self.callback,
            communicator,
            in_buckets=in_buckets,
            may_miss=find_unused_parameters,
            check=self._watch.check,
            at_end=self._broadcast_buffers,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            InvalidArgument: it has parameters that came after it was wrapped, and gradients are asked for.
        """
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a compiler would unroll the check
            self._watch.check()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Surrounds backward passes that accumulate gradients on this rank only; the next one outside reduces the sum.

        Every rank must make the same number of them.
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
        """Surrounds a loop over batches of which ranks may have different numbers; see AllreduceCallback.join.

        Ranks that have left it take part with zeros until all have; then all have the parameters and the buffers of one
        that was there to the end. Within it, buffers are not broadcast.

        Raises:
            InvalidArgument: with find_unused_parameters, whose collective they would not take part in.
        """
        if self._may_miss:
            raise InvalidArgument(f"{self._communicator.label}: join() does not go with find_unused_parameters=True")
        before, self._broadcast_buffers.is_on = self._broadcast_buffers.is_on, False
        try:
            with self.callback.join() as joined:
                yield joined
        finally:
            self._broadcast_buffers.is_on = before
        self._broadcast_state(joined.last_rank)

    def unwrap(self) -> torch.nn.Module:
        """Takes the hooks away, and returns the module, which synchronises no more.

        Until then a module is synchronised for as long as it lives, also where nobody holds its Synchronised.
        """
        self._passes.remove()
        if _passes_by_module.get(self.module) is self._passes:  # else it was wrapped again
            del _passes_by_module[self.module]
        return self.module

    def train(self, mode: bool = True) -> Synchronised:
        """See torch.nn.Module."""
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the module's."""
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
        broadcast_state("Synchronised, parameters and buffers", state, root, self._communicator)


def _release(module: torch.nn.Module) -> None:
    """Takes away the hooks of an earlier Synchronised, which nobody may hold any more: they would reduce once more."""
    for part in module.modules():
        earlier = _passes_by_module.pop(part, None)
        if earlier is not None:
            earlier.remove()


def _plain(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module: what a copy of a Synchronised is made by."""
    return module


def _parameters_to_synchronise(module: Any, communicator: Communicator) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters that need gradients, last layer first, in the order of a backward pass."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgument(
            f"{communicator.label}: Synchronised needs a torch.nn.Module, got {type(module).__name__}"
        )
    if any(isinstance(each, Synchronised) for each in module.modules()):
        raise InvalidArgument(
            f"{communicator.label}: Synchronised got a module that is synchronised already, or in part: each "
            "gradient would be reduced twice; unwrap() that before"
        )
    wanted = {name: each for name, each in reversed(list(module.named_parameters())) if each.requires_grad}
    if not wanted:
        raise InvalidArgument(f"{communicator.label}: Synchronised got a module of which no parameter needs a gradient")
    for name, parameter in wanted.items():
        if str(parameter.device) != communicator.device:
            raise InvalidArgument(
                f"{communicator.label}: Synchronised needs the module on {communicator.device}, where its communicator "
                f"({communicator.backend}) works; {name} is on {parameter.device}"
            )
    return wanted
