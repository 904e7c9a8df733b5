# gradsync run -n 2 --backend shm {}
import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    parameters = {"weights": np.full(2, float(comm.rank)), "bias": np.zeros(2)}
    sync = gs.AllreduceCallback(parameters=parameters)
    with sync.backward():
        for name in parameters:
            sync(name, np.ones(2))
    print(parameters["weights"])
