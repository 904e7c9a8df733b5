"""What a callback takes and what it refuses: options, parameters, gradients; always where the user stands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from bucketing import reference
from bucketing.reference import step

PARAMETERS = {"a": ((2, 3), "float32"), "b": np.zeros(4), "c": ((), np.dtype("float64"))}
ARRAYS = [np.ones(3)]
MATRICES = {
    "a": ((20, 30), "float32"),
    "b": ((7, 5), "float32"),
    "c": ((3,), "float32"),
    "d": ((4, 3, 2), "float32"),
    "e": ((), "float32"),
    "f": ((6, 0), "float32"),
    "g": ((9, 8), "float64"),
    "h": ((5, 4), "float32"),
}


def test_make_allreduce_cb_is_the_callback():
    assert gs.make_allreduce_cb is gs.AllreduceCallback


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        *[((method,), {}) for method in ("average", "min", "", None, 3, np.float64, ARRAYS, {"w": ARRAYS[0]})],
        *[(("mean", group), {}) for group in ("world", ARRAYS, np.ones(3))],
        (("mean",), {"backend": "gloo"}),
        *[(("mean",), {"missing": word}) for word in ("zeros", None)],
        (("mean",), {"missing": "zero"}),  # without parameters
        (("mean",), {"gradient_as_bucket_view": True}),  # without parameters
        *[(("mean",), {"nonfinite": word}) for word in ("ignore", None)],
        *[(("mean",), {"clip_norm": limit}) for limit in (0, -1.0, math.nan, True, "1")],
        *[(("mean",), {"name": name}) for name in ("", "two\nlines", "x" * 81, 3, b"generator")],
        *[(("mean",), {"parameters": wrong}) for wrong in (np.ones(3), "ab", 7, {}, [], ARRAYS * 2)],
        *[
            (("mean",), {"parameters": {"a": wrong}})
            for wrong in (3, ((2,),), ((-2,), "float32"), ((2,), "float99"), ((2,), "int32"))
        ],
    ],
)
def test_wrong_options_are_refused(alone, arguments, options):
    error = gs.UnsupportedDtype if "int32" in repr(options) else gs.InvalidArgument
    with pytest.raises(error):
        gs.AllreduceCallback(*arguments, **options)


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("clip_nrom", "did you mean clip_norm"),
        ("bucket_cap_mb", "threshold_bytes="),
        ("op", "reduce_method"),
        ("max_norm", "clip_norm"),
        ("find_unused_parameters", "missing="),
        ("colour", ""),
    ],
)
def test_an_unknown_option_is_a_type_error_with_the_right_word(option, advice):
    with pytest.raises(TypeError, match=option) as raised:
        gs.AllreduceCallback(**{option: 1})
    assert advice in str(raised.value)


@pytest.mark.ranks(2, on=("fake",))
@pytest.mark.parametrize("dtype", ["int16", "uint16"])
def test_over_nccl_dtypes_that_it_lacks_are_refused_at_the_hand_over(comm, dtype):
    mine, sync = arrays_of(comm).put(np.ones(3, dtype)), gs.AllreduceCallback("sum", comm)
    for call in (
        lambda: sync("w", mine),
        lambda: gs.AllreduceCallback("sum", comm, parameters={"w": ((3,), dtype)}),
        lambda: gs.AllreduceCallback("sum", comm, parameters={"w": mine}),
        lambda: gs.pack_allreduce_split([mine], [(3,)], comm, "sum"),
    ):
        with pytest.raises(gs.UnsupportedDtype, match=f"NCCL does not reduce {dtype}.*astype"):
            call()
    assert (arrays_of(comm).get(step(sync, {"w": mine.astype("int32")})["w"]) == 2).all()


@pytest.mark.parametrize(
    ("method", "gradient", "remedy"),
    [
        ("mean", np.ones(2, ">f8"), 'convert it with astype("float64")'),
        ("mean", np.ones(2, int), 'convert it with astype("float32"), or take "sum" where that is meant'),
        ("sum", np.ones(2, bool), 'convert it with astype("float32")'),
        ("mean", "w", "pass the name first"),
    ],
)
def test_a_refused_gradient_has_one_remedy(alone, method, gradient, remedy):
    with pytest.raises((gs.InvalidArgument, gs.UnsupportedDtype)) as raised:
        gs.AllreduceCallback(method, alone)("w", gradient)
    assert str(raised.value).endswith(f": {remedy}")


@pytest.mark.parametrize("options", [{}, {"parameters": PARAMETERS}, {"threshold_bytes": 1}], ids=repr)
def test_a_refused_gradient_leaves_no_trace(alone, options):
    """Whatever is refused, in each step, whether the arrays come again or not."""
    sync = gs.AllreduceCallback("mean", alone, **options)
    a, b, c = np.ones((2, 3), np.float32), np.ones(4), np.ones(())
    wrong: list[tuple[Any, Any, type[gs.GradsyncError]]] = [
        ("a", None, gs.InvalidArgument),
        ("a", [1.0, 2.0], gs.InvalidArgument),
        ("a", True, gs.InvalidArgument),
        ("a", 3, gs.InvalidArgument),
        ("a", "1.0", gs.InvalidArgument),
        ("a", np.ma.ones((2, 3)), gs.InvalidArgument),
        ("a", np.ones((2, 3), np.int32), gs.UnsupportedDtype),
        ("a", np.ones((2, 3), "M8[s]"), gs.UnsupportedDtype),
        ("a", np.array([[None] * 3] * 2), gs.UnsupportedDtype),
        ([], b, gs.InvalidArgument),  # not hashable
    ]
    if "parameters" in options:
        wrong += [
            ("d", np.ones(2), gs.InvalidArgument),
            ("a", np.ones((3, 2), np.float32), gs.InvalidArgument),
            ("a", np.ones((2, 3)), gs.InvalidArgument),
        ]
    for number in range(4):
        sync("b", b)
        for name, gradient, error in wrong:
            with pytest.raises(error):
                sync(name, gradient)
        sync("a", a)
        sync("c", c if number > 1 else np.ones(()))
        assert sync.statistics.steps == number
        sync.flush()
    assert sync.statistics.gradients == 12


@pytest.mark.parametrize("options", [{}, {"parameters": PARAMETERS}], ids=repr)
def test_a_gradient_that_comes_twice_fails_the_step_and_the_next_is_right(alone, options):
    """Of the same name, or in the same memory; at the hand-over or at the flush."""
    sync = gs.AllreduceCallback("mean", alone, **options)
    gradients = {"a": np.ones((2, 3), np.float32), "b": np.ones(4), "c": np.ones(())}
    for second in (("b", gradients["b"]), ("b", np.ones(4)), ("c", gradients["b"][1:2].reshape(()))):
        with pytest.raises(gs.InvalidArgument), sync.backward():
            sync("b", gradients["b"])
            sync(*second)
        assert step(sync, gradients)["b"] is gradients["b"]


def test_a_gradient_that_comes_twice_is_told_with_the_name_of_the_callback(alone):
    sync = gs.AllreduceCallback("mean", alone, name="discriminator")
    sync("w", np.ones(2))
    with pytest.raises(gs.InvalidArgument, match=r"'w' was handed over to callback 'discriminator' twice before"):
        sync("w", np.ones(2))
    sync.flush()


def test_without_a_process_group_or_with_another_backend_a_gradient_is_refused(alone):
    with pytest.raises(gs.InvalidArgument):
        gs.AllreduceCallback("mean", alone, "nccl")("w", np.ones(1))
    gs.destroy_process_group()
    with pytest.raises(gs.InvalidArgument):
        gs.AllreduceCallback("mean")("w", np.ones(1))


def test_a_gradient_may_have_another_shape_and_dtype_in_the_next_step(alone):
    sync, changed = gs.AllreduceCallback("mean", alone), np.zeros(6)
    for shape, dtype in [((3,), "f4"), ((3,), "f4"), ((2, 2), "f4"), ((2, 2), "f8"), ((3,), "f4")]:
        result = step(sync, {"w": np.ones(shape, dtype)})["w"]
        assert (result.shape, result.dtype) == (shape, dtype)
    for number in range(4):
        if number == 3:
            changed = changed.reshape(2, 3)
        assert step(sync, {"w": changed})["w"].shape == changed.shape


@pytest.mark.ranks(2, on=("shm", "fake", "gpu"))
def test_numbers_are_gradients(comm):
    """The future gives their result: a 0-d array of their dtype."""
    arrays, sync = arrays_of(comm), gs.AllreduceCallback("sum", comm)
    for _ in range(3):
        given = [1.5, np.float32(2.0), np.float64(3.0), arrays.put(np.array(4.0)), 1j, np.complex64(2j)]
        results = [arrays.get(result) for result in step(sync, dict(enumerate(given))).values()]
        wanted = (1.5, 2.0, 3.0, 4.0, 1j, 2j)
        assert [complex(result) for result in results] == [comm.world_size * value for value in wanted]
        assert [(str(result.dtype), result.shape) for result in results][:2] == [("float64", ()), ("float32", ())]


class Foreign:
    """An array of another library: it supports DLPack, and nothing else.

    An old one exports without a version, and so without a flag that says whether the memory may be written to.
    """

    def __init__(self, array: Any, is_old: bool = False) -> None:
        self.array, self.is_old = array, is_old

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(stream=options.get("stream")) if self.is_old else self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Tensor(Foreign):
    """As of PyTorch before 2.9: its DLPack is old, and __array__ gives its memory."""

    def __init__(self, array: Any) -> None:
        super().__init__(array, is_old=True)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array


class Unwriteable(Tensor):
    """As of JAX."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        view = self.array.view()
        view.setflags(write=False)
        return view


