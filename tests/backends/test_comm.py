"""gs.comm: what detectron2's users call, alone and among ranks."""

from __future__ import annotations

import gc
import itertools
import re
import weakref

import ml_dtypes
import numpy as np
import pytest

import gradsync as gs
from gradsync import comm as gs_comm


@pytest.fixture
def alone():
    yield
    gs.destroy_process_group()


# -- Alone -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_world_of_one_that_nobody_has_initialised():
    assert not gs.is_initialized()
    assert (gs_comm.get_world_size(), gs_comm.get_rank()) == (1, 0)
    assert (gs_comm.get_local_size(), gs_comm.get_local_rank()) == (1, 0)
    assert gs_comm.is_main_process()
    gs_comm.synchronize()
    anything = object()
    assert gs_comm.all_gather(anything) == gs_comm.gather(anything) == gs_comm.gather(anything, dst=1) == [anything]
    with gs.init_process_group("local") as world:
        assert gs_comm.gather(anything, dst=1, group=world) == [anything]


@pytest.mark.usefixtures("alone")
def test_the_local_group_of_one_belongs_to_its_world():
    with gs.init_process_group("local"):
        with pytest.raises(gs.InvalidArgument, match=r"create_local_process_group"):
            gs_comm.get_local_process_group()
        with pytest.raises(gs.InvalidArgument, match="divides the world size 1, got 2"):
            gs_comm.create_local_process_group(2)
        gs_comm.create_local_process_group(1)
        group = gs_comm.get_local_process_group()
        assert (group.rank, group.world_size) == (0, 1)
        assert gs_comm.all_gather("mine", group=group) == ["mine"]
        gs_comm.create_local_process_group(np.int64(1))
        assert gs_comm.get_local_process_group() is group
    gs.destroy_process_group()
    with gs.init_process_group("local"), pytest.raises(gs.InvalidArgument):
        gs_comm.get_local_process_group()  # that one was another world's


@pytest.mark.usefixtures("alone")
def test_a_world_that_was_destroyed_is_not_kept_alive():
    world = gs.init_process_group("local")
    gs_comm.create_local_process_group(1)
    gs_comm.reduce_dict({"loss": 1.0})
    kept = weakref.ref(world), weakref.ref(gs_comm.get_local_process_group())
    gs.destroy_process_group()
    del world
    gc.collect()
    assert [each() for each in kept] == [None, None]


@pytest.mark.ranks(2)
def test_without_a_process_group_no_rank_takes_itself_for_all(rank):
    calls = (
        lambda: gs_comm.reduce_dict({"rank": rank})["rank"] == 0.5,
        lambda: gs_comm.all_gather(rank) == [0, 1],
        lambda: gs_comm.gather(rank) == [[0, 1], []][rank],
        gs_comm.shared_random_seed,
        lambda: gs_comm.synchronize() is None,
    )
    for call in calls:
        with pytest.raises(gs.InvalidArgument):
            call()
    with gs.init_process_group("shm"):
        for call in calls:
            assert call()


# -- Scalars -----------------------------------------------------------------------------------------------------------


class Exported:
    """A 0-d array of a library that has DLPack and nothing else."""

    def __init__(self, value):
        self.array = np.asarray(value)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return 1, 0


class Tensor(Exported):
    """One that refuses to export, and names its dtype its own way, as a tensor of torch that needs a gradient."""

    def __init__(self, value, dtype):
        super().__init__(value)
        self.dtype = dtype

    def __dlpack__(self, **options):
        raise BufferError("Can't export tensors that require gradient")

    def item(self):
        return self.array.item()


#: By name: the value, the dtype of the sum, and of the mean.
SCALARS = {
    "int": (7, "int64", "float64"),
    "bool": (True, "int64", "float64"),
    "float": (0.5, "float64", "float64"),
    "complex": (1 + 2j, "complex128", "complex128"),
    "int8": (np.int8(100), "int64", "float64"),
    "uint8": (np.uint8(200), "uint64", "float64"),
    "float16": (np.float16(0.5), "float16", "float16"),
    "bfloat16": (ml_dtypes.bfloat16(0.5), "bfloat16", "bfloat16"),
    "float32": (np.array(0.25, np.float32), "float32", "float32"),
    "complex64": (np.complex64(1j), "complex64", "complex64"),
    "dlpack": (Exported(np.float32(0.5)), "float32", "float32"),
    "tensor": (Tensor(0.5, "torch.float32"), "float32", "float32"),
    "strange": (Tensor(0.5, "torch.no_such_dtype"), "float64", "float64"),
}


