"""The NCCL communicator's devices, arrays and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from places import GPU, SHM, STAND_IN, Place, always_on, on

ROOT = Path(__file__).parents[2]


def check(comm: Any, name: str, *args: Any) -> Any:
    """Runs a check; only ranks have a CuPy, so that only they import it."""
    import nccl_device_checks

    return getattr(nccl_device_checks, name)(comm, *args)


def test_ranks_take_the_visible_devices_in_order() -> None:
    assert STAND_IN.run(3, check, "take_devices_in_order") == ["cuda:0", "cuda:1", "cuda:2"]
    visible = {"CUDA_VISIBLE_DEVICES": "3,1", "FAKE_CUPY_DEVICES": "4"}
    assert STAND_IN.run(2, check, "take_devices_in_order", environment=visible) == ["cuda:0", "cuda:1"]


def test_ranks_with_visible_devices_of_their_own() -> None:
    two = {"FAKE_CUPY_DEVICES": "2"}
    for visible in (["0", "1"], ["1", "0"]):
        found = SHM.run(2, check, "begin_on_own_gpu", visible, environment=two)
        assert found == [("cuda:0", f"0000:0{number}:00.0") for number in visible]


# Ranks that share a GPU.


def test_two_ranks_on_one_gpu_are_refused_in_words() -> None:
    one = {"FAKE_CUPY_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}
    for text in SHM.run(2, check, "begin_anew", ["nccl", "nccl"], {}, environment=one):
        # The second one may hear it from the first.
        assert text.startswith(("BackendUnavailable: rank ", "RankFailed: "))
        assert "ranks [0, 1] share the GPU 0000:00:00.0" in text
        assert "allow_shared_gpu=True" in text


def test_slices_of_one_gpu_are_told_apart() -> None:
    slices = ["MIG-a", "MIG-b"]
    assert SHM.run(2, check, "begin_on_own_gpu", slices) == [("cuda:0", "0000:00:00.0")] * 2
    for visible, version in ((["MIG-a", "MIG-a"], "23203"), (slices, "22907")):  # the latter takes none of them
        environment = {"FAKE_CUPY_NCCL_VERSION": version}
        for text in SHM.run(2, check, "begin_on_gpus_that_are_refused", visible, environment=environment):
            assert "ranks [0, 1] share the GPU 0000:00:00.0" in text


@pytest.mark.parametrize("version", ["23203", "22907"])
def test_two_ranks_may_share_a_gpu(version: str) -> None:
    one = {"FAKE_CUPY_DEVICES": "1", "FAKE_CUPY_NCCL_VERSION": version}
    found = STAND_IN.run(2, check, "share_a_gpu", environment=one, allow_shared_gpu=True)
    if version >= "23000":
        assert found == [("1", None)] * 2
    else:
        assert [enabled for enabled, _ in found] == [None, None]
        assert len({host for _, host in found}) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_a_real_gpu(world_size: int) -> None:
    GPU.run(world_size, check, "share_a_gpu")


# Beginnings that are refused.


def test_ranks_that_take_different_backends_are_told() -> None:
    told = SHM.run(2, check, "begin_anew", ["nccl", "shm"], {}, environment={"FAKE_CUPY_DEVICES": "2"})
    for rank, text in enumerate(told):
        differs = f"rank {rank}/2: rank 1 asks for backend 'shm', rank 0 for 'nccl': all ranks need the same"
        assert text.count(differs)


def test_communicators_that_do_not_block_are_refused() -> None:
    (text,) = SHM.run(1, check, "begin_anew", ["nccl"], {}, environment={"NCCL_COMM_BLOCKING": "0"})
    assert text.startswith("BackendUnavailable")
    assert "NCCL_COMM_BLOCKING=0 is set, but CuPy cannot work with it: unset the variable" in text


def test_unified_memory_is_refused() -> None:
    """With it cupy.asarray gives a view of host memory where a GPU can read that: nothing would hold a chunk table."""
    (text,) = SHM.run(1, check, "begin_anew", ["nccl"], {}, environment={"CUPY_ENABLE_UMP": "1"})
    assert text.startswith("BackendUnavailable")
    assert "CUPY_ENABLE_UMP is set" in text


def test_an_old_cupy_is_refused() -> None:
    (text,) = SHM.run(1, check, "begin_anew", ["nccl"], {}, environment={"FAKE_CUPY_VERSION": "13.6.0"})
    assert text.startswith("BackendUnavailable")
    assert "CuPy 13.6.0 is too old, gradsync needs 14 or newer: pip install --upgrade 'cupy-cuda12x[ctk]>=14'" in text


def test_a_device_that_is_not_there_is_refused() -> None:
    (text,) = SHM.run(1, check, "begin_anew", ["nccl"], {"device": "cuda:1"})
    assert "device 'cuda:1' does not exist: 1 GPUs are visible" in text


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_cupy_comes_with_a_numpy_for_its_bfloat16(extra: str) -> None:
    """It is gradsync's own bound otherwise: NumPy 2.1, with which CuPy has no loops for bfloat16."""
    found = re.search(rf"^{extra} = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    assert '"numpy>=2.1.2"' in found[1].split(", ")


def test_a_missing_libnccl_is_told() -> None:
    (text,) = STAND_IN.run(1, check, "lack_libnccl")
    assert "CuPy could not load libnccl.so.2: pip install nvidia-nccl-cu12" in text


# Arrays and errors.


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 1, 2), *on(GPU, 1, 2)])
def test_foreign_arrays_are_not_copied(place: Place, world_size: int) -> None:
    place.run(world_size, check, "reach_foreign_arrays")


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 1, 2), *on(GPU, 1, 2)])
def test_read_only_arrays_are_not_written_to(place: Place, world_size: int) -> None:
    place.run(world_size, check, "read_what_is_read_only")


@pytest.mark.parametrize(("place", "world_size"), [*always_on(STAND_IN, 1), *on(GPU, 1)])
def test_means_over_more_ranks_than_half_precision_counts(place: Place, world_size: int) -> None:
    place.run(world_size, check, "divide_half_precision_by_many_ranks")


def test_arrays_on_another_gpu_are_refused() -> None:
    STAND_IN.run(1, check, "refuse_another_gpu", environment={"FAKE_CUPY_DEVICES": "2"})


def test_errors_have_nccls_own_words() -> None:
    STAND_IN.run(1, check, "tell_nccls_own_words")


def test_errors_of_nccl() -> None:
    STAND_IN.run(1, check, "tell_errors_of_nccl")
