"""The bucket rule, for any sequence of gradients."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.bucketing.plan import GradientSpec, Planner, plan_buckets

ITEMSIZE = {"float32": 4, "float64": 8, "int8": 1}

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEMSIZE))), max_size=40).map(
    lambda rows: [GradientSpec(f"#{i}", s, d, ITEMSIZE[d]) for i, (s, d) in enumerate(rows)]
)


def naive_plan(gradients: list[GradientSpec], threshold_bytes: int) -> list[tuple[int, ...]]:
    """The rule written down once more, as plainly as possible: positions by bucket, in launch order."""
    launched: list[tuple[int, ...]] = []
    filling: dict[str, list[int]] = {}

    def size(positions: list[int]) -> int:
        return sum(prod(gradients[p].shape) * gradients[p].itemsize for p in positions)

    for position, spec in enumerate(gradients):
        if size([position]) > threshold_bytes:
            launched.append((position,))
            continue
        bucket = filling.setdefault(spec.dtype, [])
        if bucket and size([*bucket, position]) > threshold_bytes:
            launched.append(tuple(bucket))
            bucket.clear()
        bucket.append(position)
        if size(bucket) == threshold_bytes:
            launched.append(tuple(bucket))
            bucket.clear()
    return launched + [tuple(filling[d]) for d in sorted(filling) if filling[d]]


@given(specs, st.integers(1, 2000))
def test_equals_the_naive_plan(gradients: list[GradientSpec], threshold_bytes: int) -> None:
    buckets = plan_buckets(gradients, threshold_bytes)
    got = [tuple(slot.position for slot in bucket.slots) for bucket in buckets]
    assert got == naive_plan(gradients, threshold_bytes)


@given(specs, st.integers(1, 2000))
def test_invariants(gradients: list[GradientSpec], threshold_bytes: int) -> None:
    buckets = plan_buckets(gradients, threshold_bytes)
    assert sorted(slot.position for b in buckets for slot in b.slots) == list(range(len(gradients)))
    for bucket in buckets:
        assert {slot.spec.dtype for slot in bucket.slots} == {bucket.dtype}
        assert len(bucket.slots) == 1 or bucket.size_bytes <= threshold_bytes
        assert [slot.position for slot in bucket.slots] == sorted(slot.position for slot in bucket.slots)
        begin = 0
        for slot in bucket.slots:
            assert slot.begin == begin
            assert slot.end - slot.begin == prod(slot.spec.shape)
            begin = slot.end
        assert bucket.size_elements == begin


@given(st.text())
def test_a_label_is_the_name_as_the_program_wrote_it(name: str) -> None:
    assert GradientSpec(repr(name), (), "float32", 4).label == name


@given(specs, st.integers(1, 2000))
def test_planner_forgets_the_last_step(gradients: list[GradientSpec], threshold_bytes: int) -> None:
    planner = Planner(threshold_bytes)
    first, second = (planner.plan_step(gradients) for _ in range(2))
    assert first == second


def test_oversize_goes_alone_and_does_not_disturb() -> None:
    gradients = [GradientSpec(f"#{i}", (n,), "int8", 1) for i, n in enumerate((3, 100, 4, 3))]
    buckets = plan_buckets(gradients, 10)
    assert [[s.position for s in b.slots] for b in buckets] == [[1], [0, 2, 3]]


@pytest.mark.parametrize(
    ("text", "size"),
    [("25 MB", 25 * 1024**2), ("1.5kb", 1536), (" 2 GiB ", 2 * 1024**3), ("64 B", 64), ("3 mib", 3 * 1024**2), (7, 7)],
)
def test_sizes_as_text(text: str, size: int) -> None:
    sync = gs.AllreduceCallback(threshold_bytes=text)
    assert (sync.threshold_bytes, Planner(text).threshold_bytes) == (size, size)


@pytest.mark.parametrize(
    "threshold", [0, -1, 1.5, True, "10", "MB", "0 MB", "-1 MB", "1 TB", "1,5 MB", "9" * 400 + " MB"]
)
def test_threshold_is_checked(threshold: object) -> None:
    with pytest.raises(gs.InvalidArgument, match="threshold_bytes"):
        Planner(threshold)  # type: ignore[arg-type]


POOL = [
    GradientSpec(f"p{i}", (size,), dtype, 4)
    for i, (size, dtype) in enumerate([(1, "a"), (5, "a"), (3, "b"), (30, "a"), (0, "b")])
]


@given(st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=8), st.sampled_from(["flush", "reset"])), max_size=6))
def test_a_planner_that_has_seen_other_steps_plans_as_a_new_one(steps: list[tuple[list[int], str]]) -> None:
    """Steps repeat, differ in the middle, grow, shrink and break off, in any order."""
    planner = Planner(40)
    for numbers, end in steps:
        for _ in range(2):
            specs = [POOL[number] for number in numbers]
            assignments = [planner.assign(spec, position) for position, spec in enumerate(specs)]
            if end == "flush":
                buckets = [bucket for assignment in assignments for bucket in assignment.completes or ()]
                assert buckets + planner.flush(len(specs)) == plan_buckets(specs, 40)
            else:
                planner.reset()
