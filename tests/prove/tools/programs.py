"""Random programs of collectives: drawn as data from any source of choices, run by ranks, compared bit for bit.

A program is the same on every rank, which takes its own part in it: it skips the steps of groups that it is not in,
and makes its arrays from its rank and the step's number. So hypothesis can draw programs in the parent, and shrink
them; the soak draws its own on each rank, from one seed. Values are small multiples of 1/8, whose sums are exact, so
that the wanted bits do not depend on the order of a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from contract import (
    HOST_ONLY_DTYPES,
    LAYOUTS,
    Host,
    assert_identical,
    bounds_of,
    dtype_of,
    exactly_reduced,
    in_layout,
    sealed,
)
from gradsync.reduction import OPERATIONS_BY_DTYPE

T = TypeVar("T")

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MOVING = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "message", "exchange")
KINDS = (*REDUCING, *MOVING, "barrier", "objects")
FORMS = ("fresh", "out", "in place")
MANY_IN_FLIGHT = 8


class Step(NamedTuple):
    """One collective of a program.

    Attributes:
        group: place of the group among the program's; 0 is the world.
        kind: one of KINDS.
        dtype, op: the dtype's name; the operator of a reduction, else "".
        rows: rows of each member, in the group's order.
        tail: the shape of a row; None is a 0-d array, for kinds that take it.
        root: member that a collective has as its root, or that a message comes from.
        layout: place in LAYOUTS; each member takes another one from there on.
        form: one of FORMS.
        sizes: "equal" or "given"; for kinds that take sizes.
        is_asynchronous: whether it is submitted, and looked at later.
    """

    group: int
    kind: str
    dtype: str
    op: str
    rows: tuple[int, ...]
    tail: tuple[int, ...] | None
    root: int
    layout: int
    form: str
    sizes: str
    is_asynchronous: bool


class Choices(Protocol):
    """Where the choices of a program come from."""

    def among(self, options: Sequence[T]) -> T:
        """Returns one of the options."""

    def number(self, low: int, high: int) -> int:
        """Returns an integer from low to high, both included."""


def draw_groups(choices: Choices, world_size: int) -> list[tuple[int, ...]]:
    """Draws the groups of a program: the world, and up to two others, which may overlap."""
    groups = [tuple(range(world_size))]
    for _ in range(choices.number(0, 2)):
        ranks = tuple(rank for rank in range(world_size) if choices.among((True, False)))
        if ranks:
            groups.append(ranks)
    return groups


def draw_step(
    choices: Choices,
    groups: Sequence[tuple[int, ...]],
    *,
    dtypes: Sequence[str],
    most_rows: int,
    kinds: Sequence[str] = KINDS,
) -> Step:
    """Draws one step. The first of all options is the simplest: that is what hypothesis shrinks to."""
    group = choices.number(0, len(groups) - 1)
    members = len(groups[group])
    kind = choices.among(kinds)
    dtype = choices.among([name for name in dtypes if kind not in REDUCING or name in OPERATIONS_BY_DTYPE])
    op = choices.among(sorted(op.value for op in OPERATIONS_BY_DTYPE[dtype])) if kind in REDUCING else ""
    sizes = choices.among(("equal", "given"))
    rows = choices.number(0, most_rows)
    return Step(
        group,
        kind,
        dtype,
        op,
        (rows,) * members if sizes == "equal" else tuple(choices.number(0, most_rows) for _ in range(members)),
        choices.among(((), (3,), (2, 2), (0,), None)),
        choices.number(0, members - 1),
        choices.number(0, len(LAYOUTS) - 1),
        choices.among(FORMS),
        sizes,
        choices.among((False, True)),
    )


# -- Values ----------------------------------------------------------------------------------------------------------


def values(rank: int, call: int, name: str, shape: tuple[int, ...]) -> Host:
    """What a rank contributes to a call: cheap to make, different for every rank, call and place."""
    count = int(np.prod(shape, dtype=np.int64))
    numbers = ((np.arange(count) * 37 + rank * 11 + call * 7) % 13).reshape(shape)
    if name == "structured":
        records = np.zeros(shape, HOST_ONLY_DTYPES[name])
        records["weight"], records["count"] = numbers, rank
        return records
    if name.startswith(("float", "bfloat", "complex")):
        return np.asarray(numbers / 8 + 0.25).astype(dtype_of(name))
    return np.asarray(numbers).astype(dtype_of(name))


# -- One step on one rank --------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What a rank does in a step.

    Attributes:
        start: calls the collective on a communicator or its asynchronous form.
        want: the result, or None where there is none.
        into: the array that must be returned; None for a new one.
    """

    start: Callable[[Any], Any]
    want: Host | None
    into: Any = None


