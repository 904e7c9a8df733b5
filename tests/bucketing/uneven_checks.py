"""What the knobs of an AllreduceCallback must do where ranks run out of batches; run inside rank processes."""

from __future__ import annotations

from typing import Any

import numpy as np
from callback_hook_checks import Recording
from naive_reference import SPECS, expect_equal, put_all, reduced, step, values_for

import gradsync as gs
from kits import make_kit

SMALL = {name: SPECS[name] for name in ("matrix", "one", "double", "huge")}
CLIP_NORM = 7.0
OPTIONS: tuple[dict[str, Any], ...] = (
    {"hook": Recording("in place")},
    {"hook": Recording("copy"), "parameters": SMALL, "gradient_as_bucket_view": True},
    {"clip_norm": CLIP_NORM, "nonfinite": "skip"},
    {"clip_norm": CLIP_NORM, "nonfinite": "raise", "parameters": SMALL, "gradient_as_bucket_view": True},
    {"clip_norm": CLIP_NORM, "hook": Recording("in place"), "parameters": SMALL},
)


def train(comm: Any, kit_name: str) -> list[str]:
    """The last rank has fewer batches than the others; returns the norms, of which it knows the first ones."""
    kit = make_kit(comm, kit_name)
    n = comm.world_size
    batches = [4] * (n - 1) + [2]
    norms = [""] * max(batches)
    for options in OPTIONS:
        chosen = {"threshold_bytes": 700, **options}
        hook = chosen.pop("hook", None)
        callback = gs.AllreduceCallback("mean", comm, **chosen)
        callback.register_hook(hook)
        if "gradient_as_bucket_view" in options:
            callback.gradient_buffers()
        with callback.join(SMALL):
            for number in range(batches[comm.rank]):
                got = step(callback, put_all(kit, values_for(comm.rank, number, SMALL)))
                wanted = reduced([values_for(rank, number, SMALL) for rank in range(n) if number < batches[rank]])
                if "clip_norm" in options:
                    norm = float(np.sqrt(sum(np.sum(each.astype(float) ** 2) for each in wanted.values())))
                    np.testing.assert_allclose(callback.norm, norm, rtol=2e-6)
                    factor = CLIP_NORM / (callback.norm + 1e-6)
                    wanted = {
                        name: (each * each.dtype.type(factor)).astype(each.dtype) for name, each in wanted.items()
                    }
                    norms[number] += callback.norm.hex()
                expect_equal(comm, got, wanted, (options, number))
        assert not callback.skip_step
    return norms[: batches[comm.rank]]
