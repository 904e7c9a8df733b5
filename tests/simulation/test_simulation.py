"""The real server and clients on a network, a clock and threads that a seed rules.

    pytest tests/simulation                   # 200 seeds; -m slow plays 20,000
    pytest tests/simulation --seeds 1000
    pytest tests/simulation --seed 42 -s      # one, with all that happens

What each run has to be is in promises.py, what is drawn in scenario.py, and what is exchanged for the operating system
in system.py, in one list. The time limits are those that ship.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradsync.errors import CollectiveTimeout, GradsyncError, RankFailed, RendezvousTimeout
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer
from simulation.network import Weather
from simulation.program import ABSENT_SECONDS
from simulation.promises import PROMISES, violations
from simulation.run import play
from simulation.scenario import FAULTS, KINDS, draw
from simulation.sockets import VirtualSocket
from simulation.system import System

FIRST_OF_EACH_FAULT = {draw(seed).fault.kind: seed for seed in reversed(range(200))}


def test_every_promise_holds(seeds: range, pytestconfig: pytest.Config) -> None:
    found = []
    for seed in seeds:
        outcome = play(seed)
        if len(seeds) == 1:
            print(outcome.story())
        found += [f"seed {seed}: {violation}" for violation in violations(outcome)]
        if found:
            found.append(f"to replay it: python -m pytest tests/simulation --seed {seed}")
            break
    assert not found, "\n".join(found)


def test_the_seeds_reach_what_they_are_for() -> None:
    """Every fault that is not harmless is noticed by somebody, every kind of step succeeds, the whole seam is used."""
    noticed, succeeded, used = Counter[str](), set[str](), set[str]()
    for seed in range(150):
        outcome = play(seed)
        noticed[outcome.scenario.fault.kind] += any(diary.error is not None for diary in outcome.diaries)
        if all(diary.error is None for diary in outcome.diaries):
            succeeded |= {step.kind for step in outcome.scenario.steps}
        used |= outcome.used
    assert {kind for kind in FAULTS if noticed[kind]} == {kind for kind in FAULTS if not draw_is_harmless(kind)}
    assert succeeded == set(KINDS)
    assert set(System(0, Weather()).stand_ins()) - used == {"time.time"}  # the wall clock, which nobody asks


def draw_is_harmless(kind: str) -> bool:
    return draw(FIRST_OF_EACH_FAULT[kind]).fault.is_harmless


@pytest.mark.parametrize("kind", FAULTS)
def test_a_seed_replays_exactly(kind: str) -> None:
    seed = FIRST_OF_EACH_FAULT[kind]
    first, second = play(seed), play(seed)
    assert first.trace == second.trace
    assert [repr(diary.error) for diary in first.diaries] == [repr(diary.error) for diary in second.diaries]
    assert play(seed + 1000).digest != first.digest


def test_a_seed_replays_in_another_process() -> None:
    """Where texts have other hashes, and no other seeds were played before."""
    code = "from simulation.run import play; print(play(13).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == play(13).digest


def test_only_tasks_have_the_simulated_names() -> None:
    """Neither what runs beside a run, nor what comes after it."""
    before, seen = time.monotonic, []
    system = System(0, Weather())
    with system.in_effect():
        thread = threading.Thread(target=lambda: seen.append((time.monotonic(), threading.get_ident())))
        thread.start()
        thread.join()
        system.new_process("one", "here").start("main", lambda: seen.append((time.monotonic(), 0)))
        system.scheduler.run()
    assert abs(seen[0][0] - before()) < 600
    assert seen[0][1] == thread.ident
    assert seen[1] == (system.scheduler.now, 0)
    assert time.monotonic is before


def test_what_has_no_stand_in_is_refused() -> None:
    def ask() -> None:
        with pytest.raises(NotImplementedError, match="threading.RLock"):
            threading.RLock()

    system = System(0, Weather())
    with system.in_effect():
        system.new_process("one", "here").start("main", ask)
        system.scheduler.run()


def test_an_asyncio_server_runs_in_it() -> None:
    """Its loop, its timers and calls from another thread: what is exchanged is enough for a server made of it."""
    seen: list[tuple[object, float]] = []
    system = System(1, Weather(most_bytes=3))

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.data_received = transport.write

        def connection_lost(self, exc: Exception | None) -> None:
            seen.append(("lost", time.monotonic()))

    async def serve(listener: socket.socket) -> None:
        server = await asyncio.get_running_loop().create_server(Echo, sock=listener)
        await asyncio.sleep(5.0)
        server.close()

    def host() -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 4000))
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=lambda: loop.run_until_complete(serve(listener)))
        thread.start()
        time.sleep(1.0)
        loop.call_soon_threadsafe(lambda: seen.append(("called", time.monotonic())))
        thread.join()
        loop.close()

    def talk() -> None:
        stream, poll, heard = socket.create_connection((b"127.0.0.1", 4000), 5.0), select.poll(), b""
        stream.setblocking(False)
        poll.register(stream, select.POLLIN)
        for at in range(6):
            stream.send(b"hello!"[at : at + 1])
            poll.poll(1000.0)
            heard += stream.recv(1)
        seen.append((heard, 0.0))
        stream.close()

    with system.in_effect():
        system.new_process("server", "here").start("main", host)
        client = system.new_process("client", "here")
        system.scheduler.at(1000.5, lambda: client.start("main", talk))
        system.scheduler.run()
    assert [what for what, _ in seen] == [b"hello!", "lost", "called"]
    assert seen[2][1] == 1001.0
    assert system.scheduler.now == 1005.0


# Each promise once with a fault that breaks it, made at the public face of client and server or in the network.

METHODS = ("barrier", "exchange", "get", "set", "check", "left_ranks", "report_stuck")
Fault = Callable[[pytest.MonkeyPatch], dict[str, Any]]


def with_client(**methods: Any) -> dict[str, Any]:
    return {"client_class": type("FaultyClient", (RendezvousClient,), methods)}


def with_errors(convert: Callable[[RendezvousClient, GradsyncError], BaseException]) -> dict[str, Any]:
    """A client whose errors are others."""

    def wrap(name: str) -> Callable[..., Any]:
        def call(self: RendezvousClient, *args: Any, **options: Any) -> Any:
            try:
                return getattr(RendezvousClient, name)(self, *args, **options)
            except GradsyncError as error:
                raise convert(self, error) from None

        return call

    return with_client(**{name: wrap(name) for name in METHODS})


def with_barrier(then: Callable[[RendezvousClient], object]) -> dict[str, Any]:
    """A client that does something more in each barrier."""

    def barrier(self: RendezvousClient, *args: Any, **options: Any) -> None:
        RendezvousClient.barrier(self, *args, **options)
        then(self)

    return with_client(barrier=barrier)


def a_rank_fails_without_reason(_: pytest.MonkeyPatch) -> dict[str, Any]:
    def fail(client: RendezvousClient) -> None:
        if client.rank == 1:
            raise RankFailed("it seemed so", rank=0, phase="running")

    return with_barrier(fail)


def another_rank_is_blamed(_: pytest.MonkeyPatch) -> dict[str, Any]:
    def blame(client: RendezvousClient, error: GradsyncError) -> GradsyncError:
        if isinstance(error, RankFailed):
            error.rank = (error.rank + 1) % client.world_size
        return error

    return with_errors(blame)


def one_rank_blames_another(_: pytest.MonkeyPatch) -> dict[str, Any]:
    def blame(client: RendezvousClient, error: GradsyncError) -> GradsyncError:
        return error if client.rank else CollectiveTimeout("late", missing_ranks=(client.world_size - 1,))

    return with_errors(blame)


def a_failure_comes_late(_: pytest.MonkeyPatch) -> dict[str, Any]:
    def wait(_: RendezvousClient, error: GradsyncError) -> GradsyncError:
        time.sleep(DETECTION_AND_MORE_SECONDS)
        return error

    return with_errors(wait)


def the_server_serves_once(_: pytest.MonkeyPatch) -> dict[str, Any]:
    class OneGeneration(RendezvousServer):
        def wait_until_empty(self, timeout_seconds: float) -> bool:
            is_empty = super().wait_until_empty(timeout_seconds)
            self.stop()
            return is_empty

    return {"server_class": OneGeneration}


def the_server_never_sleeps(_: pytest.MonkeyPatch) -> dict[str, Any]:
    class Restless(RendezvousServer):
        def start(self) -> None:
            super().start()
            threading.Thread(target=self.look, name="look").start()

        def look(self) -> None:
            while not self._stopping:  # nothing public says that it was stopped
                time.sleep(0.5)

    return {"server_class": Restless}


def the_server_forgets_a_rank(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """It answers the handshake and the join of its first connection, and says nothing more there."""
    send, sent = VirtualSocket.send, Counter[int]()

    def send_some(self: VirtualSocket, data: bytes) -> int:
        if self.process.name != "server" or self.peer_address is None or self.fileno() % 3:
            return send(self, data)
        sent[id(self)] += 1
        return send(self, data) if sent[id(self)] <= 4 else len(data)

    patch.setattr(VirtualSocket, "send", send_some)
    return {}


def a_stream_loses_a_byte(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    recv = VirtualSocket.recv

    def recv_less(self: VirtualSocket, size: int) -> bytes:
        data = recv(self, size)
        return data[:-1] if len(data) > 100 else data

    patch.setattr(VirtualSocket, "recv", recv_less)
    return {}


DETECTION_AND_MORE_SECONDS = 8.0 + ABSENT_SECONDS
FAULTY: list[tuple[str, Fault]] = [
    ("every_call_ends_in_time", lambda _: with_barrier(lambda _: time.sleep(60))),
    ("every_rank_that_lives_comes_to_its_end", lambda _: with_barrier(lambda _: threading.Event().wait())),
    ("every_error_is_one_of_ours", lambda _: with_errors(lambda _, error: KeyError(str(error)))),
    ("nothing_fails_unless_something_is_wrong", a_rank_fails_without_reason),
    ("nothing_fails_unless_something_is_wrong", a_stream_loses_a_byte),
    ("nobody_waits_without_need", lambda _: with_barrier(lambda _: time.sleep(5))),
    ("nobody_waits_without_need", the_server_forgets_a_rank),
    ("values_are_right", lambda _: with_client(exchange=lambda *args, **options: [b"0", b"0"])),
    ("survivors_name_the_culprit", another_rank_is_blamed),
    ("survivors_hear_of_a_rank", lambda _: with_errors(lambda _, error: RendezvousTimeout("nobody came"))),
    ("survivors_hear_of_it_in_time", a_failure_comes_late),
    ("survivors_agree", one_rank_blames_another),
    ("the_next_generation_meets", the_server_serves_once),
    ("nothing_is_left", lambda _: with_client(close=lambda self: None)),
    ("nothing_is_left", the_server_never_sleeps),
    ("nothing_is_left", lambda _: with_barrier(lambda _: time.time())),
]


@pytest.mark.parametrize(("promise", "fault"), FAULTY, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_promise_is_noticed(promise: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = fault(monkeypatch)
    broken = (v.partition(":")[0] for seed in range(200) for v in violations(play(seed, **faulty)))
    assert promise in broken


def test_each_promise_has_a_fault_that_breaks_it() -> None:
    assert {promise for promise, _ in FAULTY} == {promise.__name__ for promise in PROMISES}
