import pytest

from gradsync.errors import InvalidArgument
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
def test_parse_gpus(given, names):
    assert parse_gpus(given) == names
    assert parse_gpus(names) == names


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", "got '' in ''"),
        ("0,,1", "got '' in '0,,1'"),
        ("0,", "got '' in '0,'"),
        ([], "at least one GPU, got none"),
        ("0,0", "names GPU 0 twice"),
        ([1, "01"], "names GPU 1 twice"),
        ("-1", "got '-1' in '-1'"),
        ([0, -2], r"got -2 in \[0, -2\]"),
        ("cuda:0", "got 'cuda:0'"),
        ("0;1", "got '0;1'"),
        ("²", "got '²'"),
        ([True], "got True"),
        ([0.0], "got 0.0"),
        (b"0", "a list of GPUs, got b'0'"),
        (3, "a list of GPUs, got 3"),
        (None, "a list of GPUs, got None"),
    ],
)
def test_parse_gpus_says_what_is_wrong(given, text):
    with pytest.raises(InvalidArgument, match=text):
        parse_gpus(given)


@pytest.mark.parametrize(
    ("given", "n_ranks", "environ", "chosen"),
    [
        ("4,5", 2, {}, ["4", "5"]),
        ([5, 4], 2, {"CUDA_VISIBLE_DEVICES": "3,4,5"}, ["5", "4"]),
        ("4", 1, {"CUDA_VISIBLE_DEVICES": "04"}, ["4"]),
        ("GPU-8932f937", 1, {"CUDA_VISIBLE_DEVICES": f"GPU-1,{UUID}"}, ["GPU-8932f937"]),
        (UUID, 1, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, [UUID]),
    ],
)
def test_each_rank_gets_its_gpu(given, n_ranks, environ, chosen):
    assert choose_gpus(given, n_ranks, environ) == chosen
    assert choose_gpus(given, n_ranks, environ | SHARED) == chosen


@pytest.mark.parametrize(("given", "n_ranks"), [("0", 2), ("0,1,2", 2)])
def test_as_many_gpus_as_ranks(given, n_ranks):
    count = len(given.split(","))
    with pytest.raises(
        InvalidArgument, match=f"for each of 2 ranks, got {count}: {given}; name 2 GPUs or start {count}"
    ):
        choose_gpus(given, n_ranks, {})


def test_ranks_share_in_turn_where_it_is_allowed():
    assert choose_gpus("0,3", 5, SHARED) == ["0", "3", "0", "3", "0"]
    with pytest.raises(InvalidArgument, match="got 3: 0,1,2"):  # one would stay unused
        choose_gpus("0,1,2", 2, SHARED)


@pytest.mark.parametrize(
    ("given", "visible"),
    [
        ("4", "0,1"),
        ("1", "0,-1,1"),  # CUDA stops at the -1
        ("0", ""),
        ("1", "10"),
        ("0", UUID),
        (UUID, "0"),
        ("GPU-9", UUID),
    ],
)
def test_gpus_outside_of_the_visible_ones_are_refused(given, visible):
    with pytest.raises(InvalidArgument) as caught:
        choose_gpus(given, 1, {"CUDA_VISIBLE_DEVICES": visible})
    assert f"GPU {given}, which is not in this process's CUDA_VISIBLE_DEVICES={visible};" in str(caught.value)


def test_gpus_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr("gradsync.launching.job.count_gpus", lambda environ: 2)
    assert choose_gpus("1,0", 2, {}) == ["1", "0"]
    with pytest.raises(InvalidArgument, match="GPU 2, and this machine has GPUs 0 to 1"):
        choose_gpus("1,2", 2, {})
