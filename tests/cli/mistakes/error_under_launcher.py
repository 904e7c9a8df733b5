# python {}
import gradsync as gs


@gs.launcher(world_size=2, device_type="cpu", backend="shm")
def train():
    if gs.get_communicator().rank == 1:
        raise ValueError("a bad batch")
    gs.group_barrier()


if __name__ == "__main__":
    train()
