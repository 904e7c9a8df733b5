"""What AllreduceCallback must do on every backend; run inside rank processes.

A kit makes the arrays: in host memory, on the GPU, or some of each. On a GPU done() may come later than the launch, so
the checks bring the device to rest before they ask.
"""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import Any

import numpy as np

import gradsync as gs
from contract import contribution, expect
from kits import bring_to_rest, make_kit, values_of


def awkward_values(rank: int) -> dict[str, np.ndarray[Any, Any]]:
    f4 = lambda *shape: contribution(rank, shape, "float32", seed=sum(shape))  # noqa: E731
    return {
        "scalar": contribution(rank, (), "float64"),
        "empty": f4(0, 3),
        "fortran": np.asfortranarray(f4(17, 5)) if rank % 2 else f4(17, 5),
        "strided": f4(20, 20),
        "reversed": f4(9),
        "read_only": f4(11),
        "broadcast": np.broadcast_to(f4(1), (6, 4)),
        "double": contribution(rank, (33, 3), "float64"),
        "half": contribution(rank, (50,), "float16"),
        "complex": contribution(rank, (5, 5), "complex64"),
        "huge": f4(400_000),
        "plain": f4(64, 64),
    }


def awkward_gradients(rank: int, kit: Any) -> dict[str, Any]:
    """Every kind of gradient that a training loop may produce, different on each rank."""
    values = awkward_values(rank)
    wide = np.zeros((40, 60), np.float32)
    wide[::2, ::3] = values["strided"]
    one = kit.put(values["broadcast"][0, :1].copy())
    special = {
        "strided": kit.put(wide)[::2, ::3],
        "reversed": kit.put(values["reversed"][::-1].copy())[::-1],
        "broadcast": module_of(one).broadcast_to(one, (6, 4)),
    }
    gradients = {name: special[name] if name in special else kit.put(values[name]) for name in values}
    if isinstance(gradients["read_only"], np.ndarray):
        gradients["read_only"].setflags(write=False)
    return gradients


def awkward_results(world_size: int, method: str) -> dict[str, np.ndarray[Any, Any]]:
    contributions = [awkward_values(rank) for rank in range(world_size)]
    results = {}
    for name, first in contributions[0].items():
        wide = np.complex128 if first.dtype.kind == "c" else np.float64
        total = np.sum([values[name].astype(wide) for values in contributions], axis=0)
        results[name] = total / world_size if method == "mean" else total
    return results


