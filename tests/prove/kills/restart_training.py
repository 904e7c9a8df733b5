"""The training of examples/resume_after_failure.py, as long as one likes; leaves its final state as a file.

gradsync run -n 3 --max-restarts 9 tests/prove/kills/restart_training.py DIR EPOCHS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import numpy as np

import gradsync as gs
from resume_after_failure import resume, save, train_epoch


def main() -> None:
    checkpoint, epochs = Path(sys.argv[1], "checkpoint.npz"), int(sys.argv[2])
    with gs.init_process_group(timeout_seconds=5.0) as comm:  # a rank may be stopped before the others have met it
        print("address", os.environ["GRADSYNC_ADDRESS"], flush=True)
        rng = np.random.default_rng(comm.rank)
        state = {"weights": rng.normal(size=3), "velocity": np.zeros(3), "epochs_done": np.zeros(1, int)}
        resume(checkpoint, state, comm)
        sync = gs.AllreduceCallback("mean")
        for epoch in range(int(state["epochs_done"][0]) + 1, epochs + 1):
            train_epoch(comm, sync, state, epoch)
            state["epochs_done"][0] = epoch
            if comm.rank == 0:
                save(checkpoint, state)


if __name__ == "__main__":
    main()
