"""A parameter that differs on rank 1, which check_consistency names: gradsync run -n 2 examples/failures/drifts.py"""

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    parameters = {"weights": np.ones((100, 10)), "bias": np.zeros(10)}
    if comm.rank == 1:
        parameters["bias"][3] = 1e-12
    try:
        gs.check_consistency(parameters)
    except gs.PlanMismatch as error:  # on all ranks; all can continue
        if comm.rank == 0:
            print(error)
