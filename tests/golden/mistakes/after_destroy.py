# GRADSYNC_BACKEND=local python {}
import numpy as np

import gradsync as gs

comm = gs.init_process_group()
gs.destroy_process_group()
comm.all_reduce(np.ones(2))
