# python {}
import gradsync as gs

with gs.override_backend("local"), gs.init_process_group() as comm:
    print(comm.backend)
