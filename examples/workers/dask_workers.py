"""Ranks as tasks of Dask, one on each worker. The script passes rank, world size, address and secret to each task.

    pip install distributed
    python examples/workers/dask_workers.py                        # on workers of this machine
    python examples/workers/dask_workers.py tcp://scheduler:8786   # on the workers of a cluster

Tasks that wait for each other must run at the same time, so each task has its own worker.
"""

from __future__ import annotations

import os
import secrets
import sys
from urllib.parse import urlsplit

import numpy as np
from dask.distributed import Client, LocalCluster

import gradsync as gs


def train(rank: int, world_size: int, address: str, secret: str) -> list[float]:
    """Fits a line on this rank's own data; every rank returns the same weights."""
    os.environ["GRADSYNC_SECRET"] = secret  # gradsync removes the variable when it reads it
    with gs.init_process_group(rank=rank, world_size=world_size, address=address):
        rng = np.random.default_rng(rank)
        x = rng.normal(size=(256, 3))
        y = x @ [1.0, 2.0, 3.0]
        weights = np.zeros(3)
        sync = gs.AllreduceCallback("mean")
        for _ in range(100):
            with sync.backward():
                gradient = sync("weights", 2 * (x @ weights - y) @ x / len(y))
            weights -= 0.1 * gradient.result()
    return weights.round(3).tolist()


def start_ranks(client: Client) -> list[list[float]]:
    """Starts a rank on each worker, and returns the results of all ranks."""
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
    host = urlsplit(workers[0]).hostname  # rank 0 hosts the rendezvous server, so the port must be free there
    port = client.submit(gs.free_port, workers=workers[:1], pure=False).result()
    secret = secrets.token_hex(32)
    ranks = [
        client.submit(train, rank, len(workers), f"{host}:{port}", secret, workers=[worker], pure=False)
        for rank, worker in enumerate(workers)
    ]
    return client.gather(ranks)


if __name__ == "__main__":
    if sys.argv[1:]:
        with Client(sys.argv[1]) as client:
            print(start_ranks(client))
    else:
        with LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
            print(start_ranks(client))
