"""PyTorch's tensors as gradsync's arrays and back, over the same memory; and the broadcast of named tensors."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from gradsync.bucketing.lists import broadcast_named
from gradsync.communicators.communicator import Communicator
from gradsync.errors import InvalidArgument
from gradsync.reduction import dtype_of

_BFLOAT16 = "bfloat16"  # PyTorch and NumPy exchange it as 16 bits of no meaning


def dtype_name_of(tensor: torch.Tensor) -> str:
    """Returns e.g. "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def array_of(tensor: torch.Tensor) -> Any:
    """Returns what a communicator takes for a tensor: on the CPU a NumPy array, elsewhere what speaks DLPack.

    Raises:
        InvalidArgument: a sparse tensor, or one whose values lie in memory conjugated or negated.
    """
    if tensor.layout is not torch.strided:
        raise InvalidArgument(
            f"a gradient of layout {tensor.layout} cannot be synchronised: make the module with sparse=False"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument("a tensor that is a conjugate, or a negative, of another's memory: use resolve_conj()")
    plain = tensor.detach()
    if plain.device.type != "cpu":
        return plain
    if dtype_name_of(plain) == _BFLOAT16:
        return plain.view(torch.int16).numpy().view(dtype_of(_BFLOAT16))
    return plain.numpy()


def tensor_of(array: Any) -> torch.Tensor:
    """Returns an array, NumPy's or CuPy's, as a tensor."""
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if array.dtype.name == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def broadcast_tensors(
    what: str, named: Iterable[tuple[str, torch.Tensor]], root: int, communicator: Communicator
) -> None:
    """Copies the root's tensors into those of all ranks, in place, as one collective.

    Autograd is told: a tensor that a graph still needs as it was makes the backward pass say so.

    Raises:
        PlanMismatch: the ranks' tensors differ in names, shapes or dtypes; nothing was sent.
        RankFailed, CollectiveTimeout, CommunicatorClosed: from the collective.
    """
    tensors = dict(named)
    with on_stream_of_torch(communicator):
        natives = [(name, communicator.native_array(array_of(each), name)) for name, each in tensors.items()]
        broadcast_named(what, natives, root, communicator)
    if communicator.rank != root:
        for tensor in tensors.values():
            torch.autograd.graph.increment_version(tensor)


def on_stream_of_torch(communicator: Communicator) -> AbstractContextManager[Any]:
    """Makes PyTorch's current stream that of CuPy, whose order gradsync keeps to; on the CPU there is none."""
    if communicator.device == "cpu":
        return nullcontext()
    import cupy

    stream = torch.cuda.current_stream()
    external: AbstractContextManager[Any] = cupy.cuda.ExternalStream(stream.cuda_stream, stream.device.index)
    return external
