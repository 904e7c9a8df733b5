"""The inner loops of shared memory: those in C give the bits of those in plain NumPy, and no argument makes them crash.

Ranks are threads over one mapping here.
"""

from __future__ import annotations

import functools
import gc
import itertools
import mmap
import platform
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gradsync.communicators.agreement import LayoutsDiffer
from gradsync.communicators.shared_memory import kernels, memory, plain
from gradsync.communicators.shared_memory.compiled import RUNNING, compiled
from gradsync.communicators.shared_memory.kernels import Call, DigestsDiffer
from gradsync.diagnostics.trace import no_phases
from gradsync.reduction import OPERATIONS_BY_DTYPE, ReduceOp, dtype_of

pytestmark = pytest.mark.skipif(RUNNING.kind != "C", reason="the C extension was not built")

SLOT_BYTES, BLOCK_BYTES = 16384, 8192


@pytest.fixture(autouse=True)
def quick_waits(monkeypatch):
    """Threads that wait in NumPy's loops hand the interpreter on at once."""

    def wait(is_over, check):
        while not is_over():
            check()
            time.sleep(0)

    monkeypatch.setattr(plain, "wait", wait)


def shared_by(size, slot_bytes=SLOT_BYTES):
    mapping = mmap.mmap(-1, size * memory.part_bytes(size, slot_bytes))
    return [memory.Shared(mapping, rank, size, slot_bytes) for rank in range(size)]


class Stopped(Exception):
    """Another rank has failed."""


def on_ranks(size, body, slot_bytes=SLOT_BYTES):
    """Calls body(shared, check) on each rank, and returns the results by rank."""
    failed = threading.Event()

    def check():
        if failed.is_set():
            raise Stopped
        return 0.001

    def run(shared):
        try:
            return body(shared, check)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(run, shared) for shared in shared_by(size, slot_bytes)]
    for error in [run.exception() for run in runs if not isinstance(run.exception(), Stopped)]:
        if error is not None:
            raise error
    return [run.result() for run in runs]


def its(check, digest=1, layout=7):
    return Call(digest, layout, check, no_phases)


def never():
    raise AssertionError("nobody needs to wait")


def bits(array):
    """The bytes of an array; a NaN is a NaN."""
    array = np.array(array)
    parts = array.view(array.real.dtype) if array.dtype.kind == "c" else array
    if parts.dtype.kind in "fV":
        parts[np.isnan(parts)] = np.nan
        if platform.machine() == "aarch64":
            parts[parts == 0] = 0  # to NumPy -0.0 is less than 0.0 there, and on x86-64 neither is less
    return array.tobytes()


def values_of(dtype, size, seed, specials=True):
    random = np.random.default_rng([seed, size])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max, size, dtype, endpoint=True)
    if dtype.kind == "b":
        return random.integers(0, 2, size).astype(dtype)
    parts = random.normal(size=2 * size) * 2.0 ** random.integers(-9, 9, 2 * size)
    if specials:
        for special in (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-7, 6e4, 1e-41):
            parts[random.integers(0, 40, 2 * size) == 0] = special
    with np.errstate(all="ignore"):
        if dtype.kind == "c":
            return parts.astype(np.empty(0, dtype).real.dtype).view(dtype)
        return parts[:size].astype(dtype)


def lists_around_the_borders(dtype):
    """Lists of sizes, in elements."""
    block, slot = BLOCK_BYTES // dtype.itemsize, SLOT_BYTES // dtype.itemsize
    yield from ([size] for size in (0, 1, 7, block - 1, block, block + 1, slot - 1, slot, slot + 1, 4 * slot + 5))
    yield [0, 1, 0, 3, 5, 0] * 30 + [2 * slot + 3] + [1, 0, 2] * 40 + [0]


