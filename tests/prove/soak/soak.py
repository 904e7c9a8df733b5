"""A soak: thousands of collectives of every kind, in groups too, at once and in the background, with random pauses.

    python tests/prove/soak/soak.py                        # 10,000 calls on 2 and on 4 ranks over shared memory
    python tests/prove/soak/soak.py --calls 500 --ranks 3

All in one process lifetime; each result is checked bit for bit. The tests run it in a shortened form.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "tools")]

from programs import KINDS, Step, draw_step, playing, values

import gradsync as gs
from contract import KITS

T = TypeVar("T")

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int8", "int32", "int64", "uint16", "bool")
GRADIENTS = "gradients"
CALLS_OF_ONE_PROGRAM = 250  # then its groups are closed, and others made
PAUSE_SECONDS = 2e-3


class Seeded:
    """Choices made by a random generator, the same on every rank."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def among(self, options: Sequence[T]) -> T:
        return options[int(self._generator.integers(len(options)))]

    def number(self, low: int, high: int) -> int:
        return int(self._generator.integers(low, high + 1))

    def magnitude(self, most: int) -> int:
        """Returns an integer of any magnitude up to `most`."""
        return int(10 ** (self._generator.random() * np.log10(most)))


def soak(comm: Any, calls: int, seed: int) -> int:
    """Runs on every rank. Every choice comes from `seed`, but the pauses, which differ by rank.

    Returns the number of calls that were made; raises AssertionError for a wrong bit.
    """
    choices = Seeded(seed)
    pauses = np.random.default_rng([seed, comm.rank])
    callback = gs.AllreduceCallback("sum", comm, threshold_bytes=100_000)
    n = comm.world_size
    groups = [tuple(range(n)), tuple(range(n - 1)), tuple(range(1, n)), tuple(range(0, n, 2))]
    for begin in range(0, calls, CALLS_OF_ONE_PROGRAM):
        with playing(comm, KITS["numpy"](), groups) as player:
            for call in range(begin, min(calls, begin + CALLS_OF_ONE_PROGRAM)):
                if pauses.random() < 0.02:
                    time.sleep(pauses.random() * PAUSE_SECONDS)
                step = _draw(choices, groups)
                if step.kind == GRADIENTS:
                    _check_gradients(comm, callback, choices, call)
                else:
                    player.play(step)
    return calls


def _draw(choices: Seeded, groups: Sequence[tuple[int, ...]]) -> Step:
    # Sizes of every magnitude, and those around the limits at which the way of a collective changes.
    most_rows = choices.among([1, 31, 1000, 32_768, 32_769, choices.magnitude(100_000)])
    return draw_step(choices, groups, dtypes=DTYPES, most_rows=most_rows, kinds=(*KINDS, GRADIENTS))


def _check_gradients(comm: Any, callback: gs.AllreduceCallback, choices: Seeded, call: int) -> None:
    sizes = [choices.number(0, 20_000) for _ in range(6)]
    with callback.backward():
        futures = [callback(i, values(comm.rank, call + i, "int64", (size,))) for i, size in enumerate(sizes)]
    for i, (size, future) in enumerate(zip(sizes, futures, strict=True)):
        want = sum(values(rank, call + i, "int64", (size,)) for rank in range(comm.world_size))
        assert future.result().tobytes() == np.asarray(want, np.int64).tobytes(), f"call {call}: gradient {i}"


def run(ranks: int, calls: int, seed: int) -> None:
    began = time.monotonic()
    done = gs.launch(functools.partial(_on_rank, calls, seed), nprocs=ranks)
    print(f"{ranks} ranks: {done[0]} calls, every bit right, {time.monotonic() - began:.1f} s", flush=True)


def _on_rank(calls: int, seed: int) -> int:
    with gs.init_process_group("shm", collective_timeout_seconds=60.0) as comm:
        return soak(comm, calls, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Thousands of random collectives over shared memory, each checked.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for ranks in options.ranks:
        run(ranks, options.calls, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
