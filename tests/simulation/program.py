"""What each rank does in a run, through the real client, and how each of its calls has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradsync.errors import GradsyncError
from gradsync.rendezvous.client import RendezvousClient
from simulation.scenario import Fault, Scenario, Step
from simulation.system import System

SECRET = b"the secret of a simulated run..."
# What the program asks for, in public arguments.
CONNECT_SECONDS, CALL_SECONDS = 6.0, 15.0
COLLECTIVE_SECONDS = 8.0  # after which a rank that waits in a collective says who is missing; longer than any detection
SHORT_COLLECTIVE_SECONDS = 1.0  # likewise, where that is what the run is about
ABSENT_SECONDS = 3.0
# How long calls may take that have no argument for it: what their docstrings say.
AT_ONCE_SECONDS = 30.0
STUCK_SECONDS = 10.0
CLOSE_SECONDS = 3.0
LOOK_SECONDS = 0.02


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
    is_finished: bool = False  # it has come to the end of its program, one way or the other

    @property
    def failed(self) -> Call | None:
        """The call whose error ended the program, if one did: the first one, where it has several threads."""
        failed = [call for call in self.calls if call.error is not None]
        return min(failed, key=lambda call: call.ended or 0.0) if failed else None

    @property
    def error(self) -> BaseException | None:
        return None if self.failed is None else self.failed.error

    def find(self, name: str) -> Call | None:
        return next((call for call in self.calls if call.name == name), None)


class Ended(Exception):
    """The rank's program is over because of an error, which its diary has."""