# -- Reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS_BY_DTYPE)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_reduce_has_the_bits_of_numpy(name, size):
    dtype = dtype_of(name)
    lists = list(lists_around_the_borders(dtype))
    # Each size once, in place, with an operator; all operators, with factors and to other arrays too, for a few.
    ops = sorted(OPERATIONS_BY_DTYPE[name])
    factors = [False, True] if dtype.kind not in "biu" else [False]
    cases = [(ops[number % len(ops)], sizes, True, False) for number, sizes in enumerate(lists)]
    cases += [
        (op, sizes, not has_factor, has_factor)
        for op, sizes, has_factor in itertools.product(ops, [[7], lists[-1]], factors)
        if not has_factor or op in ("sum", "mean")
    ]

    def run(module, shared, check):
        results = []
        for number, (op, sizes, in_place, has_factor) in enumerate(cases):
            flat = values_of(dtype, sum(sizes), shared.rank)
            arrays = [flat[end - n : end].copy() for n, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
            targets = arrays if in_place else [np.empty_like(array) for array in arrays]
            factor = (0.3, 1.0, 1.7, 1e-3, 0.0)[shared.rank] if has_factor else 1.0
            module.all_reduce(shared, arrays, targets, ReduceOp(op), factor, its(check, number))
            results.append(np.concatenate(targets))
        return results

    ours = on_ranks(size, functools.partial(run, kernels))
    reference = on_ranks(size, functools.partial(run, plain))
    for number, (op, sizes, *rest) in enumerate(cases):
        for rank in range(size):
            got, expected = ours[rank][number], reference[rank][number]
            if op == "prod" and dtype.kind == "c":  # NumPy may fuse it, see reduction.py
                finite = np.isfinite(expected)
                np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-4)
            else:
                assert bits(got) == bits(expected), (op, sizes[:9], *rest, rank)
            assert bits(got) == bits(ours[0][number]), "all ranks have the same"


