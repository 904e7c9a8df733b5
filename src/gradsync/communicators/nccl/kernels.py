"""gradsync's CUDA kernels, and the packer that launches them. No other file contains CUDA source.

One kernel launch packs device arrays into a flat buffer, and one launch splits the buffer back into the arrays.
pack_layout computes the offset of each array in the buffer, and cuts the arrays into chunks. FusedPacker keeps a table
of these chunks on the device and launches the kernels. Memory bandwidth limits the speed, so every multiprocessor needs
enough loads in flight. The host only launches one kernel; it uploads a new table of chunks only if the addresses of the
arrays are new.

This file imports CuPy only when a FusedPacker is created.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# This size is calculated for an H200 (132 multiprocessors of 2,048 threads, 4.8 TB/s), and not measured yet. 10 MiB are
# 320 chunks: more than two for each multiprocessor, all resident at once. Reading at half of 4.8 TB/s with a latency
# near 1 us needs 18 KB in flight on each multiprocessor. Two blocks with four 16-byte loads for each thread have 32 KiB
# in flight.
CHUNK_BYTES = 32 * 1024
# With this number, an array of 4 KiB still gives work to every thread of a block. The kernels use 32 registers, so
# eight blocks fit on a multiprocessor. If the arrays are small, the eight blocks hide the latency of reading the table.
THREADS_PER_BLOCK = 256
# The address of a 16-byte load or store must be a multiple of 16. Allocations on the device begin at such addresses, so
# the kernels can use 16-byte loads and stores for most copies.
ALIGNMENT_BYTES = 16

# A training step has tens of tables of a few kilobytes. Later steps use these tables again, because an allocator
# returns the same few sets of addresses.
_MAX_TABLES = 256
_MAX_TABLE_BYTES = 8 * 1024**2

CHUNK = np.dtype([("address", np.uint64), ("offset", np.uint64), ("size", np.uint64)])

PACK_SOURCE = r"""
typedef unsigned long long u64;

struct Chunk {
    u64 address;  // the address of a piece of an array
    u64 offset;   // the piece's offset in the flat buffer
    u64 size;     // the piece's size in bytes: at most CHUNK_BYTES, never 0
};

struct alignas(16) Vector {
    unsigned int words[4];
};

const unsigned LOADS_IN_FLIGHT = 4;

// Copies `count` words. Each round issues all its loads before its first store, so that the loads overlap.
template <typename Word>
__device__ void copy_words(const Word* from, Word* to, unsigned count) {
    const unsigned stride = blockDim.x;
    for (unsigned base = threadIdx.x; base < count; base += LOADS_IN_FLIGHT * stride) {
        Word held[LOADS_IN_FLIGHT];
#pragma unroll
        for (unsigned k = 0; k < LOADS_IN_FLIGHT; ++k)
            if (base + k * stride < count) held[k] = from[base + k * stride];
#pragma unroll
        for (unsigned k = 0; k < LOADS_IN_FLIGHT; ++k)
            if (base + k * stride < count) to[base + k * stride] = held[k];
    }
}

// Copies fewer bytes than a block has threads.
__device__ void copy_few(const char* from, char* to, unsigned size) {
    if (threadIdx.x < size) to[threadIdx.x] = from[threadIdx.x];
}

// Copies bytes between addresses that agree modulo sizeof(Word): whole words, and the bytes before and after them.
template <typename Word>
__device__ void copy_as(const char* from, char* to, unsigned size) {
    const unsigned to_whole_word = static_cast<unsigned>(-reinterpret_cast<u64>(from) % sizeof(Word));
    const unsigned head = to_whole_word < size ? to_whole_word : size;
    const unsigned count = (size - head) / sizeof(Word);
    const unsigned tail = head + count * sizeof(Word);
    copy_words(reinterpret_cast<const Word*>(from + head), reinterpret_cast<Word*>(to + head), count);
    copy_few(from, to, head);
    copy_few(from + tail, to + tail, size - tail);
}

// Copies the chunk of this block by the widest words at which both addresses agree.
__device__ void copy_chunk(const char* from, char* to, unsigned size) {
    // The addresses come from a table. The compiler cannot know that they are not in shared memory, and would check at
    // each access.
    __builtin_assume(__isGlobal(from));
    __builtin_assume(__isGlobal(to));
    const u64 differing_bits = reinterpret_cast<u64>(from) ^ reinterpret_cast<u64>(to);
    if (differing_bits % 16 == 0) copy_as<Vector>(from, to, size);
    else if (differing_bits % 8 == 0) copy_as<u64>(from, to, size);
    else if (differing_bits % 4 == 0) copy_as<unsigned int>(from, to, size);
    else if (differing_bits % 2 == 0) copy_as<unsigned short>(from, to, size);
    else copy_words(from, to, size);
}

extern "C" __global__ void pack_chunks(const Chunk* chunks, char* flat) {
    const Chunk chunk = chunks[blockIdx.x];
    copy_chunk(reinterpret_cast<const char*>(chunk.address), flat + chunk.offset, static_cast<unsigned>(chunk.size));
}

