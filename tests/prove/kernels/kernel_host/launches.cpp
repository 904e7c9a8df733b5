// The pack kernels as functions of the host; kernels.cu is their source, as the library hands it to CuPy.
#include "shim.hpp"

#include "kernels.cu"

extern "C" void launch_pack(unsigned blocks, unsigned threads, bool descending, const Chunk* chunks, char* flat) {
    launch(pack_chunks, blocks, threads, descending, chunks, flat);
}

extern "C" void launch_split(unsigned blocks, unsigned threads, bool descending, const Chunk* chunks, char* flat) {
    launch(split_chunks, blocks, threads, descending, chunks, flat);
}
