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
from simulation.promises import PROMISES, check, violations
from simulation.run import play
from simulation.scenario import FAULTS, KINDS, draw
from simulation.system import System

FIRST_OF_EACH_FAULT = {draw(seed).fault.kind: seed for seed in reversed(range(200))}


def test_every_promise_holds(seeds: range) -> None:
    check(seeds, play)


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


def test_only_tasks_have_the_simulated_names_and_no_others_that_would_wait() -> None:
    """Neither what runs beside a run, nor what comes after it."""
    before, seen = time.monotonic, []

    def ask() -> None:
        seen.append((time.monotonic(), 0))
        with pytest.raises(NotImplementedError, match="threading.RLock"):
            threading.RLock()

    system = System(0, Weather())
    with system.in_effect():
        thread = threading.Thread(target=lambda: seen.append((time.monotonic(), threading.get_ident())))
        thread.start()
        thread.join()
        system.new_process("one", "here").start("main", ask)
        system.scheduler.run()
    assert abs(seen[0][0] - before()) < 600
    assert seen[0][1] == thread.ident
    assert seen[1] == (system.scheduler.now, 0)
    assert time.monotonic is before


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


# Each promise once with a fault that breaks it, made at the public face of client and server.

METHODS = ("barrier", "exchange", "get", "set", "check", "left_ranks", "report_stuck")


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


def fail_without_reason(client: RendezvousClient) -> None:
    if client.rank == 1:
        raise RankFailed("it seemed so", rank=0, phase="running")


def blame_another(client: RendezvousClient, error: GradsyncError) -> GradsyncError:
    if isinstance(error, RankFailed):
        error.rank = (error.rank + 1) % client.world_size
    return error


def blame_alone(client: RendezvousClient, error: GradsyncError) -> GradsyncError:
    return error if client.rank else CollectiveTimeout("late", missing_ranks=(client.world_size - 1,))


def come_late(_: RendezvousClient, error: GradsyncError) -> GradsyncError:
    time.sleep(8.0 + ABSENT_SECONDS)
    return error


class OneGeneration(RendezvousServer):
    def wait_until_empty(self, timeout_seconds: float) -> bool:
        is_empty = super().wait_until_empty(timeout_seconds)
        self.stop()
        return is_empty


FAULTY: dict[str, dict[str, Any]] = {
    "every_call_ends_in_time": with_barrier(lambda _: time.sleep(60)),
    "every_rank_that_lives_comes_to_its_end": with_barrier(lambda _: threading.Event().wait()),
    "every_error_is_one_of_ours": with_errors(lambda _, error: KeyError(str(error))),
    "nothing_fails_unless_something_is_wrong": with_barrier(fail_without_reason),
    "nobody_waits_without_need": with_barrier(lambda _: time.sleep(5)),
    "values_are_right": with_client(exchange=lambda *args, **options: [b"0", b"0"]),
    "survivors_name_the_culprit": with_errors(blame_another),
    "survivors_hear_of_a_rank": with_errors(lambda _, error: RendezvousTimeout("nobody came")),
    "survivors_hear_of_it_in_time": with_errors(come_late),
    "survivors_agree": with_errors(blame_alone),
    "the_next_generation_meets": {"server_class": OneGeneration},
    "nothing_is_left": with_client(close=lambda self: None),
}


@pytest.mark.parametrize("promise", [promise.__name__ for promise in PROMISES])
def test_a_broken_promise_is_noticed(promise: str) -> None:
    runs = (play(seed, **FAULTY[promise]) for seed in range(200))
    assert promise in (broken.partition(":")[0] for run in runs for broken in violations(run))
