/* The part of the CUDA driver, libcuda.so.1, that CuPy uses to load and launch kernels; for tests.

   A module is a compiled image; asking it for a kernel that it has not is an error. Of the launches only these do
   something:
     - kernels that redirect.py has compiled for the host too (those of a cupy.RawModule) run, thread by thread;
     - CuPy's all() gives True, its sum() and the sum of two such sums 1, whatever they read, so that who reads the
       result finds no garbage (sum() by runtime.c, where it is CUB's);
     - copies of one such result, as of concatenate().
   CuPy's other kernels (arithmetic, fill, strided copies, conversions) are compiled and launched, but do not run. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_FOUND = 500 };
typedef struct { char *image; size_t size; } Module;
typedef void (*HostKernel)(unsigned blocks, unsigned threads, void **arguments);
typedef struct Kernel { char name[200]; HostKernel run; struct Kernel *next; } Kernel;
static Kernel *of_host;

/* For redirect.py: from now on `run` stands for the kernels of this name. */
void host_kernel(const char *name, HostKernel run) {
    Kernel *kernel = calloc(1, sizeof *kernel);
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    kernel->run = run;
    kernel->next = of_host;
    of_host = kernel;
}

/* The end of the last table of an ELF file: NVRTC's images do not tell their size. */
static size_t size_of(const char *image) {
    const unsigned long long program = *(unsigned long long *)(image + 32), section = *(unsigned long long *)(image + 40);
    const unsigned short *sizes = (unsigned short *)(image + 54); /* of a program header, their number; of a section ... */
    const size_t programs_end = program + (size_t)sizes[0] * sizes[1], sections_end = section + (size_t)sizes[2] * sizes[3];
    return programs_end > sections_end ? programs_end : sections_end;
}

int cuModuleLoadData(void **loaded, const char *image) {
    Module *module = malloc(sizeof *module);
    module->size = memcmp(image, "\177ELF", 4) ? strlen(image) : size_of(image);
    module->image = malloc(module->size);
    memcpy(module->image, image, module->size);
    *loaded = module;
    return SUCCESS;
}
int cuModuleUnload(Module *module) { free(module->image); free(module); return SUCCESS; }
int cuModuleGetFunction(void **function, Module *module, const char *name) {
    if (!memmem(module->image, module->size, name, strlen(name) + 1)) return NOT_FOUND;
    Kernel *kernel = calloc(1, sizeof *kernel); /* never freed: CuPy does not say when it needs it no more */
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    for (Kernel *known = of_host; known && !kernel->run; known = known->next)
        if (!strcmp(known->name, name)) kernel->run = known->run;
    *function = kernel;
    return SUCCESS;
}
int cuModuleGetGlobal_v2(void **pointer, size_t *size, Module *module, const char *name) { return NOT_FOUND; }

typedef struct { void *data; long size; } Array; /* CuPy's CArray begins so */

static void answer(const char *kernel, void **arguments) {
    if (!strncmp(kernel, "cupy_all", 8) || !strncmp(kernel, "cupy_cub_all", 12)) *(char *)((Array *)arguments[1])->data = 1;
    if (!strncmp(kernel, "cupy_sum", 8)) *(double *)((Array *)arguments[1])->data = 1.0; /* gradsync sums in float64 only */
    if (!strncmp(kernel, "cupy_add__float", 15) && strstr(kernel, "_float64_float64") && ((Array *)arguments[2])->size == 1)
        *(double *)((Array *)arguments[2])->data = 1.0;
    if (!strncmp(kernel, "cupy_copy__", 11) && ((Array *)arguments[0])->size == 1) {
        void *from = ((Array *)arguments[0])->data, *to = ((Array *)arguments[1])->data;
        if (!strcmp(kernel + 11, "bool_bool")) *(char *)to = *(char *)from;
        if (!strcmp(kernel + 11, "bool_float64")) *(double *)to = *(char *)from;
        if (!strcmp(kernel + 11, "float64_float64")) *(double *)to = *(double *)from;
    }
    if (!strcmp(kernel, "cupy_concatenate_same_size")) { /* of many results, all True */
        Array *to = arguments[2];
        memset(to->data, 1, to->size);
    }
}

int cuLaunchKernel(const Kernel *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    if (kernel->run) kernel->run(gx, bx, arguments);
    else answer(kernel->name, arguments);
    return SUCCESS;
}

/* Events and contexts are those of runtime.c; redirect.py tells where. */
static int (*event_query)(void *event), (*has_context)(int device);
void host_runtime(void *query, void *context) { event_query = query; has_context = context; }
int cuEventQuery(void *event) { return event_query(event); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = has_context(device);
    return SUCCESS;
}

int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the driver for tests"; return SUCCESS; }
int cuDevicePrimaryCtxRelease(int device) { return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return SUCCESS; }
int cuCtxSetCurrent(void *context) { return SUCCESS; }
int cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
int cuStreamGetCtx(void *stream, void **context) { *context = (void *)1; return SUCCESS; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 32; return SUCCESS; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int threads, size_t shared) {
    *count = 2;
    return SUCCESS;
}
int cuOccupancyMaxPotentialBlockSize(int *blocks, int *threads, void *function, void *to_shared, size_t shared, int limit) {
    *blocks = 264;
    *threads = 256;
    return SUCCESS;
}
