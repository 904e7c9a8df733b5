"""The hand-over of shared memory: only to those who know the token, and nothing is left behind."""

from __future__ import annotations

import mmap
import os
import resource
import secrets
import threading
import time
from pathlib import Path

import pytest

import gradsync as gs
from gradsync.communicators.shared_memory import segment as shared_segment
from gradsync.communicators.shared_memory.segment import (
    SegmentOffer,
    create_segment,
    map_segment,
    populate,
    reserve,
    take_segment,
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


def test_hand_over_to_peers_with_the_token_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And through no file: a killed rank would leave it behind."""
    monkeypatch.chdir(tmp_path)
    before = open_descriptors()
    descriptor = create_segment(4096)
    offer = SegmentOffer()
    thread = threading.Thread(
        target=offer.serve, args=(descriptor, 1, time.monotonic() + 30, lambda _served: None), daemon=True
    )
    thread.start()
    forged = secrets.token_bytes(32) + offer.ticket[32:]
    with pytest.raises(gs.BackendUnavailable):
        take_segment(forged, 5.0)
    taken = take_segment(offer.ticket, 5.0)
    thread.join(30)
    assert os.fstat(taken).st_ino == os.fstat(descriptor).st_ino
    assert not os.get_inheritable(taken)
    for fd in (taken, descriptor):
        os.close(fd)
    assert list(tmp_path.iterdir()) == []
    offer.close()
    assert open_descriptors() == before


def test_root_that_is_not_there() -> None:
    offer = SegmentOffer()
    offer.close()
    with pytest.raises(gs.BackendUnavailable, match="on one host"):
        take_segment(offer.ticket, 1.0)


def test_peers_that_do_not_come() -> None:
    offer = SegmentOffer()
    with pytest.raises(gs.RendezvousTimeout, match="0 of 2 ranks"):
        offer.serve(-1, 2, time.monotonic() - 1, lambda _served: None)
    offer.close()


def test_a_failure_elsewhere_ends_the_wait() -> None:
    def check(served: int) -> None:
        if served == 1:
            raise gs.RankFailed("rank 2 died", rank=2)

    offer, descriptor = SegmentOffer(), create_segment(4096)
    peer = threading.Thread(target=lambda: os.close(take_segment(offer.ticket, 30.0)))
    peer.start()
    with pytest.raises(gs.RankFailed):
        offer.serve(descriptor, 2, time.monotonic() + 30, check)
    peer.join()
    os.close(descriptor)
    offer.close()


def test_no_memfd_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError("function not implemented")

    monkeypatch.setattr(shared_segment.os, "memfd_create", refuse)
    with pytest.raises(gs.BackendUnavailable, match="memfd_create"):
        create_segment(4096)
