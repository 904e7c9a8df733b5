/* Ranks as threads over one memory, for the sanitizers: `make sanitize`. Python is left out, so that its lock puts no
   order between the threads. All draw the same calls, pause as they like, and look at every result. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <Python.h>

#define PyEval_SaveThread() NULL
#define PyEval_RestoreThread(thread) ((void)(thread))
#define PyErr_CheckSignals() (-1) /* so that check() calls nothing, and asks to be called again at once */
#define PyErr_Occurred() NULL
#include "../../src/gradsync/communicators/shared_memory/_kernels.c"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { RANKS = 3, SLOT = 16384, PART = 4096 + SLOTS * SLOT, LARGEST = 70000, CALLS = 3000 };

static char *mapping;

static unsigned next(unsigned *state) { return (*state = *state * 1103515245u + 12345u) >> 8; }

static void expect(bool is_right, int call, const char *what) {
    if (is_right) return;
    fprintf(stderr, "call %d, %s: wrong\n", call, what);
    exit(1);
}

/* What a rank has at a place; small, so that sums are exact. */
static float value(int rank, int call, int place) { return (float)((rank + 1) * (call % 7) + place % 13); }

static void *run(void *number) {
    const int rank = (int)(intptr_t)number;
    unsigned drawn = 1, own = 77u + (unsigned)rank;
    float *a = malloc(LARGEST * sizeof *a), *b = malloc(RANKS * LARGEST * sizeof *b);
    struct Values values[RANKS];
    Memory memory = {.rank = rank, .size = RANKS, .part_bytes = PART, .slots_begin = 4096, .slot_bytes = SLOT};
    memory.mapping.buf = mapping;
    memory.values = values;
    for (int call = 0; call < CALLS; call++) {
        memory.is_crowded = next(&own) % 2; /* spins or yields, or sleeps at once */
        memory.without_yields = memory.is_crowded && next(&own) % 2 ? 1000 : 0;
        if (next(&own) % 16 == 0) usleep(next(&own) % 300);
        Call its = {.m = &memory, .phase = Py_None, .digest = (uint64_t)call, .layout = 1, .factor = rank + 1};
        const int kind = (int)(next(&drawn) % 6), n = 1 + (int)(next(&drawn) % (next(&drawn) % 2 ? 200 : LARGEST / 2));
        const int bytes = n * (int)sizeof *a, root = call % RANKS;
        for (int i = 0; i < n; i++) a[i] = value(rank, call, i);
        Size bounds[RANKS + 1];
        for (int each = 0; each <= RANKS; each++) bounds[each] = (Size)each * bytes;
        Span spans[] = {{(char *)a, bytes / 8 * 4}, {NULL, 0}, {(char *)a + bytes / 8 * 4, bytes - bytes / 8 * 4}};
        const List list = {.count = 3, .bytes = bytes, .spans = spans};
        Reduction reduction;
        const bool has_begun = begin_reduction(&reduction, &memory, FLOAT32, SUM, 1.0) == 0;
        int result = SAME;
        if (kind == 0) {
            its.digest += (uint64_t)rank;
            expect(has_begun && meet(&its) == DIGESTS_DIFFER, call, "meet");
        } else if (kind == 1) {
            reduction.with_squares = call % 2;
            result = bytes <= SLOT ? all_reduce_small(&its, &reduction, &list, &list)
                                   : all_reduce_large(&its, &reduction, &list, &list);
            for (int i = 0; i < n; i++) {
                float total = 0;
                for (int each = 0; each < RANKS; each++) total += (float)(each + 1) * value(each, call, i);
                expect(a[i] == total, call, "all_reduce");
            }
        } else if (kind == 2) {
            its.factor = 1.0;
            for (int i = 0; i < RANKS * n; i++) b[i] = value(rank, call, i);
            result = reduce_scatter_bytes(&its, &reduction, (char *)b, (char *)a, bounds);
            for (int i = 0; i < n; i++) {
                float total = 0;
                for (int each = 0; each < RANKS; each++) total += value(each, call, rank * n + i);
                expect(a[i] == total, call, "reduce_scatter");
            }
        } else if (kind == 3) {
            result = broadcast_bytes(&its, &list, root);
            for (int i = 0; i < n; i++) expect(a[i] == value(root, call, i), call, "broadcast");
        } else {
            for (int i = 0; kind == 5 && i < RANKS * n; i++) b[i] = value(rank, call, i);
            float *target = kind == 4 ? b : malloc((size_t)(RANKS * bytes));
            result = kind == 4 ? all_gather_bytes(&its, (char *)a, (char *)b, bounds)
                               : all_to_all_bytes(&its, (char *)b, (char *)target, bounds, bounds, bytes);
            for (int i = 0; i < RANKS * n; i++)
                expect(target[i] == value(i / n, call, kind == 4 ? i % n : rank * n + i % n), call, "a move");
            if (target != b) free(target);
        }
        expect(result == SAME, call, "the result");
    }
    free(a);
    free(b);
    return NULL;
}

int main(void) {
    mapping = mmap(NULL, (size_t)RANKS * PART, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_t threads[RANKS];
    for (intptr_t rank = 0; rank < RANKS; rank++) pthread_create(&threads[rank], NULL, run, (void *)rank);
    for (int rank = 0; rank < RANKS; rank++) pthread_join(threads[rank], NULL);
    printf("%d calls on %d ranks: right\n", CALLS, RANKS);
    return 0;
}
