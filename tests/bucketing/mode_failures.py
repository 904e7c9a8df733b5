"""Backward passes that fail, in each of an AllreduceCallback's modes; run inside rank processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
from naive_reference import by_rank, expect_equal, fill, put_all, reduced, step, values_for

import gradsync as gs
from contract import expect
from kits import bring_to_rest, make_kit

SPECS = {f"p{i}": ((100,), np.float32) for i in range(6)}


def reduce_by_hook(bucket: Any) -> None:
    bucket.communicator.all_reduce(bucket.buffer, bucket.op)


MODES: dict[str, dict[str, Any]] = {
    "parameters": {"parameters": SPECS},
    "views": {"parameters": SPECS, "gradient_as_bucket_view": True},
    "hook": {},
    "watched": {"nonfinite": "raise", "clip_norm": 1.0},
    "zero": {"parameters": SPECS, "missing": "zero"},
}


def make(comm: Any, kit: Any, mode: str) -> tuple[Any, dict[str, Any]]:
    """Returns a callback and the arrays for its gradients."""
    callback = gs.AllreduceCallback("mean", comm, **{"threshold_bytes": 800, **MODES[mode]})
    if mode == "hook":
        callback.register_hook(reduce_by_hook)
    arrays = callback.gradient_buffers() if mode == "views" else put_all(kit, values_for(comm.rank, 0, SPECS))
    return callback, arrays


def fail_in_the_middle(callback: Any, arrays: dict[str, Any], culprit: int, rank: int, how: str) -> list[Any]:
    """Runs steps, of which the third fails on one rank; returns the futures of that one."""
    futures: list[Any] = []
    for number in range(4):
        futures.clear()
        with callback.backward():
            for at, (name, array) in enumerate(arrays.items()):
                fill(array, values_for(rank, number, SPECS)[name])
                futures.append(callback(name, array))
                if number == 2 and at == 2 and rank == culprit:
                    if how == "Ctrl-C":
                        os.kill(os.getpid(), signal.SIGINT)
                    raise ValueError("no such batch")
    return futures


def raise_in_modes(comm: Any, kit_name: str, modes: tuple[str, ...], ways: tuple[str, ...]) -> list[str]:
    """Where ranks share memory, each failure is in a group of its own, and the world can be used afterwards."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kit = make_kit(comm, kit_name)
    told = []
    for mode in modes:
        for how in ways:
            group = comm.split(0) if comm.backend == "shm" else comm
            callback, arrays = make(group, kit, mode)
            culprit = comm.world_size - 1
            try:
                fail_in_the_middle(callback, arrays, culprit, comm.rank, how)
            except gs.RankFailed as error:
                assert comm.rank != culprit
                assert error.rank == culprit
                assert ("KeyboardInterrupt" if how == "Ctrl-C" else "no such batch") in str(error)
                told.append("told")
            except KeyboardInterrupt:
                assert how == "Ctrl-C"
                told.append("raised")
            except ValueError as error:
                assert str(error) == "no such batch"
                told.append("raised")
            expect(gs.CommunicatorClosed, lambda c=callback, a=arrays: step(c, a))
            if group is comm:
                return told
            again, _ = make(comm, kit, mode)
            got = step(again, put_all(kit, values_for(comm.rank, 7, SPECS)))
            if mode != "watched":
                expect_equal(comm, got, reduced(by_rank(comm.world_size, 7, SPECS)), mode)
            if mode == "views":
                for array in arrays.values():
                    fill(array, np.ones(100, np.float32))  # they are still there
    return told


def cancel_what_was_not_reduced(comm: Any, kit_name: str) -> None:
    """Futures of buckets that had not been launched are cancelled, the others keep their results."""
    kit = make_kit(comm, kit_name)
    for mode in MODES:
        callback, arrays = make(comm, kit, mode)
        futures = []
        try:
            with callback.backward():
                for name, array in list(arrays.items())[:3]:
                    futures.append(callback(name, array))
                raise KeyError(mode)
        except KeyError:
            pass
        bring_to_rest(comm)
        cancelled = [isinstance(future.exception(), gs.GradientCancelled) for future in futures]
        assert cancelled == [False, False, True], mode
        got = step(callback, put_all(kit, values_for(comm.rank, 1, SPECS)))
        if mode != "watched":
            expect_equal(comm, got, reduced(by_rank(comm.world_size, 1, SPECS)), mode)
