"""Training in float16 with loss scaling: all ranks skip a step if gradients overflow on any rank.

Run it with `gradsync run -n 2 examples/loss_scaling.py`.
"""

import numpy as np

import gradsync as gs

STEPS = 200
STEPS_BEFORE_GROWTH = 50

with gs.init_process_group() as comm:
    rng = np.random.default_rng(comm.rank)
    x = rng.normal(size=(256, 3)).astype(np.float16)
    y = x.astype(np.float32) @ np.float32([1.0, 2.0, 3.0])
    weights = np.zeros(3, np.float32)  # the master copy; the model computes in float16
    gs.bcast_list_([weights])
    sync = gs.AllreduceCallback("mean", nonfinite="skip")
    scale, good_steps = 2.0**20, 0  # far too large: the first steps overflow

    for step in range(STEPS):
        error = x @ weights.astype(np.float16) - y.astype(np.float16)
        with np.errstate(over="ignore", invalid="ignore"), sync.backward():
            scaled_loss = (error.astype(np.float32) * scale * 2 / len(y)).astype(np.float16)
            gradient = sync("weights", scaled_loss @ x)
        if sync.skip_step:  # the same value on all ranks
            scale, good_steps = scale / 2, 0
            if comm.rank == 0:
                print(f"step {step}: a gradient overflowed, the loss scale is now 2**{np.log2(scale):.0f}")
            continue
        weights -= 0.1 * gradient.result().astype(np.float32) / scale
        good_steps += 1
        if good_steps == STEPS_BEFORE_GROWTH:
            scale, good_steps = scale * 2, 0

    if comm.rank == 0:
        print(f"weights {weights.round(2)}, {sync.statistics.skipped_steps} of {STEPS} steps skipped")
