"""What an AllreduceCallback counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """What a callback has done since it was made.

    Attributes:
        steps: flushes that reduced gradients.
        gradients: gradients handed over for reduction.
        all_reduces: buckets reduced.
        bytes_all_reduced: their size.
        communication_seconds: time the host spent in packing, waiting, reducing and splitting; on a GPU, in launching
            them.
        skipped_steps: those whose gradients were not finite, where the policy is "skip".
    """

    steps: int = 0
    gradients: int = 0
    all_reduces: int = 0
    bytes_all_reduced: int = 0
    communication_seconds: float = 0.0
    skipped_steps: int = 0