def module_of(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def is_reduced_in_place(name: str, gradient: Any) -> bool:
    return name != "broadcast" and not (name == "read_only" and isinstance(gradient, np.ndarray))


def reduce_awkward_gradients(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    for method, threshold_bytes in (("mean", 10 * 1024**2), ("sum", 300), ("mean", 1)):
        wanted = awkward_results(comm.world_size, method)
        callback = gs.AllreduceCallback(method, comm, threshold_bytes=threshold_bytes)
        for step in range(3):
            gradients = awkward_gradients(comm.rank, kit)
            with callback.backward():
                futures = {name: callback(name, gradient) for name, gradient in gradients.items()}
            for name, future in futures.items():
                in_place = is_reduced_in_place(name, gradients[name])
                # After the flush the reduced gradients are there for whatever is queued next, result() or not.
                got = gradients[name] if in_place and step == 1 else future.result()
                assert (got is gradients[name]) == in_place, name
                assert_close(kit.get(got), wanted[name], gradients[name], name)


def assert_close(got: Any, wanted: Any, gradient: Any, name: str) -> None:
    assert got.shape == gradient.shape, name
    assert got.dtype == gradient.dtype, name
    tolerance = 2e-3 if got.dtype == np.float16 else 1e-6
    np.testing.assert_allclose(got.astype(wanted.dtype), wanted, rtol=tolerance, err_msg=name)


def count_all_reduces(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    # 10 gradients of 100 float32 (400 bytes) and, in between, 4 of 50 float64 (400 bytes).
    for threshold_bytes, wanted in ((399, 14), (400, 14), (401, 14), (800, 7), (1200, 6), (4000, 2), (10**7, 2)):
        callback = gs.AllreduceCallback("sum", comm, threshold_bytes=threshold_bytes)
        for step in range(1, 4):
            with callback.backward():
                for i in range(10):
                    callback(i, kit.put(np.ones(100, np.float32)))
                    if i % 3 == 0:
                        callback(f"double {i}", kit.put(np.ones(50)))
            assert callback.statistics.all_reduces == wanted * step, threshold_bytes
            assert callback.statistics.bytes_all_reduced == 14 * 400 * step
            assert callback.statistics.steps == step


def resolve_per_bucket(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    gradient = lambda: kit.put(np.ones(100, np.float32))  # noqa: E731
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=800)
    called = threading.Event()
    first = callback("a", gradient())
    first.add_done_callback(lambda future: called.set())
    assert not first.done()
    expect(gs.FutureNotReady, first.result, "flush")
    expect(gs.FutureNotReady, lambda: first.shape, "not ready")
    second = callback("b", gradient())
    assert (first.shape, first.dtype) == ((100,), np.float32)
    bring_to_rest(comm)
    assert first.done()
    assert second.done()
    assert called.wait(30)
    third = callback("c", gradient())
    assert not third.done()
    callback.flush()
    bring_to_rest(comm)
    assert third.done()


def name_parameters_by_anything(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    parameters = [kit.put(np.zeros(3)), ("layer", 1), 7, object(), None, kit.put(np.zeros(3))]
    callback = gs.AllreduceCallback("mean", comm)
    for _ in range(2):
        with callback.backward():
            futures = [callback(p, kit.put(np.full(2, comm.rank + 1.0))) for p in parameters]
        assert all((values_of(f, kit) == (comm.world_size + 1) / 2).all() for f in futures)
    expect(gs.InvalidArgument, lambda: callback([], kit.put(np.ones(1))), "hashable")


WAYS_TO_DIFFER = ("order", "shape", "dtype", "name", "fewer", "more")


def step_that_may_differ(comm: Any, kit: Any, callback: Any, how: str | None = None) -> list[Any]:
    """Hands over eight gradients; one of them, or their order, differs on this rank in the way that is named."""
    gradients = [(f"p{i}", kit.put(np.full((3, 4), 1.0 + comm.rank))) for i in range(8)]
    odd = {"shape": np.ones((4, 3)), "dtype": np.ones((3, 4), np.float32), "name": np.ones((3, 4))}
    if how == "order":
        gradients[4], gradients[5] = gradients[5], gradients[4]
    elif how == "fewer":
        del gradients[7]
    elif how == "more":
        gradients.append(("p8", kit.put(np.ones(2))))
    elif how in odd:
        gradients[5] = ("q5" if how == "name" else "p5", kit.put(odd[how]))
    with callback.backward():
        futures = [callback(name, gradient) for name, gradient in gradients]
    return [values_of(future, kit) for future in futures]


def disagree(comm: Any, kit_name: str) -> list[tuple[str, int | None, str]]:
    """One rank differs; every rank must get PlanMismatch, and be able to go on afterwards."""
    kit = make_kit(comm, kit_name)
    told = []
    for threshold_bytes in (1, 200, 10**7):
        for how in WAYS_TO_DIFFER:
            callback = gs.AllreduceCallback("mean", comm, threshold_bytes=threshold_bytes)
            step = partial(step_that_may_differ, comm, kit, callback)
            step()
            error = expect(gs.PlanMismatch, lambda s=step, h=how if comm.rank == 1 else None: s(h))
            assert set(error.descriptions) == set(range(comm.world_size))
            assert error.descriptions[0] != error.descriptions[1]
            for result in step():  # NCCL's mean adds up thirds
                np.testing.assert_allclose(result, (comm.world_size + 1) / 2, rtol=1e-6)
            told.append((how, error.index, str(error).partition(":")[2]))
    return told


def raise_in_the_middle(comm: Any, kit_name: str, where: int) -> str:
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=800)
    futures = []
    try:
        for step in range(4):
            with callback.backward():
                for i in range(6):
                    futures.append(callback(i, kit.put(np.ones(100, np.float32))))
                    if comm.rank == 1 and step == 2 and i == where:
                        raise ValueError("no such batch")
    except ValueError:
        assert all(f.done() for f in futures)
        cancelled = [f for f in futures if isinstance(f.exception(), gs.GradientCancelled)]
        assert len(cancelled) == (where + 1) % 2
        expect(gs.CommunicatorClosed, comm.barrier, "no such batch")
        return "raised"
    except gs.RankFailed as error:
        assert error.rank == 1
        assert "no such batch" in str(error)
        assert all(f.done() for f in futures)
        return "told"
    return "finished"


def die_in_the_middle(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=800)
    for step in range(4):
        with callback.backward():
            for i in range(6):
                callback(i, kit.put(np.ones(100, np.float32)))
                if comm.rank == 1 and step == 2 and i == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def reduce_temporaries(comm: Any, kit_name: str) -> None:
    """Gradients that nobody keeps must not be taken for one another when memory is used again."""
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("sum", comm, threshold_bytes=4000)
    for step in range(8):
        with callback.backward():
            futures = [callback(i, kit.put(np.full(1000, step + i, np.float32))) for i in range(30)]
            del futures[:-1]
        assert (values_of(futures[0], kit) == (step + 29) * comm.world_size).all()


def differ_late_in_a_large_bucket(comm: Any, kit_name: str) -> str:
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("sum", comm)
    for i in range(4500):
        shape = (3, 2) if i == 4400 and comm.rank == 1 else (2, 3)
        callback(f"a parameter with a long name, number {i}", kit.put(np.ones(shape)))
    return str(expect(gs.PlanMismatch, callback.flush))


def hand_over_numbers(comm: Any, kit_name: str) -> None:
    """0-d arrays, NumPy's scalars and Python's floats: the future gives the result."""
    kit, n = make_kit(comm, kit_name), comm.world_size
    sync = gs.AllreduceCallback("sum", comm)
    for _ in range(3):
        given = [1.5, np.float32(2.0), np.float64(3.0), kit.put(np.array(4.0)), 1j, np.complex64(2j)]
        with sync.backward():
            futures = [sync(number, gradient) for number, gradient in enumerate(given)]
        results = [future.result() for future in futures]
        assert [complex(kit.get(result) if at == 3 else result) for at, result in enumerate(results)] == [
            complex(value) * n for value in (1.5, 2.0, 3.0, 4.0, 1j, 2j)
        ]
        assert [(str(result.dtype), result.shape) for result in results][:2] == [("float64", ()), ("float32", ())]
        assert given[0] == 1.5
    for wrong in (True, 3, "1.0"):
        expect(gs.InvalidArgument, lambda wrong=wrong: sync("p", wrong), "the gradient of 'p'")
