"""Bucketing: from single gradients to flat buffers, and back.

The way of a gradient: `callback` (called by the program), `step` (does it repeat the last one?), `plan` (which bucket),
`reducer` (the bucket's all-reduce), and gradsync.futures. Beside the way: `gradient` (which arrays are accepted, where
results go), `options`, `guard` (gradients in flight are read-only), `agreements` (the ranks compare them), `values`
(NaN, the norm, clipping), `compression`, `bucket_memory` (gradients that live in buckets), `bucket_hook`, `join`,
`accumulation` (local passes), `forgotten` (never reduced) and `shapes_file`. `lists` and `trees` are for programs that
have all gradients at once.
"""

from gradsync.bucketing.forgotten import fail_at_exit, raise_forgotten, report_forgotten_at_exit

__all__ = ["fail_at_exit", "raise_forgotten", "report_forgotten_at_exit"]
