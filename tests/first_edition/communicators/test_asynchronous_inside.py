"""communicator.asynchronous between ranks: the results of the synchronous form, one order, errors in futures."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync.communicators.communicator import Asynchronous, Communicator
from gradsync.futures import pending
from rank_processes import run_ranks

WAIT = 20.0
METHODS = [name for name, _ in inspect.getmembers(Asynchronous, inspect.isfunction) if not name.startswith("_")]


def test_every_collective_has_an_asynchronous_form() -> None:
    made = {name.removeprefix("_").removesuffix("_call") for name in dir(Communicator) if name.endswith("_call")}
    assert set(METHODS) == made


@pytest.mark.parametrize("method", METHODS)
def test_the_arguments_are_the_same(method: str) -> None:
    ours, theirs = (inspect.signature(getattr(owner, method)) for owner in (Asynchronous, Communicator))
    assert ours.parameters == theirs.parameters


# -- Results ---------------------------------------------------------------------------------------------------------


def calls(comm: Any, collectives: Any) -> list[Any]:
    """Every collective, in several forms, through the communicator or its asynchronous face."""
    n, rank = comm.world_size, comm.rank
    rows = np.arange(6.0 * n).reshape(2 * n, 3) * (rank + 1)
    right, left = (rank + 1) % n, (rank - 1) % n
    uneven = np.full((rank + 1, 2), rank, np.int32)
    sizes = [i + 1 for i in range(n)]
    results = [
        collectives.all_reduce(rows.copy()),
        collectives.all_reduce(rows, "max", out=np.empty_like(rows)),
        collectives.reduce(rows.copy(), "mean", n - 1),
        collectives.reduce_scatter(rows),
        collectives.reduce_scatter(rows, "min", sizes=[2 * n] + [0] * (n - 1)),
        collectives.broadcast(rows.copy(), root=n - 1),
        collectives.all_gather(np.float32(rank) * np.ones((2, 2), np.float32)),
        collectives.all_gather(uneven, sizes=sizes),
        collectives.all_gather(uneven, sizes="ask"),
        collectives.gather(uneven, n - 1, sizes="ask"),
        collectives.scatter(rows if rank == 0 else None, out=np.empty((2, 3))),
        collectives.all_to_all(rows),
        collectives.all_to_all(uneven, send_sizes=[0] * (n - 1) + [rank + 1]),
        collectives.exchange(rows, dest=right, out=np.empty_like(rows), source=left),
        collectives.barrier(),
    ]
    if n > 1 and rank == 0:
        results.append(collectives.send(rows, 1))
    if n > 1 and rank == 1:
        results.append(collectives.recv(np.empty_like(rows), 0))
    return results


def mixed(comm: Any, seed: int) -> None:
    """What every rank calls is the same; when it does so, and where it waits, is its own affair."""
    pair = comm.new_group([0, 1])
    shared, own = random.Random(seed), random.Random(seed + comm.rank)
    open_futures = []
    for step in range(1000):
        group = shared.choice([comm, pair])
        kind = shared.choice(["all_reduce", "all_gather", "broadcast", "barrier"])
        size, form = shared.choice([1, 100, 20_000]), own.choice(["synchronous", "asynchronous"])
        if not group:
            continue
        arguments = [] if kind == "barrier" else [np.full(size, float(step + group.rank))]
        collectives = group if form == "synchronous" else group.asynchronous
        result = getattr(collectives, kind)(*arguments)
        check = checks(kind, step, group.world_size)
        if form == "synchronous":
            check(result)
        else:
            open_futures.append((result, check))
        pause(own)
        while open_futures and own.random() < 0.3:
            future, check = open_futures.pop(own.randrange(len(open_futures)))
            check(future.result(WAIT))
    for future, check in open_futures:
        check(future.result(WAIT))
    comm.barrier()
    assert not pending


def pause(own: random.Random) -> None:
    if own.random() < 0.05:
        time.sleep(own.uniform(0, 0.003))  # nothing waits for it: the ranks shall drift apart


def checks(kind: str, step: int, n: int) -> Callable[[Any], None]:
    expected = {
        "all_reduce": sum(step + rank for rank in range(n)),
        "all_gather": np.arange(step, step + n),
        "broadcast": step,
    }

    def check(result: Any) -> None:
        if kind == "barrier":
            assert result is None
        else:
            values = result.reshape(n, -1).T if kind == "all_gather" else result
            assert (values == expected[kind]).all(), (kind, step)

    return check


@pytest.mark.parametrize("world_size", [2, 3])
def test_both_forms_mixed_with_random_pauses(world_size: int) -> None:
    run_ranks(world_size, mixed, world_size)


# -- Errors ----------------------------------------------------------------------------------------------------------


def argument_errors(comm: Any) -> None:
    submit = comm.asynchronous
    expect(gs.InvalidArgument, lambda: submit.all_reduce("no array"))
    expect(gs.InvalidArgument, lambda: submit.all_reduce(np.ones(3), "median"))
    expect(gs.UnsupportedDtype, lambda: submit.all_reduce(np.ones(3, np.int32), "mean"))
    expect(gs.InvalidArgument, lambda: submit.broadcast(np.ones(3), root=comm.world_size))
    expect(gs.InvalidArgument, lambda: submit.all_gather(np.ones(3), out=np.ones(1)))
    expect(gs.InvalidArgument, lambda: submit.send(np.ones(3), comm.rank))
    assert not pending
    comm.barrier()


def test_wrong_arguments_are_refused_at_once() -> None:
    run_ranks(2, argument_errors)
