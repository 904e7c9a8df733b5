# python {}
import gradsync as gs

with gs.init_process_group() as comm:
    print(comm.world_size)
