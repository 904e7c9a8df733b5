# python {}  # deep
import gradsync as gs


def train():
    with gs.init_process_group("shm") as comm:
        if comm.rank == 1:
            raise ValueError("a bad batch")
        comm.barrier()


if __name__ == "__main__":
    gs.spawn(train, nprocs=2)