class Part:
    """The arrays of one rank's part in a step."""

    def __init__(self, step: Step, call: int, comm: Any, kit: Any) -> None:
        self.step, self.call, self.comm, self.kit = step, call, comm, kit
        self.n, self.me = comm.world_size, comm.rank
        self.tail = step.tail or ()
        self.rows = list(step.rows)
        self.shape = () if step.tail is None else (self.rows[0], *self.tail)
        self.is_root = self.me == step.root

    def given(self, shape: tuple[int, ...], seed: int = 0) -> list[Host]:
        """Returns what each member contributes in one shape."""
        return [values(rank, self.call + seed, self.step.dtype, shape) for rank in self.comm.ranks]

    def given_rows(self, rows_by_rank: Sequence[int], seed: int = 0) -> list[Host]:
        return [
            values(rank, self.call + seed, self.step.dtype, (rows, *self.tail))
            for rank, rows in zip(self.comm.ranks, rows_by_rank, strict=True)
        ]

    def source(self, host: Host) -> Any:
        """Returns an array that must not be written to, in this rank's layout."""
        return sealed(self._laid_out(host, self.me))

    def room(self, like: Host) -> Any:
        """Returns an array for results, in another layout."""
        return self._laid_out(np.zeros_like(like), self.me + 1)

    def out(self, like: Host) -> Any:
        return self.room(like) if self.step.form == "out" else None

    def _laid_out(self, host: Host, turn: int) -> Any:
        return in_layout(host, self.kit, LAYOUTS[(self.step.layout + turn) % len(LAYOUTS)])

    def own_rows(self, whole: Any) -> Any:
        """Returns this rank's rows of an array of the kit."""
        bounds = bounds_of(self.rows)
        return whole[bounds[self.me] : bounds[self.me + 1]]

    def contiguous(self, host: Host) -> Any:
        return self.kit.put(host.copy())


def _whole(parts: Sequence[Host]) -> Host:
    return np.concatenate(parts, dtype=parts[0].dtype)


def _all_reduce(p: Part) -> Work:
    given = p.given(p.shape)
    want = exactly_reduced(p.step.op, given)
    out = p.out(want)
    array = p._laid_out(given[p.me], p.me)
    return Work(lambda form: form.all_reduce(array, p.step.op, out=out), want, array if out is None else out)


def _reduce(p: Part) -> Work:
    given = p.given(p.shape)
    want = exactly_reduced(p.step.op, given)
    out = p.out(want) if p.is_root else None
    array = p._laid_out(given[p.me], p.me)
    into = (array if out is None else out) if p.is_root else None
    return Work(lambda form: form.reduce(array, p.step.op, p.step.root, out=out), want if p.is_root else None, into)


def _reduce_scatter(p: Part) -> Work:
    given = p.given((sum(p.rows), *p.tail))
    want = p.own_rows(exactly_reduced(p.step.op, given))
    sizes = _sizes(p)
    if p.step.form == "in place":
        array = p.contiguous(given[p.me])
        out = p.own_rows(array)
    else:
        array, out = p.source(given[p.me]), p.out(want)
    return Work(lambda form: form.reduce_scatter(array, p.step.op, sizes=sizes, out=out), want, out)


def _broadcast(p: Part) -> Work:
    given = p.given(p.shape)
    array = p._laid_out(given[p.me], p.me)
    return Work(lambda form: form.broadcast(array, p.step.root), given[p.step.root], array)


def _sizes(p: Part) -> Any:
    return None if p.step.sizes == "equal" else p.rows


def _all_gather(p: Part) -> Work:
    given = p.given_rows(p.rows)
    want = _whole(given)
    sizes = _sizes(p)
    if p.step.form == "fresh":
        array, out = p.source(given[p.me]), None
    elif p.step.form == "in place":
        out = p.contiguous(np.zeros_like(want))
        array = p.own_rows(out)
        array[...] = p.kit.put(given[p.me])
    else:
        array, out = p.source(given[p.me]), p.room(want)
    return Work(lambda form: form.all_gather(array, sizes=sizes, out=out), want, out)


def _gather(p: Part) -> Work:
    given = p.given_rows(p.rows)
    want = _whole(given)
    sizes = _sizes(p)
    out = p.out(want) if p.is_root else None
    array = p.source(given[p.me])
    return Work(lambda form: form.gather(array, p.step.root, sizes=sizes, out=out), want if p.is_root else None, out)


def _scatter(p: Part) -> Work:
    given = p.given_rows(p.rows)
    want = given[p.me]
    sizes = _sizes(p)
    array = p.source(_whole(given)) if p.is_root else None
    out = p.out(want) if p.is_root else p.room(want)
    return Work(lambda form: form.scatter(array, p.step.root, sizes=sizes, out=out), want, out)


