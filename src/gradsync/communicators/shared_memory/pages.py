"""The unit in which parts of the shared memory are laid out."""

from __future__ import annotations

_PAGE_BYTES = 4096


def whole_pages(size_bytes: int) -> int:
    """Returns how many bytes the whole pages take that hold so many."""
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
