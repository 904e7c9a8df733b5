"""gradsync's CUDA kernels, both of them: they pack arrays into a flat buffer, and split it again.

One launch packs all arrays of a bucket, or splits them. `pack_layout` cuts the arrays into chunks, of which a table on
the device says where they lie; each block of threads copies one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Calculated for an H200 (132 multiprocessors of 2,048 threads, 4.8 TB/s), and not measured yet. 10 MiB are 320 chunks:
# more than two for each multiprocessor, all resident at once. Reading at half of 4.8 TB/s with a latency near 1 us
# needs 18 KB in flight on each multiprocessor. Two blocks with four 16-byte loads for each thread have 32 KiB in
# flight.
CHUNK_BYTES = 32 * 1024
# With this number, an array of 4 KiB still gives work to every thread of a block.
THREADS_PER_BLOCK = 256
ALIGNMENT_BYTES = 16  # of the arrays in the flat buffer: the largest load and store; allocations begin so, too

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

// Copies words. Each round issues all its loads before its first store: they overlap.
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

// Copies bytes between addresses that agree modulo sizeof(Word): whole words, and the bytes before and after them.
template <typename Word>
__device__ void copy_as(const char* from, char* to, unsigned size) {
    const unsigned to_whole_word = static_cast<unsigned>(-reinterpret_cast<u64>(from) % sizeof(Word));
    const unsigned head = to_whole_word < size ? to_whole_word : size;
    const unsigned count = (size - head) / sizeof(Word);
    const unsigned tail = head + count * sizeof(Word);
    copy_words(reinterpret_cast<const Word*>(from + head), reinterpret_cast<Word*>(to + head), count);
    if (threadIdx.x < head) to[threadIdx.x] = from[threadIdx.x];
    if (threadIdx.x < size - tail) to[tail + threadIdx.x] = from[tail + threadIdx.x];
}

// Copies the chunk of this block by the widest words at which both addresses agree.
__device__ void copy_chunk(const char* from, char* to, unsigned size) {
    // The addresses come from a table. The compiler cannot know that they are not in shared memory, and would check at
    // each access.
    __builtin_assume(__isGlobal(from));
    __builtin_assume(__isGlobal(to));
    const u64 differing_bits = reinterpret_cast<u64>(from) ^ reinterpret_cast<u64>(to);
    if (differing_bits % 16 == 0) copy_as<Vector>(from, to, size);
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
    """Where arrays lie in a flat buffer, and the chunks (pieces of the arrays) that the kernels copy.

    Attributes:
        offsets_bytes: of each array, multiples of ALIGNMENT_BYTES.
        total_bytes: where the last array ends.
        chunks: a 1-D array of dtype CHUNK, with addresses relative to their arrays.
        array_of_chunk: the index of each chunk's array.
    """

    offsets_bytes: npt.NDArray[np.int64]
    total_bytes: int
    chunks: npt.NDArray[np.void]
    array_of_chunk: npt.NDArray[np.intp]

    def table(self, addresses: Sequence[int]) -> npt.NDArray[np.void]:
        """Returns the table of chunks, of dtype CHUNK, for arrays at these addresses."""
        chunks: npt.NDArray[np.void] = self.chunks.copy()
        chunks["address"] += np.array(addresses, np.uint64)[self.array_of_chunk]
        return chunks


@lru_cache(maxsize=128)
def pack_layout(sizes_bytes: tuple[int, ...]) -> PackLayout:
    """Returns the layout of arrays of these sizes, one after the other, each at a multiple of ALIGNMENT_BYTES."""
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


class Packer:
    """Launches the kernels, on the current stream of its device, which is the current one in every call.

    The caller keeps all arrays and tables until the stream has done its work.

    Raises:
        cupy.cuda.compiler.CompileException: NVRTC cannot compile the kernels.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        module = cupy.RawModule(code=PACK_SOURCE)
        self._pack, self._split = module.get_function("pack_chunks"), module.get_function("split_chunks")

    def table(self, arrays: Sequence[Any]) -> Any:
        """Returns the table of chunks of 1-D contiguous CuPy arrays, on the device."""
        layout = pack_layout(tuple([array.nbytes for array in arrays]))
        rows = layout.table([array.data.ptr for array in arrays])
        # CuPy copies the rows to pinned memory, and keeps that until the stream has read it.
        return self._cupy.asarray(rows.view(np.uint8))

    def pack(self, table: Any, flat: Any) -> None:
        """Copies the arrays of a table into a flat buffer of uint8, at the offsets of pack_layout."""
        self._launch(self._pack, table, flat)

    def split(self, table: Any, flat: Any) -> None:
        """Copies the parts of a flat buffer into the arrays of a table: the inverse of `pack`."""
        self._launch(self._split, table, flat)

    def _launch(self, kernel: Any, table: Any, flat: Any) -> None:
        if blocks := table.size // CHUNK.itemsize:
            kernel((blocks, 1, 1), (THREADS_PER_BLOCK, 1, 1), (table, flat))
