"""The agreement of the ranks before a collective over MPI; small arrays are sent together with the digest.

With up to 16 ranks, each rank sends its digest to every other rank. A rank sends a small array in the same message, so
that the all-reduce of this array needs one exchange of messages instead of two. The receiver reads the array only if
all digests are equal. With more ranks, MPI reduces the digests to the smallest and the largest digest, which must be
equal.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradsync.communicators.mpi.waiting import MpiRequests
from gradsync.reduction import Array

# The largest array that is sent with a digest. Between two ranks this moves no more bytes than any other way.
_PAYLOAD_BYTES = 32 * 1024
_PAYLOAD_BYTES_OF_TWO = 256 * 1024

_HEADER_BYTES = 64  # the digest, padded to a cache line
_ALL_BITS = 2**64 - 1


class MpiAgreement:
    """The exchange of digests on one communicator.

    Args:
        requests: the communicator's requests.

    Attributes:
        payload_bytes: the size of the largest array that a rank can send with a digest; -1 if it can send none.
    """

    def __init__(self, requests: MpiRequests) -> None:
        self._requests = requests
        n = requests.world_size
        self.payload_bytes = -1
        if requests.is_direct and n > 1:
            self.payload_bytes = _PAYLOAD_BYTES_OF_TWO if n == 2 else _PAYLOAD_BYTES
            # One message for each rank: this rank sends its own and receives the others.
            self._messages = np.zeros((n, _HEADER_BYTES + self.payload_bytes), np.uint8)
            self._digests = self._messages[:, :8].view(np.uint64)[:, 0]
            self._received = [(peer, self._messages[peer]) for peer in requests.peers]
        self._mine, self._smallest = np.zeros(2, np.uint64), np.zeros(2, np.uint64)

    def payload(self, size_bytes: int) -> Array:
        """Returns the memory (uint8) for the array that this rank sends with its next digest."""
        return self._messages[self._requests.rank, _HEADER_BYTES : _HEADER_BYTES + size_bytes]

    def payloads(self, size_bytes: int) -> Array:
        """Returns the arrays that the ranks have sent with their digests, one row for each rank.

        Call it after the ranks have agreed. The rows are valid until the next agreement.
        """
        return self._messages[:, _HEADER_BYTES : _HEADER_BYTES + size_bytes]

    def is_reached(self, digest: int, payload_bytes: int, look: Callable[[], None]) -> bool:
        """Exchanges the digests, and returns whether all digests are equal. Every rank gets the same answer.

        Args:
            digest: the 64-bit digest of this rank's call.
            payload_bytes: the number of bytes of `payload` to send with the digest.
            look: a function that a longer wait calls every few milliseconds.

        Raises:
            RankFailed, CollectiveTimeout, MpiError: see MpiRequests.finish.
        """
        requests = self._requests
        if self.payload_bytes < 0:
            return self._is_smallest_the_largest(digest, look)
        self._digests[requests.rank] = digest
        message = self._messages[requests.rank, : _HEADER_BYTES + payload_bytes]
        begun = requests.post([(peer, message) for peer in requests.peers], self._received)
        requests.finish(begun, look=look)
        digests: list[int] = self._digests.tolist()
        return digests.count(digest) == requests.world_size

    def _is_smallest_the_largest(self, digest: int, look: Callable[[], None]) -> bool:
        mine, smallest = self._mine, self._smallest
        mine[0] = digest
        mine[1] = _ALL_BITS - digest  # the smallest of these belongs to the largest digest
        requests = self._requests
        requests.finish([requests.comm.Iallreduce(mine, smallest, requests.mpi.MIN)], (mine, smallest), look)
        return int(smallest[0]) == _ALL_BITS - int(smallest[1])
