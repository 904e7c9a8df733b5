"""Bucketing: from single gradients to flat buffers, and back.

The way of a gradient: `callback` (what a program calls), `step` (is it as in the last step?), `plan` (which bucket),
`reducer` (the bucket's all-reduce), and its future. Beside it: `gradient` (what one is, where its values go), `guard`
(who may write to it), `agreements` (what the ranks compare), `values` (NaN, the norm, clipping), `compression`,
`bucket_memory` (gradients that live in buckets), `bucket_hook`, `join`, `accumulation` and `forgotten`; `lists` and
`trees` are for programs that hand over everything at once.
"""

from gradsync.bucketing.forgotten import fail_at_exit, raise_forgotten, report_forgotten_at_exit

__all__ = ["fail_at_exit", "raise_forgotten", "report_forgotten_at_exit"]