@pytest.mark.parametrize("module", [kernels, plain])
@pytest.mark.parametrize("name", OPERATIONS_BY_DTYPE)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_square_is_in_the_sum_of_one_rank(module, name, size):
    dtype, op = dtype_of(name), ReduceOp.PROD if name == "complex128" else sorted(OPERATIONS_BY_DTYPE[name])[-1]
    lists = list(lists_around_the_borders(dtype))

    def run(shared, check):
        rows = []
        for number, sizes in enumerate(lists):
            arrays = [values_of(dtype, n, shared.rank + n, specials=False) for n in sizes]
            squares = module.all_reduce(shared, arrays, arrays, ReduceOp(op), 1.0, its(check, number), True)
            rows.append((squares, np.concatenate(arrays)))
        return rows

    for ranks in zip(*on_ranks(size, run), strict=True):
        results = ranks[0][1]
        parts = results.view(results.real.dtype) if dtype.kind == "c" else results
        with np.errstate(all="ignore"):
            wanted = np.square(parts.astype(np.float64)).sum()
        assert sum(squares for squares, _ in ranks) == pytest.approx(wanted, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_sums_are_those_of_float64(name):
    dtype, size, n = dtype_of(name), 3, 3 * SLOT_BYTES
    factors = [0.25, 0.65, 0.1]
    wide = np.complex128 if dtype.kind == "c" else np.float64

    def run(shared, check):
        array = values_of(dtype, n, shared.rank, specials=False)
        kernels.all_reduce(shared, [array], [array], ReduceOp.SUM, factors[shared.rank], its(check))
        return array.astype(wide)

    terms = [values_of(dtype, n, rank, specials=False).astype(wide) * factors[rank] for rank in range(size)]
    scale = np.sum(np.abs(terms), axis=0)
    unit = {"float16": 2**-11, "bfloat16": 2**-8, "float64": 2**-53}.get(name, 2**-24)
    for result in on_ranks(size, run):
        assert (np.abs(result - np.sum(terms, axis=0)) <= 6 * unit * scale + 2**-25).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_converted_as_numpy_does(name):
    """All values; and products by factors, which are float32 of all sizes, many of them between two halves."""
    dtype = dtype_of(name)
    halves = np.arange(2**16, dtype=np.uint16).view(dtype)
    (shared,) = shared_by(1, 2**17)
    ties = [2.0**k * (1 + more) for k in range(-30, 20, 5) for more in (0, 2**-8, 2**-9, 2**-11, 2**-12, 3 * 2**-12)]
    random = np.random.default_rng(3)
    others = 2.0 ** random.uniform(-40, 40, 100) * random.choice([-1, 1], 100)
    for factor in [1.0, 0.0, *ties, *others]:
        got = halves.copy()
        kernels.all_reduce(shared, [got], [got], ReduceOp.SUM, factor, its(never))
        with np.errstate(all="ignore"):
            expected = (halves.astype(np.float32) * np.float32(factor)).astype(dtype)
        assert bits(got) == bits(expected), factor


@pytest.mark.parametrize("name", OPERATIONS_BY_DTYPE)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_reduce_scatter_has_the_bits_of_numpy(name, size):
    dtype = dtype_of(name)
    share = SLOT_BYTES // max(size - 1, 1) // 64 * 64 // dtype.itemsize
    parts = [(0,) * size, (1, 0, 7, 2, 0), (share - 1, share, share + 1, 0, 2), (0, 3 * share + 2, 1, 0, 9)]
    cases = [
        (op, (0, *itertools.accumulate(each[:size])), in_place)
        for op, each, in_place in itertools.product(sorted(OPERATIONS_BY_DTYPE[name]), parts, [True, False])
        if not (op == "prod" and dtype.kind == "c")
    ]

    def run(module, shared, check):
        results = []
        for number, (op, bounds, in_place) in enumerate(cases):
            source = values_of(dtype, bounds[-1], shared.rank)
            mine = source[bounds[shared.rank] : bounds[shared.rank + 1]]
            target = mine if in_place else np.empty_like(mine)
            module.reduce_scatter(shared, source, target, bounds, ReduceOp(op), its(check, number))
            results.append(bits(target))
        return results

    assert on_ranks(size, functools.partial(run, kernels)) == on_ranks(size, functools.partial(run, plain))


def test_arrays_may_begin_at_any_byte():
    """The values of this rank are reduced where they are, if they can be."""

    def run(module, shared, check):
        memory = bytearray(values_of(np.dtype("f8"), 9000, shared.rank, specials=False).tobytes() + b"123")
        arrays = [np.frombuffer(memory, "f8", 8000, 3), np.frombuffer(memory, "f8", 999, 64003)]
        module.all_reduce(shared, arrays, arrays, ReduceOp.SUM, 1.0, its(check))
        bounds = [4500 * rank for rank in range(shared.size + 1)]
        source = np.frombuffer(memory, "f8", 9000, 3)
        target = np.frombuffer(bytearray(36001), "f8", 4500, 1)
        module.reduce_scatter(shared, source, target, bounds, ReduceOp.MAX, its(check))
        return bytes(memory), target.tobytes()

    assert on_ranks(2, functools.partial(run, kernels)) == on_ranks(2, functools.partial(run, plain))


# -- Moves of bytes ---------------------------------------------------------------------------------------------------


def text(size, seed):
    return np.random.default_rng([seed, size]).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("module", [kernels, plain])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_moves(module, size):
    lengths = [0, 1, 63, 64, 65, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOT_BYTES + 7]

    def run(shared, check):
        rank = shared.rank
        for root, length in itertools.product(range(size), lengths):
            sizes = [0, 1, length, 0, 5]
            flats = [text(n, k if rank == root else 99) for k, n in enumerate(sizes)]
            if rank == root:
                flats[2].flags.writeable = False
            module.broadcast(shared, flats, root, its(check, length))
            assert all((flat == text(n, k)).all() for k, (n, flat) in enumerate(zip(sizes, flats, strict=True)))
        for turn, in_place in itertools.product(range(len(lengths)), [False, True]):
            parts = [lengths[(turn + 3 * each) % len(lengths)] for each in range(size)]
            bounds = [0, *itertools.accumulate(parts)]
            target = np.zeros(bounds[-1], np.uint8)
            source = target[bounds[rank] : bounds[rank + 1]] if in_place else np.empty(parts[rank], np.uint8)
            source[...] = text(parts[rank], rank)
            module.all_gather(shared, source, target, bounds, its(check, turn))
            assert (target == np.concatenate([text(n, each) for each, n in enumerate(parts)])).all()

            def sent(a, b, turn=turn):
                return text(lengths[(turn + a + 2 * b) % len(lengths)], 10 * a + b)

            out = [sent(rank, each) for each in range(size)]
            expected = [sent(each, rank) for each in range(size)]
            target = np.zeros(sum(map(len, expected)), np.uint8)
            send_bounds = [0, *itertools.accumulate(map(len, out))]
            receive_bounds = [0, *itertools.accumulate(map(len, expected))]
            arguments = np.concatenate(out), target, send_bounds, receive_bounds, max(lengths)
            module.all_to_all(shared, *arguments, its(check, turn))
            assert (target == np.concatenate(expected)).all()

    on_ranks(size, run)


def test_ranks_in_any_step_use_each_slot_again():
    """All kinds one after the other, with pauses: a rank may be a round ahead, and no slot is written too soon."""
    steps = np.random.default_rng(5).integers(0, [5, 40000], (250, 2))

    def run(shared, check):
        rank, size, pauses = shared.rank, shared.size, np.random.default_rng(shared.rank)
        for number, (kind, n) in enumerate(steps.tolist()):
            if pauses.integers(8) == 0:
                time.sleep(float(pauses.choice([0, 1e-5, 1e-3])))
            ranks = [text(n, number + each) for each in range(size)]
            if kind == 0:
                kernels.meet(shared, its(check, number))
            elif kind == 1:
                kernels.all_reduce(shared, [ranks[rank]], [ranks[rank]], ReduceOp.SUM, 1.0, its(check, number))
                expected = np.sum([text(n, number + each) for each in range(size)], axis=0, dtype=np.uint8)
                assert (ranks[rank] == expected).all()
            elif kind == 2:
                root = number % size
                kernels.broadcast(shared, [ranks[rank]], root, its(check, number))
                assert (ranks[rank] == ranks[root]).all()
            elif kind == 3:
                target = np.zeros(n * size, np.uint8)
                kernels.all_gather(shared, ranks[rank], target, range(0, n * size + 1, n), its(check, number))
                assert (target == np.concatenate(ranks)).all()
            elif kind == 4:
                target, bounds = np.zeros(n, np.uint8), range(0, n * size + 1, n)
                source = np.concatenate([ranks[rank]] * size)
                kernels.reduce_scatter(shared, source, target, bounds, ReduceOp.MAX, its(check, number))
                assert (target == np.max(ranks, axis=0)).all()

    steps[:, 1] += 1
    on_ranks(3, run)


# -- What differs, and what ends a wait -------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [kernels, plain])
@pytest.mark.parametrize("other", range(3))
def test_all_ranks_see_what_one_brought_and_nothing_changes(module, other):
    def run(shared, check):
        is_other = shared.rank == other
        array = np.full(5 * SLOT_BYTES, shared.rank + 1.0)

        def reduce(array, digest, layout):
            return module.all_reduce(shared, [array], [array], ReduceOp.SUM, 1.0, its(check, digest, layout))

        with pytest.raises(DigestsDiffer):
            reduce(array, 2**64 - 1 - is_other, 5)
        with pytest.raises(LayoutsDiffer):
            reduce(array[: 100 if is_other else None], 1, 2**63 + is_other)
        with pytest.raises(DigestsDiffer):
            reduce(array, 1 + is_other, is_other)
        with pytest.raises(DigestsDiffer):
            module.meet(shared, its(check, int(is_other), 0))
        assert (array == shared.rank + 1.0).all()
        reduce(array, 2**64 - 1, 2**64 - 1)
        assert (array == 6.0).all()

    on_ranks(3, run)


class Enough(Exception):
    """Ends a wait."""


def enough():
    raise Enough


def calls_of(shared, arrays, check):
    """A call of each kind on arrays of 24 bytes, as functions."""
    first, second = arrays
    bounds = [min(12 * rank, 24) for rank in range(shared.size + 1)]
    half = memoryview(second)[:12]
    last = its(check)
    return [
        lambda: compiled.meet(shared, last),
        lambda: compiled.all_reduce(shared, arrays, arrays, 8, 0, 1.0, False, last),
        lambda: compiled.all_reduce(shared, [first], [second], 8, 0, 1.0, False, last),
        lambda: compiled.all_reduce(shared, [first] * 9000, [second] * 9000, 8, 0, 1.0, False, last),
        lambda: compiled.reduce_scatter(shared, first, half, [each // 4 for each in bounds], 8, 0, last),
        lambda: compiled.broadcast(shared, arrays, 0, last),
        lambda: compiled.all_gather(shared, half, first, bounds, last),
        lambda: compiled.all_to_all(shared, first, second, bounds, bounds, 12, last),
    ]


def test_what_check_raises_ends_every_call_and_all_is_given_back():
    shared = shared_by(2)[0]
    for number in range(8):
        arrays = [bytearray(24), bytearray(24)]
        calls = calls_of(shared, arrays, enough)
        counts = [sys.getrefcount(each) for each in arrays]
        with pytest.raises(Enough):
            calls[number]()
        del calls
        gc.collect()
        assert [sys.getrefcount(each) for each in arrays] <= counts
        for array in arrays:
            array.append(0)  # refused while anyone has its buffer
    with pytest.raises(TypeError):
        compiled.meet(shared, its(lambda: "soon"))
    with pytest.raises(TypeError):
        compiled.meet(shared, its(None))
    arrays = [bytearray(24)]
    with pytest.raises(TypeError):
        compiled.all_reduce(shared, arrays, arrays, 8, 0, 1.0, False, (1, 1, enough, "no function"))


@pytest.mark.parametrize("pause", [1e300, 1e6, 0.0, -1.0, float("nan")])
def test_a_signal_ends_a_wait_whatever_check_says(pause):
    shared = shared_by(2)[0]

    def strike(*_):
        raise Enough

    kept = signal.signal(signal.SIGUSR1, strike)
    timer = threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1])
    try:
        began = time.monotonic()
        timer.start()
        with pytest.raises(Enough):
            compiled.meet(shared, its(lambda: pause))
        assert time.monotonic() - began < 5
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, kept)


