# gradsync run -n 2 --backend shm {}
import os

import gradsync as gs

if os.environ["RANK"] == "1":
    compile("loss = = 1", "model.py", "exec")

with gs.init_process_group() as comm:
    comm.barrier()
