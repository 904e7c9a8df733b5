"""What a GPU machine must do: until NCCL arrives, refuse it in words that say what was found."""

from __future__ import annotations

import pytest

import gradsync as gs


@pytest.mark.gpu
def test_nccl_is_refused_and_the_gpus_are_counted() -> None:
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    with pytest.raises(gs.BackendUnavailable, match=f"no NCCL communicator .CuPy sees {count} GPUs"):
        gs.init_process_group("nccl", rank=0, world_size=1)