def test_a_long_call_that_never_waits_checks_too():
    (shared,) = shared_by(1)
    array, calls = np.ones(100 * SLOT_BYTES, np.uint8), []

    def check():
        calls.append(1)
        return 1.0

    compiled.all_reduce(shared, [array], [array], 4, 0, 1.0, False, its(check))
    assert len(calls) == 3


def test_memory_that_a_call_uses_is_not_released_nor_used_by_another():
    first, second = shared_by(2)
    waiting = threading.Event()

    def check():
        with pytest.raises(BufferError):  # as in a signal handler
            compiled.meet(first, its(check))
        waiting.set()
        return 0.001

    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(compiled.meet, first, its(check))
        assert waiting.wait(60)
        with pytest.raises(BufferError):
            compiled.Memory.release(first)
        with pytest.raises(BufferError):
            compiled.meet(first, its(check))
        compiled.meet(second, its(lambda: 0.001))
        meeting.result(60)


def test_after_its_release_memory_is_refused_and_can_be_unmapped():
    mapping = mmap.mmap(-1, memory.part_bytes(1, SLOT_BYTES))
    own = memory.part_bytes(1, SLOT_BYTES), 8192, SLOT_BYTES, 1.0
    shared = compiled.Memory(mapping, 0, 1, *own)
    compiled.meet(shared, its(never))
    with pytest.raises(BufferError):
        mapping.close()
    shared.release()
    shared.release()
    mapping.close()
    for call in calls_of(shared, [bytearray(24), bytearray(24)], never):
        with pytest.raises(ValueError, match="released"):
            call()
    with pytest.raises(TypeError):
        shared.__init__(mmap.mmap(-1, mmap.PAGESIZE), 0, 1, *own)
    with pytest.raises(ValueError, match="released"):
        compiled.meet(compiled.Memory.__new__(compiled.Memory), its(never))