def reduce_foreign(comm, make):
    """What lies in the memory of foreign arrays after steps in which they are new, and come again."""
    arrays, sync, found = arrays_of(comm), gs.AllreduceCallback("sum", comm, threshold_bytes=64), []
    mine = [arrays.put(np.zeros((2, 3), np.float32)), arrays.put(np.zeros(5))]
    kept = [make(array) for array in mine]
    for number in range(4):
        for array in mine:
            array[...] = comm.rank + number
        foreign = kept if number > 1 else [make(array) for array in mine]
        results = step(sync, dict(enumerate(foreign)))
        found.append([arrays.get(array).max() for array in mine] + [results[at] is foreign[at] for at in range(2)])
    return found


FOREIGN = [[1.0 + 2 * number] * 2 + [True] * 2 for number in range(4)]


@pytest.mark.parametrize("place", ["shm", "fake"])
def test_results_lie_in_foreign_arrays(run_on_ranks, place):
    assert run_on_ranks(2, reduce_foreign, Foreign, on=place) == [FOREIGN] * 2


def test_results_lie_in_arrays_of_old_dlpack(run_on_ranks):
    assert run_on_ranks(2, reduce_foreign, Tensor) == [FOREIGN] * 2


def test_an_array_that_may_be_read_only_is_refused_and_one_that_is_gets_a_fresh_result(alone):
    sync, memory = gs.AllreduceCallback("sum", alone), np.ones(3)
    with pytest.raises(gs.InvalidArgument, match="a NumPy view or a copy"):
        sync("w", Foreign(memory, is_old=True))
    result = step(sync, {"w": Unwriteable(memory)})["w"]
    assert result.tolist() == [1.0] * 3
    assert not np.shares_memory(result, memory)


