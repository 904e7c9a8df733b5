"""Measures gradsync beside PyTorch over gloo and mpi4py over MPICH and Open MPI, on two ranks over shared memory.

    python benchmarks/beside_peers.py --install    # makes the peers' environments under benchmarks/.environments
    python benchmarks/beside_peers.py all_reduce   # one array, from 4 KB to 100 MB
    python benchmarks/beside_peers.py buckets      # lists of gradients, and the callback's settings
    python benchmarks/beside_peers.py collectives  # the other collectives
    python benchmarks/beside_peers.py buckets --quick  # few rounds, writes nothing

Each writes benchmarks/results/WHAT.json; together they take about half an hour. Each system has an environment of its
own, and two ranks, which are started once and sleep between their turns. A round is a barrier of that system and then
the timed call; it counts with its slowest rank. A contender counts with the median of its rounds over all blocks.
Results go into arrays that exist and are warm. The exit code is 1 when a promise is not kept, 2 when a rank failed. The
largest list takes 14 GB.

all_reduce: its parts are "sizes", and "busy", which has a busy process on each core.

buckets: "lists" are the gradients of two models, "small" 10,000 of 100 elements; all but the largest are timed beside
busy processes too. gradsync takes part with default settings, and with gradients that live inside its buckets. Beside
the peers stand a local copy of all gradients, and what one would write without buckets: concatenate all, all_reduce,
split. A step hands every gradient over, flushes, and asks for each result. "thresholds" and "knobs" are of gradsync
alone: thresholds from 0.25 to 100 MB, and each setting beside the plain step. They differ by little, so they take turns
round by round, every second round backwards.

collectives: a size is that of what a rank gives (all_gather, all_to_all), of what it gets (reduce_scatter), or of the
array (broadcast). The parameters of whole models, as rank 0 gives them to all at the start of a training, go through
bcast_list_; beside it stand what DistributedDataParallel does in its constructor, and MPI's broadcast of each tensor.
"""

from __future__ import annotations

import sys
from functools import partial

from peers.bucket_targets import bucket_targets
from peers.comparison import Comparison, main
from peers.targets import TIMED_COLLECTIVES, all_reduce_targets, collective_targets
from peers.workloads import (
    busy_cores,
    gradient_lists,
    knobs,
    parameter_lists,
    single_arrays,
    sizes_of,
    small_gradients,
    thresholds,
)

COMPARISONS = {
    "all_reduce": Comparison({"sizes": single_arrays, "busy": busy_cores}, all_reduce_targets),
    "buckets": Comparison(
        {"lists": gradient_lists, "small": small_gradients, "thresholds": thresholds, "knobs": knobs},
        bucket_targets,
    ),
    "collectives": Comparison(
        {**{name: partial(sizes_of, name) for name in TIMED_COLLECTIVES}, "parameters": parameter_lists},
        collective_targets,
    ),
}

if __name__ == "__main__":
    sys.exit(main("benchmarks/beside_peers.py", COMPARISONS))