# -- Wrong arguments --------------------------------------------------------------------------------------------------

HUGE = 2**63 - 1
GOOD = {
    "meet": (),
    "all_reduce": (["f", "f"], ["f", "f"], 8, 0, 1.0, False),
    "reduce_scatter": ("f", "h", [0, 3, 6], 8, 0),
    "broadcast": (["f", "f"], 0),
    "all_gather": ("h", "f", [0, 12, 24]),
    "all_to_all": ("f", "f", [0, 12, 24], [0, 12, 24], 12),
}
BOUNDS = [
    *([], [0, 12], [0, 12, 24, 24], [0, 12, 25], [-1, 12, 24], [12, 0, 24], [0, 24, 12], [0, HUGE, HUGE]),
    *([-HUGE, HUGE, HUGE], [0, 12, 2**70], [0, 12.5, 24], [0, None, 24], None, 7, "abc", {}, [0, 13, 24]),
]
NO_LISTS = [None, 7, ["f", None], ["f", "strided"], {}, [7]]
NO_ARRAYS = [None, 7, "text", "strided", ["f"], "empty"]


class Undecided:
    def __bool__(self):
        raise TypeError


NO_CODES = [-1, 14, 2**40, 2**70, None, 8.5, "8"]
WRONG = {
    ("all_reduce", 0): [*NO_LISTS, ["f"], ["f", "h"], ["h", "f"], [], ["f"] * 3],
    ("all_reduce", 1): [*NO_LISTS, ["f"], ["f", "h"], [], ["f"] * 3, ["f", "constant"]],
    ("all_reduce", 2): NO_CODES,
    ("all_reduce", 3): [-1, 5, 2**32, None],
    ("all_reduce", 4): [None, "1"],
    ("all_reduce", 5): [Undecided()],
    ("reduce_scatter", 0): [*NO_ARRAYS, "h"],
    ("reduce_scatter", 1): [*NO_ARRAYS, "f", "constant"],
    ("reduce_scatter", 2): BOUNDS,
    ("reduce_scatter", 3): NO_CODES,
    ("reduce_scatter", 4): [-1, 5, 2**32, None],
    ("broadcast", 0): NO_LISTS,
    ("broadcast", 1): [-1, 2, 2**32, 2**70, HUGE, None],
    ("all_gather", 0): [*NO_ARRAYS, "f"],
    ("all_gather", 1): [*NO_ARRAYS, "h", "constant"],
    ("all_gather", 2): BOUNDS,
    ("all_to_all", 0): [*NO_ARRAYS, "h"],
    ("all_to_all", 1): [*NO_ARRAYS, "h", "constant"],
    ("all_to_all", 2): [*BOUNDS, [0, 10, 22]],
    ("all_to_all", 3): [*BOUNDS, [0, 10, 22]],
    ("all_to_all", 4): [-1, 11, 2**70, None, -HUGE],
}


