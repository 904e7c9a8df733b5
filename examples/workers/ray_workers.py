"""Ranks as actors of Ray. The script passes the rank, the world size, the address and the secret to each actor.

    pip install ray
    python examples/workers/ray_workers.py           # two ranks, on this machine or on the cluster of RAY_ADDRESS

With GPUs, write @ray.remote(num_gpus=1): each rank then sees only its own GPU, and gradsync uses NCCL.
"""

from __future__ import annotations

import os
import secrets
import sys

import numpy as np
import ray

import gradsync as gs


@ray.remote(num_cpus=1)
class Rank:
    """One rank: a process of Ray."""

    def rendezvous_address(self) -> str:
        """Returns an address at which this rank can host the rendezvous."""
        return f"{ray.util.get_node_ip_address()}:{gs.free_port()}"

    def train(self, rank: int, world_size: int, address: str, secret: str) -> list[float]:
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


def main(world_size: int = 2) -> None:
    """Starts the ranks, and prints their results."""
    ray.init(log_to_driver=False)
    try:
        ranks = [Rank.remote() for _ in range(world_size)]
        address = ray.get(ranks[0].rendezvous_address.remote())
        secret = secrets.token_hex(32)
        print(ray.get([actor.train.remote(rank, world_size, address, secret) for rank, actor in enumerate(ranks)]))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
