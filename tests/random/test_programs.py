"""Random programs of callbacks, collectives and groups against a NumPy model; in some of them one rank makes a mistake.

A program is a list of operations that all ranks run. Each computes on its own what all others contributed, and compares
every number with NumPy in float64, and its bits with those of the other ranks. Where a mistake was planted, every rank
that takes part in that operation must raise PlanMismatch, no other may notice, and the communicators go on. On the CPU
no gradient of a step has changed then, and the same callbacks repeat it. Over NCCL mistakes are planted where the ranks
compare everything; only that a rank lacks a gradient of an agreed plan, which ends the world, is none of them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import gradsync as gs
from arrays import (
    FLOATS,
    OPERATORS,
    OPERATORS_ON_GPU,
    TOLERANCE,
    arrays_of,
    assert_close,
    contribution,
    dtype_of,
    reduced,
)

SHAPES = [(), (0, 3), (1,), (7,), (3, 5), (2, 1, 4), (33, 3), (700,), (70_001,)]
OPS = {"shm": OPERATORS, "fake": OPERATORS_ON_GPU, "debug": OPERATORS_ON_GPU}


class Operation(NamedTuple):
    """One call of all ranks of a group.

    Attributes:
        kind: see OPERATIONS below.
        group: a number that chooses among the groups that there are.
        shape, dtype, op: of its array, where it has one.
        seed: of the contributions, and of what else is drawn.
        is_asynchronous: whether it is called on `.asynchronous`, where there is such a thing.
    """

    kind: str
    group: int
    shape: tuple[int, ...]
    dtype: str
    op: str
    seed: int
    is_asynchronous: bool


class Program(NamedTuple):
    """Operations, and the mistake: the number of the operation, the rank and what it does otherwise; or None."""

    operations: list[Operation]
    mistake: tuple[int, int, str] | None


@dataclass
class Callback:
    """A callback as the model knows it.

    Attributes:
        sync: the callback.
        gradients: name -> (shape, dtype).
        options: that it was made with.
        knows: whether each rank knows the gradients, so that one whose weight is 0 need not hand them over.
    """

    sync: Any
    gradients: dict[Any, tuple[tuple[int, ...], str]]
    options: dict[str, Any]
    knows: bool


KINDS = [
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
    *("exchange", "objects", "barrier", "lists", "tree", "group", "close"),
    *("step",) * 6,
]


@st.composite
def operations(draw, ops):
    dtype = draw(st.sampled_from(list(ops)))
    return Operation(
        draw(st.sampled_from(KINDS)),
        draw(st.integers(0, 5)),
        draw(st.sampled_from(SHAPES)),
        dtype,
        draw(st.sampled_from(ops[dtype])),
        draw(st.integers(0, 10**6)),
        draw(st.booleans()),
    )


MISTAKES = ["another shape", "another dtype", "another call", "another name", "no gradient", "another weight"]
MISTAKES_OF_STEPS = MISTAKES[3:]


@st.composite
def programs(draw, place):
    body = draw(st.lists(operations(OPS[place]), min_size=1, max_size=25))
    mistakes = st.tuples(st.integers(0, len(body) - 1), st.integers(0, 3), st.sampled_from(MISTAKES))
    return Program(body, None if place == "fake" else draw(st.none() | mistakes))


# -- On a rank ---------------------------------------------------------------------------------------------------------


class Rank:
    """Runs a program on one rank, and compares."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.groups: list[Any] = [world]  # None where this rank is no member
        self.members: list[tuple[int, ...]] = [tuple(range(world.world_size))]
        self.callbacks: dict[tuple[int, int], Callback] = {}  # by the place of their group, and 0 or 1
        self.given: list[tuple[Any, bytes]] = []  # the arrays of the last step, and what they were
        self.arrays = arrays_of(world)

    def run(self, program: Program) -> None:
        for number, operation in enumerate(program.operations):
            mistake = program.mistake if program.mistake and program.mistake[0] == number else None
            self.run_one(operation, mistake)
        for group in self.groups[1:]:
            if group is not None:
                group.close()

    def run_one(self, operation: Operation, mistake: tuple[int, int, str] | None) -> None:
        at = operation.group % len(self.groups)
        group, members = self.groups[at], self.members[at]
        if operation.kind == "group":
            if len(self.groups) < 4:
                self.make_group(operation)
            return
        if operation.kind == "close":
            if at:
                if group is not None:
                    group.close()
                del self.groups[at], self.members[at]
                self.callbacks = {
                    (place - (place > at), seed): callback
                    for (place, seed), callback in self.callbacks.items()
                    if place != at
                }
            return
        if group is None:
            return
        self.group, self.ranks = group, members
        # Of messages no disagreement is promised: the deadline says who waits for whom.
        if mistake is None or len(members) == 1 or operation.kind == "exchange":
            getattr(self, operation.kind)(operation)
            return
        culprit = mistake[1] % len(members)
        self.given = []
        try:
            if group.rank == culprit:
                self.err(operation, mistake[2])
            else:
                getattr(self, operation.kind)(operation)
        except gs.PlanMismatch as error:
            assert len(set(error.descriptions.values())) > 1, error
        else:
            raise AssertionError(f"rank {self.world.rank}: nobody noticed {mistake} in {operation}")
        assert group.all_reduce(self.arrays.put(np.ones(3, np.float32)))[0] == len(members)
        if operation.kind != "step":
            return
        if group.device != "cpu":  # some buckets may have been reduced
            self.callbacks = {}
            return
        assert all(array.tobytes() == bits for array, bits in self.given)
        self.callback(operation).knows = False
        self.step(operation)

    def err(self, operation: Operation, mistake: str) -> None:
        """Calls something else than the others."""
        if operation.kind == "step":
            self.err_in_step(operation, mistake)
            return
        no_array = ("barrier", "objects", "lists", "tree")
        if mistake in ("another call", *MISTAKES_OF_STEPS) or operation.kind in no_array:
            self.call_another(operation)
            return
        if mistake == "another shape":
            operation = operation._replace(shape=(5, 5, 5))
        else:
            operation = operation._replace(dtype="float64" if operation.dtype != "float64" else "complex64", op="sum")
        getattr(self, operation.kind)(operation)

    def call_another(self, operation: Operation) -> None:
        if operation.kind == "broadcast":
            self.group.barrier()
        else:
            self.group.broadcast(self.arrays.put(np.ones((2, 3, 4))))

    def err_in_step(self, operation: Operation, mistake: str) -> None:
        callback = self.callback(operation)
        shapes, is_known = dict(callback.gradients), "parameters" in callback.options
        is_agreed = is_known and self.group.device != "cpu"
        weight: Any = self.weight(operation, callback)
        if mistake == "another weight" and callback.options["reduce_method"] == "mean":
            self.step(operation, weight=3 if weight is None else None)
        elif mistake == "no gradient" and weight != 0 and callback.options.get("missing") != "zero" and not is_agreed:
            del shapes["w"]
            self.step(operation, shapes)
        elif mistake in ("another shape", "another dtype", "another name") and weight != 0 and not is_known:
            # With parameters= this rank's own callback would refuse it.
            spec = shapes.pop("w")
            name = "another" if mistake == "another name" else "w"
            if mistake == "another shape":
                spec = ((5, 5, 5) if spec[0] != (5, 5, 5) else (8,)), spec[1]
            elif mistake == "another dtype":
                spec = spec[0], ("complex64" if spec[1] != "complex64" else "float64")
            self.step(operation, shapes | {name: spec})
        else:
            self.call_another(operation)

    # Contributions and references: `who` is a rank of the world.

    def mine(self, operation: Operation, shape: tuple[int, ...] | None = None) -> Any:
        shape = operation.shape if shape is None else shape
        return self.arrays.put(contribution(self.world.rank, shape, operation.dtype, operation.seed))

    def of(self, who: int, operation: Operation, shape: tuple[int, ...] | None = None) -> Any:
        shape = operation.shape if shape is None else shape
        return contribution(who, shape, operation.dtype, operation.seed)

    def reference(self, operation: Operation, shape: tuple[int, ...] | None = None, op: str | None = None) -> Any:
        shape = operation.shape if shape is None else shape
        wide = np.complex128 if operation.dtype.startswith("complex") else np.float64
        stack = np.stack([self.of(who, operation, shape).astype(wide) for who in self.ranks])
        functions: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}
        return np.asarray(functions[op or operation.op](stack, axis=0))

    def face(self, operation: Operation) -> Any:
        """The communicator, or one whose calls are asynchronous and waited for."""
        return Waited(self.group.asynchronous) if operation.is_asynchronous else self.group

    def check(self, got: Any, want: Any, operation: Operation, *, everywhere: bool = False) -> None:
        values = self.arrays.get(got)
        assert_close(values, np.asarray(want), operation.dtype, len(self.ranks))
        if everywhere:
            digest = zlib.crc32(np.ascontiguousarray(values).tobytes())
            assert len(set(self.group.objects.all_gather(digest))) == 1

    # The operations.

    def all_reduce(self, operation: Operation) -> None:
        array = self.mine(operation)
        result = self.face(operation).all_reduce(array, operation.op)
        assert result is array
        self.check(result, self.reference(operation), operation, everywhere=True)

    def reduce(self, operation: Operation) -> None:
        root = operation.seed % len(self.ranks)
        result = self.face(operation).reduce(self.mine(operation), operation.op, root)
        if self.group.rank == root:
            self.check(result, self.reference(operation), operation)

    def broadcast(self, operation: Operation) -> None:
        root = operation.seed % len(self.ranks)
        result = self.face(operation).broadcast(self.mine(operation), root)
        assert (self.arrays.get(result) == self.of(self.ranks[root], operation)).all()

    def rows(self, operation: Operation) -> tuple[int, ...]:
        """A shape whose first axis can be cut among the ranks."""
        return (2 * len(self.ranks), *operation.shape[1:])

    def all_gather(self, operation: Operation) -> None:
        shape = operation.shape or (1,)
        result = self.face(operation).all_gather(self.mine(operation, shape))
        want = np.concatenate([self.of(who, operation, shape) for who in self.ranks])
        assert (self.arrays.get(result) == want).all()

    def reduce_scatter(self, operation: Operation) -> None:
        shape = self.rows(operation)
        result = self.face(operation).reduce_scatter(self.mine(operation, shape), operation.op)
        part = slice(2 * self.group.rank, 2 * self.group.rank + 2)
        self.check(result, self.reference(operation, shape)[part], operation)

    def all_to_all(self, operation: Operation) -> None:
        shape, rank = self.rows(operation), self.group.rank
        result = self.face(operation).all_to_all(self.mine(operation, shape))
        want = np.concatenate([self.of(who, operation, shape)[2 * rank : 2 * rank + 2] for who in self.ranks])
        assert (self.arrays.get(result) == want).all()

    def gather(self, operation: Operation) -> None:
        shape, root = operation.shape or (1,), operation.seed % len(self.ranks)
        result = self.face(operation).gather(self.mine(operation, shape), root)
        if self.group.rank == root:
            want = np.concatenate([self.of(who, operation, shape) for who in self.ranks])
            assert (self.arrays.get(result) == want).all()

    def scatter(self, operation: Operation) -> None:
        shape, root = self.rows(operation), operation.seed % len(self.ranks)
        out = self.arrays.xp.empty((2, *shape[1:]), dtype_of(operation.dtype))
        given = self.mine(operation, shape) if self.group.rank == root else None
        result = self.face(operation).scatter(given, root, out=out)
        part = slice(2 * self.group.rank, 2 * self.group.rank + 2)
        assert (self.arrays.get(result) == self.of(self.ranks[root], operation, shape)[part]).all()

    def exchange(self, operation: Operation) -> None:
        n, rank = len(self.ranks), self.group.rank
        array = self.mine(operation)
        out = self.arrays.xp.empty_like(array)
        self.face(operation).exchange(array, dest=(rank + 1) % n, out=out, source=(rank - 1) % n)
        assert (self.arrays.get(out) == self.of(self.ranks[(rank - 1) % n], operation)).all()

    def objects(self, operation: Operation) -> None:
        rank, root = self.group.rank, operation.seed % len(self.ranks)
        assert self.group.objects.all_gather({rank: "x" * rank}) == [{r: "x" * r} for r in range(len(self.ranks))]
        assert self.group.objects.broadcast(rank, root) == root

    def barrier(self, operation: Operation) -> None:
        self.group.barrier()

    def lists(self, operation: Operation) -> None:
        arrays = [self.mine(operation), self.arrays.put(np.full(9, float(self.world.rank)))]
        gs.bcast_list_(arrays, communicator=self.group)
        assert (self.arrays.get(arrays[0]) == self.of(self.ranks[0], operation)).all()
        if operation.op in ("sum", "mean"):
            parts = gs.pack_allreduce_split([self.mine(operation)], [operation.shape], self.group, operation.op)
            self.check(parts[0], self.reference(operation), operation)

    def tree(self, operation: Operation) -> None:
        tree = {"a": [self.mine(operation)], "b": (self.arrays.put(np.full(2, float(self.world.rank))),)}
        found = gs.broadcast_tree(tree, communicator=self.group)
        assert (self.arrays.get(found["a"][0]) == self.of(self.ranks[0], operation)).all()
        assert self.arrays.get(found["b"][0])[0] == self.ranks[0]

    def make_group(self, operation: Operation) -> None:
        rng = np.random.default_rng(operation.seed)
        n = self.world.world_size
        if operation.is_asynchronous:
            colours = rng.integers(0, 2, n)
            made = self.world.split(int(colours[self.world.rank]))
            # For the others this is another group of the same place.
            members = tuple(int(r) for r in np.flatnonzero(colours == colours[self.world.rank]))
        else:
            members = tuple(sorted(int(r) for r in rng.choice(n, rng.integers(1, n + 1), replace=False)))
            made = self.world.new_group(members)
        self.groups.append(made or None)  # what is no member is false
        self.members.append(members)

    def callback(self, operation: Operation) -> Callback:
        """One of two callbacks of the group: made at its first use, by what the seed draws."""
        key = self.groups.index(self.group), operation.seed % 2
        if key not in self.callbacks:
            self.callbacks[key] = self.make_callback(operation)
        return self.callbacks[key]

    def weights(self, operation: Operation, callback: Callback) -> list[float] | None:
        """The weight of each rank of the group; None: a step without."""
        rng = np.random.default_rng([operation.seed, 11])
        if callback.options["reduce_method"] == "sum" or rng.random() < 0.5:
            return None
        return [float(each) for each in rng.choice([0, 0.5, 1, 7], len(self.ranks))]

    def weight(self, operation: Operation, callback: Callback) -> float | None:
        weights = self.weights(operation, callback)
        return None if weights is None else weights[self.ranks.index(self.world.rank)]

    def step(self, operation: Operation, shapes: Any = None, weight: Any = "of the model") -> None:
        """A step of a callback; a mistake has other gradients, or another weight. Each rank has an order of its own."""
        callback = self.callback(operation)
        sync, options = callback.sync, callback.options
        shapes = callback.gradients if shapes is None else shapes
        weights, place = self.weights(operation, callback), self.ranks.index(self.world.rank)
        weight = self.weight(operation, callback) if weight == "of the model" else weight
        names = list(shapes)
        np.random.default_rng([self.world.rank, operation.seed]).shuffle(names)
        by_name = {
            name: [contribution(who, *shapes[name], operation.seed + at) for who in self.ranks]
            for at, name in enumerate(shapes)
        }
        if options["nonfinite"] != "off" and operation.seed % 3 == 0 and "w" in by_name:
            by_name["w"][0][...] = np.inf
        rng = np.random.default_rng([operation.seed, 7])
        missing = set()
        if options.get("missing") == "zero":
            absent = {(name, who) for name in shapes for who in self.ranks if rng.random() < 0.3}
            missing = {name for name in shapes if (name, self.world.rank) in absent}
            for name, who in absent:
                by_name[name][self.ranks.index(who)][...] = 0
        if weight == 0 and operation.is_asynchronous and callback.knows:
            missing = set(names)
        mine = {name: by_name[name][place] for name in names if name not in missing}
        if weight == 0:
            mine = {name: np.full_like(values, np.nan) for name, values in mine.items()}
        gradients = {name: self.arrays.put(values) for name, values in mine.items()}
        if self.group.device == "cpu":
            self.given = [(array, array.tobytes()) for array in gradients.values()]
        want = self.wanted(callback, by_name, weights)
        finite = all(np.isfinite(value).all() for value in want.values())
        if options["nonfinite"] == "raise" and not finite:
            with pytest.raises(gs.NonFiniteGradient) as raised, sync.backward(weight=weight):
                for name, gradient in gradients.items():
                    sync(name, gradient)
            assert raised.value.parameters == ("w",)
            assert sync.results() == {}
            callback.knows = True
            return
        with sync.backward(weight=weight):
            futures = {name: sync(name, gradient) for name, gradient in gradients.items()}
        assert sync.total_weight == (None if weights is None else sum(weights))
        if sync.total_weight == 0:
            assert sync.results() == {}
            assert all(isinstance(future.exception(), gs.GradientCancelled) for future in futures.values())
            assert all(array.tobytes() == bits for array, bits in self.given)
            return
        results = sync.results()
        assert set(results) == set(shapes)
        assert all(results[name] is future.result() for name, future in futures.items())
        callback.knows = True
        if options["nonfinite"] == "skip":
            assert sync.skip_step is not finite
        if finite:
            self.compare(callback, want, results)

    def wanted(self, callback: Callback, by_name: Any, weights: list[float] | None) -> dict[Any, Any]:
        """The reduced gradients in float64, before they are clipped."""
        options, n, want = callback.options, len(self.ranks), {}
        if weights is not None and not any(weights):
            return {}
        for name, values in by_name.items():
            wide = np.complex128 if values[0].dtype.kind == "c" else np.float64
            with np.errstate(invalid="ignore"):
                terms = [w * each.astype(wide) for w, each in zip(weights or [1.0] * n, values, strict=True) if w]
                want[name] = np.sum(terms, axis=0)
                want[name] = want[name] / (sum(weights or [1.0] * n) if options["reduce_method"] == "mean" else 1)
        return want

    def compare(self, callback: Callback, want: Any, results: Any) -> None:
        options, n = callback.options, len(self.ranks)
        if "clip_norm" in options:
            norm = np.sqrt(sum(float((np.abs(value) ** 2).sum()) for value in want.values()))
            np.testing.assert_allclose(callback.sync.norm, norm, rtol=1e-2)
            scale = min(1.0, options["clip_norm"] / (norm + 1e-6))  # as PyTorch does
            want = {name: value * scale for name, value in want.items()}
        for name, result in results.items():
            got = self.arrays.get(result)
            dtype = got.dtype.name
            assert got.shape == want[name].shape
            # The norm is that of the reduced values, which are rounded; so are weighted ones before they are added.
            dtypes = [dtype, *(each for _, each in callback.gradients.values() if "clip_norm" in options)]
            tolerance = (4 if "clip_norm" in options else 2) * n * max(TOLERANCE[each] for each in dtypes)
            np.testing.assert_allclose(
                got.astype(want[name].dtype), want[name], rtol=tolerance, atol=0, err_msg=str(name)
            )
        bits = {str(name): zlib.crc32(self.arrays.get(result).tobytes()) for name, result in results.items()}
        assert len({tuple(sorted(each.items())) for each in self.group.objects.all_gather(bits)}) == 1

    def make_callback(self, operation: Operation) -> Callback:
        rng = np.random.default_rng(operation.seed)
        gradients = {
            name: (SHAPES[rng.integers(len(SHAPES))], FLOATS[rng.integers(len(FLOATS))])
            for name in ["w", ("layer", 1, "bias"), 3, *(f"p{i}" for i in range(rng.integers(0, 6)))]
        }
        if all(0 in shape for shape, _ in gradients.values()):
            gradients["w"] = ((7,), "float32")
        options: dict[str, Any] = {"reduce_method": ["mean", "sum"][rng.integers(2)]}
        options["threshold_bytes"] = [1, 300, 10 * 1024**2][rng.integers(3)]
        if rng.random() < 0.5:
            options["parameters"] = gradients
        if rng.random() < 0.3 and "parameters" in options:
            options["missing"] = "zero"
        if rng.random() < 0.3 and "parameters" in options:
            options["gradient_as_bucket_view"] = True
        if rng.random() < 0.3:
            options["clip_norm"] = 1.0
        options["nonfinite"] = ["off", "skip", "raise"][rng.integers(3)]
        names = f"{self.groups.index(self.group)} {operation.seed % 2}"
        sync = gs.AllreduceCallback(group=self.group, name=names, **options)
        if rng.random() < 0.2:
            sync.register_hook(lambda bucket: bucket.communicator.all_reduce(bucket.buffer, bucket.op))
        return Callback(sync, gradients, options, "parameters" in options)


