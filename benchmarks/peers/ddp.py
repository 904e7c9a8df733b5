"""PyTorch's DistributedDataParallel on gradients that exist already, so that its reducer alone can be timed.

Its reducer runs in hooks of the backward pass, so a backward pass there must be, but it computes nothing: one autograd
function hands out finished gradients, and autograd takes over such tensors as they are, without a copy. What remains
beside the reducer is the engine's walk over the parameters. The same pass inside no_sync() is that walk alone: the
hooks then return at once. The reducer counts as their difference: what it adds to a backward pass that a user has
anyway. Python has no part in it: the hooks, the copies into the buckets and back, and the collectives are C++.

Source: torch/csrc/distributed/c10d/reducer.cpp, autograd_hook and mark_variable_ready_dense;
torch/csrc/autograd/functions/accumulate_grad.h, accumulateGrad.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class _HandOut(torch.autograd.Function):
    """A loss whose gradients exist already."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *_: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        # On the gradients' device, so that autograd's thread for that device walks the graph, as for any model.
        return torch.zeros((), device=gradients[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Autograd takes over what nobody else holds: new tensors over the same memory.
        return (None, *[gradient.detach() for gradient in ctx.gradients])


class _Model(torch.nn.Module):
    """Parameters in the shapes of gradients; a model lists them first to last, a backward pass last to first."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros_like(gradient) for gradient in reversed(gradients))
        self._gradients = gradients

    def forward(self) -> torch.Tensor:
        return _HandOut.apply(self._gradients, *reversed(list(self.weights)))


class BackwardPasses:
    """Backward passes through DistributedDataParallel, with its default buckets.

    Args:
        gradients: contiguous tensors on one device, in the order in which a backward pass makes them. Their process
            group is PyTorch's default one.
        options: for DistributedDataParallel.
    """

    def __init__(self, gradients: Sequence[torch.Tensor], **options: bool) -> None:
        self._model = DistributedDataParallel(_Model(gradients), **options)

    def calls(self, *, synchronising: bool) -> tuple[Callable[[], None], Callable[[], None]]:
        """Returns the forward pass, which is not timed, and the backward pass, with or without the reducer."""
        context = contextlib.nullcontext if synchronising else self._model.no_sync

        def forward() -> None:
            self._model.zero_grad(set_to_none=True)
            with context():
                self._loss = self._model()

        def backward() -> None:
            with context():
                self._loss.backward()

        return forward, backward

    def gradients(self) -> list[torch.Tensor]:
        """Returns what the last pass left, in the order of the gradients handed out."""
        return [weight.grad for weight in reversed(list(self._model.module.weights))]
