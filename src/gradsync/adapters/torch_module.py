"""A PyTorch module that is synchronised: what may change about it, looked at without keeping it alive.

PyTorch holds the hooks of parameters where Python's garbage collection does not look: what a hook leads to by strong
references is never collected. So nothing here refers to the module itself but weakly. Its parts are held: one that
refers back to it keeps it, until Synchronised.unwrap().
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from operator import is_

import torch

from gradsync.adapters.torch_tensors import broadcast_tensors
from gradsync.bucketing.plan import list_of_names
from gradsync.communicators.communicator import Communicator
from gradsync.errors import InvalidArgument


class ParameterWatch:
    """Notices parameters that came to a module after it was wrapped: in a layer that was replaced, or added.

    Args:
        module: the module.
        known: its parameters, with those that need no gradient.
        communicator: for its name in errors.
    """

    def __init__(
        self, module: torch.nn.Module, known: Iterable[torch.nn.Parameter], communicator: Communicator
    ) -> None:
        self._module = weakref.ref(module)
        self._known = {id(parameter): parameter for parameter in known}  # alive: else another may get its id
        self._communicator = communicator
        self._note(module)

    def check(self) -> None:
        """Costs microseconds while the module consists of the same objects.

        Raises:
            InvalidArgument: a parameter needs a gradient, and came later.
        """
        if sum(map(len, self._registers)) == len(self._members) and all(
            map(is_, chain.from_iterable(self._registers), self._members)
        ):
            return
        module = self._module()
        if module is None:
            return
        late = [
            name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._known
        ]
        if late:
            raise InvalidArgument(
                f"{self._communicator.label}: {list_of_names(late)} came to the module after it was wrapped, and would "
                "not be synchronised: unwrap() it, and wrap it again"
            )
        self._note(module)

    def _note(self, module: torch.nn.Module) -> None:
        """Takes down of which objects it consists: of the registers of each part, as they are now and will be."""
        self._registers = [
            register.values() for part in module.modules() for register in (part._parameters, part._modules)
        ]
        self._members = [*chain.from_iterable(self._registers)]


class BufferBroadcast:
    """Has the buffers of a module become those of rank 0.

    Args:
        module: the module.
        communicator: of the ranks.
        is_on: whether it does.

    Attributes:
        is_on: see above.
    """

    def __init__(self, module: torch.nn.Module, communicator: Communicator, *, is_on: bool) -> None:
        self._module = weakref.ref(module)
        self._communicator = communicator
        self.is_on = is_on

    def __call__(self) -> None:
        """Does it; a collective."""
        module = self._module()
        if self.is_on and module is not None:
            broadcast_state("Synchronised, buffers", module.named_buffers(), 0, self._communicator)


def broadcast_state(
    what: str, named: Iterable[tuple[str, torch.Tensor]], root: int, communicator: Communicator
) -> None:
    """Copies the root's tensors into those of all ranks, where there are any; see broadcast_tensors."""
    tensors = list(named)
    if tensors and communicator.world_size > 1:
        broadcast_tensors(what, tensors, root, communicator)
