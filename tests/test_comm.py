"""gs.comm: what detectron2's users call, alone and among ranks."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync import comm
from places import SHM, STAND_IN, Place, on
from rank_processes import run_ranks

SIZES = [1, 3]


@pytest.fixture(autouse=True)
def leave_nothing() -> Iterator[None]:
    yield
    gs.destroy_process_group()
    comm._alone = None


# Alone.


def test_a_world_of_one_that_nobody_has_initialised() -> None:
    assert not gs.is_initialized()
    assert (comm.get_world_size(), comm.get_rank(), comm.get_local_size(), comm.get_local_rank()) == (1, 0, 1, 0)
    assert comm.is_main_process()
    comm.synchronize()
    anything = object()
    assert comm.all_gather(anything) == [anything]
    assert comm.gather(anything) == [anything]
    assert comm.gather(anything, dst=1) == [anything]
    with gs.init_process_group("local") as world:
        assert comm.gather(anything, dst=1) == comm.gather(anything, dst=1, group=world) == [anything]


def test_the_local_group_of_one() -> None:
    with pytest.raises(
        gs.InvalidArgument, match=r"call gs\.comm\.create_local_process_group\(num_workers_per_machine\)"
    ):
        comm.get_local_process_group()
    with pytest.raises(gs.InvalidArgument, match="divides the world size 1, got 2"):
        comm.create_local_process_group(2)
    comm.create_local_process_group(1)
    group = comm.get_local_process_group()
    assert (group.rank, group.world_size) == (0, 1)
    assert comm.all_gather("mine", group=group) == ["mine"]
    comm.create_local_process_group(np.int64(1))
    assert comm.get_local_process_group() is group
    with gs.init_process_group("local"):
        with pytest.raises(gs.InvalidArgument, match="there is no local process group"):
            comm.get_local_process_group()  # that one was another world's
        comm.create_local_process_group(1)
        assert comm.get_local_process_group() is not group


def test_a_group_must_be_a_communicator() -> None:
    for call in (comm.all_gather, comm.gather):
        with pytest.raises(gs.InvalidArgument, match="needs group to be a Communicator or None, got str"):
            call(1, group="world")


def draw_seeds(_: Any = None) -> tuple[list[int], list[int], int]:
    """Returns the numbers that rank 0 would draw, the shared seeds, and what this rank's generator gives then."""
    rank = comm.get_rank()
    before = np.random.get_state()
    try:
        np.random.seed(7 + rank)
        shared = [comm.shared_random_seed() for _ in range(10)]
        left = int(np.random.randint(2**31))
        alike = np.random.RandomState(7 + rank)
        assert [int(alike.randint(2**31)) for _ in range(11)][-1] == left  # each rank's generator goes on alike
    finally:
        np.random.set_state(before)
    of_rank_0 = np.random.RandomState(7)
    return [int(of_rank_0.randint(2**31)) for _ in range(10)], shared, left


def test_seeds_are_rank_0s_next_random_numbers() -> None:
    wanted, shared, _ = draw_seeds()
    assert shared == wanted
    assert len(set(shared)) == 10
    assert all(0 <= seed < 2**31 for seed in shared)
    assert max(shared) > 2**24


@pytest.mark.parametrize(("place", "n"), [*on(SHM, 2, 3), *on(STAND_IN, 2)])
def test_seeds_of_ranks_are_rank_0s_next_random_numbers(place: Place, n: int) -> None:
    results = place.run(n, draw_seeds)
    for wanted, shared, _ in results:
        assert shared == wanted
    assert len({left for _, _, left in results}) == n


class Exported:
    """A 0-d array of a library that has DLPack and nothing else."""

    def __init__(self, value: Any) -> None:
        self.array = np.asarray(value)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Tensor(Exported):
    """One that refuses to export, and names its dtype its own way, as a tensor of torch that needs a gradient."""

    def __init__(self, value: Any, dtype: str) -> None:
        super().__init__(value)
        self.dtype = dtype

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("Can't export tensors that require gradient")

    def item(self) -> Any:
        return self.array.item()


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


