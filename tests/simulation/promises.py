"""What has to be true of every run, whatever its seed. Each promise yields what breaks it, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gradsync.errors import CollectiveTimeout, GradsyncError, RankFailed, RendezvousError, RendezvousTimeout
from simulation.program import Diary
from simulation.run import Outcome

GRACE_SECONDS = 2.0  # how long a client listens for the server's answer after its deadline
SLACK_SECONDS = 1.0  # of the network and of a slow or stopped rank
# From the fault until the survivors know, at most: the targets of the failures, and what the network takes.
AT_ONCE, SILENT_HOST = 0.5, 6.0
DETECTION_SECONDS = {"crash": AT_ONCE, "reset": AT_ONCE, "stop": 10.0, "vanish": SILENT_HOST, "cut": SILENT_HOST}
DETECTION_SECONDS |= {"server crash": AT_ONCE, "server vanish": SILENT_HOST}
NETWORK_SECONDS = 0.3
NEEDED_SECONDS = 4.0  # above what ranks wait for one that computes, starts late, is slow, or is stopped for a moment
JOINED_AFTER_SECONDS = 0.3  # the server has read the join by then, in any weather


def every_call_ends_in_time(outcome: Outcome) -> Iterator[str]:
    """A call of a rank that lives ends by its own deadline, whatever happens to the others."""
    for rank, diary in outcome.living():
        for call in diary.calls:
            within = call.seconds + GRACE_SECONDS + SLACK_SECONDS + outcome.busy_seconds
            if call.ended is None or call.ended - call.began > within:
                yield f"rank {rank}: {call.name} began at {call.began:.3f} and ended at {call.ended}"


def every_rank_that_lives_comes_to_its_end(outcome: Outcome) -> Iterator[str]:
    """No rank that lives hangs."""
    for rank, diary in outcome.living():
        if not diary.is_finished:
            yield f"rank {rank} is still in {diary.calls[-1].name if diary.calls else 'its beginning'}"


def every_error_is_one_of_ours(outcome: Outcome) -> Iterator[str]:
    """What a call raises is a typed error of the library's, and what ends a connection raises nothing."""
    for rank, diary in outcome.living():
        for call in diary.calls:
            is_ours = isinstance(call.error, GradsyncError) and call.name not in ("close", "abandon")
            if call.error is not None and not is_ours:
                yield f"rank {rank}: {call.name} raised {call.error!r}"


def nothing_fails_unless_something_is_wrong(outcome: Outcome) -> Iterator[str]:
    """Without a fault, or with one that ends soon enough, everything succeeds."""
    fault = outcome.scenario.fault
    is_harmless = fault.is_harmless or (outcome.fault_at is None and fault.at_step is None)
    for rank, diary in enumerate(outcome.diaries):
        if is_harmless and diary.error is not None:
            yield f"rank {rank} failed, and nothing was wrong: {diary.error!r}"


def nobody_waits_without_need(outcome: Outcome) -> Iterator[str]:
    """Where nothing is wrong nothing takes long: what wakes who waits is never lost until a deadline."""
    for rank, diary in enumerate(outcome.diaries if outcome.scenario.fault.is_harmless else []):
        for call in diary.calls:
            if call.ended is not None and call.ended - call.began > NEEDED_SECONDS + outcome.busy_seconds:
                yield f"rank {rank}: {call.name} took {call.ended - call.began:.3f} s, and nothing was wrong"


def values_are_right(outcome: Outcome) -> Iterator[str]:
    """What the calls bring is what the step was to bring, on all ranks."""
    world_size = outcome.scenario.world_size
    for rank, diary in enumerate(outcome.diaries):
        for call in diary.calls:
            what, _, number = call.name.rpartition(" ")
            expected = {
                "exchange": lambda: [b"%d" % other for other in range(world_size)],
                "left_ranks": lambda number=number: dict.fromkeys(range(1, world_size), int(number)),
                "get": number.encode,
                "unique_id": lambda number=number: bytes([int(number)]) * 128,
            }.get(what)
            if expected is not None and call.error is None and call.ended is not None and call.value != expected():
                yield f"rank {rank}: {call.name} brought {call.value!r:.200}"


