"""Packing a model's gradients into buckets and splitting them back out, beside what CuPy itself offers for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import cupy

from gradsync.bucketing.plan import GradientSpec, plan_buckets
from gradsync.communicators.nccl.kernels import FusedPacker, pack_layout
from models import Shape
from on_gpu.clock import DeviceClock, Operation, take_turns
from on_gpu.copying import copy
from on_gpu.rows import Row
from on_gpu.scale import Scale, size_name
from on_gpu.targets import PACK, PACKING, SPLIT, whole_list

# CuPy's pool begins each allocation there.
_ALLOCATION_BYTES = 512
# More sets of addresses than the packer keeps tables for: none is known again.
_ADDRESS_SETS = 1024


def measure(scale: Scale, clock: DeviceClock) -> list[Row]:
    """Times every model's list in one bucket, and in buckets as a step has them."""
    rows = []
    for model, shapes in scale.models.items():
        in_buckets = f"{model}, buckets of {size_name(scale.threshold_bytes)}"
        arriving = shapes[::-1]  # a backward pass produces them last first
        layouts = {whole_list(model): [arriving], in_buckets: packed_buckets(arriving, scale.threshold_bytes)}
        for workload, buckets in layouts.items():
            contenders = Contenders(buckets)
            samples = take_turns(contenders.operations(), clock, scale.rounds, scale.warm_up)
            contenders.check(workload)
            moved_bytes = contenders.moved_bytes
            rows += [Row.of(PACKING, workload, name, of_name, moved_bytes) for name, of_name in samples.items()]
    return rows


def packed_buckets(shapes: Sequence[Shape], threshold_bytes: int) -> list[list[Shape]]:
    """Returns the shapes in the buckets of a step; what goes alone is not packed, and left out."""
    specs = [GradientSpec(f"#{number}", shape, "float32", 4) for number, shape in enumerate(shapes)]
    buckets = [[slot.spec.shape for slot in bucket.slots] for bucket in plan_buckets(specs, threshold_bytes)]
    return [bucket for bucket in buckets if len(bucket) > 1]


class Contenders:
    """Ways to pack and to split lists of arrays.

    Every bucket has a flat buffer of its own, other than in a communicator, so that nothing is still in a cache.

    Args:
        buckets: the shapes in each.
    """

    def __init__(self, buckets: Sequence[Sequence[Shape]]) -> None:
        sizes = [[prod(shape) for shape in bucket] for bucket in buckets]
        self._arrays = [[cupy.full(size, _value(i), cupy.float32) for i, size in enumerate(of)] for of in sizes]
        layouts = [pack_layout(tuple([array.nbytes for array in arrays])) for arrays in self._arrays]
        self._flats = [cupy.zeros(layout.total_bytes, cupy.uint8) for layout in layouts]
        self._scratch = [cupy.zeros(layout.total_bytes, cupy.uint8) for layout in layouts]
        # The same elements without the gaps that the layout leaves for alignment.
        self._joined = [flat[: 4 * sum(of)].view(cupy.float32) for flat, of in zip(self._scratch, sizes, strict=True)]
        self._pieces = [_pieces(joined, of) for joined, of in zip(self._joined, sizes, strict=True)]
        self._moving = MovingArrays(sizes)
        self._packer = FusedPacker()
        self._pack()  # splitting may come first

    @property
    def moved_bytes(self) -> int:
        """What each contender reads and writes."""
        return 2 * sum(joined.nbytes for joined in self._joined)

    def operations(self) -> dict[str, Operation]:
        """Returns all contenders."""
        return {
            PACK: Operation(self._pack),
            SPLIT: Operation(self._split),
            # The addresses that a packer has not seen cost it a table, made on the host and copied to the device.
            "pack, new addresses": Operation(self._pack_moving, self._moving.move),
            "cupy.concatenate": Operation(self._concatenate),
            "cupy.copyto, array by array": Operation(self._copy_pieces),
            "cudaMemcpyAsync of as much": Operation(self._copy),
        }

    def check(self, workload: str) -> None:
        """Packs once more, into cleared buffers, and splits, into cleared arrays.

        Raises:
            RuntimeError: not every array has its values back.
        """
        for flat in self._flats:
            flat.fill(0)
        self._pack()
        for arrays in self._arrays:
            for array in arrays:
                array.fill(-1)
        self._split()
        for arrays in self._arrays:
            for number, array in enumerate(arrays):
                if not bool((array == _value(number)).all()):
                    raise RuntimeError(f"{workload}: array {number} of a bucket did not come back from it")

    def _pack(self) -> None:
        for arrays, flat in zip(self._arrays, self._flats, strict=True):
            self._packer.pack(arrays, flat)

    def _split(self) -> None:
        for arrays, flat in zip(self._arrays, self._flats, strict=True):
            self._packer.split(flat, arrays)

    def _pack_moving(self) -> None:
        for arrays, flat in zip(self._moving.arrays, self._scratch, strict=True):
            self._packer.pack(arrays, flat)

    def _concatenate(self) -> None:
        for arrays, joined in zip(self._arrays, self._joined, strict=True):
            cupy.concatenate(arrays, out=joined)

    def _copy_pieces(self) -> None:
        # Into the flat buffer, where splitting copies out of it: as many bytes, and the arrays keep their values.
        for arrays, pieces in zip(self._arrays, self._pieces, strict=True):
            for array, piece in zip(arrays, pieces, strict=True):
                cupy.copyto(piece, array)

    def _copy(self) -> None:
        for flat, joined in zip(self._flats, self._joined, strict=True):
            copy(flat, joined)


class MovingArrays:
    """Arrays that lie elsewhere each time, as after an allocator gave them other memory.

    Attributes:
        arrays: of each bucket.

    Args:
        sizes: elements of each array, by bucket.
    """

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        self._sizes_bytes = [[4 * size for size in of_bucket] for of_bucket in sizes]
        room_bytes = sum(_up(size) for of_bucket in self._sizes_bytes for size in of_bucket)
        self._memory = cupy.zeros(room_bytes + _ADDRESS_SETS * _ALLOCATION_BYTES, cupy.uint8)
        self._moves = 0
        self.arrays: list[list[Any]] = []

    def move(self) -> None:
        """Lays all arrays out anew."""
        begin = self._moves % _ADDRESS_SETS * _ALLOCATION_BYTES
        self._moves += 1
        self.arrays = []
        for of_bucket in self._sizes_bytes:
            begins = list(accumulate(map(_up, of_bucket), initial=begin))
            self.arrays.append([self._memory[at : at + size] for at, size in zip(begins, of_bucket, strict=False)])
            begin = begins[-1]


def _value(number: int) -> int:
    """Returns what fills an array: neither zero, which memory may hold by itself, nor its neighbours' value."""
    return 1 + number


def _up(size_bytes: int) -> int:
    return -(-size_bytes // _ALLOCATION_BYTES) * _ALLOCATION_BYTES


def _pieces(flat: Any, sizes: Sequence[int]) -> list[Any]:
    """Returns consecutive views of these sizes."""
    ends = list(accumulate(sizes))
    return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]
