"""Times copies with memcpy's worst alignment on AMD Zen 3, and the same by np.positive, which gradsync uses."""

from __future__ import annotations

import numpy as np
import pytest

from gradsync.communicators.host_copy import copy_words

SIZE_BYTES = 128 * 1024
PAGE_BYTES = 4096


def at_page_offset(offset_bytes: int) -> np.ndarray:
    memory = np.zeros(SIZE_BYTES + 2 * PAGE_BYTES, np.uint8)
    begin = -memory.ctypes.data % PAGE_BYTES + offset_bytes
    return memory[begin : begin + SIZE_BYTES].view(np.uint32)


@pytest.mark.parametrize("target_offset_bytes", [16, 128])
@pytest.mark.parametrize("copy", [lambda s, t: np.copyto(t, s), copy_words], ids=["memcpy", "copy_words"])
@pytest.mark.benchmark(group="copy 128 KiB")
def test_copy_from_a_page_start(benchmark, copy, target_offset_bytes: int) -> None:
    source, target = at_page_offset(0), at_page_offset(target_offset_bytes)
    benchmark(copy, source, target)
