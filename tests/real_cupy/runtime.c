/* The CUDA runtime API over host memory, for tests. redirect.py leads CuPy's calls of cudaX to host_cudaX.

   "Device memory" is memory of the host, filled with 0xA5 when it is allocated. Copies happen at once, so a stream never
   has work left, and streams need not wait for each other. An event, though, is "not ready" the first times that it is
   queried after a record, so that whoever polls it also runs the code for work that has not ended.

   What CUDA refuses is refused here too: a copy whose kind does not fit the memory, a pointer that was never allocated,
   an event that was destroyed. A function that is missing here returns cudaErrorNotSupported (redirect.py). */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_COPY = 21, INVALID_DEVICE = 101, INVALID_HANDLE = 400,
       NOT_READY = 600 };
enum { UNREGISTERED = 0, PINNED = 1, DEVICE = 2 }; /* as cudaMemoryType */
enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3 };
enum { QUERIES_NOT_READY = 3, MAX_DEVICES = 64 };

static int capabilities[MAX_DEVICES], device_count = 0; /* such as 90 for sm_90 */
static __thread int current_device = 0;

/* For the tests: the devices on which a call has made a context, as it would with CUDA 12 or newer. */
static volatile int has_context[MAX_DEVICES];
int host_has_context(int device) { return has_context[device]; }
static void make_context(void) { has_context[current_device] = 1; }

__attribute__((constructor)) static void read_environment(void) {
    char *text = getenv("HOST_CUDA_DEVICES"); /* the compute capability of each device: "90,80" */
    while (text && *text && device_count < MAX_DEVICES) {
        capabilities[device_count++] = strtol(text, &text, 10);
        if (*text == ',') text++;
    }
}

/* Memory */

typedef struct { char *begin; size_t size; int type, device; } Block;
static Block *blocks;
static int block_count, block_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void remember(void *begin, size_t size, int type) {
    pthread_mutex_lock(&lock);
    if (block_count == block_room) {
        block_room = block_room ? 2 * block_room : 1024;
        blocks = realloc(blocks, block_room * sizeof *blocks);
    }
    blocks[block_count++] = (Block){begin, size, type, current_device};
    pthread_mutex_unlock(&lock);
}

static int forget(void *begin, int type) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < block_count && !found; i++)
        if (blocks[i].begin == begin && blocks[i].type == type) {
            blocks[i] = blocks[--block_count];
            found = 1;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

static Block block_of(const void *pointer) {
    Block found = {0, 0, UNREGISTERED, -2};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < block_count; i++)
        if ((char *)pointer >= blocks[i].begin && (char *)pointer < blocks[i].begin + blocks[i].size) found = blocks[i];
    pthread_mutex_unlock(&lock);
    return found;
}

static int allocate(void **pointer, size_t size, int type) {
    make_context();
    *pointer = NULL;
    if (!size) return SUCCESS;
    if (posix_memalign(pointer, 4096, size)) return OUT_OF_MEMORY;
    memset(*pointer, 0xA5, size);
    remember(*pointer, size, type);
    return SUCCESS;
}

static int release(void *pointer, int type) {
    if (!pointer) return SUCCESS;
    if (!forget(pointer, type)) return INVALID_VALUE;
    free(pointer);
    return SUCCESS;
}

int host_cudaMalloc(void **pointer, size_t size) { return allocate(pointer, size, DEVICE); }
int host_cudaFree(void *pointer) { return release(pointer, DEVICE); }
int host_cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return allocate(pointer, size, PINNED); }
int host_cudaFreeHost(void *pointer) { return release(pointer, PINNED); }
int host_cudaMemGetInfo(size_t *left, size_t *total) { *left = *total = 1ull << 37; return SUCCESS; }

typedef struct { int type, device; void *on_device, *on_host; } Attributes;
int host_cudaPointerGetAttributes(Attributes *attributes, const void *pointer) {
    Block block = block_of(pointer);
    attributes->type = block.type;
    attributes->device = block.device;
    attributes->on_device = block.type ? (void *)pointer : NULL;
    attributes->on_host = block.type == PINNED ? (void *)pointer : NULL;
    return SUCCESS;
}

static int copy(void *to, const void *from, size_t size, int kind) {
    make_context();
    if (!size) return SUCCESS;
    if (!to || !from) return INVALID_VALUE;
    if ((kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE) && block_of(to).type != DEVICE) return INVALID_COPY;
    if ((kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE) && block_of(from).type != DEVICE) return INVALID_COPY;
    memmove(to, from, size);
    return SUCCESS;
}

int host_cudaMemcpy(void *to, const void *from, size_t size, int kind) { return copy(to, from, size, kind); }
int host_cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return copy(to, from, size, kind);
}
int host_cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *stream) {
    return copy(to, from, size, DEVICE_TO_DEVICE);
}
int host_cudaMemset(void *to, int value, size_t size) { make_context(); memset(to, value, size); return SUCCESS; }
int host_cudaMemsetAsync(void *to, int value, size_t size, void *stream) { return host_cudaMemset(to, value, size); }

/* Devices */