def made(what):
    if isinstance(what, list):
        return [made(each) for each in what]
    kinds = {"f": (24,), "h": (12,), "empty": (0,)}
    if what == "strided":
        return np.zeros(48, np.uint8)[::2]
    if what == "constant":
        return bytes(24)
    return bytearray(*kinds[what]) if isinstance(what, str) and what in kinds else what


@pytest.mark.parametrize(("name", "place"), WRONG)
def test_wrong_arguments_are_errors(name, place):
    """Rank 0 is alone: it would wait if it took them, and then be told that it is enough."""
    shared, call = shared_by(2)[0], getattr(compiled, name)
    for wrong in WRONG[name, place]:
        arguments = [made(each) for each in GOOD[name]]
        arguments[place] = made(wrong)
        with pytest.raises((TypeError, ValueError, OverflowError, BufferError)):
            call(shared, *arguments, its(enough))
        for array in arguments:
            for each in array if isinstance(array, list) else [array]:
                if isinstance(each, bytearray):
                    each.append(0)
        with pytest.raises(Enough):  # nothing is left behind
            call(shared, *map(made, GOOD[name]), its(enough))


def test_bounds_of_other_ranks_need_to_be_right_too():
    shared = shared_by(3)[0]
    for wrong in ([0, 12, 8, 24], [0, 12, -5, 24], [0, 12, 25, 24], [0, 12, 24, 13]):
        with pytest.raises(ValueError, match="ascend"):
            compiled.all_gather(shared, bytearray(12), bytearray(24), wrong, its(enough))
    with pytest.raises(Enough):
        compiled.all_gather(shared, bytearray(12), bytearray(24), [0, 12, 24, 24], its(enough))


