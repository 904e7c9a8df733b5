// The value kernels as functions of the host; kernels.cu is their source, as the library hands it to CuPy.
#include "shim.hpp"

#include "kernels.cu"

#define LAUNCHES(NAME, WORD, VALUE)                                                                                   \
    extern "C" void launch_check_##NAME(unsigned blocks, unsigned threads, bool descending, const void* values,      \
                                        u64 count, bool* finite) {                                                   \
        launch(check_##NAME, blocks, threads, descending, static_cast<const WORD*>(values), count, finite);          \
    }                                                                                                                 \
    extern "C" void launch_square_##NAME(unsigned blocks, unsigned threads, bool descending, const void* values,     \
                                         u64 count, double* sums) {                                                  \
        launch(square_##NAME, blocks, threads, descending, static_cast<const VALUE*>(values), count, sums);          \
    }

LAUNCHES(float16, unsigned short, Float16)
LAUNCHES(bfloat16, unsigned short, Bfloat16)
LAUNCHES(float32, unsigned int, Wide<float>)
LAUNCHES(float64, u64, Wide<double>)