# -- Missing gradients -------------------------------------------------------------------------------------------------


def test_a_flush_without_gradients_is_an_empty_step(alone):
    sync = gs.AllreduceCallback("mean", alone, parameters=PARAMETERS)
    sync.flush()
    assert (sync.statistics.steps, sync.statistics.all_reduces) == (0, 0)


def missing(comm, given, threshold_bytes):
    """The error of a step in which this rank hands over these of the parameters a to d; then the next step is right."""
    parameters = dict.fromkeys("abcd", ((5,), "float64"))
    sync = gs.AllreduceCallback("sum", comm, parameters=parameters, threshold_bytes=threshold_bytes)
    step(sync, {name: np.ones(5) for name in "abcd"})
    futures = []
    with pytest.raises(gs.PlanMismatch) as raised, sync.backward():
        futures.extend(sync(name, np.ones(5)) for name in given[comm.rank])  # one by one: a hand-over may raise
    assert all(future.done() for future in futures)
    assert all((result == 3).all() for result in step(sync, {name: np.ones(5) for name in "abcd"}).values())
    return type(raised.value), sorted(raised.value.descriptions)


@pytest.mark.parametrize("threshold_bytes", [80, 10**6])
@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["bd", "bd", "db"], gs.MissingGradient),  # the same on all ranks
        (["abcd", "abcd", "abc"], gs.PlanMismatch),
        (["abcd", "", ""], gs.PlanMismatch),
        (["acd", "abd", "abc"], gs.PlanMismatch),
    ],
)
def test_missing_gradients_raise_on_all_ranks(run_on_ranks, given, error, threshold_bytes):
    outcomes = run_on_ranks(3, missing, given, threshold_bytes)
    assert [each for each, _ in outcomes] == [error] * 3
    assert issubclass(gs.MissingGradient, gs.PlanMismatch)
    if error is gs.PlanMismatch:
        assert [ranks for _, ranks in outcomes] == [[0, 1, 2]] * 3