extern "C" __global__ void split_chunks(const Chunk* chunks, char* flat) {
    const Chunk chunk = chunks[blockIdx.x];
    copy_chunk(flat + chunk.offset, reinterpret_cast<char*>(chunk.address), static_cast<unsigned>(chunk.size));
}
"""


class PackLayout(NamedTuple):
    """The offsets of arrays in a flat buffer, and the chunks (pieces of the arrays) that the kernels copy.

    Attributes:
        offsets_bytes: the offset of each array in the buffer; each offset is a multiple of ALIGNMENT_BYTES.
        total_bytes: the offset in the buffer at which the last array ends.
        chunks: a 1-D array with the dtype CHUNK; the address of each chunk is relative to its array.
        array_of_chunk: for each chunk the index of its array.
    """

    offsets_bytes: npt.NDArray[np.int64]
    total_bytes: int
    chunks: npt.NDArray[np.void]
    array_of_chunk: npt.NDArray[np.intp]

    def table(self, addresses: Sequence[int]) -> npt.NDArray[np.void]:
        """Returns the table of chunks, with the dtype CHUNK, for arrays at the given addresses.

        Args:
            addresses: the arrays' addresses, in order; an empty array may have any address.
        """
        chunks: npt.NDArray[np.void] = self.chunks.copy()
        chunks["address"] += np.array(addresses, np.uint64)[self.array_of_chunk]
        return chunks


@lru_cache(maxsize=128)
def pack_layout(sizes_bytes: tuple[int, ...]) -> PackLayout:
    """Computes a layout in which the arrays follow one another, each at a multiple of ALIGNMENT_BYTES.

    Args:
        sizes_bytes: the size of each array; 0 is allowed.
    """
    sizes = np.array(sizes_bytes, np.int64)
    rooms = -(-sizes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    offsets = np.cumsum(rooms) - rooms
    counts = -(-sizes // CHUNK_BYTES)
    array_of_chunk = np.repeat(np.arange(sizes.size), counts)
    first_of_array = np.cumsum(counts) - counts
    begins = (np.arange(array_of_chunk.size) - first_of_array[array_of_chunk]) * CHUNK_BYTES
    chunks = np.empty(array_of_chunk.size, CHUNK)
    chunks["address"] = begins
    chunks["offset"] = offsets[array_of_chunk] + begins
    chunks["size"] = np.minimum(sizes[array_of_chunk] - begins, CHUNK_BYTES)
    total_bytes = int(offsets[-1] + sizes[-1]) if sizes_bytes else 0
    return PackLayout(offsets, total_bytes, chunks, array_of_chunk)


class _DeviceTable(NamedTuple):
    """A table of chunks in GPU memory.

    Only one stream uses the table's memory, from its allocation until its release.
    """

    chunks: Any  # device array
    rows: int  # the number of chunks
    stream: Any  # while this reference exists, CUDA gives the stream's handle to no other stream


class FusedPacker:
    """Packs arrays of one device into a flat buffer, or splits the buffer, with one kernel launch for each call.

    When the packer is created, and in every call, the same device must be the current device. Kernels run on the
    current stream. The packer keeps its tables on the device, and uses a table again if the addresses and the stream
    are the same. CuPy's pool gives freed memory at once to the next allocation for the same stream. Only the stream for
    which a table was made reads the table. So the packer may drop a table even if a queued launch still has to read the
    table.

    Keep a reference to the packer until the device has done the packer's work. Only one thread at a time may use a
    packer. If each thread has its own default stream (CUPY_CUDA_PER_THREAD_DEFAULT_STREAM), only one thread may ever
    use the packer.

    Raises:
        ImportError: CuPy is not installed. If CuPy cannot compile a kernel, the packer raises CuPy's error.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        module = cupy.RawModule(code=PACK_SOURCE)
        self._pack_kernel = module.get_function("pack_chunks")
        self._split_kernel = module.get_function("split_chunks")
        self._tables: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _DeviceTable] = {}
        self._tables_bytes = 0

    def pack(self, arrays: Sequence[Any], flat: Any) -> None:
        """Copies arrays into a flat buffer, at the offsets that pack_layout computes. Does not wait for the copy.

        Args:
            arrays: 1-D contiguous CuPy arrays of any dtypes; the caller keeps the arrays until the copy is done.
            flat: 1-D contiguous CuPy array of uint8, large enough for the layout. The copy is slower if the address of
                `flat` is not a multiple of ALIGNMENT_BYTES. The bytes of `flat` between two arrays do not change.
        """
        self._launch(self._pack_kernel, arrays, flat)

    def split(self, flat: Any, arrays: Sequence[Any]) -> None:
        """Copies the parts of a flat buffer into arrays: the inverse of pack.

        Args:
            flat, arrays: the flat buffer and the arrays, as for `pack`.
        """
        self._launch(self._split_kernel, arrays, flat)

    def _launch(self, kernel: Any, arrays: Sequence[Any], flat: Any) -> None:
        table = self._table(arrays)
        if table.rows:
            kernel((table.rows, 1, 1), (THREADS_PER_BLOCK, 1, 1), (table.chunks, flat))

    def _table(self, arrays: Sequence[Any]) -> _DeviceTable:
        """Returns the table of chunks of these arrays, for the current stream."""
        stream = self._cupy.cuda.get_current_stream()
        addresses = tuple([array.data.ptr for array in arrays])
        sizes_bytes = tuple([array.nbytes for array in arrays])
        key = (stream.ptr, addresses, sizes_bytes)
        table = self._tables.get(key)
        if table is None:
            rows = pack_layout(sizes_bytes).table(addresses)
            if len(self._tables) >= _MAX_TABLES or self._tables_bytes + rows.nbytes > _MAX_TABLE_BYTES:
                self._tables.clear()  # later calls upload again the tables that they need
                self._tables_bytes = 0
            # CuPy copies the rows to pinned memory, and keeps this memory until the stream has read it. So the host
            # need not wait.
            chunks = self._cupy.asarray(rows.view(np.uint8))
            table = self._tables[key] = _DeviceTable(chunks, rows.size, stream)
            self._tables_bytes += rows.nbytes
        return table
