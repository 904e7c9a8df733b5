"""What the adapter for JAX does: run on two ranks, as jax_checks.py FOLDER."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from reported_checks import expect, names_of, run_all

NAMES = names_of(__file__)


class Layer(NamedTuple):
    weight: Any
    bias: Any


def tree_of(rank: int) -> dict[str, Any]:
    values = jnp.arange(1000, dtype=jnp.float32).reshape(10, 100) * (rank + 1)
    half = jnp.full((3,), rank + 0.5, jnp.bfloat16)
    return {"layer": Layer(values, half), "scale": jnp.float32(rank), "none": None, "empty": jnp.zeros((0, 2))}


def assert_averaged(got: Any) -> None:
    first, second = tree_of(0), tree_of(1)
    assert jax.tree_util.tree_structure(got) == jax.tree_util.tree_structure(first)
    for result, one, other in zip(*map(jax.tree_util.tree_leaves, (got, first, second)), strict=True):
        assert (result.shape, result.dtype) == (one.shape, one.dtype)
        assert isinstance(result, jax.Array)
        np.testing.assert_array_equal(np.asarray(result, np.float32), np.asarray((one + other) / 2, np.float32))


def check_a_pytree_is_averaged(comm: Any) -> None:
    for average in (adapter.average_gradients, gs.average_gradients):
        for _ in range(2):
            mine = tree_of(comm.rank)
            assert_averaged(average(mine))
            np.testing.assert_array_equal(np.asarray(mine["layer"].weight), tree_of(comm.rank)["layer"].weight)
    total = adapter.average_gradients([comm.rank, np.float32(comm.rank), 1.0 * comm.rank], op="sum")
    assert (total, [type(each) for each in total]) == ([1, 1.0, 1.0], [int, np.float32, float])
    array = np.full(3, float(comm.rank))
    assert (adapter.average_gradients(array) == 0.5).all()
    assert (array == comm.rank).all()


def check_nothing_is_copied_on_the_way(comm: Any) -> None:
    gradient = jnp.full((256, 256), comm.rank, jnp.float32)
    assert adapter._read_only(gradient).ctypes.data == gradient.unsafe_buffer_pointer()
    aligned = ArrayKind().empty_like(np.asarray(gradient))
    assert adapter._as_given(gradient, aligned).unsafe_buffer_pointer() == aligned.ctypes.data


def check_inside_a_compiled_function(comm: Any) -> None:
    def step(gradients: Any) -> Any:
        once = adapter.average_gradients(gradients)
        twice = adapter.average_gradients({"again": once["scale"] + comm.rank})
        return once, twice

    compiled = jax.jit(step)
    for _ in range(3):
        once, twice = compiled(tree_of(comm.rank))
        assert_averaged(once)
        assert float(twice["again"]) == 1.0


def check_a_large_tree_inside_a_compiled_function(comm: Any) -> None:
    size = 3_000_000
    loss = jax.jit(lambda w: adapter.average_gradients(jax.grad(lambda v: (v * (comm.rank + 1.0)).sum())(w)).sum())
    assert float(loss(jnp.ones(size))) == 1.5 * size


def check_training_ends_with_one_model(comm: Any) -> None:
    rng = np.random.default_rng(comm.rank)
    weights = adapter.broadcast_tree({"w": jnp.asarray(rng.normal(size=3), jnp.float32)})
    gradient = jax.grad(lambda parameters, x, y: jnp.mean((x @ parameters["w"] - y) ** 2))

    @jax.jit
    def step(parameters: Any, x: Any, y: Any) -> Any:
        gradients = adapter.average_gradients(gradient(parameters, x, y))
        return jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, parameters, gradients)

    for _ in range(100):
        x = rng.normal(size=(64, 3)).astype(np.float32)
        weights = step(weights, x, x @ np.float32([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(weights["w"], [1.0, 2.0, 3.0], rtol=1e-3)
    rows = comm.all_gather(np.asarray(weights["w"])[None])
    assert rows[0].tobytes() == rows[1].tobytes()


def check_the_root_s_state_reaches_all(comm: Any) -> None:
    key = jax.random.key(comm.rank)
    state = {"layer": Layer(jnp.full((3, 2), comm.rank), jnp.full(2, comm.rank, jnp.bfloat16)), "step": comm.rank}
    got = adapter.broadcast_tree({**state, "key": key, "host": np.full(2, comm.rank), "name": f"of {comm.rank}"}, 1)
    assert type(got["layer"]) is Layer
    assert isinstance(got["layer"].weight, jax.Array)
    assert got["layer"].bias.dtype == jnp.bfloat16
    for value in (*got["layer"], got["host"]):
        assert (np.asarray(value, np.float32) == 1).all()
    assert (got["step"], got["name"]) == (1, "of 1")
    assert (jax.random.key_data(got["key"]) == jax.random.key_data(jax.random.key(1))).all()
    assert (np.asarray(state["layer"].weight) == comm.rank).all()


def check_differences_are_told(comm: Any) -> None:
    mine = {"layer": Layer(jnp.ones(3 + comm.rank), jnp.ones(2))}
    error = expect(gs.PlanMismatch, lambda: adapter.average_gradients(mine), "layer/weight: float32[4]")
    assert "layer/weight: float32[3]" in str(error)
    expect(
        gs.PlanMismatch, lambda: adapter.broadcast_tree(mine), "layer/weight: float32[4], but float32[3] on the root"
    )
    expect(RuntimeError, lambda: jax.block_until_ready(jax.jit(adapter.average_gradients)(mine)), "PlanMismatch")
    expect(gs.UnsupportedDtype, lambda: adapter.average_gradients({"count": jnp.ones(2, int)}), "count: mean")
    expect(gs.InvalidArgument, lambda: adapter.average_gradients({"a": {"b": 1.0}, "a/b": 1.0}), "have the path a/b")
    assert_averaged(adapter.average_gradients(tree_of(comm.rank)))


if __name__ == "__main__":
    import jax
    import jax.numpy as jnp

    import gradsync as gs
    from gradsync.adapters import jax as adapter
    from gradsync.communicators.host_arrays import ArrayKind

    with gs.init_process_group() as comm:
        run_all({name: globals()[name] for name in NAMES}, comm, sys.argv[1])
