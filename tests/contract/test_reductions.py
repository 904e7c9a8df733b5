"""all_reduce, reduce and reduce_scatter, against NumPy in float64."""

import warnings
from itertools import count, permutations, product

import numpy as np
import pytest

import gradsync as gs
from arrays import (
    LAYOUTS,
    NOT_ON_GPU,
    HostArrays,
    arrays_for,
    arrays_of,
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    bounds_of,
    contribution,
    dtype_of,
    in_layout,
    operators_of,
    read_only,
    reduced,
    sizes_of,
)
from ranks import ALSO_ALONE, COMPARED, EVERYWHERE, ON_GPU, THREE_OF_FAKE

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (13, 17), (4, 3, 5)]
LARGE_SHAPES = {  # each way of accumulating, and each size of word
    "float32": [(20_011,), (300_007,)],
    "bfloat16": [(300_007,)],
    "complex128": [(20_011,)],
    "int8": [(20_011,)],
}


@pytest.mark.ranks(on=ALSO_ALONE | ON_GPU)
def test_every_dtype_operator_layout_and_shape(comm):
    n, turn, results = comm.world_size, count(), []
    for arrays, (dtype, operators) in product(arrays_for(comm), operators_of(comm).items()):
        is_staged = comm.device != "cpu" and isinstance(arrays, HostArrays)
        shapes = SHAPES[::2] if is_staged else SHAPES + LARGE_SHAPES.get(dtype, [])[:: 1 if n > 1 else 2]
        for shape, op in product(shapes, operators):
            number = next(turn)
            root, layout = number % n, LAYOUTS[(number + comm.rank) % 4]  # elements meet by index, not by address
            mine, want = contribution(comm.rank, shape, dtype), reduced(op, shape, dtype, n)

            array = in_layout(mine, arrays, layout)
            assert comm.all_reduce(array, op) is array
            results.append(arrays.get(array).copy())
            assert_close(results[-1], want, dtype, n)

            array = in_layout(mine, arrays, layout)
            assert comm.reduce(array, op, root) is (array if comm.rank == root else None)
            if comm.rank == root:
                assert_close(arrays.get(array), want, dtype, n)
            else:
                assert_identical(arrays.get(array), mine)

            if shape:
                array = read_only(in_layout(mine, arrays, layout))
                sizes = [shape[0] // n] * (n - 1)
                sizes.append(shape[0] - sum(sizes))
                part = comm.reduce_scatter(array, op, sizes=sizes if shape[0] % n else None)
                assert isinstance(part, arrays.xp.ndarray)
                assert_close(arrays.get(part), rows_of(comm, want, sizes), dtype, n)
    assert_same_on_all_ranks(comm, results)


@pytest.mark.ranks(on={"fake": (1, 2)} | ON_GPU)
def test_what_nccl_does_not_reduce_is_refused(comm):
    """Each rank says so by itself, and the communicator goes on; what only moves may have any dtype."""
    for arrays, (dtype, operators) in product(arrays_for(comm), NOT_ON_GPU.items()):
        mine = contribution(comm.rank, (2 * comm.world_size,), dtype)
        array = arrays.put(mine)
        for op, form in product(operators, (comm, comm.asynchronous)):
            for attempt in (form.all_reduce, form.reduce, form.reduce_scatter):
                with pytest.raises(gs.UnsupportedDtype, match=rf"NCCL does not reduce .*{dtype}.*astype"):
                    attempt(array, op)
        assert_identical(arrays.get(array), mine)
        comm.broadcast(array)
        assert_identical(arrays.get(array), contribution(0, (2 * comm.world_size,), dtype))
    assert (arrays_of(comm).get(comm.all_reduce(arrays_of(comm).put(np.ones(3)))) == comm.world_size).all()


@pytest.mark.ranks(3, on=("fake",))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_mean_of_half_precision_where_a_third_has_no_exact_value(comm, dtype):
    n, arrays = comm.world_size, arrays_of(comm)
    mine, want = contribution(comm.rank, (3 * n, 50), dtype), reduced("mean", (3 * n, 50), dtype, n)
    array = read_only(arrays.put(mine))
    assert_close(arrays.get(comm.all_reduce(array, "mean", out=arrays.xp.empty_like(array))), want, dtype, n)
    assert_close(arrays.get(comm.reduce_scatter(array, "mean")), rows_of(comm, want, [3] * n), dtype, n)
    on_root = comm.reduce(array, "mean", 1)
    assert_identical(arrays.get(array), mine) if comm.rank != 1 else assert_close(arrays.get(on_root), want, dtype, n)


def rows_of(comm, whole, sizes):
    bounds = bounds_of(sizes)
    return whole[bounds[comm.rank] : bounds[comm.rank + 1]]


@pytest.mark.ranks(on=EVERYWHERE)
def test_a_result_goes_into_out_and_the_source_stays(comm):
    n = comm.world_size
    for arrays, shape, (number, layout) in product(arrays_for(comm), [(3, 5), (200, 301)], enumerate(LAYOUTS)):
        mine, root = contribution(comm.rank, shape, "float64"), number % n
        source = read_only(in_layout(mine, arrays, layout))
        out = in_layout(np.zeros(shape), arrays, LAYOUTS[(number + comm.rank + 1) % 4])
        assert comm.all_reduce(source, "mean", out=out) is out
        assert_close(arrays.get(out), reduced("mean", shape, "float64", n), "float64", n)
        given = out if comm.rank == root else "not looked at"
        assert comm.reduce(source, "max", root, out=given) is (out if comm.rank == root else None)
        if comm.rank == root:
            assert_close(arrays.get(out), reduced("max", shape, "float64", n), "float64", n)
        assert_identical(arrays.get(source), mine)


@pytest.mark.ranks(on=EVERYWHERE | THREE_OF_FAKE)
def test_reduce_scatter_of_given_sizes(comm):
    n = comm.world_size
    for arrays, sizes, tail in product(arrays_for(comm), sizes_of(n), [(), (7,)]):
        shape = (sum(sizes), *tail)
        want = rows_of(comm, reduced("mean", shape, "float32", n), sizes)
        for number in range(2):  # what is kept from a call must not be its arrays
            mine = contribution(comm.rank, shape, "float32")
            source = read_only(in_layout(mine, arrays, LAYOUTS[(number + comm.rank) % 4]))
            assert_close(arrays.get(comm.reduce_scatter(source, "mean", sizes=sizes)), want, "float32", n)
            out = in_layout(np.zeros(want.shape, np.float32), arrays, LAYOUTS[number])
            assert comm.reduce_scatter(source, "mean", sizes=sizes, out=out) is out
            assert_close(arrays.get(out), want, "float32", n)
            assert_identical(arrays.get(source), mine)


@pytest.mark.ranks(on=EVERYWHERE)
def test_all_reduce_within_one_memory(comm):
    """The result lies on its source, shifted: each value must be read before it is overwritten."""
    n = comm.world_size
    for arrays, size, shift in product(arrays_for(comm), (10, 300_000), (3, -3)):
        memory = arrays.put(np.zeros(size + 3))
        source, out = (memory[3:], memory[:-3]) if shift > 0 else (memory[:-3], memory[3:])
        source[...] = arrays.put(contribution(comm.rank, size, "float64"))
        for call in range(2):
            assert comm.all_reduce(source, out=out) is out
            if call == 0:
                assert_close(arrays.get(out), reduced("sum", size, "float64", n), "float64", n)


@pytest.mark.ranks(on=EVERYWHERE)
@pytest.mark.parametrize(
    ("dtype", "op", "rows"),
    [
        ("float32", "mean", 2),
        ("float64", "prod", 7_000),
        ("int32", "max", 7_000),
        # Half precision was wrong from the second call on: a block of float32 was written before the next was read.
        ("float16", "sum", 100_000),
        ("bfloat16", "sum", 100_000),
    ],
)
def test_reduce_scatter_into_rows_of_its_source(comm, dtype, op, rows):
    n = comm.world_size
    mine, want = contribution(comm.rank, (n * rows,), dtype), reduced(op, (n * rows,), dtype, n)
    for arrays, shift, _ in product(arrays_for(comm), (0, rows // 3, -(rows // 3)), range(2)):
        begin = min(max(comm.rank * rows + shift, 0), (n - 1) * rows)
        memory = arrays.put(mine)
        part = memory[begin : begin + rows]
        assert comm.reduce_scatter(memory, op, out=part) is part
        assert_close(arrays.get(part), rows_of(comm, want, [rows] * n), dtype, n)


@pytest.mark.ranks(on=EVERYWHERE)
def test_an_array_that_repeats_its_elements_is_a_source(comm):
    out = np.empty((4, 4))
    comm.all_reduce(np.broadcast_to(np.float64(comm.rank), (4, 4)), out=out)
    assert (out == sum(range(comm.world_size))).all()


class Foreign:
    """An array of a library that only supports DLPack."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack__(self, **options):
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


@pytest.mark.ranks(on=EVERYWHERE | ON_GPU)
def test_arrays_of_other_libraries(comm):
    arrays = arrays_of(comm)
    foreign = Foreign(arrays.put(np.full(5, comm.rank + 1.0)))
    assert comm.all_reduce(foreign) is foreign
    assert (arrays.get(foreign.memory) == sum(range(1, comm.world_size + 1))).all()


@pytest.mark.ranks(on=EVERYWHERE)
def test_many_in_a_row(comm):
    """Sizes and collectives change from call to call: who reads or writes too early is found out."""
    arrays, n, rng = arrays_of(comm), comm.world_size, np.random.default_rng(11)
    for step in range(100):
        size, kind = int(rng.choice([1, 100, 16_384, 16_385, 70_000])), rng.integers(0, 5)
        array = arrays.put(np.full(size, comm.rank + step, np.int32))
        if kind == 0:
            comm.barrier()
        elif kind == 1:
            root = int(rng.integers(0, n))
            comm.broadcast(array, root)
            assert (arrays.get(array) == root + step).all()
        elif kind == 2:
            total = comm.reduce_scatter(arrays.put(np.full(n * size, comm.rank + step, np.int32)), "max")
            assert (arrays.get(total) == n - 1 + step).all()
        else:
            comm.all_reduce(array)
            assert (arrays.get(array) == n * step + n * (n - 1) // 2).all()


SPELLINGS = ["sum", "SUM", np.str_("Sum"), gs.ReduceOp.SUM]


@pytest.mark.ranks(on=EVERYWHERE)
def test_ranks_meet_however_they_spell_the_operator_and_lay_out_the_array(comm):
    arrays, n = arrays_of(comm), comm.world_size
    for dtype, rows, turn in product(("float32", "float16", "int64"), (3, 2_000), range(4)):
        values = contribution(comm.rank, (rows, 4), dtype)
        array = in_layout(values, arrays, LAYOUTS[(turn + comm.rank) // 2 % 2])
        comm.all_reduce(array, SPELLINGS[(turn + comm.rank) % 4])
        assert_close(arrays.get(array), reduced("sum", (rows, 4), dtype, n), dtype, n)


@pytest.mark.ranks(on=EVERYWHERE)
def test_fortran_order_on_all_ranks(comm):
    arrays, n = arrays_of(comm), comm.world_size
    for op, out in product(("sum", "mean"), (False, True)):
        array = in_layout(contribution(comm.rank, (300, 500), "float32"), arrays, "Fortran")
        got = comm.all_reduce(array, op, out=arrays.xp.zeros_like(array) if out else None)
        assert got.flags.f_contiguous
        assert_close(arrays.get(got), reduced(op, (300, 500), "float32", n), "float32", n)


def layouts_of(shape):
    """What puts values of one shape into arrays that lie in memory in other ways."""
    for layout in LAYOUTS:
        yield layout, lambda values, layout=layout: in_layout(values, HostArrays(), layout)
    for axes in permutations(range(len(shape))):
        back = np.argsort(axes)
        yield f"axes {axes}", lambda values, axes=axes, back=back: values.transpose(axes).copy().transpose(back)


@pytest.mark.ranks(on=EVERYWHERE)
@pytest.mark.parametrize(
    "shape", [(), (5,), (1, 5), (5, 1), (0, 4), (4, 3), (300, 200), (2, 3, 4), (20, 30, 40)], ids=str
)
def test_elements_meet_by_index_whatever_lies_where(comm, shape):
    """Fortran order on all ranks, on some, on one, and in the target alone; again in C order: nothing is left of it."""
    n, arrays = comm.world_size, arrays_of(comm)
    if comm.device != "cpu" and shape not in ((5, 1), (4, 3), (2, 3, 4)):
        return
    ways = dict(layouts_of(shape))
    mine = contribution(comm.rank, shape, "float32")
    wanted = {op: reduced(op, shape, "float32", n) for op in ("sum", "mean", "max")}
    for number, (name, other) in enumerate(product(ways, ("C", "Fortran", "strided"))):
        op = ("sum", "mean", "max")[number % 3]
        for of_ranks in ([name] * n, [other] + [name] * (n - 1), [name] * (n - 1) + [other]):
            array = arrays.put(ways[of_ranks[comm.rank]](mine))
            assert comm.all_reduce(array, op) is array
            assert_close(arrays.get(array), wanted[op], "float32", n)
            source = read_only(arrays.put(ways[of_ranks[comm.rank]](mine)))
            for to in {other, name}:
                out = arrays.put(ways[to](np.zeros(shape, np.float32)))
                assert comm.all_reduce(source, op, out=out) is out
                assert_close(arrays.get(out), wanted[op], "float32", n)
            assert_identical(arrays.get(source), mine)
            on_root = comm.reduce(arrays.put(ways[of_ranks[comm.rank]](mine)), op, n - 1)
            assert on_root is None or arrays.get(on_root).shape == shape
            if on_root is not None:
                assert_close(arrays.get(on_root), wanted[op], "float32", n)


@pytest.mark.ranks(on=COMPARED)
def test_layouts_differ_beside_messages_futures_and_mistakes(comm):
    """What all ranks do again in C order disturbs nothing, and a disagreement is one in either order."""
    n, arrays = comm.world_size, arrays_of(comm)
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    put = [np.asfortranarray, np.ascontiguousarray][comm.rank % 2]
    for call in range(3):
        mine = contribution(comm.rank, (30, 40), "float64", call)
        room = arrays.put(np.zeros(100_000))
        received = comm.asynchronous.recv(room, before)
        sent = comm.asynchronous.send(arrays.put(np.full(100_000, float(comm.rank))), after)
        begun = comm.recorder.begun
        future = comm.asynchronous.all_reduce(arrays.put(put(mine)), "sum")
        assert_close(arrays.get(future.result()), reduced("sum", (30, 40), "float64", n, call), "float64", n)
        assert future.done() or comm.device != "cpu"
        assert comm.recorder.begun - begun <= 2
        with pytest.raises(gs.PlanMismatch):
            comm.all_reduce(arrays.put(put(np.ones((30, 40 + (comm.rank == 0))))))
        with pytest.raises(gs.PlanMismatch):
            comm.barrier() if comm.rank == 0 else comm.all_reduce(arrays.put(put(mine)))
        sent.result()
        assert (arrays.get(received.result()) == before).all()


@pytest.mark.ranks(2, 3, on=("shm",))
def test_an_element_has_the_same_bits_by_whichever_collective_and_in_whichever_array(comm):
    n, rows = comm.world_size, 20_000
    values = contribution(comm.rank, (rows * n,), "float32")
    whole = comm.all_reduce(values.copy())
    for number in (rows * n, 10):
        assert_identical(comm.all_reduce(values[:number].copy()), whole[:number])
    assert_identical(comm.reduce_scatter(values), rows_of(comm, whole, [rows] * n))
    on_root = comm.reduce(values.copy(), root=n - 1)
    assert on_root is None or on_root.tobytes() == whole.tobytes()


@pytest.mark.ranks(on={"shm": (2, 3), "mpi": (2, 3)})
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_accumulates_in_float32_on_the_host(comm, dtype):
    # In half precision the small ones would vanish one by one beside the first, and the largest would overflow.
    n, spacing = comm.world_size, {"float16": 2.0, "bfloat16": 16.0}[dtype]
    mine = np.full(70_000, 2048 if comm.rank == 0 else 0.75 * spacing / (n - 1)).astype(dtype_of(dtype))
    for got in (comm.all_reduce(mine.copy()), comm.reduce_scatter(np.concatenate([mine] * n)), comm.reduce(mine)):
        assert got is None or (got.astype(np.float64) == 2048 + spacing).all()
    if dtype == "float16":
        largest = np.full(70_000, 65504, np.float16)
        assert (comm.all_reduce(largest, "mean") == 65504).all()


@pytest.mark.ranks(on={"local": (1,), "shm": (1, 2, 3), "mpi": (2, 3)})
def test_values_that_are_not_finite(comm):
    n = comm.world_size
    for dtype, size in product(("float32", "float16", "float64"), (4, 100_000)):
        values = np.zeros(size, dtype)
        values[:4] = [np.inf, -np.inf, 1.0, np.nan if comm.rank == n - 1 else 1.0]
        for op in ("sum", "mean", "min", "max"):
            got = comm.all_reduce(values.copy(), op)
            assert np.isnan(got[3]), op
            assert got[:2].tolist() == [np.inf, -np.inf], op
    for dtype in ("complex64", "complex128"):
        infinite = np.array([complex(np.inf, 0.0), complex(1.0, -np.inf)], dtype)
        assert comm.all_reduce(infinite, "mean").tolist() == [complex(np.inf, 0.0), complex(1.0, -np.inf)]


@pytest.mark.ranks(on={"shm": (2, 3), "local": (1,)})
def test_no_arithmetic_warns_or_raises(comm):
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for op, size in product(("sum", "min", "max"), (8, 300_000)):
            array = np.full(size, 3e38, np.float32)
            comm.all_reduce(array, op)
            assert np.isinf(array).all() == (op == "sum" and comm.world_size > 1)
            comm.reduce_scatter(np.full(size * comm.world_size, 3e38, np.float32), op)