def survivors_name_the_culprit(outcome: Outcome) -> Iterator[str]:
    """Whoever hears of a failure hears of the rank that failed, never of one that did not."""
    victim = outcome.scenario.fault.victim
    for rank, diary in _survivors(outcome):
        error = diary.error
        if _is_death(error) and error.rank != victim:
            yield f"rank {rank} blames rank {error.rank}, and rank {victim} it was: {error}"
        if _is_death(error) and error.was_silent != (outcome.scenario.fault.kind in ("stop", "cut", "vanish")):
            yield f"rank {rank} takes silence for death, or death for silence: {error}"
        # First the one that it was; then those that it keeps from coming.
        if isinstance(error, CollectiveTimeout) and error.missing_ranks[:1] != (victim,):
            yield f"rank {rank} misses ranks {error.missing_ranks}, and rank {victim} it was: {error}"
        is_joining = isinstance(error, RendezvousTimeout) and diary.calls[0].error is error
        if is_joining and not outcome.scenario.fault.hits_server:
            # A victim that was cut off while it joined comes again; who had met it by then knows that, and does not.
            missed = set(error.missing_ranks) - {victim} - _who_heard_of(victim, outcome)
            if missed or not error.missing_ranks:
                yield f"rank {rank} misses ranks {error.missing_ranks} at the meeting, and rank {victim} it was"


def survivors_hear_of_a_rank(outcome: Outcome) -> Iterator[str]:
    """A rank that fails where that can be seen is named as such: the others do not find out by waiting in vain.

    Whoever loses the server hears of that, a rank too that was cut off itself.
    """
    fault = outcome.scenario.fault
    for rank, diary in _who_has_to_hear(outcome):
        expected: type[Exception] | tuple[type[Exception], ...] = RankFailed
        if fault.hits_server or rank == fault.victim:
            expected = RendezvousError
        elif fault.kind == "stop":  # a wait may have a shorter deadline, and names it then
            expected = RankFailed, RendezvousTimeout, CollectiveTimeout
        if diary.error is not None and not isinstance(diary.error, expected):
            yield f"rank {rank} was to hear of the {fault.kind} at rank {fault.victim}, and got {diary.error!r}"


def survivors_hear_of_it_in_time(outcome: Outcome) -> Iterator[str]:
    """They hear of it within the target of that failure, or of their own beginning where they come later."""
    within = DETECTION_SECONDS.get(outcome.scenario.fault.kind)
    for rank, diary in _who_has_to_hear(outcome) if within is not None else ():
        call = diary.failed
        if call is not None and call.ended is not None and outcome.fault_at is not None:
            took = call.ended - max(outcome.fault_at, diary.calls[0].began)
            if took > within + NETWORK_SECONDS + outcome.busy_seconds:
                yield f"rank {rank} heard {took:.3f} s after the {outcome.scenario.fault.kind}"


def survivors_agree(outcome: Outcome) -> Iterator[str]:
    """All who hear that the generation failed hear of the same rank."""
    errors = [diary.error for _, diary in _survivors(outcome)]
    named = {(error.rank,) for error in errors if _is_death(error)}
    named |= {error.missing_ranks for error in errors if isinstance(error, CollectiveTimeout)}
    if len(named) > 1:
        yield f"survivors blame {sorted(named)}"


def the_next_generation_meets(outcome: Outcome) -> Iterator[str]:
    """Whatever happened, new processes of all ranks meet at the same server, at once, as one later generation."""
    joined = [diary.find("connect") for diary in outcome.again]
    for rank, diary in enumerate(outcome.again):
        within = NEEDED_SECONDS + outcome.busy_seconds
        slow = [call for call in diary.calls if call.ended is None or call.ended - call.began > within]
        if diary.error is not None or slow or not diary.is_finished:
            yield f"rank {rank} of the next generation: {diary.error!r}, slow: {slow}"
    numbers = {call.value for call in joined if call is not None}
    before = [call.value for diary in outcome.diaries for call in diary.calls if call.name == "connect" and call.value]
    if outcome.again and (len(numbers) != 1 or not min(numbers, key=str) or min(numbers) <= max(before, default=0)):
        yield f"the generations were {before}, then {numbers}"


