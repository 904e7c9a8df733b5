"""The collectives that are timed: how large their arrays are for a size, and what bandwidth a link has carried.

Sizes and factors are those of nccl-tests, so that figures can be laid beside its own. Source: NVIDIA/nccl-tests,
doc/PERFORMANCE.md, and the functions *GetCollByteCount and *GetBw of src/*.cu.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradsync.errors import InvalidArgument

ROOT = 0

ALL_REDUCE, REDUCE, REDUCE_SCATTER = "all_reduce", "reduce", "reduce_scatter"
BROADCAST, ALL_GATHER, GATHER, SCATTER = "broadcast", "all_gather", "gather", "scatter"
ALL_TO_ALL, EXCHANGE = "all_to_all", "exchange"


@dataclass(frozen=True)
class Kind:
    """One collective.

    Attributes:
        name: of the method.
        reduces: whether it takes an operator.
        rooted: whether one rank is its root.
        source_parts, target_parts: what a rank gives and gets: "n" parts, one for each rank, or "1".
        bus_ring: whether (n - 1) / n of the bytes pass a link; else all of them do.
        bus_passes: how often they do: twice in an all-reduce.
        has_separate_target: whether there is a form with source and target apart.
        has_in_place: whether there is a form in place.
    """

    name: str
    reduces: bool = False
    rooted: bool = False
    source_parts: str = "1"
    target_parts: str = "1"
    bus_ring: bool = False
    bus_passes: int = 1
    has_separate_target: bool = True
    has_in_place: bool = True

    @property
    def is_dealt(self) -> bool:
        """Whether the size is cut into a part for each rank."""
        return "n" in (self.source_parts, self.target_parts)

    def bus_factor(self, ranks: int) -> float:
        """Returns the bus bandwidth by the algorithm bandwidth: size over time."""
        return self.bus_passes * ((ranks - 1) / ranks if self.bus_ring else 1.0)

    def count(self, size_bytes: int, itemsize: int, ranks: int) -> int:
        """Returns the elements of a part, at least one: of the whole, or of what a rank has of it."""
        return max(size_bytes // itemsize // (ranks if self.is_dealt else 1), 1)

    def size_bytes(self, count: int, itemsize: int, ranks: int) -> int:
        """Returns the bytes of the larger of source and target, which is what counts as the size."""
        return count * itemsize * (ranks if self.is_dealt else 1)


KINDS = {
    kind.name: kind
    for kind in (
        Kind(ALL_REDUCE, reduces=True, bus_ring=True, bus_passes=2),
        Kind(ALL_GATHER, target_parts="n", bus_ring=True),
        Kind(REDUCE_SCATTER, reduces=True, source_parts="n", bus_ring=True),
        Kind(ALL_TO_ALL, source_parts="n", target_parts="n", bus_ring=True),
        Kind(BROADCAST, rooted=True, has_separate_target=False),
        Kind(REDUCE, reduces=True, rooted=True),
        Kind(GATHER, rooted=True, target_parts="n", bus_ring=True),
        Kind(SCATTER, rooted=True, source_parts="n", bus_ring=True),
        Kind(EXCHANGE, has_in_place=False),
    )
}


def kinds_of(names: str) -> list[Kind]:
    """Returns the collectives of "all", or of a list as "all_reduce,broadcast".

    Raises:
        InvalidArgument: no collective has that name.
    """
    if names == "all":
        return list(KINDS.values())
    wanted = [name.strip().replace("-", "_") for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in KINDS:
            raise InvalidArgument(f"no collective is called {name!r}: use all, or some of {', '.join(KINDS)}")
    if not wanted:
        raise InvalidArgument(f"name at least one collective: all, or some of {', '.join(KINDS)}")
    return [KINDS[name] for name in dict.fromkeys(wanted)]
