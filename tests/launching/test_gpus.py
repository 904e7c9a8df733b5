"""Which GPUs ranks get, and how many ranks a machine has by default."""

import os

import pytest

import gradsync as gs
from gradsync import machine

# Private, since no test machine has the GPUs; that ranks get them is in test_run and test_spawn, end to end.
from gradsync.launching.job import choose_gpus, parse_gpus

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
SHARED = {"GRADSYNC_ALLOW_SHARED_GPU": "1"}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("4,5", ("4", "5")),
        (" 1 , 0 ", ("1", "0")),
        ([0, "1"], ("0", "1")),
        (("04",), ("4",)),
        (UUID, (UUID,)),
        ("GPU-8932f937,MIG-GPU-8932f937-d72c/1/0", ("GPU-8932f937", "MIG-GPU-8932f937-d72c/1/0")),
        ("MIG-8cd96a05-5eb6-5ccf-aefc-61a78e0eb60f", ("MIG-8cd96a05-5eb6-5ccf-aefc-61a78e0eb60f",)),
    ],
)
def test_gpus_are_named_as_for_cuda(given, names):
    assert parse_gpus(given) == parse_gpus(names) == names


@pytest.mark.parametrize(
    "given",
    ["", "0,,1", "0,", [], "0,0", [1, "01"], "-1", [0, -2], "cuda:0", "0;1", "²", [True], [0.0], b"0", 3],
)
def test_what_names_no_gpus_is_refused_by_spawn(given):
    with pytest.raises(gs.InvalidArgument):
        gs.spawn(print, nprocs=1, gpus=given)


@pytest.mark.parametrize(
    ("given", "n_ranks", "variables", "chosen"),
    [
        ("4,5", 2, {}, ["4", "5"]),
        ([5, 4], 2, {"CUDA_VISIBLE_DEVICES": "3,4,5"}, ["5", "4"]),
        ("4", 1, {"CUDA_VISIBLE_DEVICES": "04"}, ["4"]),
        ("GPU-8932f937", 1, {"CUDA_VISIBLE_DEVICES": f"GPU-1,{UUID}"}, ["GPU-8932f937"]),
        (UUID, 1, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, [UUID]),
        ("0,3", 5, SHARED, ["0", "3", "0", "3", "0"]),
        ("0", 2, {}, None),
        ("0,1,2", 2, {}, None),
        ("0,1,2", 2, SHARED, None),  # one would stay unused
        ("4", 1, {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ("1", 1, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, None),  # CUDA stops at the -1
        ("0", 1, {"CUDA_VISIBLE_DEVICES": ""}, None),
        ("1", 1, {"CUDA_VISIBLE_DEVICES": "10"}, None),
        ("0", 1, {"CUDA_VISIBLE_DEVICES": UUID}, None),
        (UUID, 1, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        ("GPU-9", 1, {"CUDA_VISIBLE_DEVICES": UUID}, None),
    ],
)
def test_each_rank_gets_one_of_the_visible_gpus_or_all_are_refused(given, n_ranks, variables, chosen):
    if chosen is None:
        with pytest.raises(gs.InvalidArgument):
            choose_gpus(given, n_ranks, variables)
    else:
        assert choose_gpus(given, n_ranks, variables) == chosen


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
    assert choose_gpus("1,0", 2, {}) == ["1", "0"]
    with pytest.raises(gs.InvalidArgument):
        choose_gpus("1,2", 2, {})


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
def test_the_visible_gpus_are_counted_and_ranks_are_as_many(visible, count):
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine.count_gpus(variables) == count


@pytest.mark.usefixtures("two_gpus")
def test_spawn_and_launcher_start_a_rank_for_each_visible_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert len(gs.spawn(int).processes) == 2
    assert gs.launcher(lambda: gs.get_communicator().world_size, backend="shm")() == [2, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(gs.BackendUnavailable):
        gs.launcher(print, device_type="gpu")()