def _all_to_all(p: Part) -> Work:
    is_equal = p.step.sizes == "equal"
    table = [[p.rows[(sender + 2 * receiver) % p.n] for receiver in range(p.n)] for sender in range(p.n)]
    blocks = [p.given_rows(rows_from_all, seed) for seed, rows_from_all in enumerate(zip(*table, strict=True))]
    want = _whole(blocks[p.me])
    array = p.source(_whole([to_rank[p.me] for to_rank in blocks]))
    send_sizes = None if is_equal else table[p.me]
    recv_sizes = None if is_equal else [row[p.me] for row in table]
    out = p.out(want)
    return Work(lambda form: form.all_to_all(array, send_sizes=send_sizes, recv_sizes=recv_sizes, out=out), want, out)


def _message(p: Part) -> Work | None:
    receiver = (p.step.root + 1 + p.step.layout % max(1, p.n - 1)) % p.n
    given = p.given(p.shape)
    if receiver == p.step.root or p.me not in (receiver, p.step.root):
        return None
    if p.is_root:
        array = p.source(given[p.me])
        return Work(lambda form: form.send(array, receiver), None)
    room = p.room(given[p.me])
    return Work(lambda form: form.recv(room, p.step.root), given[p.step.root], room)


def _exchange(p: Part) -> Work:
    turn = 1 + p.step.root
    dest, source = (p.me + turn) % p.n, (p.me - turn) % p.n
    given = p.given_rows(p.rows)
    room = p.room(given[source])
    array = p.source(given[p.me])
    if p.step.form == "in place" and p.step.sizes == "equal":
        array = room = p._laid_out(given[p.me], p.me)
    return Work(lambda form: form.exchange(array, dest=dest, out=room, source=source), given[source], room)


def _barrier(p: Part) -> Work:
    return Work(lambda form: form.barrier(), None)


_WORKS: dict[str, Callable[[Part], Work | None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "message": _message,
    "exchange": _exchange,
    "barrier": _barrier,
}


def check_objects(comm: Any, call: int, root: int) -> None:
    """Objects of another size on each rank, through each of their collectives in turn."""
    everything = [{"rank": rank, "text": "x" * ((37 * call + 11 * rank) % 5000)} for rank in comm.ranks]
    mine, is_root = everything[comm.rank], comm.rank == root
    kind = call % 4
    if kind == 0:
        assert comm.objects.all_gather(mine) == everything
    elif kind == 1:
        assert comm.objects.gather(mine, root) == (everything if is_root else None)
    elif kind == 2:
        assert comm.objects.broadcast(mine if is_root else None, root) == everything[root]
    else:
        assert comm.objects.scatter(everything if is_root else None, root) == mine


# -- Programs --------------------------------------------------------------------------------------------------------


class Player:
    """Runs the steps of a program on one rank, and compares.

    Args:
        comm: the world.
        kit: of contract.KITS.
        groups: ranks of each group; the first is the world. Made here, and closed by close().
    """

    def __init__(self, comm: Any, kit: Any, groups: Sequence[tuple[int, ...]]) -> None:
        self._kit = kit
        self._groups = [comm, *(comm.new_group(ranks) for ranks in groups[1:])]
        self._pending: list[tuple[str, Any, Work]] = []
        self._calls = 0

    def play(self, step: Step) -> None:
        """Takes this rank's part in a step; a result that is still to come is looked at later."""
        self._calls += 1
        comm, call = self._groups[step.group], self._calls
        if not comm:
            return
        if step.kind == "objects":
            check_objects(comm, call, step.root)
            return
        work = _WORKS[step.kind](Part(step, call, comm, self._kit))
        if work is None:
            return
        where = f"call {call}, {step}"
        if step.is_asynchronous:
            self._pending.append((where, work.start(comm.asynchronous), work))
            if len(self._pending) >= MANY_IN_FLIGHT:
                self.settle()
        else:
            self._compare(where, work.start(comm), work)

    def settle(self) -> None:
        """Looks at all results that were still to come."""
        pending, self._pending = self._pending, []
        for where, future, work in pending:
            self._compare(where, future.result(60.0), work)

    def _compare(self, where: str, got: Any, work: Work) -> None:
        try:
            assert work.into is None or got is work.into
            if work.want is None:
                assert got is None
            else:
                assert_identical(self._kit.get(got), work.want)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error

    def close(self) -> None:
        for group in self._groups[1:]:
            if group:
                group.close()


@contextmanager
def playing(comm: Any, kit: Any, groups: Sequence[tuple[int, ...]]) -> Iterator[Player]:
    """Gives a player, and looks at its last results in the end."""
    player = Player(comm, kit, groups)
    yield player
    player.settle()
    player.close()
