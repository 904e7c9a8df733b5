"""Measures gradsync's buckets: whole lists of gradients against the peers, and the callback's own settings.

    python benchmarks/buckets.py --install  # makes the peers' environments under benchmarks/.environments
    python benchmarks/buckets.py            # writes benchmarks/results/buckets.json
    python benchmarks/buckets.py --quick    # few rounds, writes nothing

Two ranks of each system, as in full_speed.py. "lists" are the gradients of two models, "small" 10,000 of 100 elements;
all but the largest are timed beside busy processes too. gradsync takes part with default settings, and with gradients
that live inside its buckets; beside the peers stand a plain local copy of all gradients, and what one would write
without buckets: concatenate all, all_reduce that, split it again. A step hands every gradient over, flushes, and asks
for each result. DistributedDataParallel with bucket views copies each gradient that autograd has made into its bucket.

"thresholds" and "knobs" are of gradsync alone, on gradients that its contenders share: thresholds from 0.25 to 100 MB,
and each knob beside the plain step. What is to be told apart there differs by little: they take turns round by round,
every second round backwards.

The exit code is 1 when a promise is not kept, 2 when a rank failed. The largest list needs about 14 GB of memory, in
all ranks together.
"""

from __future__ import annotations

import sys

from peers.bucket_targets import bucket_targets
from peers.comparison import Comparison
from peers.workloads import gradient_lists, knobs, small_gradients, thresholds

COMPARISON = Comparison(
    "buckets",
    {"lists": gradient_lists, "small": small_gradients, "thresholds": thresholds, "knobs": knobs},
    bucket_targets,
)

if __name__ == "__main__":
    sys.exit(COMPARISON.main())
