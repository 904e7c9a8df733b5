"""Measures the other collectives against their peers over shared memory, as full_speed.py does all_reduce.

    python benchmarks/collectives.py --install  # makes the peers' environments under benchmarks/.environments
    python benchmarks/collectives.py            # writes benchmarks/results/collectives.json
    python benchmarks/collectives.py --quick    # few rounds, writes nothing

What a size means:

| collective | its size is that of | |
| --- | --- | --- |
| all_gather | what a rank gives | it gets as much of each rank |
| reduce_scatter | what a rank gets | it gives as much to each rank |
| broadcast | the array | |
| all_to_all | all that a rank gives | it gets as much; the part from itself to itself counts too |

All results go into arrays that are there already, and warm. The parameters of whole models, as rank 0 gives them to
all at the start of a training, go through bcast_list_; beside it stand what DistributedDataParallel does when it is
made, and MPI's broadcast tensor by tensor. The exit code is 1 when a promise is not kept, 2 when a rank failed.

The largest workload needs about 8 GB of memory, in all ranks together.
"""

from __future__ import annotations

import sys
from functools import partial

from peers.comparison import Comparison
from peers.targets import TIMED_COLLECTIVES, collective_targets
from peers.workloads import parameter_lists, sizes_of

COMPARISON = Comparison(
    "collectives",
    {**{collective: partial(sizes_of, collective) for collective in TIMED_COLLECTIVES}, "parameters": parameter_lists},
    collective_targets,
)

if __name__ == "__main__":
    sys.exit(COMPARISON.main())
