"""What a caller tells of the parameters beforehand: names with arrays, or with shapes and dtypes; or arrays alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gradsync.bucketing.pending import display_name, key_of
from gradsync.bucketing.plan import GradientSpec
from gradsync.communicators.base import Communicator
from gradsync.errors import InvalidArgument
from gradsync.reduction import ReduceOp, check_operation, dtype_name, dtype_of


class KnownParameter(NamedTuple):
    """A parameter whose gradients are known beforehand.

    Attributes:
        parameter: by what its gradients will be handed over; held, where it is an array, so that its identity stays.
        key: what tells it apart from others in this process.
        spec: of its gradients.
    """

    parameter: Any
    key: Hashable
    spec: GradientSpec

    @property
    def label(self) -> Any:
        """What results are listed by: the name, or the array's place among the parameters ("#3")."""
        return self.spec.name if hasattr(self.parameter, "dtype") else self.parameter


def known_parameters(parameters: Any, what: str, op: ReduceOp, communicator: Communicator) -> list[KnownParameter]:
    """Returns the parameters that a caller tells of, in order.

    Args:
        parameters: names -> array or (shape, dtype); or a list of arrays, where gradients are handed over by those;
            None: none.
        what: names the call in errors.
        op: by which the gradients are to be reduced.
        communicator: of the arrays.

    Raises:
        InvalidArgument: another thing than that, or a parameter that comes twice.
        UnsupportedDtype: the operator is not defined for a dtype.
    """
    if parameters is None:
        return []
    if hasattr(parameters, "dtype") or not isinstance(parameters, Iterable) or isinstance(parameters, (str, bytes)):
        raise InvalidArgument(
            f"{communicator.label}: {what} needs parameters as a mapping of names to arrays, or to (shape, dtype), or "
            f"as a list of arrays, got {type(parameters).__name__}"
        )
    pairs = parameters.items() if isinstance(parameters, Mapping) else ((each, each) for each in parameters)
    known = [
        KnownParameter(param, key_of(param), _spec_of(param, array, place, what, op, communicator))
        for place, (param, array) in enumerate(pairs)
    ]
    if len({parameter.key for parameter in known}) < len(known):
        raise InvalidArgument(f"{communicator.label}: {what} got the same parameter twice")
    return known


def _spec_of(param: Any, of: Any, position: int, what: str, op: ReduceOp, communicator: Communicator) -> GradientSpec:
    name = display_name(param, position)
    try:
        if isinstance(of, tuple):
            shape, dtype = tuple(map(int, of[0])), dtype_of(of[1]) if isinstance(of[1], str) else np.dtype(of[1])
            if len(of) != 2 or any(length < 0 for length in shape):
                raise ValueError("a shape has integers >= 0")
        else:
            native = communicator.native_array(of, f"{what}, parameter {name}")
            shape, dtype = native.shape, native.dtype
    except (AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{communicator.label}: {what} needs an array or (shape, dtype), such as ((3,), 'float32'), for parameter "
            f"{name}, got {of!r}: {error}"
        ) from error
    check_operation(op, dtype)
    return GradientSpec(name, shape, dtype_name(dtype), dtype.itemsize)
