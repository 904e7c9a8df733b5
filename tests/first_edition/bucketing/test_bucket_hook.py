"""The interface of hooks: buckets as hooks see them, and what they may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.bucketing.bucket_hook import GradientBucket, result_of
from gradsync.communicators.local import local_communicator
from gradsync.reduction import ReduceOp


def make_bucket() -> GradientBucket:
    flat = np.arange(7, dtype=np.float32)
    return GradientBucket(2, ("w", "b"), ((2, 3), ()), flat, local_communicator(), ReduceOp.SUM)


def test_gradients_are_views() -> None:
    bucket = make_bucket()
    weight, bias = bucket.gradients()
    assert (weight.shape, bias.shape) == ((2, 3), ())
    weight[1, 2] = 50
    bias[...] = 60
    assert bucket.flat.tolist() == [0, 1, 2, 3, 4, 50, 60]


def test_an_array_or_a_future() -> None:
    bucket = make_bucket()
    assert result_of(bucket.flat, bucket) is bucket.flat
    assert result_of(bucket.flat.reshape(1, 7), bucket) is bucket.flat
    future = bucket.communicator.asynchronous.all_reduce(bucket.flat, bucket.op)
    assert result_of(future, bucket).tolist() == list(range(7))
    transposed = np.ones((1, 7), np.float32).T
    assert result_of(transposed, bucket).shape == (7,)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.ones(6, np.float32), "bucket 2 must return 7 elements of float32, or a future of them, got 6 of float32"),
        (np.ones(7), "got 7 of float64"),
        (None, "hook for bucket 2.*got None"),
        ([1.0] * 7, "hook for bucket 2.*got a list"),
    ],
)
def test_what_does_not_fit(value: Any, match: str) -> None:
    with pytest.raises(gs.InvalidArgument, match=f"^rank 0/1: .*{match}|{match}"):
        result_of(value, make_bucket())


def test_errors_of_a_future_pass_through() -> None:
    bucket = make_bucket()
    bucket.communicator.close()
    with pytest.raises(gs.CommunicatorClosed):
        result_of(bucket.communicator.asynchronous.all_reduce(bucket.flat), bucket)
