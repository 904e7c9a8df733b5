"""Worlds that are rebuilt after ranks have failed: what a seed stands for, what each rank does, and what is promised.

Ranks meet in collectives, step by step. After a failure, or at the edge of some steps, all who are left rebuild the
world; ranks that died may be started again. Faults come once the first world has formed, one after the other, and many
of them while the ranks rebuild.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradsync.errors import CollectiveTimeout, RankFailed, RendezvousError, RendezvousTimeout
from gradsync.rendezvous.client import RendezvousClient
from simulation.program import (
    CALL_SECONDS,
    CLOSE_SECONDS,
    LOOK_SECONDS,
    SECRET,
    STUCK_SECONDS,
    Diary,
    SimulatedRank,
    without_frames,
)
from simulation.promises import (
    every_call_ends_in_time,
    every_error_is_one_of_ours,
    every_rank_that_lives_comes_to_its_end,
    nothing_is_left,
    the_next_generation_meets,
)
from simulation.run import Outcome, Run, play_scenario
from simulation.scenario import BUSY, HERE, THERE, WEATHERS, WEIGHTS, Fault, Setting
from simulation.scheduler import Process

STEPS = 8
CONNECT_SECONDS, REBUILD_SECONDS, IMPATIENT_SECONDS = 3.0, 20.0, 0.2
COLLECTIVE_SECONDS = 1.5
ABSENT_SECONDS = 9.0  # from a collective; the others have given it up by then, at the latest
NEEDED_SECONDS = 4.0  # what a rebuild takes at most after a death that is seen at once, also with a late step of a rank
FAULTS = {
    "none": 10,
    "crash": 36,
    "stop": 12,
    "absent": 8,
    "vanish": 6,
    "cut": 6,
    "reset": 6,
    "partition": 6,
    "server crash": 4,
}
SEEN_AT_ONCE, UNSEEN = ("none", "crash", "reset"), ("cut", "vanish", "partition")


@dataclass(frozen=True, kw_only=True)
class Rebuilding(Setting):
    """What goes wrong there, and how the ranks rebuild.

    Attributes:
        faults: in the order in which they come.
        edges: before which steps all rebuild, though nothing has failed.
        floor: how many ranks a world needs, for the server; `asks` for the ranks, 0 for what is usual.
        is_impatient: of each rank: whether it asks for a short time first.
        kills_lost: whether a launcher ends the ranks that the server gives up.
    """

    faults: tuple[Fault, ...]
    edges: tuple[int, ...]
    floor: int
    asks: int
    is_impatient: tuple[bool, ...]
    kills_lost: bool

    @property
    def fault(self) -> Fault:
        """The one that hits the server, or the first one."""
        return next((fault for fault in self.faults if fault.hits_server), self.faults[0])


def draw(seed: int) -> Rebuilding:
    """Returns the scenario of a seed."""
    choices = random.Random(f"rebuilding {seed}")
    world_size = choices.choice((2, 3, 3, 4))
    others = (HERE,) if choices.random() < 0.5 else (HERE, THERE)
    machines = (HERE, *(choices.choice(others) for _ in range(world_size - 1)))
    (weather,) = choices.choices(WEATHERS[:4], WEIGHTS[:4])
    faults, at_seconds = [], choices.random() * 0.5
    for _ in range(choices.choice((1, 1, 2, 2, 3))):
        (kind,) = choices.choices(tuple(FAULTS), tuple(FAULTS.values()))
        again = choices.random() * choices.choice((0.1, 1.0)) if kind == "crash" and choices.random() < 0.6 else None
        faults.append(Fault(kind, choices.randrange(world_size), at_seconds, again_seconds=again))
        at_seconds += choices.random() * choices.choice((0.0, 0.02, 0.2, 3.0, 12.0))
    return Rebuilding(
        seed=seed,
        machines=machines,
        weather=weather,
        faults=tuple(faults),
        edges=tuple(step for step in range(STEPS) if choices.random() < 0.2),
        floor=choices.choice((1, 1, 1, 2)),
        asks=choices.choice((0, 0, 1, 2)),
        is_impatient=tuple(choices.random() < 0.2 for _ in machines),
        kills_lost=choices.random() < 0.5,
        busy_seconds=choices.choice(BUSY) if choices.random() < 0.1 else 0.0,
    )


@dataclass
class Life:
    """One process of a rank.

    Attributes:
        is_gone: whether it was killed, stopped, cut off, or whether it was not there when the others waited for it.
        worlds: what it has been told of each world: its generation, the ranks at launch, its rank.
        is_done: whether it has taken all steps.
    """

    number: int
    process: Process
    diary: Diary
    is_gone: bool = False
    is_again: bool = False
    is_done: bool = False
    worlds: list[tuple[int, list[int], int]] = field(default_factory=list)


@dataclass
class Rebuilt(Outcome):
    """What came of a seed, with the lives of all processes, and the worlds that the server has told of."""

    lives: list[Life] = field(default_factory=list)
    formed: dict[int, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    steps: list[tuple[float, int, Life]] = field(default_factory=list)  # when which step of a generation has ended

    def living(self) -> Iterator[tuple[int, Diary]]:
        return ((life.number, life.diary) for life in self.lives if life.diary.is_finished or not life.is_gone)


class RebuildingRank(SimulatedRank):
    """Takes all steps, in the worlds that come."""

    def live(self, address: str, life: Life, outcome: Rebuilt) -> None:
        self._life, self._outcome = life, outcome
        self._step = self._edges = 0
        self.is_absent = False
        scenario = self._scenario
        try:
            self._pause(0.05)
            client = self._meet(address, CONNECT_SECONDS)
            while True:
                try:
                    self._take_steps(client)
                    life.is_done = True
                    return
                except (RankFailed, CollectiveTimeout):
                    pass
                with contextlib.suppress(RankFailed, CollectiveTimeout):
                    self._call("check", 0.0, client.check)
                if scenario.is_impatient[self._rank]:
                    with contextlib.suppress(RendezvousTimeout, RankFailed):
                        client = self._meet(address, IMPATIENT_SECONDS, client)
                        continue
                client = self._rebuild(address, client)
        except Exception as error:
            if all(call.error is not error for call in self.diary.calls):
                raise
        finally:
            self._leave()

    def _rebuild(self, address: str, client: RendezvousClient) -> RendezvousClient:
        """As gs.rebuild(): once more if another one fails in the midst of it."""
        deadline = self._scheduler.now + REBUILD_SECONDS
        while True:
            try:
                return self._meet(address, max(deadline - self._scheduler.now, 0.1), client)
            except RankFailed:
                if self._scheduler.now >= deadline:
                    raise

    def _meet(self, address: str, seconds: float, last: RendezvousClient | None = None) -> RendezvousClient:
        def connect() -> RendezvousClient:
            return self._client_class.connect(
                address,
                secret=SECRET,
                rank=self._rank,
                world_size=self._scenario.world_size,
                timeout_seconds=seconds,
                last=last,
                min_ranks=0 if last is None else self._scenario.asks,
            )

        within = math.inf if last is None and self._life.is_again else seconds  # it waits as long as the others run
        self._client = client = self._call("connect" if last is None else "rebuild", within, connect)
        client.describe_with(lambda: {"world": self._step}, lambda: (f"rank {self._rank} is busy", {}))
        numbers = list(range(self._scenario.world_size)) if client.numbers is None else list(client.numbers)
        self._life.worlds.append((client.generation, numbers, client.rank))
        if last is not None:
            self._call("abandon", CLOSE_SECONDS, last.abandon)
        return client

    def _take_steps(self, client: RendezvousClient) -> None:
        mine = b"%d %d" % (self._step, self._edges)
        found = self._call(
            "exchange", CALL_SECONDS, lambda: client.exchange("state", mine, timeout_seconds=CALL_SECONDS)
        )
        self._step, self._edges = max(tuple(map(int, row.split())) for row in found)
        while self._step < STEPS:
            if self._edges < len([step for step in self._scenario.edges if step <= self._step]):
                self._edges += 1
                raise RankFailed("nothing: this is an edge", rank=0, phase="running")
            self._pause(0.1)
            if self.is_absent:
                self.is_absent = False
                self._scheduler.sleep(ABSENT_SECONDS)
            self._meet_in_a_collective(client)
            self._step += 1
            self._outcome.steps.append((self._scheduler.now, client.generation, self._life))

    def _meet_in_a_collective(self, client: RendezvousClient) -> None:
        """Outside of the rendezvous, as over shared memory."""
        arrived = self._arrived.setdefault((client.generation, self._step), set())
        arrived.add(client.rank)
        began = self._scheduler.now
        while True:
            self._call("check", 0.0, client.check)
            if len(arrived) == client.world_size:
                return
            waited = self._scheduler.now - began
            if waited > COLLECTIVE_SECONDS:
                missing = sorted({*range(client.world_size)} - arrived)
                wait = ("world", self._step + 1, f"all_reduce #{self._step + 1}", waited, missing)
                self._call("report_stuck", STUCK_SECONDS, lambda: client.report_stuck(*wait))
            self._scheduler.sleep(LOOK_SECONDS)

    def _call(self, name: str, seconds: float, function: Callable[[], Any]) -> Any:
        call = self._note_call(name, seconds, function)
        if call.error is not None:
            raise call.error
        value, call.value = call.value, None  # a diary keeps no client
        return value


class RebuildingRun(Run):
    """One run of such a scenario."""

    _outcome: Rebuilt

    def _begin(self) -> None:
        self._lives: list[Life] = []
        self._arrived: dict[Any, set[int]] = {}
        self._is_to_come = 0  # faults, and processes that are to be started again
        self._ranks_of: dict[int, RebuildingRank] = {}  # the latest ones
        self._outcome = Rebuilt(self._scenario, [], lives=self._lives)

    def _serve(self) -> None:
        scenario, scheduler = self._scenario, self._scheduler
        server = self._server_class(
            scenario.world_size,
            secret=SECRET,
            min_ranks=min(scenario.floor, scenario.world_size),
            on_lost=self._give_up,
            on_rebuilt=self._note_world,
        )
        self._address = server.address
        server.start()
        for number in range(scenario.world_size):
            self._start(number)
            if scenario.machines[number] == HERE:
                server.note_start(number, self._lives[-1].process.pid)
        scheduler.wait(lambda: all(map(self._is_over, self._lives)) and not self._is_to_come, None)
        for life in self._lives:
            if life.process.is_stopped and not life.process.is_dead:
                self._system.crash(life.process)
        new = [life for life in self._lives if not life.diary.is_finished and not life.process.is_dead]
        # One may have been taken in at this very moment, and waits for another rebuild.
        scheduler.wait(lambda: all(life.diary.is_finished for life in new), CONNECT_SECONDS + 2 * REBUILD_SECONDS)
        self._end(server)

    def _start(self, number: int, *, is_again: bool = False) -> None:
        process = self._system.new_process(f"rank{number}", self._scenario.machines[number])
        process.slowness_seconds = self._scenario.busy_seconds
        rank = RebuildingRank(self._system, self._scenario, number, self._arrived, self._client_class)
        life = Life(number, process, rank.diary, is_again=is_again)
        self._lives.append(life)
        self._ranks_of[number] = rank
        process.start("main", lambda: rank.live(self._address, life, self._outcome))

    def _is_over(self, life: Life) -> bool:
        """Whether nobody waits for it: one that was started again may wait for a world that is over."""
        if life.diary.is_finished or life.process.is_dead or life.process.is_stopped:
            return True
        others = [other for other in self._lives if not other.is_again or other.worlds]
        return life.is_again and not life.worlds and all(map(self._is_over, others))

    def _note_world(self, generation: int, numbers: tuple[int, ...], _: float) -> None:
        self._scheduler.note("formed", generation, numbers)
        if not self._outcome.formed:
            self._is_to_come = len(self._scenario.faults)
            for fault in self._scenario.faults:
                self._scheduler.at(self._scheduler.now + fault.at_seconds, lambda fault=fault: self._hit(fault))
        self._outcome.formed[generation] = self._scheduler.now, numbers

    def _give_up(self, number: int, _: str) -> None:
        """As a launcher: it kills a process of its machine that the server has given up."""
        life = [life for life in self._lives if life.number == number][-1]
        self._scheduler.note("lost", number)
        life.is_gone = True
        if self._scenario.kills_lost and self._scenario.machines[number] == HERE:
            self._scheduler.at(self._scheduler.now + 0.01, lambda: self._kill(life))

    def _kill(self, life: Life) -> None:
        if not life.process.is_dead:
            life.process.is_stopped = False
            self._system.crash(life.process)

    def _hit(self, fault: Fault) -> None:
        self._is_to_come -= 1
        life = [life for life in self._lives if life.number == fault.victim][-1]
        system, process = self._system, life.process
        if fault.hits_server:
            self._outcome.fault_at = self._scheduler.now
            self._scheduler.note("fault", fault.kind)
            system.crash(self._server_process)
            return
        if fault.kind == "partition":
            for other in self._lives:
                if self._scenario.machines[other.number] == THERE and not other.process.is_dead:
                    other.is_gone = True
                    self._scheduler.note("fault", "cut", other.number)
                    system.cut(other.process, None)
            return
        if fault.kind == "none" or life.diary.is_finished or process.is_dead or process.is_stopped:
            return
        self._scheduler.note("fault", fault.kind, fault.victim)
        life.is_gone = True
        if fault.kind == "absent":
            self._ranks_of[fault.victim].is_absent = True
        else:
            self._harm(process, fault)
        if fault.again_seconds is not None and not self._server_process.is_dead:
            self._is_to_come += 1
            self._scheduler.at(self._scheduler.now + fault.again_seconds, lambda: self._start_again(fault.victim))

    def _start_again(self, number: int) -> None:
        self._is_to_come -= 1
        if not self._server_process.is_dead and not all(map(self._is_over, self._lives)):
            self._start(number, is_again=True)

    def _strike(self) -> None:
        """Faults come by `_hit`."""

    def play(self) -> Rebuilt:
        super().play()
        for life in self._lives:
            del life.process  # what came of a seed keeps nothing of the run alive
            for call in life.diary.calls:
                if call.error is not None:
                    without_frames(call.error)
        return self._outcome


play = partial(play_scenario, draw, RebuildingRun)


# What has to be true.


def all_members_say_the_same(outcome: Rebuilt) -> Iterator[str]:
    """Each rank is in a world with the members, and with the number, that the server and the others say."""
    for life in outcome.lives:
        for generation, numbers, rank in life.worlds:
            _, told = outcome.formed.get(generation, (0.0, ()))
            if tuple(numbers) != told or told != tuple(sorted(set(told))):
                yield f"rank {life.number} is in a world of {numbers}, and the server has told of {told}"
            if rank >= len(numbers) or numbers[rank] != life.number:
                yield f"rank {life.number} is number {rank} of {numbers}"
        if len({generation for generation, _, _ in life.worlds}) < len(life.worlds):
            yield f"rank {life.number} was twice in one world: {life.worlds}"
    for generation in outcome.formed:
        inside = [life.number for life in outcome.lives for world in life.worlds if world[0] == generation]
        if len(set(inside)) < len(inside):
            yield f"ranks {inside} are in world {generation}: two processes with one number"


def worlds_follow_each_other(outcome: Rebuilt) -> Iterator[str]:
    """No step of a world ends once the next one has formed, but on ranks that were left out."""
    for at, generation, life in outcome.steps:
        later = [formed for number, (formed, _) in outcome.formed.items() if number > generation]
        if later and at > min(later) and not life.is_gone:
            yield f"rank {life.number} took a step in world {generation} after the next one had formed"


def floors_are_kept(outcome: Rebuilt) -> Iterator[str]:
    """No world has fewer ranks than were asked for; on several machines, than half of the last one."""
    scenario, last = outcome.scenario, None
    for _, numbers in outcome.formed.values():
        if last is not None:
            are_apart = len({scenario.machines[number] for number in last}) > 1
            least = scenario.asks or (len(last) + 1) // 2 if are_apart else scenario.asks
            if len(numbers) < max(scenario.floor, least):
                yield f"a world of {numbers} after {last}"
        last = numbers


def those_who_are_left_go_on(outcome: Rebuilt) -> Iterator[str]:
    """Where enough are left, and their server, and those who do not answer can be found, all of them take all steps."""
    scenario = outcome.scenario
    left = [life for life in outcome.lives if not life.is_gone and not life.is_again]
    are_apart = len(set(scenario.machines)) > 1
    enough = max(
        scenario.floor, scenario.asks, (scenario.world_size + 1) // 2 if are_apart and not scenario.asks else 1
    )
    is_hidden = any(fault.kind == "stop" and scenario.machines[fault.victim] == THERE for fault in scenario.faults)
    # One that does not come to a collective while it may still come is given up if the others are at least as many.
    is_absent = any(fault.kind == "absent" for fault in scenario.faults)
    if scenario.fault.hits_server or len(left) < enough or is_hidden or is_absent:
        return
    has_ended = any(life.is_done for life in left)  # in the last step, which another one has not seen the end of
    for life in left:
        is_alone = enough > 1 and has_ended and isinstance(_error_of(life), RendezvousTimeout)
        if not life.is_done and not is_alone:
            yield f"rank {life.number} did not take all steps: {_error_of(life)!r}"


def nobody_waits_without_need(outcome: Rebuilt) -> Iterator[str]:
    """After deaths that are seen at once the next world is there at once."""
    scenario = outcome.scenario
    if any(fault.kind not in SEEN_AT_ONCE for fault in scenario.faults) or max(scenario.asks, scenario.floor) > 1:
        return
    if scenario.asks == 0 and len(set(scenario.machines)) > 1:
        return
    for rank, diary in outcome.living():
        for call in diary.calls:
            took = (call.ended or call.began) - call.began
            if call.name == "rebuild" and took > NEEDED_SECONDS + outcome.busy_seconds:
                yield f"rank {rank}: {call.name} took {took:.3f} s"


def who_is_refused_was_left_out(outcome: Rebuilt) -> Iterator[str]:
    """Nobody loses its place without a reason."""
    for life in outcome.lives:
        error = _error_of(life)
        is_refused = isinstance(error, RendezvousError) and not isinstance(error, RendezvousTimeout)
        # The server still takes one that was cut off, and killed then, for alive.
        is_early = life.is_again and any(fault.kind in UNSEEN for fault in outcome.scenario.faults)
        if is_refused and not life.is_gone and not is_early and not outcome.scenario.fault.hits_server:
            yield f"rank {life.number} was not to be refused: {error}"


def who_times_out_names_who_is_missing(outcome: Rebuilt) -> Iterator[str]:
    """At the deadline of a rebuild or of a start: ranks at launch, none of which has come."""
    for life in outcome.lives:
        for call in life.diary.calls:
            if not isinstance(call.error, RendezvousTimeout) or call.error.cause:  # it did not reach the server
                continue
            if not call.error.missing_ranks and not life.is_gone and not outcome.scenario.fault.hits_server:
                yield f"rank {life.number} does not say who is missing: {call.error}"


PROMISES: tuple[Callable[[Rebuilt], Iterator[str]], ...] = (
    every_call_ends_in_time,
    every_rank_that_lives_comes_to_its_end,
    every_error_is_one_of_ours,
    all_members_say_the_same,
    worlds_follow_each_other,
    floors_are_kept,
    those_who_are_left_go_on,
    nobody_waits_without_need,
    who_is_refused_was_left_out,
    who_times_out_names_who_is_missing,
    the_next_generation_meets,
    nothing_is_left,
)


def _error_of(life: Life) -> BaseException | None:
    """What ended it."""
    calls = [call for call in life.diary.calls if call.name != "close"]
    return calls[-1].error if calls else None