class Waited:
    """The collectives of `.asynchronous`, each waited for."""

    def __init__(self, asynchronous: Any) -> None:
        self._asynchronous = asynchronous

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: getattr(self._asynchronous, name)(*args, **options).result()


def run_program(comm: Any, program: Program) -> None:
    with comm.split(0) as world:  # what a failing program leaves behind concerns no later one
        Rank(world).run(program)


# -- In pytest --------------------------------------------------------------------------------------------------------

SIZES = {"shm": 3, "fake": 2, "debug": 2}


def run_programs(run_on_ranks, place, examples):
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(programs(place))
    def check(program):
        note(f"{len(program.operations)} operations, mistake: {program.mistake}")
        run_on_ranks(SIZES[place], run_program, program, on=place)

    check()


@pytest.mark.parametrize(("place", "examples"), [("shm", 60), ("fake", 15), ("debug", 15)])
def test_random_programs(run_on_ranks, place, examples):
    run_programs(run_on_ranks, place, examples)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("place", "examples"), [("shm", 2000), ("fake", 300), ("debug", 300)])
def test_many_random_programs(run_on_ranks, place, examples):
    run_programs(run_on_ranks, place, examples)


def test_a_wrong_number_would_be_found(run_on_ranks):
    """The model itself: a rank that contributes something else than it says is noticed."""
    operation = Operation("all_reduce", 0, (7,), "float64", "sum", 1, False)
    with pytest.raises(AssertionError):
        run_on_ranks(2, run_wrongly, Program([operation], None))


def run_wrongly(comm: Any, program: Program) -> None:
    if comm.rank == 1:
        program.operations[0] = program.operations[0]._replace(seed=2)
    Rank(comm).run(program)


def test_the_reference_is_that_of_the_other_tests():
    """Over the whole world, what this model computes is what arrays.reduced says."""

    class World:
        rank, world_size, device = 0, 3, "cpu"

    rank = Rank(World)
    rank.ranks = (0, 1, 2)
    operation = Operation("all_reduce", 0, (5,), "float32", "mean", 4, False)
    assert (rank.reference(operation) == reduced("mean", (5,), "float32", 3, seed=4)).all()
