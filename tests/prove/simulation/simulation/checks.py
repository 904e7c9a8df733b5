"""What has to be true of every run, whatever its seed. Each returns what is wrong, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gradsync.errors import CollectiveTimeout, GradsyncError, RankFailed, RendezvousError, RendezvousTimeout
from gradsync.rendezvous.roster import LEFT_PHASE
from simulation.rank import Diary
from simulation.run import Outcome
from simulation.scenario import HARMLESS

_GRACE_SECONDS = 2.0  # how long a client listens for the server's answer after its deadline
_SLACK_SECONDS = 1.0  # of the network and of a slow or stopped rank
# From the fault until the survivors know, at most: the targets of the failures, and what the network takes.
_DETECTION_SECONDS = {"crash": 0.5, "reset": 0.5, "stop": 3.0, "vanish": 6.0, "cut": 6.0, "server crash": 0.5}
_NETWORK_SECONDS = 0.3
_NEEDED_SECONDS = 4.0  # above what ranks wait for one that computes, is slow, or is stopped for a moment


def every_call_ends_in_time(outcome: Outcome) -> Iterator[str]:
    """A call of a rank that lives ends by its own deadline, whatever happens to the others."""
    for rank, diary in _living(outcome):
        for call in diary.calls:
            if call.ended is None or call.ended - call.began > call.seconds + _GRACE_SECONDS + _SLACK_SECONDS:
                yield f"rank {rank}: {call.name} began at {call.began:.3f} and ended at {call.ended}"


def every_rank_that_lives_comes_to_its_end(outcome: Outcome) -> Iterator[str]:
    """No rank that lives hangs."""
    for rank, diary in _living(outcome):
        if not diary.is_finished:
            yield f"rank {rank} is still in {diary.calls[-1].name if diary.calls else 'its beginning'}"


def every_error_is_one_of_ours(outcome: Outcome) -> Iterator[str]:
    """What a call raises is a typed error of the library's, and closing raises nothing."""
    for rank, diary in _living(outcome):
        for call in diary.calls:
            if call.error is not None and (not isinstance(call.error, GradsyncError) or call.name == "close"):
                yield f"rank {rank}: {call.name} raised {call.error!r}"


def nothing_fails_unless_something_is_wrong(outcome: Outcome) -> Iterator[str]:
    """Without a fault, or with one that ends soon enough, everything succeeds."""
    fault = outcome.scenario.fault
    is_harmless = fault.kind in HARMLESS or (outcome.fault_at is None and fault.at_step is None)
    for rank, diary in enumerate(outcome.diaries):
        if is_harmless and diary.error is not None:
            yield f"rank {rank} failed, and nothing was wrong: {diary.error!r}"


def nobody_waits_without_need(outcome: Outcome) -> Iterator[str]:
    """Where nothing is wrong nothing takes long: what wakes who waits is never lost until a deadline."""
    if outcome.scenario.fault.kind not in HARMLESS:
        return
    for rank, diary in enumerate(outcome.diaries):
        for call in diary.calls:
            if call.ended is not None and call.ended - call.began > _NEEDED_SECONDS:
                yield f"rank {rank}: {call.name} took {call.ended - call.began:.3f} s, and nothing was wrong"


def values_are_right(outcome: Outcome) -> Iterator[str]:
    """What the calls of one step bring fits together on all ranks to which they brought anything."""
    values: dict[str, list[object]] = {}
    for diary in outcome.diaries:
        for call in diary.calls:
            if call.error is None and call.value is not None:
                values.setdefault(call.name, []).append(call.value)
    for name, found in values.items():
        if not _fit(name, found):
            yield f"{name} brought {found!r:.200}"


def survivors_name_the_culprit(outcome: Outcome) -> Iterator[str]:
    """Whoever is told of a failure is told of the rank that failed, never of one that did not."""
    victim = outcome.scenario.fault.victim
    for rank, diary in _survivors(outcome):
        error = diary.error
        if isinstance(error, RankFailed) and error.phase != LEFT_PHASE and error.rank != victim:
            yield f"rank {rank} blames rank {error.rank}, and rank {victim} it was: {error}"
        # First the one that it was; then those that it keeps from coming.
        if isinstance(error, CollectiveTimeout) and error.missing_ranks[:1] != (victim,):
            yield f"rank {rank} misses ranks {error.missing_ranks}, and rank {victim} it was: {error}"
        is_joining = isinstance(error, RendezvousTimeout) and diary.calls[0].error is error
        if is_joining and outcome.scenario.fault.kind != "server crash":
            # A victim that was cut off while it joined comes again; who had met it by then has been told, and does not.
            missed = set(error.missing_ranks) - {victim} - _told_of(victim, outcome)
            if missed or not error.missing_ranks:
                yield f"rank {rank} misses ranks {error.missing_ranks} at the meeting, and rank {victim} it was"


