"""What each rank does in a run, through the real client, and how each of its calls has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradsync.rendezvous.client import RendezvousClient
from simulation.scenario import Fault, Scenario, Step
from simulation.substitution import Machine

SECRET = b"the secret of a simulated run..."
CONNECT_SECONDS, CALL_SECONDS = 6.0, 15.0
COLLECTIVE_SECONDS = 8.0  # after which a rank that waits in a collective says who is missing; longer than any detection
AT_ONCE_SECONDS = 30.0  # for calls without a deadline of their own, as the client has it
CLOSE_SECONDS = 3.0
SHORT_COLLECTIVE_SECONDS = 1.0  # likewise, where that is what the run is about
ABSENT_SECONDS = 3.0
_LOOK_SECONDS = 0.02


@dataclass
class Call:
    """One call of the client's, and how it has ended."""

    name: str
    began: float
    seconds: float  # that it may take by its own deadline
    ended: float | None = None
    value: Any = None
    error: BaseException | None = None


@dataclass
class Diary:
    """What one rank has seen."""

    calls: list[Call] = field(default_factory=list)
    generation: int = 0
    is_finished: bool = False  # it has come to the end of its program, one way or the other

    @property
    def error(self) -> BaseException | None:
        """The error that ended its program, if one did: the first one, where it has several threads."""
        failed = [call for call in self.calls if call.error is not None]
        return min(failed, key=lambda call: call.ended or 0.0).error if failed else None


class Ended(Exception):
    """The rank's program is over because of an error, which its diary has."""


