"""The NCCL communicator's devices, arrays and errors."""

from __future__ import annotations

import re

import pytest

import gradsync as gs
from gradsync.communicators.nccl.connect import choose_device
from gradsync.communicators.nccl.kernels import CHUNK, PACK_SOURCE
from gradsync.communicators.nccl.library import version_text

# Which GPU a rank takes.


@pytest.mark.parametrize(
    ("visible", "count", "local_rank", "wanted", "device"),
    [
        (None, 8, 0, None, 0),
        (None, 8, 5, None, 5),
        ("2,3", 2, 1, None, 1),
        ("2", 1, 0, None, 0),
        ("2", 1, 5, None, 0),  # given by the launcher: this rank's own
        ("GPU-1f2e", 1, 3, None, 0),
        (None, 8, 5, "cuda", 5),
        (None, 8, 5, "cuda:2", 2),
        ("4,5", 2, 7, "cuda:0", 0),
    ],
)
def test_the_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, local_rank: int, wanted: str | None, device: int
) -> None:
    set_visible(monkeypatch, visible)
    for allow_shared_gpu in (False, True):
        assert choose_device(wanted, local_rank, count, allow_shared_gpu=allow_shared_gpu) == device


@pytest.mark.parametrize(
    ("visible", "count", "local_rank", "wanted", "kind", "text"),
    [
        (None, 2, 2, None, gs.BackendUnavailable, "local rank 2 has no GPU of its own: 2 GPUs are visible"),
        (None, 1, 1, None, gs.BackendUnavailable, "CUDA_VISIBLE_DEVICES is not set"),
        ("0,1", 2, 2, "cuda", gs.BackendUnavailable, "CUDA_VISIBLE_DEVICES=0,1"),
        ("", 0, 0, None, gs.BackendUnavailable, "needs a GPU"),
        (None, 2, 0, "cuda:2", gs.BackendUnavailable, "'cuda:2' does not exist: 2 GPUs"),
        (None, 2, 0, "cpu", gs.InvalidArgument, "'cuda' or 'cuda:N', got 'cpu'"),
        (None, 2, 0, "cuda:", gs.InvalidArgument, "got 'cuda:'"),
        (None, 2, 0, "cuda:-1", gs.InvalidArgument, "got 'cuda:-1'"),
        (None, 2, 0, "gpu:0", gs.InvalidArgument, "got 'gpu:0'"),
    ],
)
def test_no_device_for_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    count: int,
    local_rank: int,
    wanted: str | None,
    kind: type[Exception],
    text: str,
) -> None:
    set_visible(monkeypatch, visible)
    with pytest.raises(kind, match=text):
        choose_device(wanted, local_rank, count, allow_shared_gpu=False)


def test_ranks_that_share_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    set_visible(monkeypatch, None)
    assert [choose_device(None, rank, 2, allow_shared_gpu=True) for rank in range(5)] == [0, 1, 0, 1, 0]


def set_visible(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_versions_are_written_as_people_write_them() -> None:
    assert [version_text(v) for v in (23203, 22907, 21805)] == ["2.32.3", "2.29.7", "2.18.5"]


# The table of chunks.


def test_the_kernels_read_the_fields_that_the_host_writes() -> None:
    """CuPy's stand-in does not compile CUDA source, so it would not notice a field that became part of a comment."""
    struct = PACK_SOURCE.split("struct Chunk {")[1].split("}")[0]
    assert re.sub("//.*", "", struct).split() == [word for name in CHUNK.names or () for word in ("u64", f"{name};")]
