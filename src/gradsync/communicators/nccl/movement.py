"""What NCCL moves without computing: broadcasts, gathers, and bytes between pairs of ranks.

NCCL gathers equal parts only, and CuPy shows no gather, scatter or all-to-all of it: they are made of messages in one
group, which NCCL launches as one kernel. A part of no bytes takes no message, on neither side, and a rank's own part is
copied on the device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import cupy

from gradsync.communicators.backend import Bounds, part_of
from gradsync.communicators.nccl.handle import NcclHandle


class NcclMovement:
    """Launches movements of bytes on the current stream; all arrays are flat, of uint8, on the device.

    Args:
        handle: NCCL's communicator.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, handle: NcclHandle, rank: int, world_size: int) -> None:
        self._handle = handle
        self._rank = rank
        self._ranks = range(world_size)
        self._datatype = handle.library.bytes_datatype

    def broadcast(self, flat: Any, root: int) -> None:
        """Copies the root's bytes to all ranks."""
        if flat.size:
            pointer = flat.data.ptr
            self._handle.call("broadcast", pointer, pointer, flat.size, self._datatype, root, current_stream())

    def all_gather(self, source: Any, target: Any, bounds: Bounds) -> None:
        """Gathers the parts on all ranks; the source may be exactly this rank's part of the target."""
        if is_even(bounds):
            if target.size:
                pointers = source.data.ptr, target.data.ptr
                self._handle.call("allGather", *pointers, source.size, self._datatype, current_stream())
            return
        self.copy(source, target[part_of(bounds, self._rank)])
        with self._handle.group():
            for peer in self._others():
                self.send(source, peer)
                self.receive(target[part_of(bounds, peer)], peer)

    def gather(self, source: Any, target: Any | None, bounds: Bounds, root: int) -> None:
        """Gathers the parts on the root, where the source may be exactly its part of the target; None elsewhere."""
        if target is None:
            self.send(source, root)
            return
        self.copy(source, target[part_of(bounds, self._rank)])
        with self._handle.group():
            for peer in self._others():
                self.receive(target[part_of(bounds, peer)], peer)

    def scatter(self, source: Any | None, target: Any, bounds: Bounds, root: int) -> None:
        """Deals out the root's parts; None elsewhere."""
        if source is None:
            self.receive(target, root)
            return
        self.copy(source[part_of(bounds, self._rank)], target)
        with self._handle.group():
            for peer in self._others():
                self.send(source[part_of(bounds, peer)], peer)

    def all_to_all(self, source: Any, target: Any, send_bounds: Bounds, receive_bounds: Bounds) -> None:
        """Deals out the parts of every rank."""
        self.copy(source[part_of(send_bounds, self._rank)], target[part_of(receive_bounds, self._rank)])
        with self._handle.group():
            for peer in self._others():
                self.send(source[part_of(send_bounds, peer)], peer)
                self.receive(target[part_of(receive_bounds, peer)], peer)

    def send(self, part: Any, peer: int) -> None:
        """Sends to another rank, which receives as many bytes."""
        if part.size:
            self._handle.call("send", part.data.ptr, part.size, self._datatype, peer, current_stream())

    def receive(self, part: Any, peer: int) -> None:
        """Receives from another rank, which sends as many bytes."""
        if part.size:
            self._handle.call("recv", part.data.ptr, part.size, self._datatype, peer, current_stream())

    @staticmethod
    def copy(source: Any, target: Any) -> None:
        """Copies bytes on the device, unless they are where they belong."""
        if source.size and source.data.ptr != target.data.ptr:
            target.data.copy_from_device_async(source.data, source.size)

    def _others(self) -> list[int]:
        return [peer for peer in self._ranks if peer != self._rank]


def is_even(bounds: Bounds) -> bool:
    """Whether all parts are of one size."""
    return all(end - begin == bounds[1] - bounds[0] for begin, end in pairwise(bounds))


def current_stream() -> int:
    """Returns the handle of CuPy's current stream."""
    return int(cupy.cuda.get_current_stream().ptr)
