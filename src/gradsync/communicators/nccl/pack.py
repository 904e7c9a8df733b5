"""gradsync's CUDA kernels, all of them: they pack arrays into a flat buffer, split it again, and make digests.

One launch packs all arrays of a bucket, or splits them. `pack_layout` cuts the arrays into chunks, of which a table on
the device says where they lie; each block of threads copies one chunk. A factor is multiplied in on the way, so that
weights cost no pass over the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradsync.reduction import dtype_name, part_dtype

# Calculated for an H200 (132 multiprocessors of 2,048 threads, 4.8 TB/s), and not measured yet. 10 MiB are 320 chunks:
# more than two for each multiprocessor, all resident at once. Reading at half of 4.8 TB/s with a latency near 1 us
# needs 18 KB in flight on each multiprocessor. Two blocks with four 16-byte loads for each thread have 32 KiB in
# flight.
CHUNK_BYTES = 32 * 1024
# With this number, an array of 4 KiB still gives work to every thread of a block.
THREADS_PER_BLOCK = 256
ALIGNMENT_BYTES = 16  # of the arrays in the flat buffer: the largest load and store; allocations begin so, too

CHUNK = np.dtype([("address", np.uint64), ("offset", np.uint64), ("size", np.uint64)])
DIGEST_WORDS = 2**14  # as in host_values.py, whose digest this is

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

struct Copied {
    template <typename Word> __device__ Word operator()(Word value) const { return value; }
};

// Writes what `change` makes of each word. Each round issues all its loads before its first store: they overlap.
template <typename Word, typename Change>
__device__ void move_words(const Word* from, Word* to, unsigned count, Change change) {
    const unsigned stride = blockDim.x;
    for (unsigned base = threadIdx.x; base < count; base += LOADS_IN_FLIGHT * stride) {
        Word held[LOADS_IN_FLIGHT];
#pragma unroll
        for (unsigned k = 0; k < LOADS_IN_FLIGHT; ++k)
            if (base + k * stride < count) held[k] = from[base + k * stride];
#pragma unroll
        for (unsigned k = 0; k < LOADS_IN_FLIGHT; ++k)
            if (base + k * stride < count) to[base + k * stride] = change(held[k]);
    }
}

// Copies bytes between addresses that agree modulo sizeof(Word): whole words, and the bytes before and after them.
template <typename Word>
__device__ void copy_as(const char* from, char* to, unsigned size) {
    const unsigned to_whole_word = static_cast<unsigned>(-reinterpret_cast<u64>(from) % sizeof(Word));
    const unsigned head = to_whole_word < size ? to_whole_word : size;
    const unsigned count = (size - head) / sizeof(Word);
    const unsigned tail = head + count * sizeof(Word);
    move_words(reinterpret_cast<const Word*>(from + head), reinterpret_cast<Word*>(to + head), count, Copied());
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
    else move_words(from, to, size, Copied());
}

extern "C" __global__ void pack_chunks(const Chunk* chunks, char* flat) {
    const Chunk chunk = chunks[blockIdx.x];
    copy_chunk(reinterpret_cast<const char*>(chunk.address), flat + chunk.offset, static_cast<unsigned>(chunk.size));
}

extern "C" __global__ void split_chunks(const Chunk* chunks, char* flat) {
    const Chunk chunk = chunks[blockIdx.x];
    copy_chunk(flat + chunk.offset, reinterpret_cast<char*>(chunk.address), static_cast<unsigned>(chunk.size));
}

// -- Packing with a factor: half precision is multiplied in float32, and rounded once, to the nearest, even at ties

__device__ float float_of(unsigned bits) {
    union { unsigned bits; float value; } both = {bits};
    return both.value;
}
__device__ unsigned bits_of(float value) {
    union { float value; unsigned bits; } both = {value};
    return both.bits;
}
__device__ unsigned rounded(unsigned bits, unsigned shift) {  // bits >> shift; a carry goes into the exponent, rightly
    return (bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift;
}

struct BFloat16 {
    unsigned short bits;
    __device__ float wide() const { return float_of(static_cast<unsigned>(bits) << 16); }
    __device__ static BFloat16 of(float value) {
        const unsigned all = bits_of(value);
        if (value != value) return {static_cast<unsigned short>(all >> 16 | 64)};
        return {static_cast<unsigned short>(rounded(all, 16))};
    }
};

struct Float16 {
    unsigned short bits;
    __device__ float wide() const {
        const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
        if (exponent == 31u) return float_of(sign | 0x7f800000u | fraction << 13);
        if (exponent == 0u) return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
        return float_of(sign | (exponent + 112u) << 23 | fraction << 13);
    }
    __device__ static Float16 of(float value) {
        const unsigned all = bits_of(value), sign = all >> 16 & 0x8000u, magnitude = all & 0x7fffffffu;
        unsigned half;
        if (magnitude > 0x7f800000u) half = 0x7e00u;        // NaN
        else if (magnitude >= 0x47800000u) half = 0x7c00u;  // 2^16 and more
        else if (magnitude >= 0x38800000u) half = rounded(magnitude - 0x38000000u, 13);
        else half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;  // subnormal: the sum rounds to 2^-24
        return {static_cast<unsigned short>(sign | half)};
    }
};

struct Float32 {
    float value;
    __device__ float wide() const { return value; }
    __device__ static Float32 of(float value) { return {value}; }
};

struct Float64 {
    double value;
    __device__ double wide() const { return value; }
    __device__ static Float64 of(double value) { return {value}; }
};

template <typename Wide>
struct Scaled {
    Wide factor;
    template <typename Value> __device__ Value operator()(Value value) const {
        return Value::of(value.wide() * factor);
    }
};

// The factor of all values is on the host, or on the device, where the ranks have just added their weights up.
template <typename Value, typename Wide>
__device__ void scale_chunk(const Chunk& chunk, char* flat, double factor, const double* on_device) {
    move_words(
        reinterpret_cast<const Value*>(chunk.address), reinterpret_cast<Value*>(flat + chunk.offset),
        static_cast<unsigned>(chunk.size / sizeof(Value)),
        Scaled<Wide>{static_cast<Wide>(on_device ? *on_device : factor)});
}

extern "C" __global__ void scale_float16(const Chunk* chunks, char* flat, double factor, const double* on_device) {
    scale_chunk<Float16, float>(chunks[blockIdx.x], flat, factor, on_device);
}
extern "C" __global__ void scale_bfloat16(const Chunk* chunks, char* flat, double factor, const double* on_device) {
    scale_chunk<BFloat16, float>(chunks[blockIdx.x], flat, factor, on_device);
}
extern "C" __global__ void scale_float32(const Chunk* chunks, char* flat, double factor, const double* on_device) {
    scale_chunk<Float32, float>(chunks[blockIdx.x], flat, factor, on_device);
}
extern "C" __global__ void scale_float64(const Chunk* chunks, char* flat, double factor, const double* on_device) {
    scale_chunk<Float64, double>(chunks[blockIdx.x], flat, factor, on_device);
}

// -- Digests: host_values.py has the formula. Each block adds up one piece; the order of additions does not matter

__device__ u64 digest_key(u64 number) {
    u64 key = number * 0x9E3779B97F4A7C15ull;
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9ull;
    key = (key ^ key >> 27) * 0x94D049BB133111EBull;
    return key ^ key >> 31;
}

extern "C" __global__ void digest_pieces(const u64* words, u64 count, u64* sums) {
    const u64 begin = blockIdx.x * 16384ull, left = count - begin, size = left < 16384ull ? left : 16384ull;
    u64 sum = 0;
    for (u64 i = threadIdx.x; i < size; i += blockDim.x) {
        const u64 word = words[begin + i];
        sum += ((word & 0xFFFFFFFFull) + digest_key(i + 1)) * ((word >> 32) + digest_key(i + 16385));
    }
    atomicAdd(sums + blockIdx.x, sum);
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
        self._module = cupy.RawModule(code=PACK_SOURCE)
        self._pack = self._module.get_function("pack_chunks")
        self._split = self._module.get_function("split_chunks")

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

    def scale(self, table: Any, flat: Any, dtype: np.dtype[Any], factor: Any) -> None:
        """Packs arrays, and multiplies their values by a factor. The buffer may be the single array of the table.

        Half precision is multiplied in float32, real and imaginary parts separately. Subnormal numbers of float32 and
        bfloat16 become 0: CuPy compiles with -ftz=true.

        Args:
            table, flat: as for `pack`.
            dtype: of the arrays: floating or complex.
            factor: a number, or a CuPy array with one float64.
        """
        kernel = self._module.get_function(f"scale_{dtype_name(part_dtype(dtype))}")
        on_host = isinstance(factor, float)
        self._launch(kernel, table, flat, factor if on_host else 1.0, np.uint64(0) if on_host else factor)

    def _launch(self, kernel: Any, table: Any, flat: Any, *more: Any) -> None:
        if blocks := table.size // CHUNK.itemsize:
            kernel((blocks, 1, 1), (THREADS_PER_BLOCK, 1, 1), (table, flat, *more))

    def digest_sums(self, words: Any) -> npt.NDArray[np.uint64]:
        """Returns the sums of the pieces of a 1-D contiguous CuPy array of uint64, for host_values.combined_digest.

        The host waits for the current stream.
        """
        sums = self._cupy.zeros(-(-words.size // DIGEST_WORDS), np.uint64)
        if sums.size:
            kernel = self._module.get_function("digest_pieces")
            kernel((sums.size, 1, 1), (THREADS_PER_BLOCK, 1, 1), (words, np.uint64(words.size), sums))
        on_host: npt.NDArray[np.uint64] = sums.get()
        return on_host