@pytest.mark.ranks(1, 3)
def test_scalars_of_every_kind_keep_their_dtype(comm):
    values = {name: value for name, (value, _, _) in SCALARS.items()}
    for average in (False, True):
        got = gs_comm.reduce_dict(values, average=average)
        assert list(got) == list(SCALARS)
        for name, (value, dtype_of_sum, dtype_of_mean) in SCALARS.items():
            assert isinstance(got[name], np.generic)
            assert got[name].dtype.name == (dtype_of_mean if average else dtype_of_sum), name
            given = np.asarray(getattr(value, "array", value)).astype(got[name].dtype)
            assert got[name] == given * (1 if average else comm.world_size), name


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"loss": "high"}, "'loss' is a str"),
        ({"loss": None}, "'loss' is a NoneType"),
        ({"loss": [1.0]}, "'loss' is a list"),
        ({"loss": np.ones(1)}, "'loss' is an array of shape (1,)"),
        ({"loss": Exported(np.ones(3))}, "'loss' is a Exported of shape (3,)"),
        ({"loss": 2**70}, "'loss' has dtype object"),
        ({"loss": np.datetime64("2020")}, "'loss' has dtype datetime64[Y]"),
        (7, "got int"),
    ],
)
def test_what_is_no_scalar_is_refused(wrong, word):
    with pytest.raises(gs.InvalidArgument, match=re.escape(word)):
        gs_comm.reduce_dict(wrong)


def test_an_operator_in_the_place_of_average_is_refused():
    with pytest.raises(gs.InvalidArgument, match="average=False gives the sum"):
        gs_comm.reduce_dict({"right": 3}, "sum")
    assert gs_comm.reduce_dict({"right": 3}, np.bool_(False)) == {"right": 3}


@pytest.mark.ranks(2, 3)
def test_scalars_are_reduced_by_name_whatever_their_order(comm):
    n, rank = comm.world_size, comm.rank
    names = ["loss", "steps", 3, ("a", 1)]
    mine = list(itertools.permutations(names))[rank * 5]
    values = {"loss": 0.1 * (rank + 1), "steps": rank, 3: np.float32(rank), ("a", 1): -rank}
    mean = gs_comm.reduce_dict({name: values[name] for name in mine})
    total = gs_comm.reduce_dict({name: values[name] for name in mine}, average=False)
    assert tuple(mean) == tuple(total) == tuple(mine)
    ranks = n * (n - 1) // 2
    assert (total["steps"], total[3], total["a", 1]) == (ranks, np.float32(ranks), -ranks)
    np.testing.assert_allclose(mean["loss"], 0.1 * (n + 1) / 2, rtol=1e-12)
    bits = {name: (mean[name].tobytes(), total[name].tobytes()) for name in names}
    assert gs_comm.all_gather(bits) == [bits] * n
    assert gs_comm.reduce_dict({}) == {}
    mixed = gs_comm.reduce_dict({"x": np.float32(1) if rank == 0 else 1.0})["x"]
    assert mixed.dtype == np.float64


@pytest.mark.ranks(2)
def test_integers_do_not_wrap_and_dtypes_without_a_common_one_are_refused(comm):
    rank = comm.rank
    mean = gs_comm.reduce_dict({"time": 2**62 + rank, "unsigned": np.uint64(2**64 - 1), "mixed": 2**63 if rank else 5})
    assert mean == {"time": float(2**62), "unsigned": float(2**64), "mixed": (2**63 + 5) / 2}
    total = gs_comm.reduce_dict({"time": 2**62, "mixed": 2**63 if rank else 5, "negative": -(2**62)}, average=False)
    assert {name: int(value) for name, value in total.items()} == {
        "time": 2**63, "mixed": 2**63 + 5, "negative": -(2**63),
    }  # fmt: skip
    with pytest.raises(gs.InvalidArgument, match="does not fit into 64 bits"):
        gs_comm.reduce_dict({"n": 2**63}, average=False)
    with pytest.raises(gs.InvalidArgument, match="no common dtype"):
        gs_comm.reduce_dict({"loss": ml_dtypes.bfloat16(1) if rank else np.float16(1)})
    assert gs_comm.all_gather(rank) == [0, 1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("error", "of_rank_0", "of_rank_1"),
    [
        (gs.PlanMismatch, ("reduce_dict", {"loss": 1.0, "accuracy": 2}), ("reduce_dict", {"loss": 1.0, "extra": 2})),
        (gs.PlanMismatch, ("reduce_dict", {"loss": 1.0}), ("reduce_dict", {})),
        (gs.PlanMismatch, ("reduce_dict", {"loss": 1.0}, True), ("reduce_dict", {"loss": 1.0}, False)),
        (gs.PlanMismatch, ("reduce_dict", {"loss": 1.0}), ("all_gather", 1)),
        (gs.PlanMismatch, ("shared_random_seed",), ("synchronize",)),
        (gs.PlanMismatch, ("create_local_process_group", 2), ("create_local_process_group", 1)),
        (gs.InvalidArgument, ("reduce_dict", {"loss": 1.0}), ("reduce_dict", {"loss": "high"})),
        (gs.InvalidArgument, ("all_gather", 1), ("all_gather", len)),
    ],
)
def test_ranks_that_differ_all_raise_and_go_on(comm, error, of_rank_0, of_rank_1):
    name, *arguments = of_rank_1 if comm.rank else of_rank_0
    if arguments == [len]:
        arguments = [lambda: 0]  # which does not pickle
    with pytest.raises(error):
        getattr(gs_comm, name)(*arguments)
    assert gs_comm.all_gather(comm.rank) == [0, 1]


