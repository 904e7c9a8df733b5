"""How ranks agree on a collective over MPI: they reduce the digest to its smallest and its largest value."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NoReturn

import numpy as np

from gradsync.communicators.agreement import Agreement, Description, mismatch
from gradsync.communicators.mpi.transport import MpiTransport

_ALL_BITS = 2**64 - 1
_MAX_TEXT_BYTES = 64 * 1024  # of each rank, where the ranks disagree
_SHOWN_LINES = 20


class MpiAgreements:
    """The agreements of one communicator on its collectives.

    Args:
        transport: this rank's.
        ranks: the numbers of all ranks in the world.
        label: this rank in errors.
        look_around: called now and then while the others have not come.
    """

    def __init__(
        self, transport: MpiTransport, ranks: tuple[int, ...], label: str, look_around: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._look_around = look_around
        self._ranks = ranks
        self._label = label
        self._mine = np.zeros(2, np.uint64)
        self._smallest = np.zeros(2, np.uint64)

    def agree(self, agreement: Agreement) -> None:
        """Returns once all ranks have come with the same digest.

        Raises:
            PlanMismatch: they differ; on all ranks, and nothing was moved.
        """
        transport = self._transport
        transport.waiting.begun += 1
        if transport.world_size == 1:
            return
        mine, smallest = self._mine, self._smallest
        mine[0] = agreement.digest
        mine[1] = _ALL_BITS - agreement.digest  # the smallest of these is of the largest digest
        request = transport.comm.Iallreduce(mine, smallest, transport.mpi.MIN)
        transport.waiting.finish([request], (mine, smallest), self._look_around)
        if int(smallest[0]) != _ALL_BITS - int(smallest[1]):
            self._raise_mismatch(agreement)

    def _raise_mismatch(self, agreement: Agreement) -> NoReturn:
        """Exchanges descriptions; every rank makes the same error of them."""
        text = np.frombuffer(agreement.text_for_others().encode(errors="replace")[:_MAX_TEXT_BYTES], np.uint8)
        sizes = self._transport.all_gather_numbers(np.array([text.size], np.int64)).reshape(-1).tolist()
        bounds = [0, *accumulate(sizes)]
        texts = np.empty(bounds[-1], np.uint8)
        self._transport.all_gather(text, texts, bounds)
        told = [texts[begin:end].tobytes().decode(errors="replace") for begin, end in pairwise(bounds)]
        descriptions = Description.parse_whole(dict(zip(self._ranks, told, strict=True)))
        shown = {rank: d._replace(lines=d.lines[:_SHOWN_LINES]) for rank, d in descriptions.items()}
        raise mismatch(self._label, agreement, shown)
