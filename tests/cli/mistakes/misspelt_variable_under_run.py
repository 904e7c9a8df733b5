# GRADSYNC_BACKND=local gradsync run -n 1 --backend local {}
import gradsync as gs

with gs.init_process_group() as comm:
    print(comm.backend)
