// Runs CUDA kernels on the host, thread by thread: for kernels whose threads need nothing of each other.
// redirect.py includes this before a kernel's source, and adds ON_HOST(name) for each kernel.
#pragma once
#include <utility>

#define __global__
#define __device__
#define __builtin_assume(condition) static_cast<void>(0)

template <typename Number>
void atomicAdd(Number* sum, Number value) {
    *sum += value;
}

struct Index {
    unsigned x;
};
static Index blockIdx, threadIdx, blockDim, gridDim;

template <typename... Arguments, std::size_t... Places>
void run_on_host(void (*kernel)(Arguments...), unsigned blocks, unsigned threads, void** arguments,
                 std::index_sequence<Places...>) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            kernel(*static_cast<Arguments*>(arguments[Places])...);
}

template <typename... Arguments>
void run_on_host(void (*kernel)(Arguments...), unsigned blocks, unsigned threads, void** arguments) {
    run_on_host(kernel, blocks, threads, arguments, std::index_sequence_for<Arguments...>());
}

#define ON_HOST(name)                                                                      \
    extern "C" void on_host_##name(unsigned blocks, unsigned threads, void** arguments) { \
        run_on_host(name, blocks, threads, arguments);                                    \
    }
