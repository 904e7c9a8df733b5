"""Times the decision which gradient goes into which bucket."""

import pytest

import models
from gradsync.bucketing.plan import DEFAULT_THRESHOLD_BYTES, GradientSpec, plan_buckets


def specs_of(model):
    shapes = models.MODELS[model]()
    return [GradientSpec(f"#{index}", shape, "float32", 4) for index, shape in enumerate(reversed(shapes))]


@pytest.mark.parametrize("model", models.MODELS)
def test_plan_a_step(benchmark, model):
    specs = specs_of(model)
    buckets = benchmark(plan_buckets, specs, DEFAULT_THRESHOLD_BYTES)
    assert sum(len(bucket.slots) for bucket in buckets) == len(specs)


def test_plan_a_step_one_bucket_per_gradient(benchmark):
    specs = specs_of("ResNet-50")
    buckets = benchmark(plan_buckets, specs, 1)
    assert len(buckets) == len(specs)
