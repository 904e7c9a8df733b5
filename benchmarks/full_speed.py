"""Measures gradsync's all_reduce against its peers over shared memory: two ranks, every contender in one run.

    python benchmarks/full_speed.py --install  # makes the peers' environments under benchmarks/.environments
    python benchmarks/full_speed.py            # writes benchmarks/results/full_speed.json
    python benchmarks/full_speed.py --quick    # few rounds, writes nothing

The peers are PyTorch over gloo and mpi4py over MPICH and over Open MPI, each in an environment of its own. Of each
system two ranks are started, once; they sleep until it is their turn. A round is a barrier of that system and then what
is timed; it counts with its slowest rank. A contender counts with the median of its rounds over all blocks. The exit
code is 1 when a promise is not kept, 2 when a rank failed.

Lists of gradients are timed by buckets.py, other collectives by collectives.py, in the same way.
"""

from __future__ import annotations

import sys

from peers.comparison import Comparison
from peers.targets import all_reduce_targets
from peers.workloads import busy_cores, single_arrays

COMPARISON = Comparison("full_speed", {"sizes": single_arrays, "busy": busy_cores}, all_reduce_targets)

if __name__ == "__main__":
    sys.exit(COMPARISON.main())
