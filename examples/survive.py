"""Training that goes on when a rank dies, and takes in the rank that is started in its place.

    gradsync run -n 4 --min-ranks 3 --respawn 1 examples/survive.py --kill 200

After step 200 one of the four ranks kills itself. The other three go on at once, and a fourth joins them at the end of
an epoch. Each step has the same 48 samples as without the kill, whoever takes them, so that the accuracy is the same.
The data are scikit-learn's handwritten digits: 1,797 scans of 8 x 8 pixels. One in five is for the test.
"""

import argparse
import os
import signal

import numpy as np
from sklearn.datasets import load_digits

import gradsync as gs

EPOCHS = 100
BATCH = 48  # samples in a step, over all ranks


def forward(model, x):
    """Returns the hidden layer, and ten scores for each image."""
    hidden = np.tanh(x @ model["w1"] + model["b1"])
    return hidden, hidden @ model["w2"] + model["b2"]


def gradients(model, x, y):
    """Returns those of the mean cross-entropy."""
    hidden, scores = forward(model, x)
    error = np.exp(scores - scores.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    inner = (error @ model["w2"].T) * (1 - hidden**2)
    return {"w1": x.T @ inner, "b1": inner.sum(axis=0), "w2": hidden.T @ error, "b2": error.sum(axis=0)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kill", type=int, metavar="STEP", help="the step after which a rank kills itself")
    kill = parser.parse_args().kill

    digits = load_digits()
    images, labels = digits.images.reshape(-1, 64) / 16, digits.target
    is_test = np.arange(len(labels)) % 5 == 0
    x, y = images[~is_test], labels[~is_test]
    steps = len(y) // BATCH  # in an epoch

    rng = np.random.default_rng(0)
    model = {"w1": rng.normal(size=(64, 64)) / 8, "b1": np.zeros(64)}
    model |= {"w2": rng.normal(size=(64, 10)) / 8, "b2": np.zeros(10)}
    velocity = {name: np.zeros_like(array) for name, array in model.items()}

    comm = gs.init_process_group()  # a rank that was started again waits here until the others rebuild
    state = {"model": model, "velocity": velocity, "step": 0, "launched": comm.world_size}
    sync, ranks = gs.AllreduceCallback("mean"), 0
    while True:
        try:
            state = gs.broadcast_tree(state, root=comm.most_advanced)  # some may be one step behind
            if comm.rank == 0 and comm.world_size != ranks:
                print(f"step {state['step']}: {comm.world_size} ranks")
            ranks = comm.world_size
            if state["step"] == EPOCHS * steps:
                break
            epoch, done = divmod(state["step"], steps)
            batches = gs.shard_indices(len(y), epoch, shards=BATCH, uneven="drop").reshape(steps, -1)
            for batch in batches[done:]:
                with sync.backward(weight=len(batch)):
                    for name, gradient in gradients(model, x[batch], y[batch]).items():
                        sync(name, gradient)
                for name, gradient in sync.results().items():  # after the block: a step is made whole, or not at all
                    velocity[name] *= 0.9
                    velocity[name] -= 0.1 * gradient
                    model[name] += velocity[name]
                state["step"] += 1
                if state["step"] == kill and comm.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            if comm.world_size < state["launched"]:
                comm = gs.rebuild()  # takes in a rank that waits, if there is one
        except (gs.RankFailed, gs.CollectiveTimeout):
            comm = gs.rebuild()  # without the dead
    if comm.rank == 0:
        right = forward(model, images[is_test])[1].argmax(axis=1) == labels[is_test]
        print(f"step {state['step']}: accuracy {right.mean():.2%}")
    gs.destroy_process_group()


if __name__ == "__main__":
    main()