def check_scalars(n: int) -> None:
    """All ranks give the same values."""
    values = {name: value for name, (value, _, _) in SCALARS.items()}
    for average in (False, True):
        got = comm.reduce_dict(values, average=average)
        assert list(got) == list(SCALARS)
        for name, (value, dtype_of_sum, dtype_of_mean) in SCALARS.items():
            assert isinstance(got[name], np.generic)
            assert got[name].dtype.name == (dtype_of_mean if average else dtype_of_sum), name
            given = np.asarray(getattr(value, "array", value)).astype(got[name].dtype)
            assert got[name] == given * (1 if average else n), name


@pytest.mark.parametrize("initialised", [False, True])
def test_scalars_of_every_kind_come_back_with_the_same_types_alone(initialised: bool) -> None:
    if initialised:
        gs.init_process_group("local")
    check_scalars(1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"loss": "high"}, "'loss' is a str"),
        ({"loss": None}, "'loss' is a NoneType"),
        ({"loss": [1.0]}, "'loss' is a list"),
        ({"loss": np.ones(1)}, r"'loss' is an array of shape \(1,\)"),
        ({"loss": Exported(np.ones(3))}, r"'loss' is a Exported of shape \(3,\)"),
        ({"loss": 2**70}, "'loss' has dtype object"),
        ({"loss": np.datetime64("2020")}, r"'loss' has dtype datetime64\[Y\]"),
        (7, "got int"),
    ],
)
def test_what_is_no_scalar_is_refused(wrong: Any, text: str) -> None:
    with pytest.raises(gs.InvalidArgument, match=f"rank 0/1: reduce_dict needs scalars by name: rank 0: {text}"):
        comm.reduce_dict(wrong)


# Among ranks.


def know_the_place(communicator: Any) -> None:
    n, rank = communicator.world_size, communicator.rank
    assert (comm.get_world_size(), comm.get_rank(), comm.is_main_process()) == (n, rank, rank == 0)
    assert (comm.get_local_size(), comm.get_local_rank()) == (n, rank)  # as the launcher says
    comm.synchronize()


@pytest.mark.parametrize("n", SIZES)
def test_the_place_among_ranks(n: int) -> None:
    run_ranks(n, know_the_place)


def local_place(communicator: Any) -> tuple[int, int]:
    return comm.get_local_rank(), comm.get_local_size()


def test_the_launcher_tells_the_local_rank() -> None:
    two_a_machine = {"GRADSYNC_LOCAL_WORLD_SIZE": "3", "GRADSYNC_LOCAL_RANK": "2"}
    assert run_ranks(4, local_place, environment=two_a_machine, backend="shm") == [(2, 3)] * 4


def move_data(communicator: Any) -> None:
    n, rank = communicator.world_size, communicator.rank
    assert comm.all_gather({"rank": rank, "data": "x" * rank}) == [{"rank": r, "data": "x" * r} for r in range(n)]
    for dst in range(n):
        assert comm.gather(rank, dst) == (list(range(n)) if rank == dst else [])
    if n > 1:
        for wrong in (9, -1, "0", True):
            error = expect(gs.InvalidArgument, lambda w=wrong: comm.gather(rank, dst=w))
            assert str(error) == f"rank {rank}/{n}: comm.gather needs dst to be a rank from 0 to {n - 1}, got {wrong!r}"
        error = expect(gs.InvalidArgument, lambda: comm.all_gather(lambda: rank))
        assert "comm.all_gather moved nothing" in str(error)
    seeds = [comm.shared_random_seed() for _ in range(10)]
    assert comm.all_gather(seeds) == [seeds] * n
    assert len(set(seeds)) == 10


@pytest.mark.parametrize("n", SIZES)
def test_data_among_ranks(n: int) -> None:
    run_ranks(n, move_data)