class SimulatedRank:
    """One rank.

    Args:
        machine: what it runs on.
        scenario: what all do.
        rank: which it is.
        arrived: for each collective, who has come to it: what stands in for the data path.
    """

    def __init__(self, machine: Machine, scenario: Scenario, rank: int, arrived: dict[int, set[int]]) -> None:
        self.diary = Diary()
        self._machine = machine
        self._scenario = scenario
        self._rank = rank
        self._arrived = arrived
        self._client: RendezvousClient | None = None
        self._begun = 0

    def run(self, address: str) -> None:
        """Joins, takes all steps, and closes; or tells of its own error and abandons."""
        try:
            self._pause(0.05)
            self._client = self._call("connect", CONNECT_SECONDS, lambda: self._connect(address))
            self._client.describe_with(lambda: {"world": self._begun}, lambda: (f"rank {self._rank} is busy", {}))
            self.diary.generation = self._client.generation
            for step in self._scenario.steps:
                self._pause(0.05)
                self._misbehave(self._client, self._scenario.fault, step)
                getattr(self, "_" + step.kind.replace(" ", "_"))(self._client, step)
        except Ended:
            pass
        finally:
            if not self._machine.scheduler.process.is_dead:
                self._leave()
                self.diary.is_finished = True

    def _connect(self, address: str) -> RendezvousClient:
        size = self._scenario.world_size
        return RendezvousClient.connect(
            address, secret=SECRET, rank=self._rank, world_size=size, timeout_seconds=CONNECT_SECONDS
        )

    def _leave(self) -> None:
        if self._client is not None:
            with contextlib.suppress(Ended):
                self._call("close", CLOSE_SECONDS, self._client.close)

    def _call(self, name: str, seconds: float, function: Callable[[], Any]) -> Any:
        """Makes a call and writes down how it ends."""
        scheduler = self._machine.scheduler
        call = Call(name, scheduler.now, seconds)
        self.diary.calls.append(call)
        try:
            call.value = function()
        except Exception as error:
            call.error = error
            raise Ended from None
        finally:
            call.ended = scheduler.now
            scheduler.note(self._rank, name, type(call.error).__name__)
        return call.value

    def _pause(self, most_seconds: float) -> None:
        self._machine.time.sleep(self._machine.scheduler.choices.random() * most_seconds)

    def _misbehave(self, client: RendezvousClient, fault: Fault, step: Step) -> None:
        if fault.victim != self._rank or fault.at_step != step.number:
            return
        if fault.kind == "raises":
            self._call(
                "report_failure", AT_ONCE_SECONDS, lambda: client.report_failure(f"step {step.number} went wrong")
            )
            raise Ended
        self._machine.time.sleep(ABSENT_SECONDS)

    # The steps.

    def _barrier(self, client: RendezvousClient, step: Step) -> None:
        self._call(f"barrier {step.number}", CALL_SECONDS, lambda: client.barrier("all", timeout_seconds=CALL_SECONDS))

    def _unique_id(self, client: RendezvousClient, step: Step) -> None:
        root = step.number % self._scenario.world_size

        group = f"id {step.number}"
        if self._rank == root:
            made = bytes([step.number]) * 128
            self._call(f"set id {step.number}", AT_ONCE_SECONDS, lambda: client.set(group, made))

        def get() -> bytes:
            return client.get(group, from_rank=root, timeout_seconds=CALL_SECONDS)

        self._call(f"unique_id {step.number}", CALL_SECONDS, get)

    def _keys(self, client: RendezvousClient, step: Step) -> None:
        key, setter = f"key {step.number}", step.number % self._scenario.world_size
        if self._rank == setter:
            self._call(f"set {step.number}", AT_ONCE_SECONDS, lambda: client.set(key, b"%d" % step.number))
        self._call(f"get {step.number}", CALL_SECONDS, lambda: client.get(key, timeout_seconds=CALL_SECONDS))

    def _exchange(self, client: RendezvousClient, step: Step) -> None:
        def exchange() -> list[bytes]:
            return client.exchange(f"exchange {step.number}", b"%d" % self._rank, timeout_seconds=CALL_SECONDS)

        self._call(f"exchange {step.number}", CALL_SECONDS, exchange)

    def _leaving(self, client: RendezvousClient, step: Step) -> None:
        """Every rank but the first leaves a communicator, one after the other; the first one asks who has."""
        name = f"communicator {step.number}"
        if self._rank:
            client.announce_left(name, step.number)
        self._barrier(client, step)
        if not self._rank:
            left = self._call(f"left_ranks {step.number}", AT_ONCE_SECONDS, lambda: client.left_ranks(name))
            assert left == dict.fromkeys(range(1, self._scenario.world_size), step.number), left

    def _group(self, client: RendezvousClient, step: Step) -> None:
        """A group of all but rank 0, or of all, whose members meet under its name and are done with it."""
        first = step.number % 2 if self._scenario.world_size > 2 else 0
        members = list(range(first, self._scenario.world_size))[::-1]
        if self._rank in members:
            group = client.group(members, f"group {step.number}")
            self._call(
                f"group barrier {step.number}", CALL_SECONDS, lambda: group.barrier(timeout_seconds=CALL_SECONDS)
            )
            group.close()

    def _two_threads(self, client: RendezvousClient, step: Step) -> None:
        """Two threads of a rank wait at once: one of them reads for both."""

        def meet(name: str) -> None:
            self._call(
                f"{name} {step.number}", CALL_SECONDS, lambda: client.barrier(name, timeout_seconds=CALL_SECONDS)
            )

        def meet_beside() -> None:
            with contextlib.suppress(Ended):
                meet("beside")

        scheduler = self._machine.scheduler
        other = scheduler.process.start("beside", meet_beside)
        meet("barrier")
        scheduler.wait(lambda: other.is_over, None)

    def _compute(self, client: RendezvousClient, step: Step) -> None:
        until = self._machine.scheduler.now + self._machine.scheduler.choices.random() * 0.6
        while self._machine.scheduler.now < until:
            self._call("check", 0.0, client.check)
            self._pause(2 * _LOOK_SECONDS)

    def _collective(self, client: RendezvousClient, step: Step) -> None:
        """Waits for the others outside of the rendezvous, as a collective over shared memory does."""
        self._begun += 1
        arrived = self._arrived.setdefault(step.number, set())
        arrived.add(self._rank)
        began = self._machine.scheduler.now
        is_told = False
        while len(arrived) < self._scenario.world_size:
            self._call("check", 0.0, client.check)
            waited = self._machine.scheduler.now - began
            claim = ("world", self._begun, f"all_reduce #{self._begun}", waited, None)
            if waited > self._patience:
                self._call("report_stuck", 1.0, lambda claim=claim: client.report_stuck(*claim))
            if waited > 0.5 and not is_told:
                is_told = True
                client.report_waiting(*claim)
            self._machine.time.sleep(_LOOK_SECONDS)

    @property
    def _patience(self) -> float:
        is_short = self._scenario.fault.kind == "absent"
        return SHORT_COLLECTIVE_SECONDS if is_short else COLLECTIVE_SECONDS
