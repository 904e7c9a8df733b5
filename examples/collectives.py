import numpy as np

import gradsync as gs


def tell(what, value):
    if gs.comm.is_main_process():
        print(f"{what:15} {np.asarray(value).tolist()}")


with gs.init_process_group() as comm:
    rank, size = comm.rank, comm.world_size
    rows = np.full((2, 2), rank)  # parts are rows, in rank order: the first axis

    tell("all_reduce", comm.all_reduce(rows.copy(), "max"))
    tell("all_gather", comm.all_gather(rows))
    tell("uneven", comm.all_gather(np.full(rank + 1, rank), sizes="ask"))  # a row here, two rows there
    tell("reduce_scatter", comm.reduce_scatter(rows, "sum", out=np.empty((2 // size, 2), rows.dtype)))
    tell("all_to_all", comm.all_to_all(rows))

    came = comm.exchange(rows, (rank + 1) % size, np.empty_like(rows), (rank - 1) % size)  # a ring cannot deadlock
    tell("exchange", came)

    pending = comm.asynchronous.all_reduce(np.ones(3))  # in the background, in the order of the calls
    tell("asynchronous", pending.result())

    alone = comm.split(color=rank)  # groups: also comm.new_group([0, 2]) and comm.split_by_machine()
    tell("group", alone.all_gather(rows[:1]))

    names = comm.objects.all_gather({"rank": rank})  # any object that pickles
    tell("objects", [name["rank"] for name in names])
