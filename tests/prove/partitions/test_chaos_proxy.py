"""The chaos proxy: what it does to bytes, and that ranks behind it end with right sums or with typed errors."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import chaos_runs
import pytest
from chaos_proxy import (
    CORRUPT,
    DUPLICATE,
    INCIDENTS,
    RESET,
    TO_CLIENT,
    TO_SERVER,
    TRUNCATE,
    ChaosProxy,
    Incident,
    Plan,
)
from chaos_runs import VICTIM, run_through

_UNACKED = struct.Struct("=24xI")
TEXT = b"the quick brown fox"
AFTER_MEETING_BYTES = 600  # in either direction: the ranks train by then


@contextmanager
def echo_server() -> Iterator[str]:
    """Gives the address of a server that sends each connection's bytes back to it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            with stream:
                try:
                    while data := stream.recv(1000):
                        stream.sendall(data)
                except OSError:
                    continue

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()


@contextmanager
def connected(plan: Plan) -> Iterator[tuple[socket.socket, ChaosProxy]]:
    with echo_server() as address, ChaosProxy(address, plan) as proxy:
        host, port = proxy.address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            yield client, proxy


def received(client: socket.socket, size: int = 1000) -> bytes:
    """Gives what comes until the end, or so many bytes."""
    found = b""
    while len(found) < size and (data := client.recv(size - len(found))):
        found += data
    return found


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(piece_bytes=1), Plan(piece_bytes=7, delay_seconds=0.01, jitter_seconds=0.01)], ids=str
)
def test_bytes_pass_in_order(plan: Plan) -> None:
    with connected(plan) as (client, _):
        client.sendall(TEXT)
        assert received(client, len(TEXT)) == TEXT


def test_delay_comes_before_each_arrival() -> None:
    with connected(Plan(delay_seconds=0.05)) as (client, _):
        began = time.monotonic()
        client.sendall(TEXT)
        received(client, len(TEXT))
        assert time.monotonic() - began >= 0.1  # there and back


@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
def test_truncated_in_the_middle(direction: str) -> None:
    with connected(Plan(incident=Incident(TRUNCATE, direction, 4))) as (client, _):
        client.sendall(TEXT)
        assert received(client) in ((b"the ", b"") if direction == TO_SERVER else (b"the ",))


def test_reset() -> None:
    with connected(Plan(incident=Incident(RESET, TO_SERVER, 0))) as (client, _):
        client.sendall(TEXT)
        with pytest.raises(ConnectionResetError):
            received(client)


def test_duplicate_and_corrupt_bytes() -> None:
    with connected(Plan(incident=Incident(DUPLICATE, TO_SERVER, 4))) as (client, _):
        client.sendall(TEXT)
        assert received(client, 2 * len(TEXT)) == TEXT + TEXT
    with connected(Plan(incident=Incident(CORRUPT, TO_CLIENT, 4))) as (client, _):
        client.sendall(TEXT)
        got = received(client, len(TEXT))
        assert [at for at in range(len(TEXT)) if got[at] != TEXT[at]] == [4]


def unacknowledged(stream: socket.socket) -> int:
    return int(_UNACKED.unpack_from(stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64))[0])


def test_dropped_without_a_word_and_unacknowledged() -> None:
    with connected(Plan()) as (client, proxy):
        client.sendall(TEXT)
        assert received(client, len(TEXT)) == TEXT
        proxy.drop_everything()
        client.sendall(TEXT)
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert unacknowledged(client) > 0


def test_only_the_first_connection_has_the_incident() -> None:
    with connected(Plan(incident=Incident(TRUNCATE, TO_SERVER, 0))) as (client, proxy):
        client.sendall(TEXT)
        assert received(client) == b""
        host, port = proxy.address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as second:
            second.sendall(TEXT)
            assert received(second, len(TEXT)) == TEXT


def test_a_seed_draws_the_same_plan_and_seeds_draw_all() -> None:
    plans = [Plan.drawn(seed, most_bytes=500) for seed in range(60)]
    assert plans == [Plan.drawn(seed, most_bytes=500) for seed in range(60)]
    assert {plan.incident.kind for plan in plans if plan.incident} == set(INCIDENTS)


# -- Ranks behind it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", [Plan(piece_bytes=1), Plan(delay_seconds=0.02, jitter_seconds=0.03)], ids=["byte by byte", "delayed"]
)
def test_a_slow_network_changes_no_sum(plan: Plan) -> None:
    run = run_through(plan)
    assert run.complaints == ()
    assert run.is_unharmed


@pytest.mark.parametrize("kind", [TRUNCATE, RESET, DUPLICATE])
def test_what_breaks_the_handshake_is_tried_again(kind: str) -> None:
    run = run_through(Plan(incident=Incident(kind, TO_SERVER, 30)))
    assert run.complaints == ()
    assert run.is_unharmed


@pytest.mark.parametrize("kind", INCIDENTS)
@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
def test_what_breaks_a_run_is_told_and_names_the_culprit(kind: str, direction: str) -> None:
    run = run_through(Plan(incident=Incident(kind, direction, AFTER_MEETING_BYTES)), steps=None)
    assert run.complaints == ()
    assert run.errors  # of all ranks, but for those that the launcher ends before they have found it
    assert run.exit_code == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_random_incident_is_survived_or_told(seed: int) -> None:
    run = run_through(Plan.drawn(seed, most_bytes=900))
    assert run.complaints == ()


def test_the_judge_complains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_runs, "_TOLD_SECONDS", -10.0)
    late = run_through(Plan(incident=Incident(RESET, TO_SERVER, AFTER_MEETING_BYTES)), steps=None)
    assert [text.partition(" after ")[0] for text in late.complaints] == ["told"]
    monkeypatch.setattr(chaos_runs, "_TOLD_SECONDS", 0.5)
    monkeypatch.setattr(chaos_runs, "_judged", judged_with_another_victim)
    wrong = run_through(Plan(incident=Incident(RESET, TO_SERVER, AFTER_MEETING_BYTES)), steps=None)
    assert any(text.startswith(f"rank {VICTIM - 1} blames {VICTIM}") for text in wrong.complaints)


_judged = chaos_runs._judged


def judged_with_another_victim(*args: object) -> chaos_runs.ProxiedRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chaos_runs, "VICTIM", VICTIM + 1)
        return _judged(*args)  # type: ignore[arg-type]
