"""What AllreduceCallback.join must do on every backend, when ranks have different numbers of batches; run by ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import ml_dtypes
import numpy as np

import gradsync as gs
from contract import expect
from gradsync.communicators.shared_memory.resident import SharedResidentMemory
from kits import make_kit

BATCHES = (2, 5, 0)
GRADIENTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "weight": ((40, 30), np.float32),
    "bias": ((7,), np.float64),
    "negative_zero": ((5,), np.float32),
    "scalar": ((), np.float64),
    "empty": ((0, 3), np.float32),
    "complex": ((6,), np.complex64),
    "negative_complex": ((3,), np.complex128),
    "half": ((9,), np.float16),
    "brain": ((9,), ml_dtypes.bfloat16),
    "huge": ((3000,), np.float32),  # above the threshold: goes alone
}
THRESHOLD_BYTES = 5000


def gradient(name: str, rank: int, step: int) -> np.ndarray[Any, Any]:
    shape, dtype = GRADIENTS[name]
    if name.startswith("negative"):
        return np.full(shape, complex(-0.0, -0.0) if name == "negative_complex" else -0.0, dtype)
    rng = np.random.default_rng([rank, step, len(name)])
    values = rng.normal(size=shape)
    if name == "complex":
        values = values + 1j * rng.normal(size=shape)
    return np.asarray(values).astype(dtype)


def mean_by_hand(name: str, step: int, batches: tuple[int, ...], method: str = "mean") -> np.ndarray[Any, Any]:
    """Adds up the gradients of the ranks that have a batch, in rank order, and divides once."""
    given = [gradient(name, rank, step) for rank, count in enumerate(batches) if step < count]
    dtype = given[0].dtype
    wide = np.dtype(np.float32) if name in ("half", "brain") else dtype
    total = given[0].astype(wide)
    for each in given[1:]:
        total = total + each.astype(wide)
    if len(given) < len(batches):  # the sum is rounded to half precision before it is divided
        total = total.astype(dtype)
    if method == "mean":
        total = np.atleast_1d(total)
        parts = total.view(total.real.dtype) if total.dtype.kind == "c" else total  # complex numbers part by part
        parts /= parts.dtype.type(len(given))
    return np.asarray(total).astype(dtype).reshape(given[0].shape)


def run_step(callback: Any, kit: Any, rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    with callback.backward():
        futures = {name: callback(name, kit.put(gradient(name, rank, step))) for name in GRADIENTS}
    return {name: kit.get(future.result()).copy() for name, future in futures.items()}


def expect_bits(
    comm: Any, got: dict[str, np.ndarray[Any, Any]], step: int, batches: tuple[int, ...], method: str
) -> None:
    # NCCL adds up in an order of its own: sums of two ranks are the same in any. Where all have a batch, it is NCCL
    # that makes the mean, and it need not divide last.
    given = sum(step < count for count in batches)
    exact = comm.backend == "shm" or (given < 3 and (method == "sum" or min(batches) <= step))
    for name, values in got.items():
        wanted = mean_by_hand(name, step, batches, method)
        assert (values.shape, values.dtype) == (wanted.shape, wanted.dtype), name
        if not exact:
            wide = np.complex128 if values.dtype.kind == "c" else np.float64
            rounding = 1e-2 if values.itemsize == 2 else 0  # of the contributions, which may cancel each other
            np.testing.assert_allclose(values.astype(wide), wanted.astype(wide), rtol=2e-2, atol=rounding)
        else:
            assert values.tobytes() == wanted.tobytes(), (name, step, values, wanted)


def run_out(comm: Any, kit_name: str, batches: tuple[int, ...]) -> list[int]:
    """Two epochs of uneven batches, and an even step after each."""
    kit = make_kit(comm, kit_name)
    last_ranks = []
    for method in ("mean", "sum"):
        callback = gs.AllreduceCallback(method, comm, threshold_bytes=THRESHOLD_BYTES)
        # In the second epoch every rank knows the gradients from the even step after the first one.
        for parameters in (GRADIENTS, None):
            callback.flush()  # an empty step makes nobody forget
            with callback.join(parameters) as joined:
                for step in range(batches[comm.rank]):
                    expect_bits(comm, run_step(callback, kit, comm.rank, step), step, batches, method)
            last_ranks.append(joined.last_rank)
            expect_bits(comm, run_step(callback, kit, comm.rank, 7), 7, (8,) * comm.world_size, method)
        assert callback.statistics.steps == 2 * (batches[comm.rank] + 1)
    return last_ranks


def repeat_uneven_steps(comm: Any) -> int:
    """Rank 0 has one batch. Returns how often the memory of the buckets was prepared."""
    specs = {"a": ((40,), "float32"), "b": ((3, 5), "float32")}
    callback = gs.AllreduceCallback("mean", comm, parameters=specs, gradient_as_bucket_view=True)
    views = callback.gradient_buffers()
    prepared: list[int] = []
    prepare = SharedResidentMemory.prepare

    def note(memory: Any, *arguments: Any) -> Any:
        prepared.append(callback.statistics.steps)
        return prepare(memory, *arguments)

    SharedResidentMemory.prepare = note  # type: ignore[method-assign]
    with callback.join():
        for step in range(1 if comm.rank == 0 else 6):
            with callback.backward():
                for name, view in views.items():
                    view[...] = step + comm.rank
                    callback(name, view)
            wanted = step + (comm.world_size - 1) / 2 if step == 0 else step + comm.world_size / 2
            assert all((view == wanted).all() for view in views.values()), step
    SharedResidentMemory.prepare = prepare  # type: ignore[method-assign]
    return len(prepared)


def leave_after_a_shorter_step(comm: Any, kit_name: str) -> float:
    """The last step of rank 0 leaves out a gradient; all arrays in this step are known from earlier steps."""
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm)
    known = kit.put(np.zeros(4, np.float32))
    with callback.join():
        for step in range(4 + comm.rank):
            known[...] = 1 + comm.rank * (step == 4) / 2
            with callback.backward():
                callback("known", known)
                if step < 3:
                    callback("new", kit.put(np.ones(3, np.float32)))
    return float(known[0])


def leave_without_a_batch(comm: Any, kit_name: str) -> str:
    """Rank 2 has no batch, and does not know what the others reduce."""
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=THRESHOLD_BYTES)

    def train() -> None:
        with callback.join():
            for step in range(BATCHES[comm.rank]):
                run_step(callback, kit, comm.rank, step)

    error = expect(gs.PlanMismatch, train, "rank 2 had no batch at all")
    expect_bits(comm, run_step(callback, kit, comm.rank, 0), 0, (1, 1, 1), "mean")  # what was refused has left no trace
    with callback.join():
        pass  # now all know; and nobody has a batch
    return str(error).partition(":")[2]


def leave_after_a_failed_step(comm: Any, kit_name: str) -> list[float]:
    """The ranks differ in the last gradient of their second step. Later rank 1 repeats the first step."""
    kit, callback = make_kit(comm, kit_name), gs.AllreduceCallback("mean", comm)

    def step(dtype: str = "float64") -> list[Any]:
        with callback.backward():
            return [callback(name, kit.put(np.ones(2, given))) for name, given in (("w", "float64"), ("b", dtype))]

    with callback.join():
        step()
        expect(
            gs.PlanMismatch,
            lambda: step("float32" if comm.rank == 1 else "float64"),
            "'b' differs: float64[2] on rank 0; float32[2] on rank 1",
        )
        futures = step() if comm.rank == 0 else []
    return [float(kit.get(future.result())[0]) for future in futures]


def know_another_order(comm: Any, kit_name: str) -> str:
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("sum", comm)
    shape = np.float64([1, 2])

    def train() -> None:
        with callback.join({"second": ((2,), "float64"), "first": ((2,), "float64")}):
            if comm.rank == 0:
                with callback.backward():
                    callback("first", kit.put(shape.copy()))
                    callback("second", kit.put(shape.copy()))

    error = expect(gs.PlanMismatch, train, "'second': float64[2]")
    total = comm.all_reduce(kit.put(np.ones(1)))
    assert kit.get(total)[0] == comm.world_size
    return str(error).partition(":")[2]


def join_on_some_ranks_only(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm)

    def train() -> None:
        run_step(callback, kit, comm.rank, 0)

    def train_joined() -> None:
        with callback.join():
            train()

    expect(gs.PlanMismatch, train_joined if comm.rank else train, "the beginning of a step inside join()")


def raise_in_the_loop(comm: Any, kit_name: str, inside: bool) -> str:
    """Rank 1 fails in its third step, when rank 0 has run out and rank 2 never had a batch."""
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=THRESHOLD_BYTES)
    try:
        with callback.join(GRADIENTS):
            for step in range(BATCHES[comm.rank]):
                if step == 2 and not inside:
                    raise KeyError("no such sample")
                with callback.backward():
                    for name in GRADIENTS:
                        callback(name, kit.put(gradient(name, comm.rank, step)))
                        if step == 2 and name == "brain":
                            raise KeyError("no such sample")
    except gs.RankFailed as error:
        assert error.rank == 1
        assert "no such sample" in str(error)
        return "told"
    except KeyError:
        return "raised"
    return "ended"


def die_in_the_loop(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=THRESHOLD_BYTES)
    with callback.join(GRADIENTS):
        for step in range(BATCHES[comm.rank]):
            with callback.backward():
                for name in GRADIENTS:
                    callback(name, kit.put(gradient(name, comm.rank, step)))
                    if step == 3 and name == "brain":
                        os.kill(os.getpid(), signal.SIGKILL)


def take_the_newest_parameters(comm: Any, kit_name: str) -> bytes:
    """The loop of the documentation; afterwards all ranks have the parameters of one that took part to the end."""
    kit = make_kit(comm, kit_name)
    weights = kit.put(np.zeros(4))
    callback = gs.AllreduceCallback("mean", comm)
    with callback.join([weights]) as joined:
        for step in range(BATCHES[comm.rank]):
            with callback.backward():
                future = callback(weights, kit.put(np.full(4, comm.rank + step + 1.0)))
            weights -= future.result()
    gs.bcast_list_([weights], root=joined.last_rank, communicator=comm)
    return kit.get(weights).tobytes()


def join_in_a_group(comm: Any, kit_name: str) -> list[float] | None:
    """Ranks 0 and 2 of the world have 1 and 3 batches; rank 1 is not of their group."""
    kit = make_kit(comm, kit_name)
    group = comm.new_group([0, 2])
    if not group:
        return None
    callback = gs.AllreduceCallback("mean", group)
    weights = kit.put(np.zeros(2))
    with callback.join() as joined:
        for step in range(1 + 2 * group.rank):
            with callback.backward():
                future = callback("w", kit.put(np.full(2, 1.0 + comm.rank + step)))
            weights += future.result()
    assert joined.last_rank == 1
    gs.bcast_list_([weights], joined.last_rank, group)
    gs.check_consistency([weights], group)
    changed = {"w": kit.put(np.full(1, float(group.rank)))}
    error = expect(gs.PlanMismatch, lambda: gs.check_consistency(changed, group), "\n  rank 2: float64[1]")
    assert sorted(error.descriptions) == [0, 2]
    shorter = kit.put(np.zeros(2 - group.rank))
    error = expect(gs.PlanMismatch, lambda: gs.broadcast_tree(shorter, 1, group), "rank 2 (the root)")
    assert list(error.descriptions) == [0]
    total: list[float] = kit.get(weights).tolist()
    return total
