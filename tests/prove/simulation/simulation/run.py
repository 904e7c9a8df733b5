"""Plays one seed: the server, the ranks, and the fault, until all have ended."""

from __future__ import annotations

import gc
import hashlib
import logging
from dataclasses import dataclass, field
from typing import Any

from gradsync.rendezvous.server import RendezvousServer
from simulation.rank import SECRET, Diary, SimulatedRank
from simulation.scenario import Scenario, draw
from simulation.scheduler import Process, Stuck
from simulation.substitution import Machine, in_place

_EMPTY_WITHIN_SECONDS = 10.0


@dataclass
class Outcome:
    """What came of a seed.

    Attributes:
        diaries: of the ranks.
        fault_at: when the fault came, None where it met nobody.
        seated: the ranks that the server had as members by then.
        began_at, ended_at: when all began, and when it was over.
        trace: everything that happened, with its time.
        leftovers: what was left behind, in words.
    """

    scenario: Scenario
    diaries: list[Diary]
    fault_at: float | None = None
    seated: frozenset[int] = frozenset()
    began_at: float = 0.0
    ended_at: float = 0.0
    trace: list[tuple[Any, ...]] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Stands for the trace: equal digests, equal runs."""
        return hashlib.blake2b(repr(self.trace).encode(), digest_size=16).hexdigest()


def play(seed: int) -> Outcome:
    """Plays the scenario of a seed; the same one every time."""
    scenario = draw(seed)
    machine = Machine(seed, scenario.weather)
    logger = logging.getLogger("gradsync.rendezvous")
    was_disabled, logger.disabled = logger.disabled, True
    gc.disable()  # what it would collect, and when, no seed decides
    try:
        with in_place(machine):
            return _Run(machine, scenario).play()
    finally:
        gc.enable()
        logger.disabled = was_disabled


class _Run:
    """One run of a scenario."""

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        self._machine = machine
        self._scenario = scenario
        arrived: dict[int, set[int]] = {}
        self._ranks = [SimulatedRank(machine, scenario, rank, arrived) for rank in range(scenario.world_size)]
        self._server_process = machine.new_process("server", scenario.machines[0])
        self._processes = [machine.new_process(f"rank{r}", name) for r, name in enumerate(scenario.machines)]
        self._server: RendezvousServer | None = None
        self._outcome = Outcome(scenario, [rank.diary for rank in self._ranks])

    def play(self) -> Outcome:
        scheduler = self._machine.scheduler
        self._outcome.began_at = scheduler.now
        self._server_process.start("main", self._serve)
        scheduler.at(scheduler.now + self._scenario.fault.at_seconds, self._strike)
        try:
            scheduler.run()
        except Stuck as error:
            self._outcome.leftovers.append(str(error))
        self._outcome.ended_at = scheduler.now
        self._outcome.trace = scheduler.trace
        self._look_for_leftovers()
        for process in (self._server_process, *self._processes):
            if not process.is_dead:
                self._machine.crash(process)
        return self._outcome

    def _serve(self) -> None:
        """The server's process: hosts the server until every rank that can has come to its end."""
        server = self._server = RendezvousServer(self._scenario.world_size, secret=SECRET)
        server.start()
        for rank, process in zip(self._ranks, self._processes, strict=True):
            process.start("main", lambda rank=rank: rank.run(server.address))
        for rank, process in enumerate(self._processes):
            if process.machine == self._server_process.machine:
                server.note_start(rank, process.pid)
        scheduler = self._machine.scheduler
        scheduler.wait(lambda: all(map(self._is_over, self._ranks, self._processes)), None)
        for process in self._processes:
            if process.is_stopped:  # its launcher would
                self._machine.crash(process)
        if not server.wait_until_empty(_EMPTY_WITHIN_SECONDS):
            self._outcome.leftovers.append("the server still has connections")
        self._look_at_core(server)
        server.stop()

    def _is_over(self, rank: SimulatedRank, process: Process) -> bool:
        return rank.diary.is_finished or process.is_dead or (process.is_stopped and self._is_stopped_for_good)

    @property
    def _is_stopped_for_good(self) -> bool:
        return self._scenario.fault.kind == "stop"

    def _strike(self) -> None:
        """Brings about what the scenario has go wrong."""
        fault, machine = self._scenario.fault, self._machine
        victim = self._processes[fault.victim]
        diary = self._ranks[fault.victim].diary
        if fault.kind in ("none", "raises", "absent") or (diary.is_finished and fault.kind != "server crash"):
            return
        self._outcome.fault_at = machine.scheduler.now
        self._outcome.seated = self._seated()
        machine.scheduler.note("fault", fault.kind, fault.victim)
        deeds = {
            "slow": lambda: setattr(victim, "slowness_seconds", fault.for_seconds),
            "short stop": lambda: machine.stop(victim, fault.for_seconds),
            "short cut": lambda: machine.cut(victim, fault.for_seconds),
            "wall clock": lambda: setattr(machine.time, "wall_clock_steps_by", 86_400.0),
            "crash": lambda: machine.crash(victim, by_force=machine.scheduler.choices.random() < 0.5),
            "stop": lambda: machine.stop(victim, None),
            "cut": lambda: machine.cut(victim, None),
            "vanish": lambda: machine.vanish(victim),
            "reset": lambda: machine.reset(victim),
            "server crash": lambda: machine.crash(self._server_process),
        }
        deeds[fault.kind]()

    def _seated(self) -> frozenset[int]:
        """The ranks that the server has as members now."""
        if self._server is None:
            return frozenset()
        return frozenset(rank for _, rank in self._server._core._member_of.values())

    def _look_at_core(self, server: RendezvousServer) -> None:
        core = server._core
        left = {
            "seats": core._member_of,
            "generations": core._generations,
            "waits": core._waits._by_connection,
            "clocks": core._peers._peers,
        }
        self._outcome.leftovers += [f"the server's core has kept {name}" for name, kept in left.items() if kept]
        if core.next_deadline() is not None:
            self._outcome.leftovers.append("the server's core wants to be woken, and nobody is there")

    def _look_for_leftovers(self) -> None:
        for process in (self._server_process, *self._processes):
            if process.is_dead or process.is_stopped:
                continue
            names = [task.name for task in process.living_tasks]
            names += [f"descriptor {number} of {process.name}" for number in process.sockets]
            self._outcome.leftovers += [f"left: {name}" for name in names]
        if self._machine.time.wall_clock_reads:
            self._outcome.leftovers.append("the wall clock was looked at")
