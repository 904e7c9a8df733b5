"""CUDA source that reads all values of a flat array once: are they finite, and the sum of their squares.

Each thread strides over the array by the whole grid, so that neighbours read neighbours, and no thread meets another:
what it has found is a flag or a partial sum of its own. device_values.py launches them.
"""

from __future__ import annotations

THREADS_PER_BLOCK = 256
# Enough for every multiprocessor of an H200 (132, of 2,048 threads) to be full. The number of partial sums, and with it
# the order of the additions, must depend on the size of the array alone: the same array gives the same bits.
MAX_BLOCKS = 1056
# Each thread adds up so many values before there are more blocks: partial sums are written, and read again.
VALUES_PER_THREAD = 16

SOURCE = r"""
typedef unsigned long long u64;

__device__ u64 first_value() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ u64 stride() { return static_cast<u64>(gridDim.x) * blockDim.x; }

// What is not finite has all bits of the exponent set. Threads that find some all write the same.
template <typename Word>
__device__ void clear_unless_finite(const Word* words, u64 count, Word exponent, bool* finite) {
    bool found = false;
    for (u64 i = first_value(); i < count; i += stride()) found |= (words[i] & exponent) == exponent;
    if (found) *finite = false;
}

extern "C" __global__ void check_float16(const unsigned short* words, u64 count, bool* finite) {
    clear_unless_finite<unsigned short>(words, count, 0x7c00, finite);
}

extern "C" __global__ void check_bfloat16(const unsigned short* words, u64 count, bool* finite) {
    clear_unless_finite<unsigned short>(words, count, 0x7f80, finite);
}

extern "C" __global__ void check_float32(const unsigned int* words, u64 count, bool* finite) {
    clear_unless_finite<unsigned int>(words, count, 0x7f800000u, finite);
}

extern "C" __global__ void check_float64(const u64* words, u64 count, bool* finite) {
    clear_unless_finite<u64>(words, count, 0x7ff0000000000000ull, finite);
}

union Float32 {
    unsigned int bits;
    float value;
};

union Float64 {
    u64 bits;
    double value;
};

// The absolute value: enough for a square. In float64, where compiling with flush-to-zero loses no small ones.
struct Float16 {
    unsigned short bits;
    __device__ double widened() const {
        const u64 magnitude = bits & 0x7fffu;
        Float64 wide;
        wide.bits = magnitude << 42;
        if (magnitude >= 0x7c00) wide.bits |= 0x7ff0000000000000ull;
        else wide.value *= 2.7430620343968443e+303;  // 2**1008: the biases of the exponents are 1023 and 15
        return wide.value;
    }
};

struct Bfloat16 {
    unsigned short bits;
    __device__ double widened() const {
        Float32 wide;
        wide.bits = static_cast<unsigned int>(bits) << 16;
        return wide.value;
    }
};

template <typename Real>
struct Wide {
    Real value;
    __device__ double widened() const { return value; }
};

template <typename Value>
__device__ void add_squares(const Value* values, u64 count, double* sums) {
    double sum = 0.0;
    for (u64 i = first_value(); i < count; i += stride()) {
        const double value = values[i].widened();
        sum += value * value;
    }
    sums[first_value()] = sum;
}

extern "C" __global__ void square_float16(const Float16* values, u64 count, double* sums) {
    add_squares(values, count, sums);
}

extern "C" __global__ void square_bfloat16(const Bfloat16* values, u64 count, double* sums) {
    add_squares(values, count, sums);
}

extern "C" __global__ void square_float32(const Wide<float>* values, u64 count, double* sums) {
    add_squares(values, count, sums);
}

extern "C" __global__ void square_float64(const Wide<double>* values, u64 count, double* sums) {
    add_squares(values, count, sums);
}
"""


def blocks_for(count: int) -> int:
    """Returns how many blocks go over so many values."""
    return min(-(-count // (THREADS_PER_BLOCK * VALUES_PER_THREAD)), MAX_BLOCKS)
