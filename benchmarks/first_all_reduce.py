"""What basic_costs.py starts to time the start-up: prints the moment at which the first all-reduce has returned."""

import sys
import time

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    comm.all_reduce(np.ones(1, np.float32))
    # On Linux every process reads the same monotonic clock. One write, so that the ranks' lines do not mingle.
    sys.stdout.write(f"{time.monotonic()}\n")
