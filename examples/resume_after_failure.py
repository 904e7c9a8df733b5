"""Training that continues after a failure: it saves each epoch in a directory.

    gradsync run -n 2 --max-restarts 2 examples/resume_after_failure.py checkpoints --fail-in-epoch 3

Rank 1 kills itself in the third epoch. gradsync then starts all ranks again. The ranks continue from the last
checkpoint, and end with the same weights as a training without a failure. A later run with the same directory continues
from there too.
"""

import argparse
import os
import signal
from pathlib import Path

import numpy as np

import gradsync as gs

EPOCHS = 6
STEPS = 50


def save(path, state):
    """Writes a complete checkpoint or none, because this process may end at any moment."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, **state)
        os.fsync(file)
    os.replace(part, path)


def resume(path, state, comm):
    """Fills the state of all ranks from rank 0's checkpoint, or from rank 0's values if there is no checkpoint."""
    if comm.rank == 0 and path.exists():
        with np.load(path) as saved:
            for name, array in state.items():
                array[...] = saved[name]
    gs.bcast_list_(list(state.values()), root=0)


def train_epoch(comm, sync, state, epoch):
    """Trains on this rank's data of one epoch. The data depend only on the rank and the epoch."""
    rng = np.random.default_rng([epoch, comm.rank])
    weights, velocity = state["weights"], state["velocity"]
    losses = []
    for _ in range(STEPS):
        x, noise = rng.normal(size=(32, 3)), 0.1 * rng.normal(size=32)
        error = x @ weights - x @ [1.0, 2.0, 3.0] - noise
        losses.append(np.mean(error**2))
        with sync.backward():
            gradient = sync("weights", 2 * error @ x / len(x))
        velocity *= 0.9
        velocity -= 0.001 * gradient.result()
        weights += velocity
    return np.mean(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the directory of the checkpoint")
    parser.add_argument("--fail-in-epoch", type=int, help="the epoch in which rank 1 kills itself, in the first start")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = options.folder / "checkpoint.npz"
    is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    with gs.init_process_group() as comm:
        rng = np.random.default_rng(comm.rank)
        state = {"weights": rng.normal(size=3), "velocity": np.zeros(3), "epochs_done": np.zeros(1, int)}
        resume(checkpoint, state, comm)
        sync = gs.AllreduceCallback("mean")
        for epoch in range(int(state["epochs_done"][0]) + 1, EPOCHS + 1):
            if comm.rank == 1 and is_first_start and epoch == options.fail_in_epoch:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = train_epoch(comm, sync, state, epoch)
            state["epochs_done"][0] = epoch
            if comm.rank == 0:
                save(checkpoint, state)
                print(f"epoch {epoch} of {EPOCHS}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
