"""The agreement of the ranks before a collective over MPI: the ranks compare digests (hashes) of their calls.

With up to 16 ranks, each rank sends its digest to every other rank. If the array to reduce is small, each rank sends it
in the same message as the digest, so that the all-reduce needs one exchange of messages instead of two. The receiver
reads the arrays only if all digests are equal. With more ranks, MPI computes the smallest and the largest digest; if
these two are equal, all digests are equal.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradsync.communicators.mpi.waiting import MpiRequests
from gradsync.reduction import Array

# The largest array that a rank sends with its digest. Between two ranks, sending whole arrays moves no more bytes than
# any other algorithm.
_PAYLOAD_BYTES = 32 * 1024
_PAYLOAD_BYTES_OF_TWO = 256 * 1024

_HEADER_BYTES = 64  # the digest, padded to a cache line
_ALL_BITS = 2**64 - 1


class MpiAgreement:
    """The exchange of digests on one communicator.

    Args:
        requests: the object that begins the communicator's MPI requests and waits for them.

    Attributes:
        payload_bytes: the size of the largest array that a rank can send with a digest; -1 if no array can be sent.
    """

    def __init__(self, requests: MpiRequests) -> None:
        self._requests = requests
        n = requests.world_size
        self.payload_bytes = -1
        if requests.is_direct and n > 1:
            self.payload_bytes = _PAYLOAD_BYTES_OF_TWO if n == 2 else _PAYLOAD_BYTES
            # One row for the message of each rank: this rank sends its own row and receives the other rows.
            self._messages = np.zeros((n, _HEADER_BYTES + self.payload_bytes), np.uint8)
            self._digests = self._messages[:, :8].view(np.uint64)[:, 0]
            self._received = [(peer, self._messages[peer]) for peer in requests.peers]
        self._mine, self._smallest = np.zeros(2, np.uint64), np.zeros(2, np.uint64)

    def payload(self, size_bytes: int) -> Array:
        """Returns a uint8 buffer, into which the caller writes the array that this rank sends with its next digest."""
        return self._messages[self._requests.rank, _HEADER_BYTES : _HEADER_BYTES + size_bytes]

    def payloads(self, size_bytes: int) -> Array:
        """Returns the arrays that the ranks have sent with their digests, one row for each rank.

        Call it after the ranks have agreed. The rows are valid until the next agreement.
        """
        return self._messages[:, _HEADER_BYTES : _HEADER_BYTES + size_bytes]

    def is_reached(self, digest: int, payload_bytes: int, poll: Callable[[], None]) -> bool:
        """Exchanges the digests, and returns whether all digests are equal. Every rank gets the same answer.

        Args:
            digest: the 64-bit digest of this rank's call.
            payload_bytes: the number of bytes of `payload` to send with the digest.
            poll: a function to call every few milliseconds during a longer wait.

        Raises:
            RankFailed, CollectiveTimeout, MpiError: see MpiRequests.finish.
        """
        requests = self._requests
        if self.payload_bytes < 0:
            return self._is_smallest_the_largest(digest, poll)
        self._digests[requests.rank] = digest
        message = self._messages[requests.rank, : _HEADER_BYTES + payload_bytes]
        begun = requests.post([(peer, message) for peer in requests.peers], self._received)
        requests.finish(begun, poll=poll)
        digests: list[int] = self._digests.tolist()
        return digests.count(digest) == requests.world_size

    def _is_smallest_the_largest(self, digest: int, poll: Callable[[], None]) -> bool:
        mine, smallest = self._mine, self._smallest
        mine[0] = digest
        mine[1] = _ALL_BITS - digest  # the smallest of these values belongs to the largest digest
        requests = self._requests
        requests.finish([requests.comm.Iallreduce(mine, smallest, requests.mpi.MIN)], (mine, smallest), poll)
        return int(smallest[0]) == _ALL_BITS - int(smallest[1])