class SimulatedRank:
    """One rank.

    Args:
        system: what it runs on.
        scenario: what all do.
        rank: which it is.
        arrived: for each collective, who has come to it: what stands in for the data path.
        client_class: the client, or one with a fault.
    """

    def __init__(
        self,
        system: System,
        scenario: Any,
        rank: int,
        arrived: dict[Any, set[int]],
        client_class: type[RendezvousClient],
    ) -> None:
        self.diary = Diary()
        self._scheduler = system.scheduler
        self._scenario: Scenario = scenario
        self._rank = rank
        self._arrived = arrived
        self._client_class = client_class
        self._client: RendezvousClient | None = None
        self._begun = 0

    def run(self, address: str) -> None:
        """Joins, takes all steps, and closes; after an error it only closes."""
        try:
            self._pause(self._scenario.delays[self._rank])
            client = self._connect(address)
            client.describe_with(lambda: {"world": self._begun}, lambda: (f"rank {self._rank} is busy", {}))
            for step in self._scenario.steps:
                self._pause(0.05)
                self._misbehave(client, self._scenario.fault, step)
                getattr(self, "_" + step.kind.replace(" ", "_"))(client, step)
        except Ended:
            pass
        finally:
            self._leave()

    def run_again(self, address: str) -> None:
        """Meets the others in a new generation of the same server."""
        try:
            client = self._connect(address)
            self._call("barrier", CALL_SECONDS, lambda: client.barrier("all", timeout_seconds=CALL_SECONDS))
        except Ended:
            pass
        finally:
            self._leave()

    def _connect(self, address: str) -> RendezvousClient:
        def connect() -> int:
            self._client = self._client_class.connect(
                address,
                secret=SECRET,
                rank=self._rank,
                world_size=self._scenario.world_size,
                timeout_seconds=CONNECT_SECONDS,
            )
            return self._client.generation

        self._call("connect", CONNECT_SECONDS, connect)
        assert self._client is not None
        return self._client

    def _leave(self) -> None:
        if self._scheduler.process.is_dead:
            return
        if self._client is not None:
            with contextlib.suppress(Ended, GradsyncError):
                self._call("close", CLOSE_SECONDS, self._client.close)
        self.diary.is_finished = True

    def _call(self, name: str, seconds: float, function: Callable[[], Any]) -> Any:
        """Makes a call and writes down how it ends; an error ends the program."""
        call = self._note_call(name, seconds, function)
        if call.error is not None:
            raise Ended
        return call.value

    def _note_call(self, name: str, seconds: float, function: Callable[[], Any]) -> Call:
        call = Call(name, self._scheduler.now, seconds)
        self.diary.calls.append(call)
        try:
            call.value = function()
        except Exception as error:
            call.error = without_frames(error)
        call.ended = self._scheduler.now  # not where the process dies meanwhile
        self._scheduler.note(self._rank, name, type(call.error).__name__)
        return call

    def _pause(self, most_seconds: float) -> None:
        self._scheduler.sleep(self._scheduler.choices.random() * most_seconds)

    def _misbehave(self, client: RendezvousClient, fault: Fault, step: Step) -> None:
        if fault.victim != self._rank or fault.at_step != step.number:
            return
        if fault.kind == "raises":
            reason = f"step {step.number} went wrong"
            self._call("report_failure", AT_ONCE_SECONDS, lambda: client.report_failure(reason))
            raise Ended
        self._scheduler.sleep(ABSENT_SECONDS)

    # The steps.

    def _barrier(self, client: RendezvousClient, step: Step, name: str = "barrier") -> None:
        self._call(f"{name} {step.number}", CALL_SECONDS, lambda: client.barrier(name, timeout_seconds=CALL_SECONDS))

    def _unique_id(self, client: RendezvousClient, step: Step) -> None:
        root, key = step.number % self._scenario.world_size, f"id {step.number}"
        if self._rank == root:
            made = bytes([step.number]) * 128
            self._call(f"set id {step.number}", AT_ONCE_SECONDS, lambda: client.set(key, made))

        def get() -> bytes:
            return client.get(key, from_rank=root, timeout_seconds=CALL_SECONDS)

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
            self._call(f"left_ranks {step.number}", AT_ONCE_SECONDS, lambda: client.left_ranks(name))

    def _group(self, client: RendezvousClient, step: Step) -> None:
        """A group of all but rank 0, or of all, whose members meet under its name and are done with it."""
        first = step.number % 2 if self._scenario.world_size > 2 else 0
        members = list(range(first, self._scenario.world_size))[::-1]
        if self._rank in members:
            group = client.group(members, f"group {step.number}")
            self._call(f"group {step.number}", CALL_SECONDS, lambda: group.barrier(timeout_seconds=CALL_SECONDS))
            group.close()

    def _two_threads(self, client: RendezvousClient, step: Step) -> None:
        """Two threads of a rank wait at once."""

        def meet_beside() -> None:
            with contextlib.suppress(Ended):
                self._barrier(client, step, "beside")

        other = self._scheduler.process.start("beside", meet_beside)
        self._barrier(client, step)
        self._scheduler.wait(lambda: other.is_over, None)

    def _compute(self, client: RendezvousClient, step: Step) -> None:
        until = self._scheduler.now + self._scheduler.choices.random() * 0.6
        while self._scheduler.now < until:
            self._call("check", 0.0, client.check)
            self._pause(2 * LOOK_SECONDS)

    def _collective(self, client: RendezvousClient, step: Step) -> None:
        """Waits for the others outside of the rendezvous, as a collective over shared memory does."""
        self._begun += 1
        arrived = self._arrived.setdefault(step.number, set())
        arrived.add(self._rank)
        began, has_reported = self._scheduler.now, False
        patience = SHORT_COLLECTIVE_SECONDS if self._scenario.fault.kind == "absent" else COLLECTIVE_SECONDS
        while len(arrived) < self._scenario.world_size:
            self._call("check", 0.0, client.check)
            waited = self._scheduler.now - began
            wait = ("world", self._begun, f"all_reduce #{self._begun}", waited, None)
            if waited > patience:
                self._call("report_stuck", STUCK_SECONDS, lambda wait=wait: client.report_stuck(*wait))
            if waited > 0.5 and not has_reported:
                has_reported = True
                client.report_waiting(*wait)
            self._scheduler.sleep(LOOK_SECONDS)


def without_frames(error: BaseException) -> BaseException:
    """Returns the error, which keeps nothing of the run alive any more."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__, link = None, link.__cause__ or link.__context__
    return error
