"""How much gpu.py measures: all of it, a quick look, or a trial of the script itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gradsync.bucketing.plan import DEFAULT_THRESHOLD_BYTES
from models import MODELS, Shape


@dataclass(frozen=True)
class Scale:
    """Sizes and numbers of rounds.

    Attributes:
        rounds: samples of each contender.
        shared_rounds: the same where ranks share a GPU, which may take milliseconds for each collective.
        warm_up: samples thrown away before. DistributedDataParallel arranges its buckets anew after the first step.
        copies_bytes: sizes of plain copies.
        filler_bytes: what is copied to keep the device busy while the host queues what is timed. Several times any
            cache, so that it leaves nothing there.
        threshold_bytes: of a bucket.
        models: name -> shapes, in the order of the model's parameters.
    """

    rounds: int = 31
    shared_rounds: int = 7
    warm_up: int = 3
    copies_bytes: tuple[int, ...] = (2**28, 2**29, 2**30)
    filler_bytes: int = 2**29
    threshold_bytes: int = DEFAULT_THRESHOLD_BYTES
    models: dict[str, list[Shape]] = field(default_factory=lambda: {name: make() for name, make in MODELS.items()})


FULL = Scale()
QUICK = replace(FULL, rounds=5, shared_rounds=3, warm_up=2)
# Shows that the script works, in a second and without a GPU's memory; its figures mean nothing.
TINY = Scale(
    rounds=2,
    shared_rounds=2,
    warm_up=1,
    copies_bytes=(2**12,),
    filler_bytes=2**12,
    threshold_bytes=2**12,
    models={"tiny": [(16, 3, 3), (16,), (300, 7), (7,), (5, 5), (1,)]},
)


def size_name(size_bytes: int) -> str:
    return f"{size_bytes // 2**20} MiB" if size_bytes >= 2**20 else f"{size_bytes // 2**10} KiB"
