import numpy as np

import gradsync as gs


def tell(what, value):
    if comm.rank == 0:
        print(f"{what:15} {np.asarray(value).tolist()}")


with gs.init_process_group() as comm:
    rank, size = comm.rank, comm.world_size
    rows = np.full((size, 2), rank)  # one row for each rank

    tell("all_reduce", comm.all_reduce(rows.copy(), "max"))  # in place, so on a copy
    tell("all_gather", comm.all_gather(rows))
    sizes = [other + 1 for other in range(size)]  # rank 0 has one row, rank 1 has two
    tell("uneven", comm.all_gather(np.full(rank + 1, rank), sizes=sizes))
    tell("reduce_scatter", comm.reduce_scatter(rows, "sum", out=np.empty((1, 2), rows.dtype)))
    tell("all_to_all", comm.all_to_all(rows))

    after, before = (rank + 1) % size, (rank - 1) % size
    tell("exchange", comm.exchange(rows, dest=after, out=np.empty_like(rows), source=before))  # a ring cannot deadlock

    pending = comm.asynchronous.all_reduce(np.ones(3))  # on a GPU beside the program, on the CPU within this call
    tell("asynchronous", pending.result())

    half = comm.split(color=rank % 2)  # two groups: even ranks and odd ranks
    tell("group", half.all_gather(np.full(1, rank)))

    names = comm.objects.all_gather({"rank": rank})  # any object that can be pickled
    tell("objects", [name["rank"] for name in names])
