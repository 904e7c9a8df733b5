"""Which GPUs ranks get, and how many ranks a machine has by default."""

import os

import pytest

import gradsync as gs
from gradsync import machine

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-GPU-8932f937-d72c/1/0"


def visible_gpus(_=None):
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("given", "visible", "chosen"),
    [
        (" 5 , 04 ", "3,4,5", ["5", "4"]),
        ([0, MIG], None, ["0", MIG]),
        ([UUID, "GPU-1"], "GPU-12,GPU-8932f937", [UUID, "GPU-1"]),  # either may be an abbreviation
    ],
)
def test_each_rank_gets_one_of_the_visible_gpus(given, visible, chosen, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [results.get() for results in gs.spawn(visible_gpus, gpus=given).return_queues] == chosen


def test_ranks_may_share_gpus(monkeypatch):
    monkeypatch.setenv("GRADSYNC_ALLOW_SHARED_GPU", "1")
    context = gs.spawn(visible_gpus, nprocs=3, gpus="0,3")
    assert [results.get() for results in context.return_queues] == ["0", "3", "0"]


@pytest.mark.parametrize(
    "given",
    ["", "0,,1", "0,", [], "0,0", [1, "01"], "-1", [0, -2], "cuda:0", "0;1", "²", [True], [0.0], b"0", 3],
)
def test_what_names_no_gpus_is_refused(given):
    with pytest.raises(gs.InvalidArgument):
        gs.spawn(visible_gpus, nprocs=1, gpus=given)


@pytest.mark.parametrize(
    ("given", "n_ranks", "variables"),
    [
        ("0", 2, {}),
        ("0,1,2", 2, {}),
        ("0,1,2", 2, {"GRADSYNC_ALLOW_SHARED_GPU": "1"}),  # one would stay unused
        ("4", 1, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ("1", 1, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}),  # CUDA stops at the -1
        ("0", 1, {"CUDA_VISIBLE_DEVICES": ""}),
        ("1", 1, {"CUDA_VISIBLE_DEVICES": "10"}),
        ("0", 1, {"CUDA_VISIBLE_DEVICES": UUID}),
        (UUID, 1, {"CUDA_VISIBLE_DEVICES": "0"}),
        ("GPU-9", 1, {"CUDA_VISIBLE_DEVICES": UUID}),
    ],
)
def test_gpus_that_ranks_cannot_have_are_refused(given, n_ranks, variables, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(gs.InvalidArgument):
        gs.spawn(visible_gpus, nprocs=n_ranks, gpus=given)


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """This process's /dev has two."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": listdir(tmp_path if path == "/dev" else path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_are_not_there_are_refused():
    with pytest.raises(gs.InvalidArgument):
        gs.spawn(visible_gpus, nprocs=2, gpus="1,2")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("1,0", 2),
        ("0,-1,1", 1),
        ("GPU-8932f937", 1),
        ("NoDevFiles", 0),
    ],
)
def test_the_visible_gpus_are_counted(visible, count):
    """By a private function: ranks would be as many, and without one it depends on the machine."""
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine.count_gpus(variables) == count


@pytest.mark.usefixtures("two_gpus")
def test_a_launcher_starts_a_rank_for_each_visible_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert gs.launcher(lambda: gs.get_communicator().world_size, backend="shm")() == [2, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(gs.BackendUnavailable):
        gs.launcher(print, device_type="gpu")()