def work_in_local_groups(communicator: Any, per_machine: int) -> None:
    n, rank = communicator.world_size, communicator.rank
    for wrong in (0, -1, n + 1, 1.0, "2", True, None):
        error = expect(gs.InvalidArgument, lambda w=wrong: comm.create_local_process_group(w))
        assert f"rank {rank}/{n}: create_local_process_group needs" in str(error)
    expect(gs.InvalidArgument, comm.get_local_process_group)
    comm.create_local_process_group(per_machine)
    made = comm.get_local_process_group()
    comm.create_local_process_group(np.int32(per_machine))
    assert comm.get_local_process_group() is made
    if n > 1:
        other = 1 if per_machine > 1 else n
        error = expect(gs.InvalidArgument, lambda: comm.create_local_process_group(other))
        assert f"was called before with {per_machine} ranks on each machine, now with {other}" in str(error)
    first = rank - rank % per_machine
    group = comm.get_local_process_group()
    assert group.ranks == tuple(range(first, first + per_machine))
    assert (comm.get_local_rank(), comm.get_local_size()) == (rank - first, per_machine)
    assert comm.all_gather(rank, group=group) == list(group.ranks)
    last = per_machine - 1
    assert comm.gather(rank, dst=last, group=group) == (list(group.ranks) if group.rank == last else [])
    assert comm.get_rank() == rank