def nothing_is_left(outcome: Outcome) -> Iterator[str]:
    """No thread, no descriptor, nothing that wakes an empty server, and nobody has looked at the wall clock."""
    yield from outcome.leftovers


PROMISES: tuple[Callable[[Outcome], Iterator[str]], ...] = (
    every_call_ends_in_time,
    every_rank_that_lives_comes_to_its_end,
    every_error_is_one_of_ours,
    nothing_fails_unless_something_is_wrong,
    nobody_waits_without_need,
    values_are_right,
    survivors_name_the_culprit,
    survivors_hear_of_a_rank,
    survivors_hear_of_it_in_time,
    survivors_agree,
    the_next_generation_meets,
    nothing_is_left,
)


def violations(outcome: Outcome, promises: Iterable[Callable[..., Iterator[str]]] = PROMISES) -> list[str]:
    """Returns what is wrong with a run, each with the name of the promise that it breaks."""
    return [f"{promise.__name__}: {what}" for promise in promises for what in promise(outcome)]


def check(
    seeds: range,
    play: Callable[[int], Any],
    promises: Iterable[Callable[..., Iterator[str]]] = PROMISES,
) -> None:
    """Plays seeds until one breaks a promise. Of a single one it prints all that happens."""
    for seed in seeds:
        outcome = play(seed)
        if len(seeds) == 1:
            print(outcome.story())
        found = [f"seed {seed}: {violation}" for violation in violations(outcome, promises)]
        assert not found, "\n".join([*found, f"to replay it: python -m pytest tests/simulation --seed {seed}"])


def _is_death(error: BaseException | None) -> bool:
    """Whether it says that a rank failed; not that one has left in good order, and will not come any more."""
    return isinstance(error, RankFailed) and error.phase != "left"


def _survivors(outcome: Outcome) -> Iterator[tuple[int, Diary]]:
    """All ranks but the victim; all where the server is."""
    fault = outcome.scenario.fault
    return (found for found in outcome.living() if fault.hits_server or found[0] != fault.victim)


def _who_heard_of(victim: int, outcome: Outcome) -> set[int]:
    """Returns the survivors that heard that the victim has failed."""
    errors = {rank: diary.error for rank, diary in _survivors(outcome)}
    return {rank for rank, error in errors.items() if isinstance(error, RankFailed) and error.rank == victim}


def _who_has_to_hear(outcome: Outcome) -> Iterator[tuple[int, Diary]]:
    """The survivors in whose generation something has happened that the server, or they themselves, can see.

    Who joins later may come to a new generation, and waits there in vain for the victim, to its deadline.
    """
    scenario, fault = outcome.scenario, outcome.scenario.fault
    is_here = scenario.machines[fault.victim] == scenario.machines[0]
    if outcome.fault_at is None or (fault.kind == "stop" and not is_here):
        return iter(())
    if not fault.hits_server and not _has_joined(outcome, outcome.diaries[fault.victim], outcome.fault_at):
        return iter(())
    concerned = outcome.living() if fault.kind in ("cut", "reset") else _survivors(outcome)
    return (found for found in concerned if _has_joined(outcome, found[1], outcome.fault_at))


def _has_joined(outcome: Outcome, diary: Diary, at: float) -> bool:
    """Whether the server surely had this rank as a member then, as far as the rank could see."""
    joining, leaving = diary.find("connect"), diary.find("close")
    if joining is None or (leaving is not None and leaving.began <= at):
        return False
    if joining.ended is not None and joining.ended <= at:
        return joining.error is None
    return joining.began < at - JOINED_AFTER_SECONDS - outcome.busy_seconds
