"""What the ranks of a shared-memory communicator share: how large its parts are, and where they lie.

In order: the barrier's header, the rings, the slots, the channels.
"""

from __future__ import annotations

import os

from gradsync.communicators.shared_memory.barrier import header_bytes
from gradsync.communicators.shared_memory.channels import SharedChannels
from gradsync.communicators.shared_memory.rings import SharedRings
from gradsync.communicators.shared_memory.segment import create_segment
from gradsync.communicators.shared_memory.slots import Slots

# What a rank publishes of a large list between two rounds of the barrier. Measured: larger chunks leave the cache,
# smaller ones pay for more rounds and NumPy calls.
CHUNK_BYTES = 1024 * 1024
# Likewise of what is moved, or reduced on one rank: some write the next round while others read the last one.
ROUND_BYTES = 512 * 1024
# Up to here one barrier and n reads of everything beat two barriers and a share of the work.
SMALL_BYTES = 128 * 1024


def segment_bytes(world_size: int) -> int:
    """Returns how much memory the ranks share."""
    own_bytes = SharedRings.bytes_for(world_size, ROUND_BYTES) + Slots.bytes_for(world_size, CHUNK_BYTES)
    return header_bytes(world_size) + own_bytes + SharedChannels.bytes_for(world_size)


def create_shared_memory(world_size: int) -> int:
    """Returns the descriptor of memory for a communicator of so many ranks.

    Raises:
        BackendUnavailable: there is not enough, or no way to share it.
    """
    return create_segment(segment_bytes(world_size))


def check_memory(world_size: int) -> None:
    """Makes sure that there is memory for a communicator of so many ranks: takes it, and gives it back.

    Raises:
        BackendUnavailable: there is not, or no way to share it.
    """
    os.close(create_shared_memory(world_size))
