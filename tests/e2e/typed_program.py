"""A user's program, typed: mypy --strict takes it, and finds the mistakes that it is told to find. Never run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import gradsync as gs

Array = npt.NDArray[np.float32]


@gs.launcher(n_gpus=2)
def train(steps: int) -> float:
    comm: gs.Communicator = gs.get_communicator()
    weights: Array = np.zeros(3, np.float32)
    gs.bcast_list_([weights], root=0)
    sync = gs.AllreduceCallback("mean", threshold_bytes=2**20, nonfinite="skip", clip_norm=1.0)
    sync.register_hook(lambda bucket: bucket.communicator.all_reduce(bucket.buffer, bucket.op))
    for _ in range(steps):
        with sync.backward():
            future: gs.GradientFuture = sync("weights", np.ones(3, np.float32))
        weights -= 0.1 * future.result()
    with sync.backward(weight=len(weights)):
        sync("weights", np.ones(3, np.float32))
    total: float | None = sync.total_weight
    print(total, sync.results()["weights"], sync.norm)
    group = comm.new_group([0])
    if group:
        group.all_reduce(weights, "max")
    state: dict[str, Array] = gs.broadcast_tree({"weights": weights})
    gs.check_consistency(state)
    return float(state["weights"].sum()) + sync.statistics.communication_seconds


@gs.synchronized
def download(address: str) -> bytes:
    return address.encode()


def main() -> None:
    with gs.init_process_group("local", collective_timeout_seconds=60) as comm:
        mine = gs.shard_indices(100, epoch=1, communicator=comm)
        names: list[object] = comm.objects.all_gather({"rank": comm.rank, "samples": mine.size})
        pending: gs.CollectiveFuture = comm.asynchronous.all_reduce(np.ones(3))
        print(names, pending.result(), download("here"))
    results: list[float] = train(3)
    try:
        print(results, gs.launch(max, [1, 2], nprocs=2))
    except gs.RankFailed as error:
        rank: int | None = error.rank
        print(rank)

    # Mistakes; mypy complains of a comment that nothing here needs.
    gs.AllreduceCallback("mean", treshold_bytes=1)  # type: ignore[arg-type]
    gs.AllreduceCallback("mean", diverged="ignore")  # type: ignore[arg-type]
    gs.AllreduceCallback("mean").backward(weight="3")  # type: ignore[arg-type]
    gs.init_process_group(rank="0")  # type: ignore[arg-type]
    train("3").append("x")  # type: ignore[arg-type]
    gs.no_such_name()  # type: ignore[attr-defined]
    gs.get_communicator().barrier(3)  # type: ignore[call-arg]


if __name__ == "__main__":
    main()
