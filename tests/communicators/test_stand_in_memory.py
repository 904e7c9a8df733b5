"""The NCCL stand-in's own memory: what its threads must never do to one another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_LOOK_WHILE_ADDING = """
import sys, threading
from cupy.cuda.memory import Block, address_space, device_bytes

sys.setswitchinterval(1e-6)
blocks = [Block(512, 0, 0) for _ in range(200)]
there, added = blocks[::2], blocks[1::2]
for block in there:
    address_space.add(block)
ended = threading.Event()

def add_and_remove():
    for _ in range(30):
        for change in (address_space.add, address_space.remove):
            for block in added:
                change(block)
    ended.set()

thread = threading.Thread(target=add_and_remove)
thread.start()
while not ended.is_set():
    for block in there:
        device_bytes(block.address, block.size)
thread.join()
"""


def test_memory_is_found_while_another_thread_allocates() -> None:
    """Work on a stream looks addresses up while the program allocates: it once met an illegal address by that."""
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1] / 'fake_cupy')!r})\n"
    subprocess.run([sys.executable, "-c", path + _LOOK_WHILE_ADDING], check=True, timeout=60)
