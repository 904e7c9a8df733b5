"""Ranks as threads of which one runs at a time, and a rendezvous for them: every order of events can be played."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradsync.errors import RendezvousTimeout
from gradsync.rendezvous.frames import Decision, event_key, is_under

_STUCK_SECONDS = 30.0


class Baton:
    """Lets one rank run at a time, up to its next pause.

    Args:
        choices: which of the ranks that can go on does so, again and again; the first one when they are used up.
    """

    def __init__(self, world_size: int, choices: Iterable[int]) -> None:
        self._choices = iter(choices)
        self._turns = [threading.Semaphore(0) for _ in range(world_size)]
        self._until: list[Callable[[], bool] | None] = [lambda: True] * world_size  # None: has ended
        self._handed_back = threading.Semaphore(0)

    def pause(self, rank: int, until: Callable[[], bool] = lambda: True) -> None:
        """Lets others run; goes on when it is this rank's turn again, and the condition holds."""
        self._until[rank] = until
        self._handed_back.release()
        assert self._turns[rank].acquire(timeout=_STUCK_SECONDS)

    def run(self, functions: list[Callable[[], None]]) -> None:
        """Runs one function for each rank to its end; raises what one of them raised, or where all are stuck."""
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            assert self._turns[rank].acquire(timeout=_STUCK_SECONDS)
            try:
                functions[rank]()
            except BaseException as error:
                errors.append(error)
            self._until[rank] = None
            self._handed_back.release()

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(functions))]
        for thread in threads:
            thread.start()
        while not errors and any(until is not None for until in self._until):
            ready = [rank for rank, until in enumerate(self._until) if until is not None and until()]
            assert ready, "the ranks wait for each other"
            self._turns[ready[next(self._choices, 0) % len(ready)]].release()
            assert self._handed_back.acquire(timeout=_STUCK_SECONDS)
        if errors:
            raise errors[0]


class Rendezvous:
    """What the server knows, without one; see agreement_service.py for the rules."""

    def __init__(self, world_size: int, baton: Baton, world_ranks: Sequence[int] | None = None) -> None:
        self.world_size = world_size
        self.world_ranks = tuple(range(world_size) if world_ranks is None else world_ranks)
        self.baton = baton
        self.keys: dict[str, bytes] = {}
        self.left: dict[int, int] = {}
        self.asked: set[tuple[int, int]] = set()  # (position, rank)
        self.digests: dict[int, dict[int, int]] = {}  # by position and rank
        self.decisions: dict[int, Decision] = {}
        self.launched_from: int | None = None
        self.followers: dict[int, Callable[[int], Any]] = {}

    def report(self, position: int, rank: int, digest: int) -> None:
        digests = self.digests.setdefault(position, {})
        digests[rank] = digest
        differ = len(set(digests.values())) > 1
        if differ and any((position, other) not in self.asked for other in digests):
            self.decisions[position] = Decision.LAUNCHED
            self.launched_from = position
        elif len(digests) == self.world_size:
            self.decisions[position] = Decision.MISMATCH if differ else Decision.AGREED

    def decision(self, position: int) -> Decision | None:
        if self.launched_from is not None and position >= self.launched_from:
            return Decision.LAUNCHED
        return self.decisions.get(position)


class Client:
    """A rank's side of it: what SpeculativeAgreement uses of RendezvousClient."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.rank = rank
        self.world_size = rendezvous.world_size
        self.world_ranks = rendezvous.world_ranks
        self._rendezvous = rendezvous

    def check(self) -> None:
        self._rendezvous.baton.pause(self.rank)

    def has_failed(self) -> bool:
        self._rendezvous.baton.pause(self.rank)
        return False

    def follow(self, group: str, on_asked: Callable[[int], Any]) -> None:
        self._rendezvous.followers[self.rank] = on_asked

    def agree(
        self, group: str, position: int, digest: int, *, timeout_seconds: float, arriving: object = None
    ) -> Decision:
        known = self._rendezvous
        if known.decision(position) is None:
            is_first = position not in known.digests
            known.asked.add((position, self.rank))
            known.report(position, self.rank, digest)
            for rank, on_asked in known.followers.items() if is_first else ():
                event = on_asked(position) if rank != self.rank else None
                if event is not None:
                    known.keys[event_key(group, position, self.world_ranks[rank])] = event.description.encode()
                    known.report(position, rank, event.digest)
            known.baton.pause(self.rank, lambda: known.decision(position) is not None)
        decision = known.decision(position)
        assert decision is not None
        return decision

    def launched_position(self, group: str) -> int | None:
        return self._rendezvous.launched_from

    def set(self, key: str, value: bytes) -> None:
        self._rendezvous.keys[key] = value

    def delete(self, key: str) -> None:
        for each in [each for each in self._rendezvous.keys if is_under(each, key)]:
            del self._rendezvous.keys[each]

    def announce_left(self, name: str, position: int) -> None:
        self._rendezvous.left[self.world_ranks[self.rank]] = position

    def left_ranks(self, name: str) -> dict[int, int]:
        return dict(self._rendezvous.left)

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        if key not in self._rendezvous.keys:
            raise RendezvousTimeout(f"nobody has set {key}")
        return self._rendezvous.keys[key]
