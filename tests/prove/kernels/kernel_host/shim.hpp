// Compiles CUDA source as host C++, and runs its kernels thread by thread. Fits kernels whose threads do not meet.
#pragma once

#define __global__
#define __device__
#define __builtin_assume(condition) static_cast<void>(0)

struct Index {
    unsigned x;
};

static Index blockIdx, threadIdx, blockDim;

// Runs the threads in ascending or descending order: a result that depends on it is a race on the device.
template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, unsigned blocks, unsigned threads, bool descending, Arguments... arguments) {
    blockDim.x = threads;
    for (unsigned long long step = 0, end = static_cast<unsigned long long>(blocks) * threads; step < end; ++step) {
        const unsigned long long place = descending ? end - 1 - step : step;
        blockIdx.x = static_cast<unsigned>(place / threads);
        threadIdx.x = static_cast<unsigned>(place % threads);
        kernel(arguments...);
    }
}
