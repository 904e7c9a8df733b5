"""The memory that ranks share: how it is made and opened, and that nothing is left behind."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync as gs
from gradsync.communicators.shared_memory import segment as shared_segment
from gradsync.communicators.shared_memory.segment import (
    create_segment,
    map_segment,
    open_segment,
    populate,
    reserve,
    share_segment,
    ticket_of,
)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_segment_is_zeroed_sealed_and_shared() -> None:
    descriptor = create_segment(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    first, second = map_segment(os.dup(descriptor)), map_segment(descriptor)
    assert first[:] == bytes(8192)
    first[100] = 7
    assert second[100] == 7
    first.close()
    second.close()


ON_HUGE_PAGES = """
import mmap
import numpy as np
from gradsync.communicators.shared_memory.segment import HUGE_PAGE_BYTES, create_segment, map_segment
size = 8 * HUGE_PAGE_BYTES + mmap.PAGESIZE
mapped = [map_segment(create_segment(size, allocated=False), on_huge_pages=True) for _ in range(4)]
print(sum(np.frombuffer(mapping, np.uint8).ctypes.data % HUGE_PAGE_BYTES == 0 for mapping in mapped))
"""


def test_a_mapping_for_huge_pages_begins_at_a_multiple_of_their_size() -> None:
    # The kernel puts each mapping right below the last one: of these sizes at most one would begin there by itself. A
    # process of its own has few gaps between its mappings, into which the kernel could put one.
    done = subprocess.run([sys.executable, "-c", ON_HUGE_PAGES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1


class OldKernel(mmap.mmap):
    """As on a Linux that cannot populate a part of a mapping."""

    def madvise(self, *_: int) -> None:
        raise OSError("Invalid argument")


@pytest.mark.parametrize("kind", [mmap.mmap, OldKernel])
def test_what_is_populated_is_not_faulted_in_later(kind: type[mmap.mmap]) -> None:
    size = 400 * mmap.PAGESIZE
    descriptor = create_segment(size)
    mapping = kind(descriptor, size, flags=mmap.MAP_SHARED)
    os.close(descriptor)
    populate(mapping, mmap.PAGESIZE + 17, size - 100)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for page in range(mmap.PAGESIZE, size, mmap.PAGESIZE):
        mapping[page]
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100
    mapping.close()


def test_what_is_not_allocated_at_first_can_be_later() -> None:
    page = mmap.PAGESIZE
    descriptor = create_segment(100 * page, allocated=False)
    assert os.fstat(descriptor).st_blocks == 0
    reserve(descriptor, 2 * page, 50 * page)
    assert os.fstat(descriptor).st_blocks * 512 == 48 * page
    os.close(descriptor)


def test_too_large_is_a_clear_error_and_leaks_nothing() -> None:
    before = open_descriptors()
    with pytest.raises(gs.BackendUnavailable, match="cannot allocate 1152921504606846976 bytes.*available"):
        create_segment(1 << 60)
    assert open_descriptors() == before


def test_another_process_opens_it_and_no_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed rank would leave a file behind."""
    monkeypatch.chdir(tmp_path)
    before = open_descriptors()
    descriptor = create_segment(4096)
    ticket = ticket_of(descriptor)
    child = (
        "import os\nfrom gradsync.communicators.shared_memory.segment import map_segment, open_segment\n"
        f"taken = open_segment({ticket!r})\nassert not os.get_inheritable(taken)\nmap_segment(taken)[100] = 7"
    )
    subprocess.run([sys.executable, "-c", child], check=True)
    mapping = map_segment(descriptor)
    assert mapping[100] == 7
    mapping.close()
    with pytest.raises(gs.BackendUnavailable, match="cannot be opened from here"):
        open_segment(ticket)
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


@pytest.mark.parametrize("identity", ["", "another boot pid:[4026531836]"])
def test_processes_that_do_not_see_each_other_do_not_share(identity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = create_segment(4096)
    with monkeypatch.context() as patched:
        patched.setattr(shared_segment, "machine_identity", lambda: identity)
        ticket = ticket_of(descriptor)
    with pytest.raises(gs.BackendUnavailable, match="on one host, in one pid namespace"):
        open_segment(ticket)
    os.close(descriptor)


def test_a_failure_elsewhere_ends_the_wait_and_leaks_nothing() -> None:
    def fail() -> None:
        raise gs.RankFailed("rank 2 died", rank=2)

    before = open_descriptors()
    with pytest.raises(gs.RankFailed):
        share_segment(lambda: create_segment(4096), lambda ticket: ticket, fail)
    descriptor = create_segment(4096)
    with pytest.raises(gs.RankFailed):
        share_segment(None, lambda _: ticket_of(descriptor), fail)
    os.close(descriptor)
    assert open_descriptors() == before


def test_no_memfd_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError("function not implemented")

    monkeypatch.setattr(shared_segment.os, "memfd_create", refuse)
    with pytest.raises(gs.BackendUnavailable, match="memfd_create"):
        create_segment(4096)
