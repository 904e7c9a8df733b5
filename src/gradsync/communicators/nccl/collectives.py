"""What a collective between GPUs does within its launch: agrees, then hands its arrays to NCCL.

communicator.py has the rest of the communicator: how a launch is made, looked after and ended.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import cupy
import numpy as np

from gradsync.bucketing.pack_kernels import FusedPacker, pack_layout
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, Message
from gradsync.communicators.base import Communicator
from gradsync.communicators.nccl.agreements import Answer, NcclAgreements, Question
from gradsync.communicators.nccl.device_arrays import DeviceArrays
from gradsync.communicators.nccl.handle import NcclHandle
from gradsync.communicators.nccl.launch import Launch
from gradsync.communicators.nccl.movement import NcclMovement
from gradsync.communicators.nccl.predicted_agreement import TEXTS_WITHIN_SECONDS
from gradsync.communicators.nccl.reduction import NcclReduction
from gradsync.communicators.verdicts import NEWS_SECONDS, Verdicts
from gradsync.diagnostics import tracing
from gradsync.errors import GradsyncError, PlanMismatch
from gradsync.reduction import ReduceOp
from gradsync.rendezvous.client import RendezvousClient


class NcclCollectives(Communicator):
    """The hooks that move data; see backend.py.

    Args:
        handle: NCCL's communicator.
        client: the way of its ranks to the rendezvous server.
        group: the communicator's name.
        timeout_seconds: how long a collective may wait for a rank.

    Attributes:
        force_packing: whether a world of one packs and splits its buckets too, so that benchmarks can measure it.
    """

    runs_beside_host = True
    arrays: DeviceArrays
    _client: RendezvousClient

    def __init__(self, handle: NcclHandle, client: RendezvousClient, group: str, timeout_seconds: float) -> None:
        super().__init__(client.rank, client.world_size, group, ranks=client.world_ranks, label=client.label)
        self.force_packing = False
        self.device = f"cuda:{handle.device_id}"
        self.arrays = DeviceArrays(handle.device_id)
        self._device = cupy.cuda.Device(handle.device_id)
        with self._device:
            self._packer = FusedPacker()
        self._handle = handle
        self._client = client
        self._verdicts = Verdicts(client, self.recorder)
        self._agreements = NcclAgreements(client, group, self.label, timeout_seconds, self._verdicts)
        self._movement = NcclMovement(handle, self.rank, self.world_size)
        self._reduction = NcclReduction(handle, self._movement, self.rank, self.world_size)
        self._flat: Any = None  # where arrays are packed: by one launch at a time, because they run one after the other
        self._stream: Any  # of the communicator
        self._numbers: Any = None  # room for those that ranks share
        self._launch: Launch | None = None  # the one being made

    def use_debug_mode(self) -> None:
        super().use_debug_mode()
        self._agreements.always_ask()

    # -- Reductions ----------------------------------------------------------------------------------------------

    def _all_reduce_list(
        self, sources: Sequence[Any], targets: Sequence[Any], op: ReduceOp, agreement: Agreement
    ) -> None:
        laps = tracing.laps_of(self.recorder)
        self._agree(agreement)
        if laps is not None:
            laps.end("waiting")
        self._keep(*sources, *targets)
        if len(sources) == 1:
            self._reduction.all_reduce(sources[0], targets[0], op)
            if laps is not None:
                laps.end("launching")
            return
        if self.world_size == 1 and not self.force_packing:
            for source, target in zip(sources, targets, strict=True):
                if target is not source:
                    target[...] = source
            return
        flat = self._packed(sources)
        if laps is not None:
            laps.end("packing")
        if flat.size:
            packed = flat.view(sources[0].dtype)
            self._reduction.all_reduce(packed, packed, op)
            if laps is not None:
                laps.end("launching")
            self._packer.split(flat, targets)
            if laps is not None:
                laps.end("splitting")

    def _reduce(self, source: Any, target: Any | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        self._reduction.reduce(source, target, op, root)

    def _reduce_scatter(self, source: Any, target: Any, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self._agree(agreement)
        self._reduction.reduce_scatter(source, target, bounds, op)

    # -- Movements -----------------------------------------------------------------------------------------------

    def _broadcast_list(self, flats: Sequence[Any], root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        if len(flats) == 1:
            self._movement.broadcast(flats[0], root)
        elif self.world_size > 1:
            flat = self._packed(flats)
            self._movement.broadcast(flat, root)
            if self.rank != root:
                self._packer.split(flat, flats)

    def _all_gather(self, source: Any, target: Any, bounds: Bounds, agreement: Agreement) -> None:
        self._agree(agreement)
        self._movement.all_gather(source, target, bounds)

    def _gather(self, source: Any, target: Any | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        self._movement.gather(source, target, bounds, root)

    def _scatter(self, source: Any | None, target: Any, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        self._movement.scatter(source, target, bounds, root)

    def _all_to_all(
        self,
        source: Any,
        target: Any,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        self._agree(agreement)
        self._movement.all_to_all(source, target, send_bounds, receive_bounds)

    def _exchange(self, send: Message | None, receive: Message | None) -> None:
        if send is not None and receive is not None and send.peer == self.rank:
            self._movement.copy(send.flat, receive.flat)  # there is nobody to agree with
            return
        launches: dict[Question, Callable[[], None]] = {}
        if send is not None:
            way = Question(self.rank, send.peer, send.agreement)
            launches[way] = partial(self._movement.send, send.flat, send.peer)
        if receive is not None:
            way = Question(receive.peer, self.rank, receive.agreement)
            launches[way] = partial(self._movement.receive, receive.flat, receive.peer)
        mismatch = None
        for answers in self._agree_on_messages(list(launches)):
            with self._handle.group():
                for question, answer in answers.items():
                    mismatch = mismatch or answer.mismatch
                    if answer.agreed is not None:  # whatever becomes of the other message: this one is waited for
                        launches[question]()
        if mismatch is not None:
            raise mismatch

    def _share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        mine = np.array(numbers, np.int64)
        shared = np.empty((self.world_size, mine.size), np.int64)
        # On the communicator's own stream, where the host need not wait for all that the caller's has to do.
        self._make_room(mine.nbytes + shared.nbytes)
        with self._launching(None, []) as launch:
            self._agree(agreement)
            source = self._numbers[: mine.nbytes]
            target = self._numbers[mine.nbytes : mine.nbytes + shared.nbytes]
            source.set(mine.view(np.uint8))
            self._movement.all_gather(source, target, [rank * mine.nbytes for rank in range(self.world_size + 1)])
            launch.bring_back(target, shared)
        launch.wait()
        numbers_by_rank: list[list[int]] = shared.tolist()
        return numbers_by_rank

    def _make_room(self, size_bytes: int) -> None:
        """Makes room for numbers where there is too little: memory of our own stream, which alone uses it."""
        if self._numbers is None or self._numbers.size < size_bytes:
            with self._device, self._stream:
                self._numbers = cupy.empty(size_bytes, np.uint8)

    # -- Meeting -------------------------------------------------------------------------------------------------

    def _agree(self, agreement: Agreement) -> None:
        self._raise_failure()
        if self.world_size == 1:
            return
        try:
            agreed = self._agreements.next(agreement)
        except GradsyncError as error:
            self._raise_disagreement(error)
        if self._launch is not None:
            self._launch.agreed.append(agreed)

    def _meet(self, agreement: Agreement) -> None:
        token = cupy.zeros(1, np.int32)
        self._all_reduce_list([token], [token], ReduceOp.SUM, agreement)
        self._bring_back(token, np.zeros(1, np.int32), self._launch)  # and so the host waits for it

    def _agree_on_messages(self, questions: Sequence[Question]) -> Iterator[dict[Question, Answer]]:
        self._raise_failure()
        try:
            for answers in self._agreements.on_messages(questions):
                if self._launch is not None:
                    self._launch.agreed += [answer.agreed for answer in answers.values() if answer.agreed is not None]
                yield answers
        except GradsyncError as error:
            self._raise_disagreement(error)

    def _raise_disagreement(self, error: GradsyncError) -> NoReturn:
        """Raises why this rank may not launch, or what it has launched before that others did not."""
        if isinstance(error, PlanMismatch):
            if error.broken:
                self._fail(error, told=True)
            raise error
        self._raise_failure()  # the server may have told only that this rank has failed
        if self._agreements.were_overtaken:  # and whoever found that has left: the watcher is about to tell it
            self._verdicts.await_news(TEXTS_WITHIN_SECONDS + NEWS_SECONDS, self._raise_failure)
        raise error

    # -- Memory --------------------------------------------------------------------------------------------------

    def _keep(self, *arrays: Any) -> None:
        """Keeps arrays until the launch that is being made has ended."""
        if self._launch is not None:
            self._launch.keep(*arrays)

    def _bring_back(self, flat: Any, native: Any, launch: Any) -> None:
        if isinstance(native, np.ndarray):
            launch.bring_back(flat, native)
        else:
            self._keep(flat, native)
            self.arrays.write_back(flat, native)

    def _packed(self, arrays: Sequence[Any]) -> Any:
        """Packs arrays into the first bytes of the flat buffer, grown where it is too small, and returns those."""
        size_bytes = pack_layout(tuple([array.nbytes for array in arrays])).total_bytes
        if self._flat is None or self._flat.size < size_bytes:
            # Initialised once; what the gaps between arrays hold is reduced too, and does not matter.
            self._flat = cupy.zeros(size_bytes, np.uint8)
        flat = self._flat[:size_bytes]
        if size_bytes:
            self._keep(flat)
            self._packer.pack(arrays, flat)
        return flat

    # -- What communicator.py has --------------------------------------------------------------------------------

    @abstractmethod
    def _launching(self, stream: Any, producers: Sequence[Any] | None = None) -> AbstractContextManager[Launch]:
        """See backend.py."""

    @abstractmethod
    def _raise_failure(self) -> None:
        """Raises what has broken the communicator."""

    @abstractmethod
    def _fail(self, error: GradsyncError, *, told: bool = False) -> None:
        """Breaks the communicator; `told` says that the error is being raised."""