# -- Among ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 3)
def test_objects_and_which_rank_this_is(comm):
    n, rank = comm.world_size, comm.rank
    assert (gs_comm.get_world_size(), gs_comm.get_rank(), gs_comm.is_main_process()) == (n, rank, rank == 0)
    assert (gs_comm.get_local_size(), gs_comm.get_local_rank()) == (n, rank)  # as the launcher says
    gs_comm.synchronize()
    assert gs_comm.all_gather({"rank": rank, "x": "x" * rank}) == [{"rank": r, "x": "x" * r} for r in range(n)]
    for dst in range(n):
        assert gs_comm.gather(rank, dst) == (list(range(n)) if rank == dst else [])
    if n > 1:
        for wrong in (9, -1, "0", True):
            with pytest.raises(gs.InvalidArgument, match=f"dst to be a rank from 0 to {n - 1}"):
                gs_comm.gather(rank, dst=wrong)


@pytest.mark.ranks(4, environment={"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "2"})
def test_the_launcher_says_the_local_rank(comm):
    assert (gs_comm.get_local_rank(), gs_comm.get_local_size()) == (2, 3)


@pytest.mark.ranks(1, 3)
def test_seeds_are_rank_0s_next_random_numbers(comm):
    before = np.random.get_state()
    try:
        np.random.seed(7 + comm.rank)
        shared = [gs_comm.shared_random_seed() for _ in range(10)]
        left = int(np.random.randint(2**31))
    finally:
        np.random.set_state(before)
    of_rank_0, mine = np.random.RandomState(7), np.random.RandomState(7 + comm.rank)
    assert shared == [int(of_rank_0.randint(2**31)) for _ in range(10)]
    assert left == [int(mine.randint(2**31)) for _ in range(11)][-1]  # each rank's generator goes on alike
    assert len(set(shared)) == 10


@pytest.mark.ranks(4)
def test_local_groups(rank):
    n = 4
    for per_machine in (1, 2, 4):
        with gs.init_process_group("shm"):
            for wrong in (0, -1, n + 1, 1.0, "2", True, None):
                with pytest.raises(gs.InvalidArgument, match="create_local_process_group needs"):
                    gs_comm.create_local_process_group(wrong)
            gs_comm.create_local_process_group(per_machine)
            group = gs_comm.get_local_process_group()
            gs_comm.create_local_process_group(np.int32(per_machine))
            assert gs_comm.get_local_process_group() is group
            with pytest.raises(gs.InvalidArgument, match="was called before"):
                gs_comm.create_local_process_group(n if per_machine < n else 1)
            first = rank - rank % per_machine
            assert group.ranks == tuple(range(first, first + per_machine))
            assert (gs_comm.get_local_rank(), gs_comm.get_local_size()) == (rank - first, per_machine)
            assert gs_comm.all_gather(rank, group=group) == list(group.ranks)
            last = per_machine - 1
            assert gs_comm.gather(rank, dst=last, group=group) == (list(group.ranks) if group.rank == last else [])
            assert gs_comm.get_rank() == rank
        gs.destroy_process_group()


@pytest.mark.ranks(2, on=("fake",))
def test_scalars_on_gpus(comm):
    import cupy

    values = {"loss": cupy.array(comm.rank + 0.5, np.float32), "n": cupy.array(2)}
    got = gs_comm.reduce_dict(values, average=False)
    found = {name: (value.item(), value.dtype.name) for name, value in got.items()}
    assert found == {"loss": (2.0, "float32"), "n": (4, "int64")}


@pytest.mark.ranks(2, on=("fake",))
def test_the_local_group_stays_what_it_is_within_an_override(rank):
    for made_within in (False, True):
        with gs.init_process_group("shm"):
            if not made_within:
                gs_comm.create_local_process_group(2)
            with gs.override_backend("nccl"):
                if made_within:
                    gs_comm.create_local_process_group(2)
                assert gs_comm.all_gather(rank) == [0, 1]
                group = gs_comm.get_local_process_group()
                assert group.backend == ("nccl" if made_within else "shm")
            assert gs_comm.get_local_process_group() is group
            assert (gs_comm.get_local_rank(), gs_comm.get_local_size()) == (rank, 2)
        gs.destroy_process_group()
