"""The gradients of a step whose parameters are known beforehand: each has its place, in whatever order they come."""

from __future__ import annotations

from typing import Any

from gradsync.bucketing.arrivals import Arrivals
from gradsync.bucketing.parameter_specs import KnownParameter
from gradsync.bucketing.pending import PendingGradient, display_name, key_of
from gradsync.bucketing.plan import GradientSpec, list_of_names
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array


class FixedArrivals(Arrivals):
    """The places of a step are those of the parameters.

    Args:
        parameters: in the order of their places.
        label: begins errors.
    """

    def __init__(self, parameters: list[KnownParameter], label: str) -> None:
        super().__init__(label)
        self._parameters = parameters
        self._places = {parameter.key: place for place, parameter in enumerate(parameters)}
        self.specs = [parameter.spec for parameter in parameters]
        self.forget()

    def recurring(self, param: Any, grad: Any, arrays: ArrayKind) -> PendingGradient | None:
        """See Arrivals."""
        position = self._places.get(key_of(param), -1)
        entry = self._entries[position] if position >= 0 else None
        if entry is None or entry.gradient is not grad or self._has_come[position] or entry.state != arrays.state(grad):
            return None
        if self.has_new:
            self._register(entry, arrays)
        self._has_come[position] = True
        self.count += 1
        return entry

    def place_of(self, param: Any) -> int:
        """See Arrivals."""
        position = self._places.get(key_of(param))
        if position is None:
            raise InvalidArgument(
                f"{self.label}: {display_name(param, self.count)} is not among the callback's parameters, which are "
                f"{list_of_names([parameter.spec.name for parameter in self._parameters])}"
            )
        if self._has_come[position]:
            raise self._twice(self.specs[position].name)
        return position

    def spec(self, position: int, name: str, native: Array, dtype: str) -> GradientSpec:
        """See Arrivals."""
        spec = self.specs[position]
        if spec.shape != native.shape or spec.dtype != dtype:
            raise InvalidArgument(
                f"{self.label}: the gradient of {spec.name} must be {spec.dtype}{list(spec.shape)}, as by the "
                f"callback's parameters, got {dtype}{list(native.shape)}"
            )
        return spec

    def of_step(self) -> list[PendingGradient]:
        """See Arrivals."""
        return [self.entry(position) for position, has_come in enumerate(self._has_come) if has_come]

    def is_complete(self) -> bool:
        """Whether every parameter's gradient has come."""
        return self.count == len(self._parameters)

    def missing(self) -> list[KnownParameter]:
        """Returns the parameters whose gradients have not come, in order."""
        return [self._parameters[place] for place, has_come in enumerate(self._has_come) if not has_come]

    def forget(self) -> None:
        """See Arrivals; the parameters stay."""
        size = len(self._parameters)
        self._entries, self._seen = [None] * size, [None] * size
        self._begin_step()

    def _cut_off(self) -> None:
        pass  # a place stays a parameter's, whether or not its gradient came

    def _begin_step(self) -> None:
        super()._begin_step()
        self._has_come = bytearray(len(self._parameters))

    def _put(self, entry: PendingGradient) -> None:
        self._entries[entry.position] = entry
        self._new.append(entry.position)
        self._has_come[entry.position] = True
