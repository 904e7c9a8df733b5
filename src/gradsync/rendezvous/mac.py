"""The MAC of one direction of a session: HMAC-SHA256 with a key that is used many times.

Below `wire`. The two blocks that depend on the key alone are hashed once, as section 4 of RFC 2104 suggests: that takes
a third of the time of `hmac.digest`, which prepares them, and the hash function, for every frame.
"""

from __future__ import annotations

import hashlib

MAC_BYTES = 32
_BLOCK_BYTES = 64
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))


class Mac:
    """Signs with one key.

    Args:
        key: at most 64 bytes.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) > _BLOCK_BYTES:
            raise ValueError(f"a key needs at most {_BLOCK_BYTES} bytes, got {len(key)}")
        block = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(block.translate(_INNER))
        self._outer = hashlib.sha256(block.translate(_OUTER))

    def sign(self, data: bytes) -> bytes:
        """Returns the MAC of the data, 32 bytes."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(data)
        outer.update(inner.digest())
        return outer.digest()
