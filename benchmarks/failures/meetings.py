"""Causes failures at the rendezvous, between ranks without gradsync's launcher."""

from __future__ import annotations

import secrets
import signal
import socket
from pathlib import Path

from failures.diary import ERROR, READY
from failures.scene import Scene

SERVER, INTRUDER = "server", "intruder"
_WORLD_SIZE = 2


def server_killed(scene: Scene) -> None:
    """`gradsync serve` dies while its ranks reduce."""
    address, secret = _serve(scene)
    _start_ranks(scene, address, secret, "all_reduce")
    scene.wait_for_ranks(_WORLD_SIZE)
    scene.send(SERVER, signal.SIGKILL)
    scene.wait_for_end("rank 0", "rank 1")


def duplicate_rank(scene: Scene) -> None:
    """A second rank 1 joins; the first must not be disturbed."""
    _intrude(scene, rank=1, world_size=_WORLD_SIZE)


def wrong_world_size(scene: Scene) -> None:
    """A rank joins with another world size."""
    _intrude(scene, rank=0, world_size=_WORLD_SIZE + 1)


def another_run(scene: Scene) -> None:
    """A rank of another run finds this run's server at its address."""
    _intrude(scene, rank=0, world_size=_WORLD_SIZE, is_of_another_run=True)


def port_in_use(scene: Scene) -> None:
    """Rank 0 is to host at a port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        variables = _place(0, _WORLD_SIZE) | {"GRADSYNC_ADDRESS": address}
        scene.start("rank 0", ["-m", "failures.in_ranks", "leaving", "none"], variables)
        scene.wait_for_end("rank 0")
    _ready_is_the_fault(scene)


def _intrude(scene: Scene, *, rank: int, world_size: int, is_of_another_run: bool = False) -> None:
    """Rank 1 waits, a process joins that must be refused, then rank 0 joins: both must end their work."""
    address, secret = _serve(scene)
    joined = ["-m", "failures.in_ranks", "leaving", "none"]
    scene.start("rank 1", joined, _place(1, _WORLD_SIZE) | _server_at(address, secret))
    scene.wait_for_ranks(1)
    other = _write_secret(scene, "other") if is_of_another_run else secret
    scene.start(INTRUDER, joined, _place(rank, world_size) | _server_at(address, other))
    scene.wait_for_end(INTRUDER)
    _ready_is_the_fault(scene)
    scene.start("rank 0", joined, _place(0, _WORLD_SIZE) | _server_at(address, secret))
    scene.wait_for_end("rank 0", "rank 1")
    scene.end(SERVER)
    scene.wait_for_end(SERVER)


def _ready_is_the_fault(scene: Scene) -> None:
    """The fault is that the refused process joins; its time is that of the call."""
    refused = scene.of(ERROR)[-1].pid if scene.of(ERROR) else -1
    for note in scene.of(READY):
        if note.pid == refused:
            scene.note_fault(note.at)


def _serve(scene: Scene) -> tuple[str, Path]:
    """Starts a rendezvous server; returns its address and the file with its secret."""
    secret = _write_secret(scene, "secret")
    arguments = ["--world-size", str(_WORLD_SIZE), "--secret-file", str(secret)]
    scene.start(SERVER, ["-m", "gradsync", "serve", *arguments])
    scene.wait_until(lambda: any(line.process == SERVER for line in scene.lines), "address of the server")
    return scene.lines[0].text.strip(), secret


def _write_secret(scene: Scene, name: str) -> Path:
    path = scene.folder / name
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n")
    return path


def _start_ranks(scene: Scene, address: str, secret: Path, phase: str) -> None:
    for rank in range(_WORLD_SIZE):
        variables = _place(rank, _WORLD_SIZE) | _server_at(address, secret)
        scene.start(f"rank {rank}", ["-m", "failures.in_ranks", phase, "none"], variables)


def _place(rank: int, world_size: int) -> dict[str, str]:
    here = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return here | {f"LOCAL_{name}": value for name, value in here.items()}


def _server_at(address: str, secret: Path) -> dict[str, str]:
    return {"GRADSYNC_ADDRESS": address, "GRADSYNC_HOSTED": "1", "GRADSYNC_SECRET_FILE": str(secret)}
