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
}
