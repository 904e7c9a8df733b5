"""Bucketing: packs single gradients into flat buffers, reduces the buffers, and unpacks the results.

A gradient passes through these modules, in this order: `callback` (called by the program), `step` (does this step
repeat the last step?), `plan` (assigns the gradient to a bucket), `reducer` (runs the bucket's all-reduce, or the
program's hook), and gradsync.futures. Other modules help them: `options`, `gradient` (which arrays are accepted, where
results are written, gradients that live in buckets), `guard` (gradients in flight are read-only), `agreements` (the
ranks compare their gradients), `values` (NaN, the norm, clipping) and `forgotten` (gradients that were never reduced).
`lists` and `trees` are for programs that have all gradients at once.
"""

from gradsync.bucketing.forgotten import take_forgotten

__all__ = ["take_forgotten"]
