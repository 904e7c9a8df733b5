"""The with-blocks of an AllreduceCallback: around a backward pass, local passes, and a whole loop of uneven batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradsync.bucketing.backward_pass import BackwardPass
from gradsync.bucketing.join import Join
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.lifetime import culprit_of
from gradsync.communicators.world import get_world
from gradsync.errors import GradientCancelled, InvalidArgument, describe


class WithBlocks(ABC):
    """What the blocks share.

    Args:
        group: the callback's communicator; None is the world's.
        backward: its steps.
    """

    def __init__(self, group: Communicator | None, backward: BackwardPass) -> None:
        self._group = group
        self._backward = backward
        self._step = backward.reduction
        self._synchronising = True

    @abstractmethod
    def flush(self) -> None:
        """Ends the backward pass; see AllreduceCallback."""

    @abstractmethod
    def _communicator(self) -> Communicator:
        """Returns the communicator of the moment, if it is one for this callback."""

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surrounds a backward pass: flushes at its end.

        When the body raises, within no_sync() too, the futures that are not done are cancelled, and the communicator is
        aborted, so that the other ranks get RankFailed instead of waiting. After PlanMismatch and NonFiniteGradient of
        the callback's own collectives, which every rank gets, it stays usable, unless the error says `broken`.
        """
        ended = self._backward.ended
        try:
            yield
            # Not once more where the step has ended within: with missing="zero" that would be a step of zeros.
            if not (self._synchronising and self._backward.is_flushed_since(ended)):
                self.flush()
        except BaseException as error:
            self._give_up("the backward pass", error)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Surrounds local passes, in which no gradient is handed over; flush() counts them.

        Nothing adds gradients up here. Sum them in arrays of your own, and hand over the sum once, in the last pass,
        outside this block; a gradient that is handed over within it is refused. The block is only there to have the
        ranks agree on the number of local passes: each flush() or backward() in it counts one, and the next step's
        agreement includes their number, so that ranks which accumulate differently get PlanMismatch.

            for batch in batches[:-1]:
                total += gradient_of(batch)
                with sync.no_sync():
                    sync.flush()
            with sync.backward():
                future = sync("weights", total + gradient_of(batches[-1]))

        Raises:
            InvalidArgument: in the middle of a step: flush first.
        """
        self._check_between_steps("no_sync()")
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    @contextmanager
    def join(self, parameters: Any = None) -> Iterator[Join]:
        """Surrounds a loop over batches of which the ranks may have different numbers, or none.

        A rank that leaves the block takes part in the steps of the others, with zeros, until all have left it; the mean
        is that over the ranks that handed over gradients. (Where some are absent, half precision is added up and
        divided in two roundings.) Each rank repeats the gradients of its last step, in their order.

        The parameters of a rank that leaves early stay behind. Afterwards all can take those of a rank that did not:

            with sync.join() as joined:
                for batch in batches:
                    ...
            gs.bcast_list_(parameters, root=joined.last_rank)

        Every rank must enter it; inside, ranks must not call collectives but those of this callback. When the body
        raises, nobody stands in for this rank: the communicator is aborted, as in backward().

        Args:
            parameters: names -> array or (shape, dtype), in the order in which gradients are handed over; or a list of
                arrays, where gradients are handed over by those. Only for ranks that may not have a single batch.

        Returns:
            What gives a Join to `as`, whose `last_rank` is known after the block.

        Raises:
            InvalidArgument: in the middle of a step, or inside another join() of this callback.
            PlanMismatch: the others' step is not the one that this rank repeats, or it knows none; on all ranks.
            RankFailed, CollectiveTimeout, CommunicatorClosed: from the collectives.
        """
        self._check_between_steps("join()")
        if self._step.roll_call is not None:
            raise InvalidArgument(
                f"{self._communicator().label}: join() inside another join() of the same callback: one block surrounds "
                "the whole loop over batches; leave it before the next begins"
            )
        communicator = self._communicator()
        self._backward.begin_with(communicator)
        self._backward.meet(communicator)  # now: ranks without batches come no further
        self._backward.prepare(None, communicator)
        joined = self._step.roll_call = Join(self._backward, communicator, parameters)
        try:
            yield joined
            self._check_between_steps("the end of join()")
            try:
                joined.stand_in()
            except BaseException as error:
                self._backward.note_told(error)
                raise
        except BaseException as error:
            self._give_up("join()", error)
            raise
        finally:
            self._step.roll_call = None
            self._step.begin_step()

    def _check_between_steps(self, what: str) -> None:
        if self._backward.is_under_way:
            raise InvalidArgument(f"{what} in the middle of a backward pass: flush first")

    def _give_up(self, what: str, error: BaseException) -> None:
        """Cancels the step, and wakes the ranks that wait for this one; after PlanMismatch, which all get, none."""
        try:
            self._backward.fail(GradientCancelled(f"{what} ended with {describe(error)}"))
        finally:  # a done-callback may end in SystemExit
            self._wake_others(what, error)

    def _wake_others(self, what: str, error: BaseException) -> None:
        communicator = self._group or get_world()
        told = communicator is None or communicator.world_size == 1 or error is self._backward.told
        if communicator is not None and not told:
            communicator.abort(f"in {what}: {describe(error)}", culprit=culprit_of(error))