@pytest.mark.parametrize(("n", "per_machine"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_local_groups(n: int, per_machine: int) -> None:
    run_ranks(n, work_in_local_groups, per_machine)


def disagree_on_machines(communicator: Any) -> str:
    error = expect(gs.PlanMismatch, lambda: comm.create_local_process_group(1 if communicator.rank else 2))
    comm.create_local_process_group(2)
    assert comm.get_local_size() == 2
    return str(error)


def test_ranks_that_disagree_on_their_machines_are_told() -> None:
    for text in run_ranks(2, disagree_on_machines):
        assert "create_local_process_group (2 on each machine)" in text
        assert "create_local_process_group (1 on each machine)" in text


def reduce_scalars(communicator: Any) -> None:
    n, rank = communicator.world_size, communicator.rank
    check_scalars(n)
    names = ["loss", "steps", 3, ("a", 1)]
    mine = list(itertools.permutations(names))[rank * 5]
    values = {"loss": 0.1 * (rank + 1), "steps": rank, 3: np.float32(rank), ("a", 1): -rank}
    mean = comm.reduce_dict({name: values[name] for name in mine})
    total = comm.reduce_dict({name: values[name] for name in mine}, average=False)
    assert tuple(mean) == tuple(total) == mine
    ranks = n * (n - 1) // 2
    assert total["steps"] == ranks
    assert total["steps"].dtype == np.int64
    assert total[3] == np.float32(ranks)
    assert total["a", 1] == -ranks
    np.testing.assert_allclose(mean["loss"], 0.1 * (n + 1) / 2, rtol=1e-12)
    bits = {name: (mean[name].tobytes(), total[name].tobytes()) for name in names}
    assert comm.all_gather(bits) == [bits] * n
    assert comm.reduce_dict({}) == {}
    big = 2**62 // n
    assert comm.reduce_dict({"n": big}, average=False)["n"] == big * n
    mixed = comm.reduce_dict({"x": np.float32(1) if rank == 0 else 1.0})["x"]
    assert mixed.dtype == (np.float32 if n == 1 else np.float64)


@pytest.mark.parametrize("n", SIZES)
def test_scalars_among_ranks(n: int) -> None:
    run_ranks(n, reduce_scalars)


def differ(communicator: Any) -> list[str]:
    rank = communicator.rank
    texts = []
    for kind, attempt in [
        (gs.PlanMismatch, lambda: comm.reduce_dict({"loss": 1.0, ("extra" if rank == 1 else "accuracy"): 2})),
        (gs.PlanMismatch, lambda: comm.reduce_dict({"loss": 1.0} if rank == 0 else {})),
        (gs.PlanMismatch, lambda: comm.reduce_dict({"loss": 1.0}, average=rank == 0)),
        (gs.PlanMismatch, lambda: comm.reduce_dict({"loss": 1.0}) if rank == 0 else comm.all_gather(1)),
        (gs.PlanMismatch, lambda: comm.shared_random_seed() if rank == 0 else comm.synchronize()),
        (gs.InvalidArgument, lambda: comm.reduce_dict({"loss": "high" if rank == 1 else 1.0})),
        (gs.InvalidArgument, lambda: comm.reduce_dict({(lambda: 0) if rank == 1 else "loss": 1.0})),
    ]:
        texts.append(str(expect(kind, attempt)).partition(": ")[2])
        assert comm.all_gather(rank) == [0, 1]
    return texts


def test_ranks_that_differ_are_told() -> None:
    first, second = run_ranks(2, differ)
    assert first == second
    assert first[0] == (
        "reduce_dict needs the same names on all ranks; nothing was reduced:"
        "\n  rank 0 has 'loss', 'accuracy', lacks 'extra'"
        "\n  rank 1 has 'loss', 'extra', lacks 'accuracy'"
    )
    assert "rank 1 has nothing, lacks 'loss'" in first[1]
    assert "reduce_dict(mean)" in first[2]
    assert "reduce_dict(sum)" in first[2]
    assert "rank 1: comm.all_gather" in first[3]
    assert "rank 1: 'loss' is a str" in first[5]
    assert "rank 1: its object cannot be pickled" in first[6]


def reduce_on_gpu(communicator: Any) -> None:
    import cupy

    got = comm.reduce_dict({"loss": cupy.array(communicator.rank + 0.5, np.float32), "n": cupy.array(2)}, average=False)
    assert {name: (value.item(), value.dtype.name) for name, value in got.items()} == {
        "loss": (2.0, "float32"),
        "n": (4, "int64"),
    }
    comm.synchronize()
    assert comm.all_gather(communicator.rank) == [0, 1]
    comm.create_local_process_group(1)
    assert comm.all_gather(communicator.rank, group=comm.get_local_process_group()) == [communicator.rank]


def test_scalars_on_gpus() -> None:
    run_ranks(2, reduce_on_gpu, backend="nccl", stand_in=True)


def override(communicator: Any) -> None:
    comm.create_local_process_group(2)
    with gs.override_backend("nccl"):
        assert comm.all_gather(communicator.rank) == [0, 1]
        assert comm.get_local_process_group().backend == "shm"
        assert comm.get_local_size() == 2


def test_the_local_group_stays_within_an_override() -> None:
    run_ranks(2, override, backend="shm", stand_in=True)


def make_within_override(communicator: Any) -> None:
    with gs.override_backend("nccl"):
        comm.create_local_process_group(2)
        group = comm.get_local_process_group()
        assert group.backend == "nccl"
    assert comm.get_local_process_group() is group
    assert (comm.get_local_rank(), comm.get_local_size()) == (communicator.rank, 2)
    gs.destroy_process_group()
    expect(gs.InvalidArgument, comm.get_local_process_group, "there is no local process group")


def test_a_local_group_may_be_made_within_an_override() -> None:
    run_ranks(2, make_within_override, backend="shm", stand_in=True)


def test_a_world_that_was_destroyed_is_not_kept_alive() -> None:
    world = gs.init_process_group("local")
    comm.create_local_process_group(1)
    comm.reduce_dict({"loss": 1.0})
    kept = weakref.ref(world), weakref.ref(comm.get_local_process_group())
    gs.destroy_process_group()
    del world
    gc.collect()
    assert [each() for each in kept] == [None, None]


def reduce_large_integers(communicator: Any) -> None:
    rank = communicator.rank
    mean = comm.reduce_dict({"time": 2**62 + rank, "unsigned": np.uint64(2**64 - 1), "mixed": 2**63 if rank else 5})
    assert mean == {"time": float(2**62), "unsigned": float(2**64), "mixed": (2**63 + 5) / 2}
    total = comm.reduce_dict({"time": 2**62, "mixed": 2**63 if rank else 5, "negative": -(2**62)}, average=False)
    assert {name: int(value) for name, value in total.items()} == {
        "time": 2**63,
        "mixed": 2**63 + 5,
        "negative": -(2**63),
    }
    assert [value.dtype.name for value in total.values()] == ["uint64", "uint64", "int64"]
    text = f"rank {rank}/2: reduce_dict: the sum of 'n' over the ranks, {2**64}, does not fit into 64 bits"
    expect(gs.InvalidArgument, lambda: comm.reduce_dict({"n": 2**63}, average=False), text)
    half = ml_dtypes.bfloat16(1) if rank else np.float16(1)
    text = "'loss' has dtype float16 on rank 0, bfloat16 on rank 1: these dtypes have no common dtype"
    expect(gs.InvalidArgument, lambda: comm.reduce_dict({"loss": half}), text)
    assert comm.all_gather(rank) == [0, 1]


def test_integers_do_not_wrap_and_types_without_a_common_one_are_told() -> None:
    run_ranks(2, reduce_large_integers)
