# gradsync run -n 2 --backend shm {}
import os

import gradsync as gs

if os.environ["RANK"] == "1":
    import no_such_module  # noqa: F401

with gs.init_process_group() as comm:
    comm.barrier()
