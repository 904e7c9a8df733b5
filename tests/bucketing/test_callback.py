"""AllreduceCallback between processes: right sums, few collectives, and no rank left waiting."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import contribution, expect
from gradsync.communicators.local import LocalCommunicator
from rank_processes import run_ranks, run_ranks_for_outcomes


def awkward_gradients(rank: int) -> dict[str, np.ndarray[Any, Any]]:
    """Every kind of gradient that a training loop may produce, different on each rank."""
    f4 = lambda *shape: contribution(rank, shape, "float32", seed=sum(shape))  # noqa: E731
    strided = np.zeros((40, 60), np.float32)
    strided[::2, ::3] = f4(20, 20)
    read_only = f4(11)
    read_only.setflags(write=False)
    return {
        "scalar": contribution(rank, (), "float64"),
        "empty": f4(0, 3),
        "fortran": np.asfortranarray(f4(17, 5)) if rank % 2 else f4(17, 5),
        "strided": strided[::2, ::3],
        "reversed": f4(9)[::-1],
        "read_only": read_only,
        "broadcast": np.broadcast_to(f4(1), (6, 4)),
        "double": contribution(rank, (33, 3), "float64"),
        "half": contribution(rank, (50,), "float16"),
        "complex": contribution(rank, (5, 5), "complex64"),
        "huge": f4(400_000),
        "plain": f4(64, 64),
    }


def reduce_awkward_gradients(comm: Any, method: str, threshold_bytes: int) -> None:
    n = comm.world_size
    wanted = {}
    for name in awkward_gradients(0):
        stack = [np.asarray(awkward_gradients(r)[name]) for r in range(n)]
        wide = np.complex128 if stack[0].dtype.kind == "c" else np.float64
        total = np.sum([s.astype(wide) for s in stack], axis=0)
        wanted[name] = total / n if method == "mean" else total
    callback = gs.AllreduceCallback(method, comm, threshold_bytes=threshold_bytes)
    for _ in range(3):
        gradients = awkward_gradients(comm.rank)
        with callback.backward():
            futures = {name: callback(name, gradient) for name, gradient in gradients.items()}
        for name, future in futures.items():
            got = future.result()
            assert got.shape == gradients[name].shape, name
            assert got.dtype == gradients[name].dtype, name
            tolerance = 2e-3 if got.dtype == np.float16 else 1e-6
            np.testing.assert_allclose(got.astype(wanted[name].dtype), wanted[name], rtol=tolerance, err_msg=name)
            in_place = name not in ("read_only", "broadcast")
            assert (got is gradients[name]) == in_place, name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("method", "threshold_bytes"), [("mean", 10 * 1024**2), ("SUM", 300), ("mean", 1)])
def test_awkward_gradients(world_size: int, method: str, threshold_bytes: int) -> None:
    run_ranks(world_size, reduce_awkward_gradients, method.lower(), threshold_bytes)


def count_all_reduces(comm: Any) -> None:
    # 10 gradients of 100 float32 (400 bytes) and, in between, 4 of 50 float64 (400 bytes).
    for threshold_bytes, wanted in (
        (399, 14),
        (400, 14),
        (401, 14),
        (800, 7),
        (1200, 6),
        (4000, 2),
        (10**7, 2),
    ):
        callback = gs.AllreduceCallback("sum", comm, threshold_bytes=threshold_bytes)
        for step in range(1, 4):
            with callback.backward():
                for i in range(10):
                    callback(i, np.ones(100, np.float32))
                    if i % 3 == 0:
                        callback(f"double {i}", np.ones(50))
            assert callback.statistics.all_reduces == wanted * step, threshold_bytes
            assert callback.statistics.bytes_all_reduced == 14 * 400 * step
            assert callback.statistics.steps == step


@pytest.mark.parametrize("world_size", [1, 2])
def test_number_of_all_reduces(world_size: int) -> None:
    run_ranks(world_size, count_all_reduces)


def resolve_per_bucket(comm: Any) -> None:
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=800)
    seen = []
    first = callback("a", np.ones(100, np.float32))
    first.add_done_callback(lambda f: seen.append("a"))
    assert not first.done()
    expect(gs.FutureNotReady, first.result, "flush")
    second = callback("b", np.ones(100, np.float32))
    assert first.done()
    assert second.done()
    third = callback("c", np.ones(100, np.float32))
    assert not third.done()
    assert seen == ["a"]
    callback.flush()
    assert third.done()


@pytest.mark.parametrize("world_size", [1, 2])
def test_futures_resolve_per_bucket(world_size: int) -> None:
    run_ranks(world_size, resolve_per_bucket)


def name_parameters_by_anything(comm: Any) -> None:
    parameters = [np.zeros(3), ("layer", 1), 7, object(), None, np.zeros(3)]
    callback = gs.AllreduceCallback("mean", comm)
    for _ in range(2):
        with callback.backward():
            futures = [callback(p, np.full(2, comm.rank + 1.0)) for p in parameters]
        wanted = (comm.world_size + 1) / 2
        assert all((f.result() == wanted).all() for f in futures)
    expect(gs.InvalidArgument, lambda: callback([], np.ones(1)), "hashable")


def test_parameters_are_named_by_anything() -> None:
    run_ranks(2, name_parameters_by_anything)


def accumulate(comm: Any) -> None:
    callback = gs.AllreduceCallback("mean", comm)
    total = np.zeros(4)
    for step in range(6):
        local = step % 3 != 2
        gradient = np.full(4, comm.rank + 1.0 + step)
        if local:
            with callback.no_sync(), callback.backward():
                future = callback("w", gradient)
                assert future.done()
                assert future.result() is gradient
            total += gradient
        else:
            with callback.backward():
                future = callback("w", total + gradient)
            n = comm.world_size
            base = sum(1.0 + s for s in range(step - 2, step + 1))
            assert np.allclose(future.result(), base + 3 * (n - 1) / 2)
            total[:] = 0
    assert callback.statistics.all_reduces == 2
    callback("w", np.ones(1))
    expect(gs.InvalidArgument, lambda: callback.no_sync().__enter__(), "flush first")
    callback.flush()


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_sync_accumulates(world_size: int) -> None:
    run_ranks(world_size, accumulate)


def disagree(comm: Any, how: str, threshold_bytes: int) -> tuple[int | None, str]:
    """One rank differs; every rank must get PlanMismatch, and be able to go on afterwards."""
    odd = comm.rank == 1
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=threshold_bytes)

    def step(differ: bool) -> list[np.ndarray[Any, Any]]:
        gradients = [(f"p{i}", np.full((3, 4), 1.0 + comm.rank)) for i in range(8)]
        passes = 0
        if differ and how == "order":
            gradients[4], gradients[5] = gradients[5], gradients[4]
        elif differ and how == "shape":
            gradients[5] = ("p5", np.ones((4, 3)))
        elif differ and how == "dtype":
            gradients[5] = ("p5", np.ones((3, 4), np.float32))
        elif differ and how == "name":
            gradients[5] = ("q5", np.ones((3, 4)))
        elif differ and how == "fewer":
            del gradients[7]
        elif differ and how == "more":
            gradients.append(("p8", np.ones(2)))
        elif differ and how == "passes":
            passes = 1
        for _ in range(passes):
            with callback.no_sync(), callback.backward():
                callback("p0", np.ones(1))
        with callback.backward():
            futures = [callback(name, gradient) for name, gradient in gradients]
        return [future.result() for future in futures]

    step(differ=False)
    error = expect(gs.PlanMismatch, lambda: step(differ=odd))
    assert set(error.descriptions) == set(range(comm.world_size))
    assert error.descriptions[0] != error.descriptions[1]
    results = step(differ=False)
    assert all((r == (comm.world_size + 1) / 2).all() for r in results)
    return error.index, str(error)


@pytest.mark.parametrize("threshold_bytes", [1, 200, 10**7])
@pytest.mark.parametrize("how", ["order", "shape", "dtype", "name", "fewer", "more", "passes"])
def test_disagreement_is_told_on_every_rank(how: str, threshold_bytes: int) -> None:
    results = run_ranks(3, disagree, how, threshold_bytes)
    assert len({index for index, _ in results}) == 1
    texts = [text.partition(":")[2] for _, text in results]
    assert len(set(texts)) == 1, "the ranks tell different stories"
    if how in ("order", "shape", "name"):
        assert "p5" in texts[0]


def raise_in_the_middle(comm: Any, where: int) -> str:
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=800)
    futures = []
    try:
        for step in range(4):
            with callback.backward():
                for i in range(6):
                    futures.append(callback(i, np.ones(100, np.float32)))
                    if comm.rank == 1 and step == 2 and i == where:
                        raise ValueError("no such batch")
    except ValueError:
        assert futures[-1].done()
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


@pytest.mark.parametrize("where", range(6))
def test_an_exception_on_one_rank_reaches_the_others(where: int) -> None:
    assert run_ranks(3, raise_in_the_middle, where) == ["told", "raised", "told"]


def die_in_the_middle(comm: Any) -> None:
    import os
    import signal

    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=800)
    for step in range(4):
        with callback.backward():
            for i in range(6):
                callback(i, np.ones(100, np.float32))
                if comm.rank == 1 and step == 2 and i == 2:
                    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_on_the_others() -> None:
    outcomes = run_ranks_for_outcomes(3, die_in_the_middle)
    assert outcomes[1].exit_code == -9
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, gs.RankFailed)
        assert survivor.error.rank == 1


# -- What needs no second process ---------------------------------------------------------------------------------


def test_bad_arguments_are_told_at_once() -> None:
    comm = LocalCommunicator()
    for method in ("average", "min", "", None, 3):
        with pytest.raises(gs.InvalidArgument, match="sum"):
            gs.AllreduceCallback(method, comm)  # type: ignore[arg-type]
    with pytest.raises(gs.InvalidArgument, match="unknown backend 'gloo'"):
        gs.AllreduceCallback("mean", comm, "gloo")
    with pytest.raises(gs.InvalidArgument, match="Communicator"):
        gs.AllreduceCallback("mean", "world")  # type: ignore[arg-type]
    with pytest.raises(gs.InvalidArgument, match="wants backend 'nccl'"):
        gs.AllreduceCallback("mean", comm, "nccl")("w", np.ones(1))
    with pytest.raises(gs.InvalidArgument, match="init_process_group"):
        gs.AllreduceCallback("mean")("w", np.ones(1))
    with pytest.raises(gs.InvalidArgument, match="threshold_bytes"):
        gs.AllreduceCallback("mean", comm, threshold_bytes=0)


def test_gradients_without_a_mean_are_refused_at_once() -> None:
    callback = gs.AllreduceCallback("mean", LocalCommunicator())
    with pytest.raises(gs.UnsupportedDtype, match="gradient of 'w'.* mean is not defined for dtype int32.*astype"):
        callback("w", np.ones(3, np.int32))
    with pytest.raises(gs.InvalidArgument, match="gradient of 'w'.*got a list: make it an array"):
        callback("w", [1.0, 2.0])
    callback("w", np.ones(3))  # what was refused has left no trace
    callback.flush()
    assert callback.statistics.gradients == 1


def test_the_same_parameter_twice_is_an_error() -> None:
    callback = gs.AllreduceCallback("mean", LocalCommunicator())
    weight = np.zeros(3)
    for param in ("w", weight):
        callback(param, np.ones(3))
        with pytest.raises(gs.InvalidArgument, match="twice before a flush"):
            callback(param, np.ones(3))
    callback.flush()
    callback("w", np.ones(3))
    callback.flush()


def test_an_exception_cancels_the_futures_of_one_rank() -> None:
    comm = LocalCommunicator()
    callback = gs.AllreduceCallback("mean", comm)
    with pytest.raises(KeyError), callback.backward():
        future = callback("w", np.ones(3))
        raise KeyError("x")
    with pytest.raises(gs.GradientCancelled, match="KeyError"):
        future.result()
    with callback.backward():
        future = callback("w", np.ones(3))
    assert (future.result() == 1).all()


def test_a_forgotten_flush_is_told(caplog: pytest.LogCaptureFixture) -> None:
    callback = gs.AllreduceCallback("mean", LocalCommunicator())
    callback("w", np.ones(3))
    del callback
    gc.collect()
    assert "1 gradients were handed over and never reduced" in caplog.text
    caplog.clear()
    callback = gs.AllreduceCallback("mean", LocalCommunicator())
    with callback.backward():
        callback("w", np.ones(3))
    del callback
    gc.collect()
    assert not caplog.text


def test_alias() -> None:
    assert gs.make_allreduce_cb is gs.AllreduceCallback


def test_a_second_thread_is_told() -> None:
    comm = LocalCommunicator()
    errors = []

    def use() -> None:
        try:
            comm.barrier()
        except gs.InvalidArgument as error:
            errors.append(str(error))

    with comm.lifetime.turn("all_reduce"):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join(30)
    assert "one thread at a time" in errors[0]


def test_forced_packing_gives_the_same_results() -> None:
    gradients = awkward_gradients(0)
    callback = gs.AllreduceCallback("mean", LocalCommunicator(force_packing=True))
    wanted = {name: gradient.copy() for name, gradient in gradients.items()}
    with callback.backward():
        futures = {name: callback(name, gradient) for name, gradient in gradients.items()}
    for name, future in futures.items():
        np.testing.assert_array_equal(future.result(), wanted[name])


def test_gradients_that_share_memory_are_refused() -> None:
    base = np.ones(1000)
    square = np.ones((4, 4))
    read_only = np.broadcast_to(np.float64(1), (8,))
    pairs = [(base, base), (base[:600], base[500:]), (square, square.T), (base[::2], base[10:13]), (base, base[3:4])]
    for first, second in pairs:
        callback = gs.AllreduceCallback("mean", LocalCommunicator(), threshold_bytes=16)
        callback("a", first)
        with pytest.raises(gs.InvalidArgument, match="gradient of 'b' shares memory with the gradient of 'a'"):
            callback("b", second)
        callback.flush()
    fine = [(base[:500], base[500:]), (base[::2], base[1::2]), (read_only, read_only), (base[:0], base)]
    for first, second in fine:
        callback = gs.AllreduceCallback("mean", LocalCommunicator())
        for _ in range(2):
            callback("a", first)
            callback("b", second)
            callback.flush()


def reduce_temporaries(comm: Any) -> None:
    """Gradients that nobody keeps must not be taken for one another when memory is used again."""
    callback = gs.AllreduceCallback("sum", comm, threshold_bytes=4000)
    for _ in range(20):
        with callback.backward():
            for i in range(30):
                callback(i, np.full(1000, 1.0))


def test_temporaries_are_no_overlap() -> None:
    run_ranks(2, reduce_temporaries)


def differ_late_in_a_large_bucket(comm: Any) -> str:
    callback = gs.AllreduceCallback("sum", comm)
    for i in range(1500):
        shape = (3, 2) if i == 1400 and comm.rank == 1 else (2, 3)
        callback(f"a parameter with a long name, number {i}", np.ones(shape))
    return str(expect(gs.PlanMismatch, callback.flush))


def test_the_first_difference_is_named_in_a_large_bucket() -> None:
    for text in run_ranks(2, differ_late_in_a_large_bucket):
        assert "first difference, gradient 1400 of the bucket" in text
        assert "number 1400': float64[2, 3]" in text
        assert "number 1400': float64[3, 2]" in text