int host_cudaGetDeviceCount(int *count) { *count = device_count; return SUCCESS; }
int host_cudaGetDevice(int *device) { *device = current_device; return SUCCESS; }
int host_cudaSetDevice(int device) {
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    current_device = device;
    make_context();
    return SUCCESS;
}
int host_cudaDeviceSynchronize(void) { return SUCCESS; }
int host_cudaDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int host_cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return SUCCESS; }
int host_cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return SUCCESS;
}
int host_cudaGetDeviceProperties(char *properties, int device) { /* name[256], uuid[16], luid[8], ..., memory */
    memset(properties, 0, 512);
    strcpy(properties, "Host memory");
    memset(properties + 256, 0x50 + device, 16);
    *(size_t *)(properties + 288) = 1ull << 37;
    return SUCCESS;
}
int host_cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) { /* the numbers of cudaDeviceAttr */
        case 75: *value = capabilities[device] / 10; break;
        case 76: *value = capabilities[device] % 10; break;
        case 16: *value = 132; break;       /* multiprocessors */
        case 1: case 2: *value = 1024; break; /* threads in a block */
        case 5: *value = 2147483647; break;   /* blocks in a grid */
        case 8: *value = 49152; break;      /* shared memory of a block */
        case 97: *value = 232448; break;    /* the same, if asked for */
        case 10: *value = 32; break;        /* threads in a warp */
        case 39: *value = 2048; break;      /* threads on a multiprocessor */
        default: *value = 1;
    }
    return SUCCESS;
}

/* Streams: handles that mean nothing, since all work has ended when its call returns */

static long next_stream = 0x1000;
int host_cudaStreamCreate(void **stream) {
    make_context();
    *stream = (void *)__sync_add_and_fetch(&next_stream, 16);
    return SUCCESS;
}
int host_cudaStreamCreateWithFlags(void **stream, unsigned flags) { return host_cudaStreamCreate(stream); }
int host_cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return host_cudaStreamCreate(stream); }
int host_cudaStreamDestroy(void *stream) { return SUCCESS; }
int host_cudaStreamSynchronize(void *stream) { return SUCCESS; }
int host_cudaStreamQuery(void *stream) { return SUCCESS; }
int host_cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }
int host_cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return SUCCESS; }
int host_cudaStreamGetFlags(void *stream, unsigned *flags) { *flags = 1; return SUCCESS; }

/* Events */

enum { EVENT = 0x45564E54, DISABLE_TIMING = 2 };
typedef struct { int magic; unsigned flags; int queries_left; } Event;
static int is_event(const Event *event) { return event && event->magic == EVENT; }

int host_cudaEventCreateWithFlags(Event **event, unsigned flags) {
    make_context();
    *event = malloc(sizeof **event);
    **event = (Event){EVENT, flags, 0};
    return SUCCESS;
}
int host_cudaEventCreate(Event **event) { return host_cudaEventCreateWithFlags(event, 0); }
int host_cudaEventDestroy(Event *event) {
    if (!is_event(event)) return INVALID_HANDLE;
    event->magic = 0;
    free(event);
    return SUCCESS;
}
int host_cudaEventRecord(Event *event, void *stream) {
    make_context();
    if (!is_event(event)) return INVALID_HANDLE;
    event->queries_left = QUERIES_NOT_READY;
    return SUCCESS;
}
int host_cudaEventQuery(Event *event) {
    if (!is_event(event)) return INVALID_HANDLE;
    return __sync_fetch_and_sub(&event->queries_left, 1) > 0 ? NOT_READY : SUCCESS;
}
int host_cudaEventSynchronize(Event *event) {
    if (!is_event(event)) return INVALID_HANDLE;
    event->queries_left = 0;
    return SUCCESS;
}
int host_cudaEventElapsedTime(float *milliseconds, Event *first, Event *last) {
    if (!is_event(first) || !is_event(last) || (first->flags | last->flags) & DISABLE_TIMING) return INVALID_HANDLE;
    *milliseconds = 1.0f;
    return SUCCESS;
}
int host_cudaStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    return is_event(event) ? SUCCESS : INVALID_HANDLE;
}

/* Kernels that were compiled into CuPy: of these gradsync needs CUB's sums only. Their second argument is the address of
   the result, which becomes 1, whatever was to be summed. The other kernels come by the driver API: driver.c. */

int host_cudaGetLastError(void) { return SUCCESS; }
int host_cudaPeekAtLastError(void) { return SUCCESS; }
static int run_kernel_of_cub(void **arguments) {
    make_context();
    if (arguments && block_of(*(void **)arguments[1]).type == DEVICE) **(double **)arguments[1] = 1.0;
    return SUCCESS;
}
typedef struct { unsigned x, y, z; } Dim3;
int host_cudaLaunchKernel(const void *kernel, Dim3 blocks, Dim3 threads, void **arguments, size_t shared, void *stream) {
    return run_kernel_of_cub(arguments);
}
int host_cudaLaunchKernelExC(const void *config, const void *kernel, void **arguments) {
    return run_kernel_of_cub(arguments);
}
int host_cudaFuncGetAttributes(int64_t *attributes, const void *kernel) {
    int *after_sizes = (int *)(attributes + 3); /* maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion */
    memset(attributes, 0, 128);
    after_sizes[0] = 1024;
    after_sizes[1] = 32;
    after_sizes[2] = after_sizes[3] = capabilities[current_device];
    return SUCCESS;
}
int host_cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *kernel, int threads, size_t shared) {
    *count = 2;
    return SUCCESS;
}
int host_cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int threads, size_t shared,
                                                                unsigned flags) {
    *count = 2;
    return SUCCESS;
}
