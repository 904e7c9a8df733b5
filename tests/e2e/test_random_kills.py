"""Ranks are killed at random moments: a training that restarts from its checkpoints ends as if nothing had been."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytestmark = pytest.mark.slow

RANKS = 3
SCRIPT = """
    import os, random, signal, sys, threading
    from pathlib import Path

    folder, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with open(folder / f"starts of {os.environ['RANK']}", "a") as file:
        start = file.tell()
        file.write(".")
    drawn = random.Random(f"{seed} {start}")
    victim, after, how = drawn.randrange(3), drawn.uniform(0.0, 0.8), drawn.choice(["KILL"] * 4 + ["STOP"])
    if start < kills and int(os.environ["RANK"]) == victim:  # while it boots, meets, trains or writes a checkpoint
        timer = threading.Timer(after, lambda: os.kill(os.getpid(), getattr(signal, f"SIG{how}")))
        timer.daemon = True
        timer.start()

    import numpy as np
    import gradsync as gs

    with gs.init_process_group() as comm:
        path = folder / "checkpoint.npz"
        weights, momentum, done = np.zeros(50), np.zeros(50), 0
        if path.exists():
            with np.load(path) as saved:
                weights, momentum, done = saved["weights"], saved["momentum"], int(saved["done"])
        weights, momentum = gs.broadcast_tree([weights, momentum])
        done = comm.objects.broadcast(done)
        sync = gs.AllreduceCallback("mean")
        for epoch in range(done, 600):  # for longer than the latest kill
            for step in range(20):
                x = np.random.default_rng([epoch, step, comm.rank]).normal(size=(8, 50))
                with sync.backward():
                    future = sync("weights", x.T @ (x @ weights - x.sum(axis=1)) / 8)
                momentum = 0.9 * momentum + future.result()
                weights = weights - 0.001 * momentum
            if comm.rank == 0:
                temporary = folder / "writing.npz"
                np.savez(temporary, weights=weights, momentum=momentum, done=epoch + 1)
                temporary.rename(path)
            comm.barrier()
"""


def trained(folder):
    with np.load(folder / "checkpoint.npz") as saved:
        return {name: array.tobytes() for name, array in saved.items()}


@pytest.mark.timeout(600)
def test_a_training_that_is_killed_ten_times_ends_with_the_bits_of_one_that_is_not(cli, script, tmp_path):
    path = script(SCRIPT)
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert cli("run", "-n", RANKS, path, tmp_path / "whole", 0, 0).code == 0
    seed, kills = random.randrange(10**9), 10
    print(f"seed {seed}")
    done = cli("run", "-n", RANKS, "--max-restarts", kills, path, tmp_path / "killed", seed, kills, timeout=500)
    assert done.code == 0, done.err
    assert "starting all ranks again" in done.err
    assert trained(tmp_path / "killed") == trained(tmp_path / "whole")
