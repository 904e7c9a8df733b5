"""What the ranks of an NCCL communicator agree on: all of them on its collectives, two of them on each message.

Each direction between two ranks has an agreement of its own, in which the other ranks have no part; it is made when the
first message goes that way.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from gradsync.communicators.agreement import Agreement, on_behalf
from gradsync.communicators.nccl.predicted_agreement import PredictedAgreement
from gradsync.communicators.verdicts import Verdicts
from gradsync.errors import PlanMismatch
from gradsync.rendezvous.client import RendezvousClient

_TOGETHER_SECONDS = 0.02  # how long a message waits to be launched with the other one of an exchange


class Agreed(NamedTuple):
    """What a launch was agreed on.

    Attributes:
        agreement: between the ranks that it concerns.
        position: number of the event in it.
        peer: the other rank of a message, as the world counts; None for a collective.
    """

    agreement: PredictedAgreement
    position: int
    peer: int | None = None


class Question(NamedTuple):
    """A message on which this rank and another one are to agree.

    Attributes:
        sender, receiver: as they are numbered in the communicator; one of them is this rank.
        agreement: what this rank believes both are about to do.
    """

    sender: int
    receiver: int
    agreement: Agreement


class Answer(NamedTuple):
    """What has come of a question: what was agreed on, or else why it was not."""

    agreed: Agreed | None
    mismatch: PlanMismatch | None = None


_Coming = SimpleQueue[tuple[Question, Answer | BaseException]]


class NcclAgreements:
    """The agreements of one communicator.

    Args:
        client: the way of its ranks to the rendezvous server.
        group: its name, the same on all ranks.
        label: this rank in messages.
        timeout_seconds: how long a rank waits for the others' word.
        verdicts: the server's, where a rank does not come.
    """

    def __init__(
        self, client: RendezvousClient, group: str, label: str, timeout_seconds: float, verdicts: Verdicts
    ) -> None:
        self._client = client
        self._group = group
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._verdicts = verdicts
        self._of_all = PredictedAgreement(client, group, label, timeout_seconds, verdicts)
        self._pairs: dict[tuple[int, int], RendezvousClient] = {}
        self._of_messages: dict[tuple[int, int], PredictedAgreement] = {}  # by sender and receiver
        self._asks_always = False

    def next(self, agreement: Agreement) -> Agreed:
        """Returns once this rank may launch a collective; see PredictedAgreement."""
        position = self._of_all.position
        self._of_all.next(agreement)
        return Agreed(self._of_all, position)

    def on_messages(self, questions: Sequence[Question]) -> Iterator[dict[Question, Answer]]:
        """Gives, in groups, which of one or two messages this rank may launch; the other rank of each knows the same.

        What comes in one group is to be launched together, before the next is asked for. A message does not wait long
        for the answer to the other one: its rank may have to receive it before it comes to the other. All ranks launch
        in the order in which messages are agreed on, or together, and so no circle of them waits for each other.

        Raises:
            PlanMismatch: `broken`: the communicator must not be used again.
            RankFailed, CollectiveTimeout: as for `next`.
        """
        repeated = {question: self._repeated(question) for question in questions}
        answers = {question: answer for question, answer in repeated.items() if answer is not None}
        asked = [question for question in questions if question not in answers]
        if asked and len(questions) == 1:
            answers[asked[0]] = self._ask(asked[0])
        elif asked:
            coming = self._ask_at_once(asked)
            while len(answers) < len(questions):
                answer = _next_of(coming, _TOGETHER_SECONDS if answers else None)
                if answer is None:
                    yield answers
                    questions = [question for question in questions if question not in answers]
                    answers = {}
                else:
                    answers.update([answer])
        yield answers

    def always_ask(self) -> None:
        """Has every collective and message be asked about from now on, also what repeats itself; on all ranks."""
        self._asks_always = True
        for agreement in self._all():
            agreement.asks_always = True

    @property
    def were_overtaken(self) -> bool:
        """Whether `overtaken` gives an error, or has given it."""
        return any(agreement.was_overtaken for agreement in self._all())

    def overtaken(self) -> PlanMismatch | None:
        """Returns the error of a rank that launched what another one did not; None while there is none."""
        for agreement in self._all():
            mismatch = agreement.overtaken()
            if mismatch is not None:
                return mismatch
        return None

    def look_for_closed_ranks(self) -> None:
        """Raises RankFailed when a rank has closed the communicator before it had passed all that this one has."""
        for agreement in self._all():
            agreement.look_for_closed_ranks(agreement.position - 1)

    def look_for_closed_members(self, ranks: Iterable[int]) -> None:
        """Raises RankFailed when one of these ranks, as the communicator numbers them, has closed the communicator."""
        self._of_all.look_for_closed_ranks(math.inf, [self._client.world_ranks[rank] for rank in ranks])

    def announce_closed(self) -> None:
        """Tells the other ranks, should they wait for this one, how far it has come."""
        for agreement in self._all():
            agreement.announce_closed()

    def close(self) -> None:
        """Stops listening."""
        for agreement in self._all():
            agreement.close()
        for client in self._pairs.values():
            client.close()

    def _all(self) -> list[PredictedAgreement]:
        return [self._of_all, *self._of_messages.values()]

    def _repeated(self, question: Question) -> Answer | None:
        """Answers a question that need not be asked, because the same messages were followed by this one before."""
        agreement = self._of_message(question)
        position = agreement.position
        if not agreement.repeats(question.agreement):
            return None
        return Answer(Agreed(agreement, position, self._peer(question)))

    def _ask(self, question: Question) -> Answer:
        agreement = self._of_message(question)
        position = agreement.position
        try:
            agreement.next(question.agreement)
        except PlanMismatch as error:
            if error.broken:
                raise
            return Answer(None, error)
        return Answer(Agreed(agreement, position, self._peer(question)))

    def _ask_at_once(self, questions: Sequence[Question]) -> _Coming:
        """Asks on threads, because the other ranks may come to the questions in any order; see _next_of."""
        coming: _Coming = SimpleQueue()
        asking = threading.get_ident()

        def ask(question: Question) -> None:
            on_behalf.thread = asking
            try:
                coming.put((question, self._ask(question)))
            except BaseException as error:  # raised where the answer is taken; another question ends by it too
                coming.put((question, error))

        for question in questions:
            self._of_message(question)  # made on this thread, like the others
            threading.Thread(target=ask, args=(question,), name="gradsync-nccl-question", daemon=True).start()
        return coming

    def _of_message(self, question: Question) -> PredictedAgreement:
        return self._of_way(question.sender, question.receiver)

    def _of_way(self, sender: int, receiver: int) -> PredictedAgreement:
        way = sender, receiver
        if way not in self._of_messages:
            low, high = sorted(way)
            pair = self._pairs.get((low, high))
            if pair is None:
                pair = self._pairs[low, high] = self._client.group((low, high), f"{self._group}/{low}-{high}")
            peer = high if self._client.rank == low else low
            self._of_messages[way] = _OfMessages(
                pair,
                "to the higher" if sender == low else "to the lower",
                self._label,
                self._timeout_seconds,
                self._verdicts,
                partial(self._of_all.look_for_closed_ranks, math.inf, (self._client.world_ranks[peer],)),
            )
            self._of_messages[way].asks_always = self._asks_always
        return self._of_messages[way]

    def _peer(self, question: Question) -> int:
        peer = question.receiver if self._client.rank == question.sender else question.sender
        return self._client.world_ranks[peer]


def _next_of(coming: _Coming, seconds: float | None) -> tuple[Question, Answer] | None:
    """Returns the next answer, raises the error that came in its place, or returns None at the deadline."""
    try:
        question, answer = coming.get(timeout=seconds)
    except Empty:
        return None
    if isinstance(answer, BaseException):
        raise answer
    return question, answer


class _OfMessages(PredictedAgreement):
    """The agreement of one direction; looks also whether the peer has left that never came to a message."""

    def __init__(
        self,
        client: RendezvousClient,
        group: str,
        label: str,
        timeout_seconds: float,
        verdicts: Verdicts,
        look_for_closed_peer: Callable[[], None],
    ) -> None:
        super().__init__(client, group, label, timeout_seconds, verdicts)
        self._look_for_closed_peer = look_for_closed_peer

    def look_for_closed_ranks(self, position: float, ranks: Iterable[int] | None = None) -> None:
        super().look_for_closed_ranks(position, ranks)
        if position == math.inf:  # a question: who has closed the communicator does not answer it
            self._look_for_closed_peer()
