"""Plays one seed: the server, the ranks and the fault, until all have ended; then a second generation."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer
from simulation.program import SECRET, Diary, SimulatedRank
from simulation.scenario import Fault, Scenario, draw
from simulation.scheduler import Process, Stuck
from simulation.system import System

EMPTY_WITHIN_SECONDS = 10.0
IDLE_SECONDS = 5.0
BUSY_TURNS = 40  # what everything takes at most on a busy machine, in turns that it is kept waiting for


@dataclass
class Outcome:
    """What came of a seed.

    Attributes:
        diaries: of the ranks.
        again: of the ranks of the second generation; empty where the server has gone.
        fault_at: when the fault came, None where it met nobody.
        began_at, ended_at: when all began, and when it was over.
        trace: everything that happened, with its time.
        leftovers: what was left behind, in words.
        used: what was asked of the operating system.
    """

    scenario: Scenario
    diaries: list[Diary]
    again: list[Diary] = field(default_factory=list)
    fault_at: float | None = None
    began_at: float = 0.0
    ended_at: float = 0.0
    trace: list[tuple[Any, ...]] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    @property
    def busy_seconds(self) -> float:
        """What everything takes longer, at most, because the machines are busy."""
        return BUSY_TURNS * self.scenario.busy_seconds

    def living(self) -> Iterator[tuple[int, Diary]]:
        """Yields the ranks that were not ended by force."""
        fault = self.scenario.fault
        dead = fault.victim if self.fault_at is not None and fault.kind in ("crash", "vanish", "stop") else None
        return ((rank, diary) for rank, diary in enumerate(self.diaries) if rank != dead)

    @property
    def digest(self) -> str:
        """Stands for the trace: equal digests, equal runs."""
        return hashlib.blake2b(repr(self.trace).encode(), digest_size=16).hexdigest()

    def story(self) -> str:
        """Returns all that happened, a line each."""
        lines = [repr(self.scenario)]
        lines += [f"{at - self.began_at:9.4f}  {' '.join(map(str, what))}" for at, *what in self.trace]
        lines += [f"rank {rank}: {len(d.calls)} calls, {d.error!r}" for rank, d in enumerate(self.diaries)]
        return "\n".join([*lines, f"trace {self.digest}"])


def play_scenario(
    draw: Callable[[int], Any],
    run_class: type[Run],
    seed: int,
    *,
    client_class: type[RendezvousClient] = RendezvousClient,
    server_class: type[RendezvousServer] = RendezvousServer,
) -> Any:
    """Plays the scenario of a seed, the same one every time; gives what came of it."""
    scenario = draw(seed)
    system = System(scenario.seed, scenario.weather)
    loggers = [logging.getLogger(name) for name in ("gradsync.rendezvous", "asyncio")]
    were_disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    gc.disable()  # what it would collect, and when, no seed decides
    try:
        with _complaints() as complaints:
            with system.in_effect():
                outcome = run_class(system, scenario, client_class, server_class).play()
            del system
            gc.collect(0)  # what the run has made
        if outcome.fault_at is None or not scenario.fault.hits_server:  # a killed server closes nothing
            outcome.leftovers += complaints
        return outcome
    finally:
        gc.enable()
        for logger, was_disabled in zip(loggers, were_disabled, strict=True):
            logger.disabled = was_disabled


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    """Collects what Python complains of in the block where no caller hears it: what nobody closed or awaited."""
    complaints: list[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda of: complaints.append(f"left: {of.exc_value!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield complaints
    finally:
        sys.unraisablehook = hook


class Run:
    """One run of a scenario."""

    def __init__(
        self,
        system: System,
        scenario: Scenario,
        client_class: type[RendezvousClient],
        server_class: type[RendezvousServer],
    ) -> None:
        self._system = system
        self._scheduler = system.scheduler
        self._scenario = scenario
        self._client_class = client_class
        self._server_class = server_class
        self._server_process = system.new_process("server", scenario.machines[0])
        self._server_process.slowness_seconds = scenario.busy_seconds
        self._begin()

    def _begin(self) -> None:
        self._ranks, self._processes = self._new_ranks("rank")
        self._outcome = Outcome(self._scenario, [rank.diary for rank in self._ranks])

    def play(self) -> Outcome:
        outcome, scheduler = self._outcome, self._scheduler
        outcome.began_at = scheduler.now
        self._server_process.start("main", self._serve)
        scheduler.at(scheduler.now + self._scenario.fault.at_seconds, self._strike)
        try:
            scheduler.run()
        except Stuck as error:
            outcome.leftovers.append(str(error))
        outcome.ended_at, outcome.trace, outcome.used = scheduler.now, scheduler.trace, self._system.used
        for process in self._system.processes.values():
            if not process.is_dead and not process.is_stopped:
                outcome.leftovers += [f"left: {task.name}" for task in process.living_tasks]
                outcome.leftovers += [f"left: descriptor {number} of {process.name}" for number in process.sockets]
            if not process.is_dead:
                self._system.crash(process)
        if "time.time" in outcome.used:
            outcome.leftovers.append("the wall clock was looked at, which may step at any moment")
        return outcome

    def _new_ranks(self, name: str) -> tuple[list[SimulatedRank], list[Process]]:
        arrived: dict[int, set[int]] = {}
        ranks, processes = [], []
        for rank, machine in enumerate(self._scenario.machines):
            processes.append(self._system.new_process(f"{name}{rank}", machine))
            processes[-1].slowness_seconds = self._scenario.busy_seconds
            ranks.append(SimulatedRank(self._system, self._scenario, rank, arrived, self._client_class))
        return ranks, processes

    def _serve(self) -> None:
        """The server's process: a launcher that hosts the server until every rank that can has come to its end."""
        server = self._server_class(self._scenario.world_size, secret=SECRET)
        server.start()
        for number, (rank, process) in enumerate(zip(self._ranks, self._processes, strict=True)):
            process.start("main", lambda rank=rank: rank.run(server.address))
            if process.machine == self._server_process.machine:
                server.note_start(number, process.pid)
        self._scheduler.wait(lambda: all(map(self._is_over, self._ranks, self._processes)), None)
        for process in self._processes:
            if process.is_stopped:  # as a launcher would
                self._system.crash(process)
        self._end(server)

    def _end(self, server: RendezvousServer) -> None:
        if server.wait_until_empty(EMPTY_WITHIN_SECONDS):
            self._stay_idle()
            self._serve_again(server)
        else:
            self._outcome.leftovers.append("the server still has connections")
        server.stop()

    def _is_over(self, rank: SimulatedRank, process: Process) -> bool:
        is_stopped_for_good = process.is_stopped and self._scenario.fault.kind == "stop"
        return rank.diary.is_finished or process.is_dead or is_stopped_for_good

    def _stay_idle(self) -> None:
        """Looks whether the server sleeps while nobody is there: what wakes it then was kept of who has gone."""
        self._scheduler.sleep(1.0)
        first = len(self._scheduler.trace)
        self._scheduler.sleep(IDLE_SECONDS)
        woken = {what for _, what, *_ in self._scheduler.trace[first:] if str(what).startswith("server.")}
        self._outcome.leftovers += [f"{name} was woken, and nobody was there" for name in woken - {"server.main"}]

    def _serve_again(self, server: RendezvousServer) -> None:
        """A generation of new processes, in which nothing goes wrong: the last one has left nothing in their way."""
        ranks, processes = self._new_ranks("again")
        self._outcome.again = [rank.diary for rank in ranks]
        for rank, process in zip(ranks, processes, strict=True):
            process.start("main", lambda rank=rank: rank.run_again(server.address))
        self._scheduler.wait(lambda: all(rank.diary.is_finished for rank in ranks), 2 * EMPTY_WITHIN_SECONDS)
        server.wait_until_empty(EMPTY_WITHIN_SECONDS)

    def _strike(self) -> None:
        """Brings about what the scenario has go wrong."""
        fault = self._scenario.fault
        victim, diary = self._processes[fault.victim], self._ranks[fault.victim].diary
        if fault.kind in ("none", "raises", "absent") or (diary.is_finished and not fault.hits_server):
            return
        if not all(process.tasks for process in self._processes):  # on a busy machine they have not begun
            return
        self._outcome.fault_at = self._scheduler.now
        self._scheduler.note("fault", fault.kind, fault.victim)
        self._harm(victim, fault)

    def _harm(self, victim: Process, fault: Fault) -> None:
        system = self._system
        {
            "slow": lambda: setattr(victim, "slowness_seconds", victim.slowness_seconds + (fault.for_seconds or 0.0)),
            "wall clock": lambda: setattr(system, "wall_clock_steps_by", 86_400.0),
            "crash": lambda: system.crash(victim, by_force=self._scheduler.choices.random() < 0.5),
            "stop": lambda: system.stop(victim, fault.for_seconds),
            "cut": lambda: system.cut(victim, fault.for_seconds),
            "vanish": lambda: system.vanish(victim),
            "reset": lambda: system.reset(victim),
            "server crash": lambda: system.crash(self._server_process),
            "server vanish": lambda: system.vanish(self._server_process),
        }[fault.kind.removeprefix("short ")]()


play = partial(play_scenario, draw, Run)
