"""Which buckets are reduced together: those side by side, of one dtype; the same however they become complete."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.bucketing import launch_groups
from gradsync.bucketing.bucket_memory import BucketMemory
from gradsync.bucketing.fixed_plan import FixedPlanner
from gradsync.bucketing.launch_groups import LaunchGroups
from gradsync.bucketing.plan import Bucket, GradientSpec
from gradsync.communicators.local import LocalCommunicator
from rank_processes import run_ranks

LIMIT_BYTES = 4096

specs = st.lists(st.tuples(st.integers(0, 900), st.sampled_from(["float32", "float64"])), min_size=1, max_size=30).map(
    lambda rows: [GradientSpec(f"'{i}'", (n,), dtype, np.dtype(dtype).itemsize) for i, (n, dtype) in enumerate(rows)]
)


def grouped(planner: FixedPlanner, memory: BucketMemory) -> list[Bucket]:
    groups = LaunchGroups(memory)
    return [ready for bucket in planner.buckets for ready in groups.add(bucket)] + groups.flush()


@given(specs)
def test_groups_hold_every_bucket_once_in_order(gradients: list[GradientSpec]) -> None:
    planner = FixedPlanner(gradients, 1000)
    memory = BucketMemory(planner, LocalCommunicator())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_groups, "_MERGED_BYTES", LIMIT_BYTES)
        groups = grouped(planner, memory)
        assert grouped(planner, memory) == groups  # the very buckets of the step before
    assert [part for group in groups for part in memory.parts(group)] == planner.buckets
    for group in groups:
        parts = memory.parts(group)
        assert {part.dtype for part in parts} == {group.dtype}
        assert sum(part.size_bytes for part in parts[:-1]) < LIMIT_BYTES
        flat = memory.flat(group)
        for part in parts:  # each lies within, at its own place
            within = memory.flat(part)
            begin = (memory.stretch(part).begin_bytes - memory.stretch(group).begin_bytes) // part.itemsize
            assert np.shares_memory(flat, within) == (within.size > 0)
            assert flat[begin : begin + within.size].tolist() == within.tolist()
        assert [slot.spec for slot in group.slots] == [slot.spec for part in parts for slot in part.slots]


def test_without_memory_each_bucket_is_alone() -> None:
    planner = FixedPlanner([GradientSpec("'a'", (9,), "float32", 4)] * 3, 36)
    groups = LaunchGroups(None)
    assert [groups.add(bucket) for bucket in planner.buckets] == [[bucket] for bucket in planner.buckets]
    assert groups.flush() == []


def reduce_in_groups(comm: Any) -> int:
    """Gradients come in another order on each rank; what is beyond the limit is reduced before the end."""
    launch_groups._MERGED_BYTES = LIMIT_BYTES
    rng = np.random.default_rng(comm.rank)
    shapes = {i: ((int(n),), "float64" if i > 20 else "float32") for i, n in enumerate(np.arange(30) * 13 % 300)}
    callback = gs.AllreduceCallback("sum", comm, threshold_bytes=500, parameters=shapes, gradient_as_bucket_view=True)
    views = callback.gradient_buffers()
    for step in range(1, 6):
        for number, view in views.items():
            view[...] = number * (comm.rank + step)
        order = [int(number) for number in rng.permutation(len(shapes))]
        futures = {number: callback(number, views[number]) for number in order}
        callback.flush()
        factor = sum(rank + step for rank in range(comm.world_size))
        for number, future in futures.items():
            assert future.result() is views[number]
            assert (views[number] == number * factor).all(), number
    return callback.statistics.all_reduces // 5


def test_ranks_that_complete_buckets_in_different_orders_merge_alike() -> None:
    counts = run_ranks(3, reduce_in_groups)
    assert len(set(counts)) == 1
    assert 3 < counts[0] < 30
