"""The soak of tests/prove/soak/soak.py in a shortened form: no hang, and no wrong bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from soak import soak

from rank_processes import run_ranks


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_soak_over_shared_memory(world_size: int, seed: int) -> None:
    assert run_ranks(world_size, soak, 350, seed, backend="shm") == [350] * world_size


def test_eight_ranks() -> None:
    """On few cores: nothing that waits may starve what it waits for."""
    assert run_ranks(8, soak, 80, 4, backend="shm") == [80] * 8


def test_soak_on_the_stand_in_for_nccl() -> None:
    assert run_ranks(2, soak, 200, 3, backend="nccl", stand_in=True) == [200] * 2


def test_the_command() -> None:
    script = Path(__file__).with_name("soak.py")
    command = [sys.executable, str(script), "--calls", "50", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "2 ranks: 50 calls, every bit right" in done.stdout