def _told_of(victim: int | None, outcome: Outcome) -> set[int]:
    """Returns the survivors that were told that the victim has failed."""
    errors = {rank: diary.error for rank, diary in _survivors(outcome)}
    return {rank for rank, error in errors.items() if isinstance(error, RankFailed) and error.rank == victim}


def survivors_are_told_of_a_rank(outcome: Outcome) -> Iterator[str]:
    """A rank that fails where that can be seen is told as such: the others do not find out by waiting in vain."""
    for rank, diary in _who_has_to_hear(outcome):
        error = diary.error
        expected = RendezvousError if outcome.scenario.fault.kind == "server crash" else RankFailed
        if error is not None and not isinstance(error, expected):
            yield f"rank {rank} was to be told that rank {outcome.scenario.fault.victim} failed, and got {error!r}"


def survivors_hear_of_it_in_time(outcome: Outcome) -> Iterator[str]:
    """They hear of it within the target of that failure."""
    within = _DETECTION_SECONDS.get(outcome.scenario.fault.kind)
    if within is None or outcome.fault_at is None:
        return
    for rank, diary in _who_has_to_hear(outcome):
        call = next((call for call in diary.calls if call.error is not None and call.error is diary.error), None)
        if call is not None and call.ended is not None and call.ended - outcome.fault_at > within + _NETWORK_SECONDS:
            yield f"rank {rank} heard {call.ended - outcome.fault_at:.3f} s after the {outcome.scenario.fault.kind}"


def survivors_agree(outcome: Outcome) -> Iterator[str]:
    """All who are told that the generation failed are told of the same rank."""
    named = set()
    for _, diary in _survivors(outcome):
        error = diary.error
        if isinstance(error, RankFailed) and error.phase != LEFT_PHASE:
            named.add((error.rank,))
        elif isinstance(error, CollectiveTimeout):
            named.add(error.missing_ranks)
    if len(named) > 1:
        yield f"survivors blame {sorted(named)}"


def nothing_is_left(outcome: Outcome) -> Iterator[str]:
    """No thread, no descriptor, nothing in the server's core, and nobody has looked at the wall clock."""
    yield from outcome.leftovers


CHECKS: tuple[Callable[[Outcome], Iterator[str]], ...] = (
    every_call_ends_in_time,
    every_rank_that_lives_comes_to_its_end,
    every_error_is_one_of_ours,
    nothing_fails_unless_something_is_wrong,
    nobody_waits_without_need,
    values_are_right,
    survivors_name_the_culprit,
    survivors_are_told_of_a_rank,
    survivors_hear_of_it_in_time,
    survivors_agree,
    nothing_is_left,
)


def complaints(outcome: Outcome) -> list[str]:
    """Returns what is wrong with a run, each with the name of what it breaks."""
    return [f"{check.__name__}: {what}" for check in CHECKS for what in check(outcome)]


def _is_dead(outcome: Outcome, rank: int) -> bool:
    fault = outcome.scenario.fault
    return outcome.fault_at is not None and fault.kind in ("crash", "vanish", "stop") and rank == fault.victim


def _living(outcome: Outcome) -> Iterator[tuple[int, Diary]]:
    return ((rank, diary) for rank, diary in enumerate(outcome.diaries) if not _is_dead(outcome, rank))


def _survivors(outcome: Outcome) -> Iterator[tuple[int, Diary]]:
    """All ranks but the victim; all where the server is."""
    fault = outcome.scenario.fault
    return (found for found in _living(outcome) if fault.kind == "server crash" or found[0] != fault.victim)


def _who_has_to_hear(outcome: Outcome) -> Iterator[tuple[int, Diary]]:
    """The survivors in whose generation something has happened that the server, or they themselves, can see.

    Who joins later may come to a new generation, and waits there in vain for the victim, to its deadline; but not where
    the launcher has told which process that is, which can be seen to stand still.
    """
    scenario, fault = outcome.scenario, outcome.scenario.fault
    is_here = scenario.machines[fault.victim] == scenario.machines[0]
    if fault.kind == "stop":
        return _survivors(outcome) if is_here else iter(())
    if fault.kind != "server crash" and fault.victim not in outcome.seated:
        return iter(())
    return (found for found in _survivors(outcome) if found[0] in outcome.seated)


def _fit(name: str, values: list[object]) -> bool:
    what, _, number = name.rpartition(" ")
    if what == "exchange":
        return all(value == [b"%d" % rank for rank in range(len(value))] for value in values)  # type: ignore[arg-type]
    if what == "left_ranks":
        return len(values) == 1
    if what == "get":
        return set(values) == {number.encode()}
    if what == "unique_id":
        return set(values) == {bytes([int(number)]) * 128}
    return name == "connect" or len(set(values)) == 1
