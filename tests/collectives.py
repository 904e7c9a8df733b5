"""A call of every collective, for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from arrays import contribution


def collectives(comm: Any, arrays: Any, shape: tuple[int, ...]) -> dict[str, Callable[[Any], Any]]:
    """Every collective, with new arrays at each call; called with a communicator, or with its asynchronous form."""
    n, rank = comm.world_size, comm.rank
    root, after, before = n - 1, (rank + 1) % n, (rank - 1) % n
    sizes = [1 + each for each in range(n)]
    rows, tail = shape[0], shape[1:]

    def mine(rows: int = rows) -> Any:
        return arrays.put(contribution(rank, (rows, *tail), "float32"))

    def room(rows: int = rows) -> Any:
        return arrays.put(np.zeros((rows, *tail), np.float32))

    return {
        "all_reduce": lambda form: form.all_reduce(mine(), "mean"),
        "all_reduce into out": lambda form: form.all_reduce(mine(), "max", out=room()),
        "reduce": lambda form: form.reduce(mine(), "prod", root),
        "reduce_scatter": lambda form: form.reduce_scatter(mine(rows * n)),
        "reduce_scatter of sizes": lambda form: form.reduce_scatter(mine(sum(sizes)), "min", sizes=sizes),
        "broadcast": lambda form: form.broadcast(mine(), root),
        "all_gather": lambda form: form.all_gather(mine()),
        "all_gather of sizes": lambda form: form.all_gather(mine(sizes[rank]), sizes=sizes, out=room(sum(sizes))),
        "gather": lambda form: form.gather(mine(), root),
        "scatter": lambda form: form.scatter(mine(rows * n) if rank == root else None, root, out=room()),
        "all_to_all": lambda form: form.all_to_all(mine(rows * n)),
        "all_to_all of sizes": lambda form: form.all_to_all(
            mine(sum(sizes)), send_sizes=sizes, recv_sizes=[sizes[rank]] * n
        ),
        "exchange": lambda form: form.exchange(mine(), dest=after, out=room(), source=before),
        "barrier": lambda form: form.barrier(),
    }
