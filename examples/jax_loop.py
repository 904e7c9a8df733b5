"""A JAX training loop with gradsync: gs.average_gradients() averages the whole tree of gradients.

Run it with `gradsync run -n 2 examples/jax_loop.py`; it needs `pip install jax`.
"""

import jax
import jax.numpy as jnp
import numpy as np

import gradsync as gs


def logits_of(parameters, points):
    hidden = jnp.tanh(points @ parameters["hidden"]["weight"] + parameters["hidden"]["bias"])
    return hidden @ parameters["out"]


@jax.jit
@jax.value_and_grad
def loss_and_gradients(parameters, points, inside):
    logits = logits_of(parameters, points)
    return jnp.mean(jnp.logaddexp(0.0, logits) - inside * logits)  # binary cross-entropy


def make_parameters(rng):
    """Returns NumPy arrays: gs.broadcast_tree() writes into them, and JAX's arrays are read-only."""
    weight, out = rng.normal(size=(2, 32)).astype(np.float32), rng.normal(size=32).astype(np.float32) / 6
    return {"hidden": {"weight": weight, "bias": np.zeros(32, np.float32)}, "out": out}


def train(parameters, batches):
    for step, (points, inside) in enumerate(batches):
        loss, gradients = loss_and_gradients(parameters, points, inside)
        gradients = gs.average_gradients(gradients)  # outside jax.jit: new arrays with the mean over all ranks
        parameters = jax.tree.map(lambda parameter, gradient: parameter - gradient, parameters, gradients)
        if gs.get_communicator().rank == 0 and step % 100 == 0:
            right = np.mean((logits_of(parameters, points) > 0) == inside)
            print(f"step {step}: loss {loss:.2f}, {right:.0%} right")
    return parameters


def make_batches(rng, steps):
    for _ in range(steps):
        points = rng.uniform(-1, 1, (64, 2)).astype(np.float32)
        yield points, (np.square(points).sum(axis=1) < 0.6).astype(np.float32)


if __name__ == "__main__":
    with gs.init_process_group() as comm:
        rng = np.random.default_rng(comm.rank)  # each rank has its own data
        parameters = gs.broadcast_tree(make_parameters(rng))  # all ranks begin with rank 0's parameters
        parameters = train(parameters, make_batches(rng, 301))
        gs.check_consistency(jax.tree.leaves(jax.tree.map(np.asarray, parameters)))