def test_missing_names_are_named_and_counted(alone):
    parameters = {f"p{i}": ((1,), "float32") for i in range(30)}
    sync = gs.AllreduceCallback("sum", alone, parameters=parameters)
    sync("p29", np.ones(1, np.float32))
    with pytest.raises(gs.MissingGradient, match="'p0', 'p1', .* and 21 more"):
        sync.flush()


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,), "gpu": (2,)})
def test_results_that_were_filled_in_are_the_users_to_keep(comm):
    """Zeros where no rank had a gradient."""
    arrays, n = arrays_of(comm), comm.world_size
    sync, kept = gs.AllreduceCallback("sum", comm, parameters=PARAMETERS, missing="zero"), []
    for number in range(3):
        with sync.backward():
            if comm.rank and number:
                sync("b", arrays.put(np.full(4, 10.0 * number)))
        assert set(sync.results()) == set("abc")
        kept.append(sync.results())
    for number, results in enumerate(kept):
        for name, result in results.items():
            assert (arrays.get(result) == (10.0 * number * (n - 1) if name == "b" else 0)).all()
            assert arrays.get(result).shape == {"a": (2, 3), "b": (4,), "c": ()}[name]
    assert sync.statistics.steps == 3


@pytest.mark.ranks(2, on=("shm", "fake"), fresh=True)
def test_a_callback_without_a_group_goes_on_in_the_next_world(comm):
    arrays, backend = arrays_of(comm), comm.backend
    shapes = {"a": ((4,), "float64")}
    callbacks = [
        gs.AllreduceCallback("sum"),
        gs.AllreduceCallback("sum", parameters=shapes),
        gs.AllreduceCallback("sum", parameters=shapes, gradient_as_bucket_view=True),
    ]
    gradients = [arrays.put(np.zeros(4)) for _ in callbacks]
    for generation in range(3):
        if generation:
            gs.destroy_process_group()
            with pytest.raises(gs.InvalidArgument):
                callbacks[0]("a", gradients[0])
            gs.init_process_group(backend)
        for _ in range(3):
            for sync, gradient in zip(callbacks, gradients, strict=True):
                gradient[...] = 1.0
                assert (arrays.get(step(sync, {"a": gradient})["a"]) == 2).all()


@pytest.mark.ranks(on={"local": (1,), "shm": (2, 3), "pipes": (2,), "fake": (2,), "mpi": (2,)})
@pytest.mark.parametrize(
    "options",
    [{}, {"parameters": MATRICES}, {"parameters": MATRICES, "gradient_as_bucket_view": True}, {"clip_norm": 1e-3}],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("threshold_bytes", [1, 1000, None])
def test_gradients_in_fortran_order_on_all_ranks_on_some_and_in_turns(comm, options, threshold_bytes):
    """Where ranks have one order, values are reduced as they lie; where not, all go through copies."""
    n, rank, arrays = comm.world_size, comm.rank, arrays_of(comm)
    sync = gs.AllreduceCallback("mean", comm, threshold_bytes=threshold_bytes, **options)
    for turn in range(6):
        # On all ranks, on the first, on the last, the one or the other, and on none.
        is_fortran = [
            [True, rank == 0, rank == n - 1, (rank + at) % 2 == 0, (rank + at + turn) % 2 == 0, False][turn]
            for at in range(len(MATRICES))
        ]
        of_ranks = reference.by_rank(n, turn, MATRICES)
        gradients = {
            name: arrays.put(np.asfortranarray(values) if turned and values.ndim else values)
            for turned, (name, values) in zip(is_fortran, of_ranks[rank].items(), strict=True)
        }
        weights = [1.0 + each for each in range(n)] if turn % 2 else None
        with sync.backward(weight=None if weights is None else weights[rank]):
            futures = {name: sync(name, gradient) for name, gradient in gradients.items()}
        wanted = reference.reduced(of_ranks, "mean", weights)
        scale = min(1.0, options["clip_norm"] / reference.norm_of(wanted.values())) if "clip_norm" in options else 1.0
        for name, future in futures.items():
            got = arrays.get(future.result())
            assert got.shape == MATRICES[name][0]
            np.testing.assert_allclose(got, wanted[name] * scale, rtol=1e-5)
            if "gradient_as_bucket_view" not in options:
                assert future.result() is gradients[name]
