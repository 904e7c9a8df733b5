"""A JAX training loop with gradsync: the compiled step averages the gradients.

Run it with `gradsync run -n 2 examples/jax_loop.py`; it needs `pip install 'gradsync[jax]'`.
"""

import jax
import jax.numpy as jnp
import numpy as np

import gradsync as gs
from gradsync.adapters.jax import average_gradients, broadcast_tree


def logits_of(parameters, points):
    hidden = jnp.tanh(points @ parameters["hidden"]["weight"] + parameters["hidden"]["bias"])
    return hidden @ parameters["out"]


def loss_of(parameters, points, inside):
    logits = logits_of(parameters, points)
    return jnp.mean(jnp.logaddexp(0.0, logits) - inside * logits)  # binary cross-entropy


@jax.jit
def train_step(parameters, points, inside):
    loss, gradients = jax.value_and_grad(loss_of)(parameters, points, inside)
    gradients = average_gradients(gradients)  # the mean over the ranks
    return loss, jax.tree_util.tree_map(lambda parameter, gradient: parameter - gradient, parameters, gradients)


with gs.init_process_group() as comm:
    rng = np.random.default_rng(comm.rank)
    weight, out = rng.normal(size=(2, 32)), rng.normal(size=32) / 6
    parameters = {"hidden": {"weight": jnp.asarray(weight), "bias": jnp.zeros(32)}, "out": jnp.asarray(out)}
    parameters = broadcast_tree(parameters)  # all ranks begin with the parameters of rank 0

    for step in range(301):
        points = rng.uniform(-1, 1, (64, 2)).astype(np.float32)  # each rank has its own data
        inside = (np.square(points).sum(axis=1) < 0.6).astype(np.float32)
        loss, parameters = train_step(parameters, points, inside)
        if comm.rank == 0 and step % 100 == 0:
            right = np.mean((logits_of(parameters, points) > 0) == inside)
            print(f"step {step}: loss {loss:.2f}, {right:.0%} right")

    jax.block_until_ready(parameters)  # compiled steps run in parallel: wait before another collective
    gs.check_consistency({"weight": np.asarray(parameters["hidden"]["weight"])})  # the same on all ranks
