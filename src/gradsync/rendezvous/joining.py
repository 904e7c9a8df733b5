"""What a rank that wants to join has to agree on with the server. Part of the server's core, without I/O."""

from __future__ import annotations

from gradsync.rendezvous.messages import PROTOCOL_VERSION


def join_refusal(version: int, rank: int, world_size: int, expected_world_size: int) -> str:
    """Returns why this join cannot be accepted, with both values, or an empty text."""
    if version != PROTOCOL_VERSION:
        return (
            f"the server speaks protocol version {PROTOCOL_VERSION}, rank {rank} version {version}; "
            "run the same version of gradsync on every rank"
        )
    if world_size != expected_world_size:
        return f"the server expects world_size {expected_world_size}, rank {rank} came with {world_size}"
    if rank >= expected_world_size:
        return f"the server expects ranks 0 to {expected_world_size - 1}, got rank {rank}"
    return ""