def test_wrong_numbers_of_arguments_and_wrong_memory_are_errors():
    shared = shared_by(2)[0]
    for name, good in GOOD.items():
        call, good = getattr(compiled, name), [made(each) for each in good]
        for arguments in ([], [shared], [shared, *good], [shared, *good, its(enough), 1]):
            with pytest.raises(TypeError):
                call(*arguments)
        for wrong in (None, 7, mmap.mmap(-1, 8192), compiled.Memory):
            with pytest.raises(TypeError):
                call(wrong, *good, its(enough))
        for wrong in (None, (), (1, 1, enough), [1, 1, enough, no_phases], its(enough)._asdict()):
            with pytest.raises(TypeError):
                call(shared, *good, wrong)
        for wrong in ((-1, 1), (1, 2**64), (None, 1), (1, "1"), (1.5, 1)):
            with pytest.raises((TypeError, OverflowError)):
                call(shared, *good, its(enough, *wrong))


def test_factors_need_sums_of_floating_values():
    (shared,) = shared_by(1)
    for code, op in ((3, 0), (8, 2), (9, 3), (12, 2)):
        with pytest.raises(ValueError, match="factor"):
            compiled.all_reduce(shared, [bytearray(16)], [bytearray(16)], code, op, 0.5, False, its(never))
    for op in (3, 4):
        with pytest.raises(ValueError, match="order"):
            compiled.all_reduce(shared, [bytearray(16)], [bytearray(16)], 13, op, 1.0, False, its(never))
    with pytest.raises(ValueError, match="another dtype"):
        compiled.all_reduce(shared, [bytearray(15)], [bytearray(15)], 9, 0, 1.0, False, its(never))


GOOD_MEMORY = {"rank": 0, "size": 2, "part_bytes": 32768, "slots_begin": 4096, "slot_bytes": 8192, "is_crowded": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rank": -1}, {"rank": 2}, {"size": 0}, {"size": -1}, {"size": 3}, {"size": 2**31 - 1}, {"size": 2**40}),
        *({"part_bytes": 0}, {"part_bytes": -64}, {"part_bytes": 2**62}, {"part_bytes": 20416}, {"part_bytes": 32769}),
        *({"slots_begin": 0}, {"slots_begin": -64}, {"slots_begin": 2**62}, {"slots_begin": 4100}),
        *({"slots_begin": 2**63 - 64}, {"slot_bytes": 0}, {"slot_bytes": -64}, {"slot_bytes": 2**62}),
        *({"slot_bytes": 100}, {"slot_bytes": 16384}, {"size": 500, "part_bytes": 8192, "slot_bytes": 64}),
        {"rank": None},
    ],
)
def test_memory_that_cannot_be(wrong):
    mapping = mmap.mmap(-1, 65536)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        compiled.Memory(mapping, **GOOD_MEMORY | wrong)
    compiled.Memory(mapping, **GOOD_MEMORY).release()
    mapping.close()


def test_mappings_that_cannot_be():
    aligned = np.zeros(65536 + 128, np.uint8)
    begin = -aligned.ctypes.data % 64
    for wrong in (None, 7, bytes(65536), aligned[begin + 8 : begin + 8 + 65536], aligned[::2]):
        with pytest.raises((TypeError, ValueError, BufferError)):
            compiled.Memory(wrong, **GOOD_MEMORY)
    compiled.Memory(aligned[begin : begin + 65536], **GOOD_MEMORY)
