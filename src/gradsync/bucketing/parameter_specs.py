"""What a caller tells of the parameters beforehand: names with arrays, or with shapes and dtypes; or arrays alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradsync.bucketing.gradient import display_name, key_of
from gradsync.bucketing.plan import GradientSpec
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.errors import InvalidArgument
from gradsync.reduction import ReduceOp, check_operation, dtype_name, dtype_of

_log = logging.getLogger("gradsync")

_COMPARISON = "the comparison of the parameters' values before the first step"
_AGREEMENT = Agreement(digest_of(_COMPARISON), lambda: _COMPARISON)


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


def warn_of_unequal_values(
    known: Sequence[KnownParameter],
    parameters: Any,
    gradient: Any,
    communicator: Communicator,
    agreed: Callable[[Agreement], Agreement],
) -> None:
    """Logs a warning, on one rank, where the ranks hold different values of the parameters. Every rank must call it.

    Values count by their bytes. Nothing is compared where a rank has no arrays to compare: it gave shapes and dtypes,
    arrays that cannot be written to (the program may have others by now), or the arrays in which its gradients are.

    Args:
        known: the parameters.
        parameters: as the caller gave them.
        gradient: the first that was handed over, or None.
        communicator: whose ranks are compared.
        agreed: returns an agreement of the callback's own.

    Raises:
        RankFailed, CollectiveTimeout, CommunicatorClosed: from the exchange.
    """
    by_name = isinstance(parameters, Mapping)
    given = {each.spec.name: parameters.get(each.parameter) if by_name else each.parameter for each in known}
    arrays = {name: array for name, array in given.items() if hasattr(array, "dtype")}
    digests: dict[str, str] = {}
    if not any(_shares_memory(array, gradient) for array in arrays.values()):
        natives = {name: communicator.native_array(array, f"parameter {name}") for name, array in arrays.items()}
        if all(communicator.arrays.writeable(native) for native in natives.values()):
            digests = {name: communicator._digest_of_values(native) for name, native in natives.items()}
    import hashlib  # here: start-up counts

    whole = int.from_bytes(hashlib.sha256(repr(digests).encode()).digest()[:8], "little", signed=True)
    shared = communicator.share_numbers(_COMPARISON, [len(digests), whole], agreed(_AGREEMENT))
    if len({tuple(numbers) for numbers in shared}) == 1 or not all(count for count, _ in shared):
        return
    by_rank: list[dict[str, str]] = communicator.objects.all_gather_for(_COMPARISON, digests)
    different = [name for name in digests if len({digests_there.get(name) for digests_there in by_rank}) > 1]
    if communicator.rank == 0 and different:
        first = different[0]
        other = next(rank for rank, there in enumerate(by_rank) if there.get(first) != digests[first])
        _log.warning(
            "%s: the parameters differ between the ranks before the first step, first %s: rank %d has other values "
            "than rank %d; %d of %d arrays differ. Gradients are averaged, parameters are not: call "
            "gs.bcast_list_(arrays, root=0) with all parameters before the first step",
            *(
                communicator.label,
                first,
                communicator.ranks[other],
                communicator.ranks[0],
                len(different),
                len(digests),
            ),
        )


def _shares_memory(array: Any, gradient: Any) -> bool:
    if array is gradient:
        return True
    return isinstance(array, np.ndarray) and isinstance(gradient, np.ndarray) and np.may_share_memory(array, gradient)
