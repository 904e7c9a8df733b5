# sh -c 'LAUNCHER=$$ exec python -m gradsync run -n 2 --backend shm {}'
import os
import signal

import gradsync as gs

with gs.init_process_group() as comm:
    comm.barrier()
    if comm.rank == 0:
        os.kill(int(os.environ["LAUNCHER"]), signal.SIGINT)
        comm.recv(__import__("numpy").ones(1), 1)
    else:
        signal.pause()
