"""The fixture of this folder; the rest is in clients.py and peer.py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from commands import Commands, Running
from rendezvous.peer import SECRET


@pytest.fixture
def serve(cli: Commands) -> Callable[[int], tuple[Running, str]]:
    """serve(n) runs `gradsync serve` for n ranks, with the secret on standard input, and gives it with its address."""

    def start(size: int) -> tuple[Running, str]:
        process = cli.start("serve", "--world-size", size, "--secret-file", "-", stdin=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(SECRET.hex() + "\n")
        process.stdin.flush()
        return process, process.stdout.readline().strip()

    return start
