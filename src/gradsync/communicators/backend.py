"""What a backend writes: the hooks behind the public methods of a communicator.

The public methods, in base.py, check everything first; a hook may rely on its stated preconditions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_arrays import ArrayKind, HostArrays
from gradsync.completion import Completion
from gradsync.reduction import Array, ReduceOp

_INLINE = nullcontext()  # how a collective on the CPU is launched: the caller's thread runs it


class Backend(ABC):
    """The hooks of one backend.

    Attributes:
        arrays: how it handles arrays.
    """

    arrays: ArrayKind = HostArrays()

    @abstractmethod
    def _all_reduce_list(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        """Reduces each source into its target. Preconditions: see all_reduce_list; at least one source."""

    def _all_reduce_prepared(self, array: Any, op: str | ReduceOp) -> bool:
        """A shortcut for all_reduce in place: does it all, with all checks, or returns False having done nothing."""
        return False

    @abstractmethod
    def _broadcast(self, flat: Array, root: int, agreement: Agreement) -> None:
        """Copies the root's flat into the others'. Precondition: 1-D, contiguous; writable except on the root."""

    @abstractmethod
    def _agree(self, agreement: Agreement) -> None:
        """Raises PlanMismatch when the ranks' digests differ; waits for the others where it must, to know."""

    def _meet(self, agreement: Agreement) -> None:
        """Waits for all ranks and raises PlanMismatch when their digests differ."""
        self._agree(agreement)

    def _launching(
        self, stream: Any, producers: Sequence[Any] | None = None
    ) -> AbstractContextManager[Completion | None]:
        """Surrounds the hooks that move data; gives what tells the end of their work, or None where it has ended.

        Args:
            stream: where the work goes; None is the current stream.
            producers: not None: the work goes to the communicator's own stream, after the work of these.
        """
        return _INLINE

    def _keep(self, *arrays: Array) -> None:
        """Keeps arrays from being given to others until the launch that is being made has ended."""

    def _bring_back(self, flat: Array, native: Array, launch: Any) -> None:
        """Brings the values of `flat` to `native`, within _launching, unless it is a view of it."""
        self.arrays.write_back(flat, native)

    def _await_host_results(self, launch: Any) -> None:
        """Waits for those results of a launch that belong in host memory."""

    def _announce_close(self) -> None:
        """Tells the other ranks that this one will not come again. Must not block and must not raise."""

    def _announce_abort(self, reason: str, culprit: int | None) -> None:
        """Tells the other ranks to stop. Must not block and must not raise."""

    def _release(self) -> None:
        """Gives back descriptors, memory and threads. Called once, with no collective running; must not block."""
