// Runs the kernels between blocks of the exact size, for the sanitisers to see every access out of bounds and every
// word that is not aligned. Arguments: threads per block, bytes of a chunk. Fails by its exit status.
#include "kernels_on_host.hpp"

#include "kernels.cu"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void fail(const char* what, unsigned size, unsigned from, unsigned to) {
    std::fprintf(stderr, "%s: %u bytes from misalignment %u to %u\n", what, size, from, to);
    std::exit(1);
}

// Runs a kernel on one chunk.
static void launch(void (*kernel)(const Chunk*, char*), unsigned threads, const Chunk* chunk, char* flat) {
    void* arguments[] = {&chunk, &flat};
    run_on_host(kernel, 1, threads, arguments);
}

// One chunk, at addresses that lie so many bytes behind a multiple of 16, packed and split back.
static void round_trip(unsigned threads, unsigned size, unsigned array_misalignment, unsigned flat_misalignment) {
    char* const array = static_cast<char*>(std::malloc(array_misalignment + size));
    char* const flat = static_cast<char*>(std::malloc(flat_misalignment + size));
    for (unsigned i = 0; i < size; ++i) array[array_misalignment + i] = static_cast<char>(i * 7 + 1);
    std::memset(flat, 0, flat_misalignment + size);
    const Chunk chunk = {reinterpret_cast<u64>(array + array_misalignment), flat_misalignment, size};
    launch(pack_chunks, threads, &chunk, flat);
    if (std::memcmp(flat + flat_misalignment, array + array_misalignment, size) != 0)
        fail("pack", size, array_misalignment, flat_misalignment);
    std::memset(array, 0, array_misalignment + size);
    launch(split_chunks, threads, &chunk, flat);
    if (std::memcmp(flat + flat_misalignment, array + array_misalignment, size) != 0)
        fail("split", size, array_misalignment, flat_misalignment);
    std::free(array);
    std::free(flat);
}

// One chunk of values at the end of its block, times a factor at the end of another.
template <typename Value>
static void scale(void (*kernel)(const Chunk*, char*, double, const double*), unsigned threads, unsigned count) {
    unsigned size = count * sizeof(Value);
    char *source = static_cast<char*>(std::calloc(1, 8 + size)), *flat = static_cast<char*>(std::malloc(16 + size));
    const double* on_device = static_cast<double*>(std::calloc(1, sizeof(double)));
    const Chunk chunk = {reinterpret_cast<u64>(source + 8), 16, size}, *chunks = &chunk;
    double factor = 0;
    void* arguments[] = {&chunks, &flat, &factor, &on_device};
    run_on_host(kernel, 1, threads, arguments);
    std::free(source);
    std::free(flat);
    std::free(const_cast<double*>(on_device));
}

// All words of one piece and some of the next.
static void digest(unsigned threads, u64 count) {
    const u64* words = static_cast<u64*>(std::calloc(count, sizeof(u64)));
    u64* sums = static_cast<u64*>(std::calloc((count + 16383) / 16384, sizeof(u64)));
    void* arguments[] = {&words, &count, &sums};
    run_on_host(digest_pieces, static_cast<unsigned>((count + 16383) / 16384), threads, arguments);
    std::free(const_cast<u64*>(words));
    std::free(sums);
}

int main(int count, char** arguments) {
    if (count != 3) return 2;
    const unsigned threads = static_cast<unsigned>(std::atoi(arguments[1]));
    const unsigned chunk_bytes = static_cast<unsigned>(std::atoi(arguments[2]));
    std::vector<unsigned> sizes = {255, 256, 257, 4095, 4096, 4097, chunk_bytes - 1, chunk_bytes};
    for (unsigned size = 1; size <= 33; ++size) sizes.push_back(size);
    for (unsigned size : sizes)
        for (unsigned array = 0; array < 16; ++array)
            for (unsigned flat = 0; flat < 16; ++flat)
                if (size <= 33 || array % 5 == flat % 3) round_trip(threads, size, array, flat);
    for (unsigned values = 1; values <= chunk_bytes / 8; values += values < 40 ? 1 : 1019) {
        scale<Float16>(scale_float16, threads, values);
        scale<BFloat16>(scale_bfloat16, threads, values);
        scale<Float32>(scale_float32, threads, values);
        scale<Float64>(scale_float64, threads, values);
    }
    for (u64 words : {1, 255, 16383, 16384, 16385, 40000}) digest(threads, words);
}
