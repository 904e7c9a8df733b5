"""Bucketing: averages the gradients of a step over the ranks, all at its end.

The way of a gradient is in four files. `callback` has what programs call. `step` takes the gradients, and reduces them
at the flush. `bucket` cuts them into buckets, and runs hooks. `communicators/for_bucketing.py` is all that bucketing
asks of a communicator. Others help: `options` (of a callback), `gradient` (its name, and whether its array is
accepted), `events` (what the ranks agree on), `values` (the norm, NaN and clipping) and `forgotten` (gradients that are
never reduced). `lists` and `trees` are for programs that have all gradients at once.
"""

from gradsync.bucketing.forgotten import begin_anew, take_forgotten

__all__ = ["begin_anew", "take_forgotten"]
