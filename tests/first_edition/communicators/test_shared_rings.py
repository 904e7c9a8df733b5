"""Where ranks put what they give: regions that are not written again before all have read them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradsync.communicators.shared_memory.arena import HOT_BYTES, SharedRings, share_begin, shares_bytes

ROUND_BYTES = 64 * 1024


class Barrier:
    """What the rings use of one."""

    def __init__(self) -> None:
        self.round = 0

    @property
    def next_parity(self) -> int:
        return (self.round + 1) & 1


@given(st.lists(st.integers(0, ROUND_BYTES), max_size=30), st.integers(1, 5))
def test_the_regions_of_two_rounds_never_meet(sizes: list[int], world_size: int) -> None:
    barrier = Barrier()
    memory = memoryview(bytearray(SharedRings.bytes_for(world_size, ROUND_BYTES)))
    rings = SharedRings(memory, world_size, ROUND_BYTES, barrier)  # type: ignore[arg-type]
    (ring,) = {each.size for each in rings.of(np.dtype(np.uint8))}
    last = 0, 0
    for size in sizes:
        begin = rings.next_place(size)
        assert 0 <= begin <= begin + size <= ring
        assert begin % 64 == 0
        assert (size <= HOT_BYTES) == (begin < 2 * HOT_BYTES)
        assert begin + size <= last[0] or last[1] <= begin or last[0] == last[1] or not size
        last = begin, begin + size
        barrier.round += 1


def test_shares_lie_one_after_the_other_without_the_owners() -> None:
    begins = [share_begin(1, reader, 100) for reader in (0, 2, 3)]
    assert begins == [0, 128, 256]
    assert shares_bytes(4, 100) == 384
