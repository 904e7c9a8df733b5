/* The inner loops over shared memory: what plain.py says in NumPy, and with the same results, bit for bit (but for
   products of complex numbers, which NumPy fuses, and norms).

   plain.py is the reference: what a part of the memory consists of, what a round is, and which slot is free when. Here
   are only the loops. They run without the GIL. A wait polls, yields its core for some microseconds, then sleeps on a
   futex, and comes back to Python again and again: it calls check(), which raises an error to end the wait, and returns
   after how many seconds it wants to be called again.

   On every way out, all buffers and references are given back. setup.py says how to compile: nothing may reorder the
   arithmetic, or fuse it. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LAYOUT_VERSION 4

typedef _Atomic uint64_t Word;
typedef Py_ssize_t Size;

/* -- The memory ---------------------------------------------------------------------------------------------------- */

enum { LINE_BYTES = 64, SLOTS = 2, MAX_RANKS = 1 << 16 };
/* The words of a rank's line; those of its second line, of which ABORTED belongs to all, in the part of rank 0. */
enum { ARRIVED = 0, DIGEST = 1, LAYOUT = 3, ABORTED = 8, SLEEPERS = 9, FACTOR = 10 };
/* The results of a meeting. FAILED: a Python error is set. */
enum { FAILED = -1, SAME = 0, LAYOUTS_DIFFER = 1, DIGESTS_DIFFER = 2 };

typedef struct {
    PyObject_HEAD
    Py_buffer mapping;
    int rank, size;
    Size part_bytes, slots_begin, slot_bytes;
    uint64_t rounds;
    bool is_crowded;       /* there are more ranks than cores */
    int without_yields;    /* so many waits do not yield; see await_rank */
    atomic_bool is_busy;   /* a call uses the mapping, perhaps without the GIL */
    struct Values *values; /* of each rank, for the running call */
} Memory;

/* The values of one rank, of which the next block is reduced, and the factor that multiplies them. */
struct Values {
    const char *at;
    double factor;
};

static inline char *part(Memory *m, int rank) { return (char *)m->mapping.buf + rank * m->part_bytes; }

static inline Word *word(Memory *m, int rank, int number) { return (Word *)part(m, rank) + number; }

/* The slot of a rank for the next round. */
static inline char *slot(Memory *m, int rank, uint64_t round) {
    return part(m, rank) + m->slots_begin + (Size)(round % SLOTS) * m->slot_bytes;
}

/* -- A call -------------------------------------------------------------------------------------------------------- */

/* What one call of Python has, and gives back at its end. While `thread` is set, the GIL is released. */
typedef struct {
    Memory *m;
    PyObject *check, *phase;
    PyThreadState *thread;
    uint64_t digest, layout;
    double factor;
    int rounds; /* of this call, so far */
} Call;

static void leave_python(Call *call) { call->thread = PyEval_SaveThread(); }

static void enter_python(Call *call) {
    PyEval_RestoreThread(call->thread);
    call->thread = NULL;
}

static int wrong(const char *what) {
    PyErr_SetString(PyExc_ValueError, what);
    return FAILED;
}

/* Tells the tracer which phase has ended. */
static int end_phase(Call *call, const char *name) {
    if (call->phase == Py_None) return 0;
    enter_python(call);
    PyObject *done = PyObject_CallFunction(call->phase, "s", name);
    Py_XDECREF(done);
    leave_python(call);
    return done == NULL ? FAILED : 0;
}

enum { FIRST_CHECK_NS = 200 * 1000, LONGEST_PAUSE_NS = 50 * 1000 * 1000 };

/* Runs the handlers of signals that came, and calls check(). *pause_ns is when this is due again: soon enough for a
   signal, whatever check() says. */
static int check(Call *call, int64_t *pause_ns) {
    enter_python(call);
    PyObject *result = PyErr_CheckSignals() < 0 ? NULL : PyObject_CallFunctionObjArgs(call->check, NULL);
    const double ns = result == NULL ? 0.0 : PyFloat_AsDouble(result) * 1e9;
    const bool failed = PyErr_Occurred() != NULL;
    Py_XDECREF(result);
    leave_python(call);
    *pause_ns = ns > 0.0 ? (ns < LONGEST_PAUSE_NS ? (int64_t)ns : LONGEST_PAUSE_NS) : 0;
    return failed ? FAILED : 0;
}

/* -- Meeting ------------------------------------------------------------------------------------------------------- */

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The half of a word that counts: a futex has 32 bits. */
static inline uint32_t *futex_of(Word *arrived) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return (uint32_t *)arrived;
#else
    return (uint32_t *)arrived + 1;
#endif
}

/* Arrives at a round, which publishes everything that this rank wrote before. */
static void arrive(Memory *m, uint64_t number) {
    Word *arrived = word(m, m->rank, ARRIVED);
    atomic_store(arrived, number);
    if (atomic_load(word(m, m->rank, SLEEPERS)) != 0)
        syscall(SYS_futex, futex_of(arrived), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Sleeps until a rank arrives at its next round, for a time at most. */
static void sleep_until_arrival(Memory *m, int rank, uint64_t seen, int64_t ns) {
    Word *arrived = word(m, rank, ARRIVED), *sleepers = word(m, rank, SLEEPERS);
    struct timespec limit = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    atomic_fetch_add(sleepers, 1); /* before the kernel compares `seen`: whoever arrives later sees it, and wakes us */
    syscall(SYS_futex, futex_of(arrived), FUTEX_WAIT, (uint32_t)seen, &limit, NULL, 0);
    atomic_fetch_sub(sleepers, 1);
}

enum { POLLS = 64, POLLS_IF_CROWDED = 4, YIELD_NS = 100 * 1000 };
enum { LONG_YIELD_NS = 1000 * 1000, WAITS_AFTER_A_LONG_YIELD = 2000 };

/* Waits until a rank has arrived at a round: polls, then yields its core, then sleeps.

   The other may wait for this very core: where ranks share cores, or if another program is busy on the rest. Four ranks
   on two cores meet in 3 us so, and in 40 with sleeps alone. Two ranks on two cores, with another program on one, took
   three times as long when they spun for 50 us in place of the yields; with nothing beside them they are as fast.
   But a process that computes keeps a core that was yielded for a slice of 1 to 4 ms. Where ranks share cores, a yield
   that took so long says that there is one, and then many waits only sleep. With a busy process on each core, and only
   200 such waits, a call took 1.2 to 1.6 times as long as with sleeps alone; with 2,000 it takes 0.6 to 1.3 times as
   long. */
static int await_rank(Call *call, int rank, uint64_t number) {
    Memory *m = call->m;
    Word *arrived = word(m, rank, ARRIVED);
    for (int polls = m->is_crowded ? POLLS_IF_CROWDED : POLLS; polls > 0; polls--) {
        if (atomic_load_explicit(arrived, memory_order_acquire) >= number) return 0;
        relax();
    }
    int64_t began = now_ns(), check_at = began + FIRST_CHECK_NS, now = began;
    if (m->without_yields > 0) m->without_yields--;
    for (;;) {
        uint64_t seen = atomic_load_explicit(arrived, memory_order_acquire);
        if (seen >= number) return 0;
        if (m->without_yields == 0 && now - began < YIELD_NS) {
            sched_yield();
            if (m->is_crowded && now_ns() - now > LONG_YIELD_NS) m->without_yields = WAITS_AFTER_A_LONG_YIELD;
        } else if (now < check_at) {
            sleep_until_arrival(m, rank, seen, check_at - now);
        } else {
            int64_t pause_ns;
            if (check(call, &pause_ns) < 0) return FAILED;
            check_at = now_ns() + pause_ns;
        }
        now = now_ns();
    }
}

/* Ranks in step never wait. So some rounds of a long call check too: they move some 16 MB, in a few milliseconds. */
enum { ROUNDS_BETWEEN_CHECKS = 32 };

/* Meets all ranks at the next round, and compares what they brought; see `meet` in plain.py. */
static int meet(Call *call) {
    Memory *m = call->m;
    uint64_t number = m->rounds + 1;
    int odd = (int)(number & 1), result = SAME;
    int64_t ignored;
    uint64_t factor;
    memcpy(&factor, &call->factor, sizeof factor);
    atomic_store_explicit(word(m, m->rank, DIGEST + odd), call->digest, memory_order_relaxed);
    atomic_store_explicit(word(m, m->rank, LAYOUT + odd), call->layout, memory_order_relaxed);
    Word *factors = word(m, m->rank, FACTOR + odd); /* mostly 1, and then nobody has to load the line again */
    if (atomic_load_explicit(factors, memory_order_relaxed) != factor)
        atomic_store_explicit(factors, factor, memory_order_relaxed);
    arrive(m, number);
    if (++call->rounds % ROUNDS_BETWEEN_CHECKS == 0 && check(call, &ignored) < 0) return FAILED;
    for (int step = 1; step < m->size; step++)
        if (await_rank(call, (m->rank + step) % m->size, number) < 0) return FAILED;
    if (atomic_load_explicit(word(m, 0, ABORTED), memory_order_acquire)) /* a rank may have arrived and then aborted */
        if (check(call, &ignored) < 0) return FAILED;
    m->rounds = number;
    for (int rank = 0; rank < m->size; rank++) {
        if (atomic_load_explicit(word(m, rank, DIGEST + odd), memory_order_relaxed) != call->digest)
            return DIGESTS_DIFFER;
        if (atomic_load_explicit(word(m, rank, LAYOUT + odd), memory_order_relaxed) != call->layout)
            result = LAYOUTS_DIFFER;
    }
    return result;
}

/* The factor that a rank brought to the round that was completed last. */
static double factor_of(Memory *m, int rank) {
    uint64_t bits = atomic_load_explicit(word(m, rank, FACTOR + (int)(m->rounds & 1)), memory_order_relaxed);
    double factor;
    memcpy(&factor, &bits, sizeof factor);
    return factor;
}

/* -- Lists of arrays ----------------------------------------------------------------------------------------------- */

typedef struct {
    char *at;
    Size bytes;
} Span;

/* The buffers of a Python list of arrays. */
typedef struct {
    Size count, bytes;
    Span *spans;
    Py_buffer *views;
} List;

static void release_list(List *list) {
    for (Size number = 0; number < list->count; number++) PyBuffer_Release(&list->views[number]);
    PyMem_Free(list->views);
    PyMem_Free(list->spans);
    *list = (List){0};
}

static int take_list(List *list, PyObject *arrays, bool writable) {
    *list = (List){0};
    Size count = PySequence_Size(arrays);
    if (count < 0) return FAILED;
    list->views = PyMem_Calloc((size_t)count + 1, sizeof *list->views);
    list->spans = PyMem_Calloc((size_t)count + 1, sizeof *list->spans);
    if (list->views == NULL || list->spans == NULL) {
        release_list(list);
        PyErr_NoMemory();
        return FAILED;
    }
    for (; list->count < count; list->count++) {
        PyObject *array = PySequence_GetItem(arrays, list->count);
        Py_buffer *view = &list->views[list->count];
        int failed = array == NULL || PyObject_GetBuffer(array, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0;
        Py_XDECREF(array);
        if (failed) {
            release_list(list);
            return FAILED;
        }
        if (view->len > PY_SSIZE_T_MAX - list->bytes) { /* the same array, again and again */
            PyBuffer_Release(view);
            release_list(list);
            PyErr_SetString(PyExc_OverflowError, "the list is larger than memory can be");
            return FAILED;
        }
        list->spans[list->count] = (Span){view->buf, view->len};
        list->bytes += view->len;
    }
    return 0;
}

/* A place in a list: the byte `at` of the array `number`. */
typedef struct {
    const List *list;
    Size number, at;
} Place;

/* Returns the longest run of bytes from a place on, at most `bytes`, and steps over it. There is at least one byte. */
static inline Size run_from(Place *place, char **from, Size bytes) {
    while (place->at == place->list->spans[place->number].bytes) {
        place->number++;
        place->at = 0;
    }
    const Span *span = &place->list->spans[place->number];
    Size left = span->bytes - place->at;
    if (left > bytes) left = bytes;
    *from = span->at + place->at;
    place->at += left;
    return left;
}

static void pack(Place *place, char *packed, Size bytes) {
    while (bytes > 0) {
        char *from;
        Size run = run_from(place, &from, bytes);
        memcpy(packed, from, (size_t)run);
        packed += run;
        bytes -= run;
    }
}

static void unpack(Place *place, const char *packed, Size bytes) {
    while (bytes > 0) {
        char *to;
        Size run = run_from(place, &to, bytes);
        memcpy(to, packed, (size_t)run);
        packed += run;
        bytes -= run;
    }
}

static void skip(Place *place, Size bytes) {
    while (bytes > 0) {
        char *ignored;
        bytes -= run_from(place, &ignored, bytes);
    }
}

/* -- Arithmetic ---------------------------------------------------------------------------------------------------- */

enum { SUM, MEAN, PROD, MIN, MAX };

/* A block is reduced in the cache: the first rank's values are taken up, those of the others joined, in rank order. */
enum { BLOCK_BYTES = 8192 };

/* How values of one dtype are reduced. `wide` is the size of an accumulated value. */
typedef struct {
    Size item, wide;
    void (*take)(void *total, const void *values, Size n, double factor);
    void (*join[5])(void *total, const void *first, const void *values, Size n, double factor);
    void (*give)(void *values, const void *total, Size n, int mean_of);
    double (*squares)(const void *values, Size bytes);
} Dtype;

/* The sum of the squares of all parts, in float64. Compilers do not reorder sums: the lanes let them use vectors. */
enum { LANES = 8 };
#define SQUARES(NAME, T, WIDEN)                                                                                      \
    static double squares_##NAME(const void *values, Size bytes) {                                                   \
        const T *v = values;                                                                                         \
        const Size n = bytes / (Size)sizeof(T), whole = n - n % LANES;                                               \
        double lanes[LANES] = {0}, sum = 0;                                                                          \
        for (Size i = 0; i < whole; i += LANES)                                                                      \
            for (int lane = 0; lane < LANES; lane++) {                                                               \
                const double value = WIDEN(v[i + lane]);                                                             \
                lanes[lane] += value * value;                                                                        \
            }                                                                                                        \
        for (Size i = whole; i < n; i++) {                                                                           \
            const double value = WIDEN(v[i]);                                                                        \
            sum += value * value;                                                                                    \
        }                                                                                                            \
        for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];                                                 \
        return sum;                                                                                                  \
    }

#define PLAIN_TAKE(NAME, T)                                                                                          \
    static void take_##NAME(void *total, const void *values, Size n, double factor) {                                \
        (void)factor;                                                                                                \
        memcpy(total, values, (size_t)n * sizeof(T));                                                                \
    }
#define PLAIN_GIVE(NAME, T)                                                                                          \
    static void give_##NAME(void *values, const void *total, Size n, int mean_of) {                                  \
        (void)mean_of;                                                                                               \
        if (values != total) memcpy(values, total, (size_t)n * sizeof(T));                                           \
    }
/* `total` may be `first` or `values`, and a result its total: each element is read before it is written. */
#define EACH_BY_ITSELF _Pragma("GCC ivdep")
#define JOIN(NAME, OP, T, VALUE)                                                                                     \
    static void OP##_##NAME(void *total, const void *first, const void *values, Size n, double factor) {             \
        (void)factor;                                                                                                \
        T *t = total;                                                                                                \
        const T *f = first, *v = values;                                                                             \
        EACH_BY_ITSELF for (Size i = 0; i < n; i++) {                                                                \
            const T a = f[i], b = v[i];                                                                              \
            t[i] = (T)(VALUE);                                                                                       \
        }                                                                                                            \
    }
/* Integers wrap around as NumPy's do; the arithmetic is unsigned, because a signed overflow has no meaning in C. */
#define INTEGER(NAME, T, U)                                                                                          \
    PLAIN_TAKE(NAME, T)                                                                                              \
    PLAIN_GIVE(NAME, T)                                                                                              \
    JOIN(NAME, sum, T, (U)a + (U)b)                                                                                  \
    JOIN(NAME, prod, T, (U)a * (U)b)                                                                                 \
    JOIN(NAME, min, T, a < b ? a : b)                                                                                \
    JOIN(NAME, max, T, a > b ? a : b)                                                                                \
    SQUARES(NAME, T, (double))
#define ROW(NAME, T, SUM_, PROD_, MIN_, MAX_) \
    { sizeof(T), sizeof(T), take_##NAME, {SUM_, SUM_, PROD_, MIN_, MAX_}, give_##NAME, squares_##NAME }
#define INTEGER_ROW(NAME, T) ROW(NAME, T, sum_##NAME, prod_##NAME, min_##NAME, max_##NAME)

INTEGER(int8, int8_t, unsigned)
INTEGER(int16, int16_t, unsigned)
INTEGER(int32, int32_t, uint32_t)
INTEGER(int64, int64_t, uint64_t)
INTEGER(uint8, uint8_t, unsigned)
INTEGER(uint16, uint16_t, unsigned)
INTEGER(uint32, uint32_t, uint32_t)
INTEGER(uint64, uint64_t, uint64_t)

/* A sum of products by a factor, where one is given: each product is rounded, and then added. A mean of a power of two
   is a product, as in reduction.py. */
#define FLOAT_SUM(NAME, T)                                                                                           \
    static void take_##NAME(void *total, const void *values, Size n, double factor) {                                \
        T *restrict t = total;                                                                                       \
        const T *restrict v = values;                                                                                \
        const T f = (T)factor;                                                                                       \
        if (f == (T)1)                                                                                               \
            memcpy(t, v, (size_t)n * sizeof(T));                                                                     \
        else                                                                                                         \
            for (Size i = 0; i < n; i++) t[i] = v[i] * f;                                                            \
    }                                                                                                                \
    static void sum_##NAME(void *total, const void *first, const void *values, Size n, double factor) {              \
        T *t = total;                                                                                                \
        const T *a = first, *v = values;                                                                             \
        const T f = (T)factor;                                                                                       \
        if (f == (T)1)                                                                                               \
            EACH_BY_ITSELF for (Size i = 0; i < n; i++) t[i] = a[i] + v[i];                                          \
        else                                                                                                         \
            EACH_BY_ITSELF for (Size i = 0; i < n; i++) t[i] = a[i] + v[i] * f;                                      \
    }                                                                                                                \
    static void give_##NAME(void *values, const void *total, Size n, int mean_of) {                                  \
        T *v = values;                                                                                               \
        const T *t = total;                                                                                          \
        const T count = (T)mean_of, inverse = (T)1 / count;                                                          \
        if (mean_of == 1) {                                                                                          \
            if (values != total) memcpy(v, t, (size_t)n * sizeof(T));                                                \
        } else if ((mean_of & (mean_of - 1)) == 0)                                                                   \
            EACH_BY_ITSELF for (Size i = 0; i < n; i++) v[i] = t[i] * inverse;                                       \
        else                                                                                                         \
            EACH_BY_ITSELF for (Size i = 0; i < n; i++) v[i] = t[i] / count;                                         \
    }
/* NaN wins, as in NumPy. */
#define FLOAT(NAME, T)                                                                                               \
    FLOAT_SUM(NAME, T)                                                                                               \
    JOIN(NAME, prod, T, a *b)                                                                                        \
    JOIN(NAME, min, T, (a < b) | (a != a) ? a : b)                                                                   \
    JOIN(NAME, max, T, (a > b) | (a != a) ? a : b)                                                                   \
    SQUARES(NAME, T, (double))

FLOAT(float32, float)
FLOAT(float64, double)

/* Complex numbers are added as their parts, which the rows of float32 and float64 do. */
#define COMPLEX_PRODUCT(NAME, T)                                                                                     \
    static void prod_##NAME(void *total, const void *first, const void *values, Size n, double factor) {             \
        (void)factor;                                                                                                \
        T *t = total;                                                                                                \
        const T *f = first, *v = values;                                                                             \
        for (Size i = 0; i < 2 * n; i += 2) {                                                                        \
            const T re = f[i] * v[i] - f[i + 1] * v[i + 1], im = f[i] * v[i + 1] + f[i + 1] * v[i];                  \
            t[i] = re;                                                                                               \
            t[i + 1] = im;                                                                                           \
        }                                                                                                            \
    }                                                                                                                \
    PLAIN_TAKE(NAME, T[2])                                                                                           \
    PLAIN_GIVE(NAME, T[2])

COMPLEX_PRODUCT(complex64, float)
COMPLEX_PRODUCT(complex128, double)

/* Half precision is accumulated in float32, and rounded once. */
static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float widen_bfloat16(uint16_t half) { return float_of_bits((uint32_t)half << 16); }

static inline uint16_t narrow_bfloat16(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint16_t nan = (uint16_t)(bits >> 16 & 0x8000u) | 0x7fc0u;
    const uint16_t rounded = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    return value != value ? nan : rounded;
}

static inline float widen_float16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    const uint32_t normal = (rest << 13) + (112u << 23), special = rest << 13 | 0x7f800000u;
    const uint32_t small = bits_of_float((float)rest * 0x1p-24f); /* subnormal, or zero */
    return float_of_bits(sign | (rest >= 0x7c00u ? special : rest >= 0x0400u ? normal : small));
}

static inline uint16_t narrow_float16(float value) {
    const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    /* The constants shift the last bit of a half to the last bit of a float, so that the addition rounds. */
    const uint32_t small = bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (rest + 0x0fffu + (rest >> 13 & 1u) - (112u << 23)) >> 13;
    const uint32_t nan = 0x7e00u | (rest >> 13 & 0x03ffu);
    return (uint16_t)(sign | (rest > 0x7f800000u    ? nan
                              : rest >= 0x477ff000u ? 0x7c00u
                              : rest < 0x38800000u  ? small
                                                    : normal));
}

#define HALF(NAME)                                                                                                   \
    static void take_##NAME(void *total, const void *values, Size n, double factor) {                                \
        float *restrict t = total;                                                                                   \
        const uint16_t *restrict v = values;                                                                         \
        const float f = (float)factor;                                                                               \
        for (Size i = 0; i < n; i++) t[i] = widen_##NAME(v[i]);                                                      \
        if (f != 1.0f)                                                                                               \
            for (Size i = 0; i < n; i++) t[i] *= f;                                                                  \
    }                                                                                                                \
    static void sum_##NAME(void *total, const void *first, const void *values, Size n, double factor) {              \
        (void)first; /* the total */                                                                                 \
        float *restrict t = total;                                                                                   \
        const uint16_t *restrict v = values;                                                                         \
        const float f = (float)factor;                                                                               \
        for (Size i = 0; i < n; i++) t[i] = t[i] + widen_##NAME(v[i]) * f;                                           \
    }                                                                                                                \
    static void prod_##NAME(void *total, const void *first, const void *values, Size n, double factor) {             \
        (void)first; /* the total */                                                                                 \
        (void)factor;                                                                                                \
        float *restrict t = total;                                                                                   \
        const uint16_t *restrict v = values;                                                                         \
        for (Size i = 0; i < n; i++) t[i] = t[i] * widen_##NAME(v[i]);                                               \
    }                                                                                                                \
    static void min_##NAME(void *total, const void *first, const void *values, Size n, double factor) {              \
        (void)first; /* the total */                                                                                 \
        (void)factor;                                                                                                \
        float *restrict t = total;                                                                                   \
        const uint16_t *restrict v = values;                                                                         \
        for (Size i = 0; i < n; i++) {                                                                               \
            const float a = t[i], b = widen_##NAME(v[i]);                                                            \
            t[i] = (a < b) | (a != a) ? a : b;                                                                       \
        }                                                                                                            \
    }                                                                                                                \
    static void max_##NAME(void *total, const void *first, const void *values, Size n, double factor) {              \
        (void)first; /* the total */                                                                                 \
        (void)factor;                                                                                                \
        float *restrict t = total;                                                                                   \
        const uint16_t *restrict v = values;                                                                         \
        for (Size i = 0; i < n; i++) {                                                                               \
            const float a = t[i], b = widen_##NAME(v[i]);                                                            \
            t[i] = (a > b) | (a != a) ? a : b;                                                                       \
        }                                                                                                            \
    }                                                                                                                \
    static void give_##NAME(void *values, const void *total, Size n, int mean_of) {                                  \
        uint16_t *restrict v = values;                                                                               \
        const float *restrict t = total;                                                                             \
        const float count = (float)mean_of, inverse = 1.0f / count;                                                  \
        if ((mean_of & (mean_of - 1)) == 0)                                                                          \
            for (Size i = 0; i < n; i++) v[i] = narrow_##NAME(t[i] * inverse);                                       \
        else                                                                                                         \
            for (Size i = 0; i < n; i++) v[i] = narrow_##NAME(t[i] / count);                                         \
    }                                                                                                                \
    SQUARES(NAME, uint16_t, widen_##NAME)
#define HALF_ROW(NAME)                                                                                               \
    {                                                                                                                \
        2, 4, take_##NAME, {sum_##NAME, sum_##NAME, prod_##NAME, min_##NAME, max_##NAME}, give_##NAME, squares_##NAME \
    }

HALF(float16)
HALF(bfloat16)

/* The rows by the code of a dtype; _DTYPES in kernels.py has the same order. */
enum { FLOAT32 = 8, FLOAT64 = 9, COMPLEX64 = 12, COMPLEX128 = 13 };
static const Dtype DTYPES[] = {
    INTEGER_ROW(int8, int8_t),
    INTEGER_ROW(int16, int16_t),
    INTEGER_ROW(int32, int32_t),
    INTEGER_ROW(int64, int64_t),
    INTEGER_ROW(uint8, uint8_t), /* and bool: the least of two is "and", the greatest "or" */
    INTEGER_ROW(uint16, uint16_t),
    INTEGER_ROW(uint32, uint32_t),
    INTEGER_ROW(uint64, uint64_t),
    INTEGER_ROW(float32, float),
    INTEGER_ROW(float64, double),
    HALF_ROW(float16),
    HALF_ROW(bfloat16),
    {8, 8, take_complex64, {NULL, NULL, prod_complex64, NULL, NULL}, give_complex64, squares_float32},
    {16, 16, take_complex128, {NULL, NULL, prod_complex128, NULL, NULL}, give_complex128, squares_float64},
};
enum { DTYPE_COUNT = sizeof DTYPES / sizeof *DTYPES };

/* How one call reduces. */
typedef struct {
    const Dtype *dtype;
    int op, size, mean_of;
    struct Values *values;
    bool with_squares;
    double squares; /* of the results, if wanted; each is counted by one rank */
} Reduction;

static int begin_reduction(Reduction *reduction, Memory *m, long code, long op, double factor) {
    if (code < 0 || code >= DTYPE_COUNT || op < 0 || op > MAX) return wrong("no such reduction");
    if (factor != 1.0 && (op > MEAN || code < FLOAT32))
        return wrong("a factor needs a sum or mean of floating or complex values");
    if (op <= MEAN && code == COMPLEX64) code = FLOAT32;
    if (op <= MEAN && code == COMPLEX128) code = FLOAT64;
    if (DTYPES[code].join[op] == NULL) return wrong("complex numbers have no order");
    *reduction = (Reduction){&DTYPES[code], (int)op, m->size, op == MEAN ? m->size : 1, m->values, false, 0.0};
    for (int rank = 0; rank < m->size; rank++) m->values[rank].factor = 1.0;
    return 0;
}

/* Reduces the next `bytes` values of all ranks, at most a block, to `out`, where this rank's own values may be. */
static void reduce_block(Reduction *reduction, char *out, Size bytes) {
    _Alignas(64) char wide[2 * BLOCK_BYTES];
    const Dtype *dtype = reduction->dtype;
    struct Values *values = reduction->values;
    const Size n = bytes / dtype->item;
    void *total = wide;
    int rank = 1;
    if (reduction->size > 1 && dtype->wide == dtype->item && values[0].factor == 1.0) { /* two ranks in one pass */
        if (reduction->size == 2) total = out;
        dtype->join[reduction->op](total, values[0].at, values[1].at, n, values[1].factor);
        rank = 2;
    } else {
        dtype->take(total, values[0].at, n, values[0].factor);
    }
    for (; rank < reduction->size; rank++)
        dtype->join[reduction->op](total, total, values[rank].at, n, values[rank].factor);
    dtype->give(out, total, n, reduction->mean_of);
    for (rank = 0; rank < reduction->size; rank++) values[rank].at += bytes;
}

/* Whether values of the user's can be computed with where they are: arrays may begin at any byte. */
static inline bool is_aligned(const Reduction *reduction, const char *values) {
    return (uintptr_t)values % (uintptr_t)reduction->dtype->item == 0;
}

/* -- all_reduce ---------------------------------------------------------------------------------------------------- */

/* Reduces the next block to a place in the targets: there at once if it is one run of memory, else by way of `block`.
   Returns where the results are. */
static const char *reduce_to(Place *place, Reduction *reduction, char *block, Size bytes) {
    const Place before = *place;
    char *target;
    if (run_from(place, &target, bytes) == bytes && is_aligned(reduction, target)) {
        reduce_block(reduction, target, bytes);
        return target;
    }
    *place = before;
    reduce_block(reduction, block, bytes);
    unpack(place, block, bytes);
    return block;
}

static void take_factors(Reduction *reduction, Memory *m) {
    for (int rank = 0; rank < m->size; rank++) reduction->values[rank].factor = factor_of(m, rank);
}

/* Up to this size every rank reduces the whole list after one round; see plain.py. */
enum { SMALL_BYTES = 128 * 1024 };

/* A small list: every rank reduces all of it, from the slots. */
static int all_reduce_small(Call *call, Reduction *reduction, const List *sources, const List *targets) {
    Memory *m = call->m;
    const uint64_t round = m->rounds + 1;
    Place from = {sources, 0, 0}, to = {targets, 0, 0};
    pack(&from, slot(m, m->rank, round), sources->bytes);
    if (end_phase(call, "packing") < 0) return FAILED;
    const int result = meet(call);
    if (result != SAME) return result;
    if (end_phase(call, "waiting") < 0) return FAILED;
    take_factors(reduction, m);
    for (int rank = 0; rank < m->size; rank++) reduction->values[rank].at = slot(m, rank, round);
    for (Size done = 0; done < sources->bytes; done += BLOCK_BYTES) {
        _Alignas(64) char block[BLOCK_BYTES];
        const Size bytes = sources->bytes - done < BLOCK_BYTES ? sources->bytes - done : BLOCK_BYTES;
        const char *results = reduce_to(&to, reduction, block, bytes);
        if (reduction->with_squares && done / BLOCK_BYTES % m->size == m->rank)
            reduction->squares += reduction->dtype->squares(results, bytes);
    }
    return end_phase(call, "reducing");
}

/* The slice [low, high) of a chunk, in bytes, that a rank reduces; no two slices share a cache line. */
static void slice_of(const Memory *m, int rank, Size bytes, Size *low, Size *high) {
    Size begin = (bytes * rank / m->size + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    Size end = (bytes * (rank + 1) / m->size + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    *low = begin < bytes ? begin : bytes;
    *high = end < bytes && rank + 1 < m->size ? end : bytes;
}

/* A large list, in chunks; see _reduce_chunks in plain.py. */
static int all_reduce_large(Call *call, Reduction *reduction, const List *sources, const List *targets) {
    Memory *m = call->m;
    const Size length = m->slot_bytes, total = sources->bytes, chunks = (total + length - 1) / length;
    const uint64_t first = m->rounds + 1;
    Place published = {sources, 0, 0}, own = {sources, 0, 0}, reduced = {targets, 0, 0}, delivered = {targets, 0, 0};
    for (Size k = 0; k < chunks + 2; k++) {
        Size low, high;
        if (k >= 2) { /* the results of the others, from the own slot */
            const Size bytes = total - (k - 2) * length < length ? total - (k - 2) * length : length;
            const char *results = slot(m, m->rank, first + (uint64_t)(k - 2));
            slice_of(m, m->rank, bytes, &low, &high);
            unpack(&delivered, results, low);
            skip(&delivered, high - low);
            unpack(&delivered, results + high, bytes - high);
            if (end_phase(call, "splitting") < 0) return FAILED;
        }
        if (k < chunks) { /* what the others reduce, to the own slot */
            const Size bytes = total - k * length < length ? total - k * length : length;
            char *mine = slot(m, m->rank, first + (uint64_t)k);
            slice_of(m, m->rank, bytes, &low, &high);
            pack(&published, mine, low);
            skip(&published, high - low);
            pack(&published, mine + high, bytes - high);
            if (end_phase(call, "packing") < 0) return FAILED;
        }
        if (k >= 1 && k <= chunks) { /* the own slice, for all */
            const Size bytes = total - (k - 1) * length < length ? total - (k - 1) * length : length;
            const uint64_t round = first + (uint64_t)(k - 1);
            slice_of(m, m->rank, bytes, &low, &high);
            if (k == 1) take_factors(reduction, m);
            skip(&own, low);
            skip(&reduced, low);
            for (Size done = low; done < high; done += BLOCK_BYTES) {
                _Alignas(64) char block[BLOCK_BYTES];
                char *values;
                const Size bytes_here = high - done < BLOCK_BYTES ? high - done : BLOCK_BYTES;
                const Place before = own;
                if (run_from(&own, &values, bytes_here) < bytes_here || !is_aligned(reduction, values)) {
                    own = before;
                    pack(&own, block, bytes_here);
                    values = block;
                }
                for (int rank = 0; rank < m->size; rank++)
                    reduction->values[rank].at = rank == m->rank ? values : slot(m, rank, round) + done;
                const char *results = reduce_to(&reduced, reduction, block, bytes_here);
                if (reduction->with_squares) reduction->squares += reduction->dtype->squares(results, bytes_here);
                for (int rank = 0; rank < m->size; rank++)
                    if (rank != m->rank) memcpy(slot(m, rank, round) + done, results, (size_t)bytes_here);
            }
            skip(&own, bytes - high);
            skip(&reduced, bytes - high);
            if (end_phase(call, "reducing") < 0) return FAILED;
        }
        if (k <= chunks) {
            const int result = meet(call);
            if (result != SAME) return result; /* in the first round, before any target is written */
            if (end_phase(call, "waiting") < 0) return FAILED;
        }
    }
    return SAME;
}

/* -- reduce_scatter, and the moves of bytes ------------------------------------------------------------------------ */

/* How many bytes a rank can publish for each of the others in one slot, in whole cache lines. */
static Size share_of(const Memory *m) {
    return m->slot_bytes / (m->size > 1 ? m->size - 1 : 1) / LINE_BYTES * LINE_BYTES;
}

/* Where, in the slot of `owner`, the share for `reader` begins. */
static Size share_begin(const Memory *m, int owner, int reader, Size share) {
    return (reader - owner - 1 + m->size) % m->size * share;
}

/* The bytes [*low, *high) of a rank's part that the step from `begin` on moves, counted in the whole array. */
static void step_of(const Size *bounds, int rank, Size begin, Size length, Size *low, Size *high) {
    *low = bounds[rank] + begin < bounds[rank + 1] ? bounds[rank] + begin : bounds[rank + 1];
    *high = bounds[rank] + begin + length < bounds[rank + 1] ? bounds[rank] + begin + length : bounds[rank + 1];
}

static Size largest_part(const Size *bounds, int size) {
    Size largest = 0;
    for (int rank = 0; rank < size; rank++)
        if (bounds[rank + 1] - bounds[rank] > largest) largest = bounds[rank + 1] - bounds[rank];
    return largest;
}

static void publish_shares(Memory *m, const char *source, const Size *bounds, Size begin, Size share, char *mine) {
    for (int step = 1; step < m->size; step++) {
        const int peer = (m->rank + step) % m->size;
        Size low, high;
        step_of(bounds, peer, begin, share, &low, &high);
        memcpy(mine + share_begin(m, m->rank, peer, share), source + low, (size_t)(high - low));
    }
}

static int reduce_scatter_bytes(
    Call *call, Reduction *reduction, const char *source, char *target, const Size *bounds) {
    Memory *m = call->m;
    const Size share = share_of(m), largest = largest_part(bounds, m->size);
    Size begin = 0;
    do { /* at least one round, which compares the digests */
        const uint64_t round = m->rounds + 1;
        Size low, high;
        publish_shares(m, source, bounds, begin, share, slot(m, m->rank, round));
        const int result = meet(call);
        if (result != SAME) return result;
        take_factors(reduction, m);
        step_of(bounds, m->rank, begin, share, &low, &high);
        for (int rank = 0; rank < m->size; rank++)
            if (rank != m->rank)
                reduction->values[rank].at = slot(m, rank, round) + share_begin(m, rank, m->rank, share);
        for (Size done = low; done < high; done += BLOCK_BYTES) {
            _Alignas(64) char block[BLOCK_BYTES]; /* the target may be this part of the source */
            const Size bytes = high - done < BLOCK_BYTES ? high - done : BLOCK_BYTES;
            const char *values = source + done;
            if (!is_aligned(reduction, values)) values = memcpy(block, values, (size_t)bytes);
            reduction->values[m->rank].at = values;
            reduce_block(reduction, block, bytes);
            memcpy(target + (done - bounds[m->rank]), block, (size_t)bytes);
        }
        begin += share;
    } while (begin < largest);
    return SAME;
}

static int broadcast_bytes(Call *call, const List *flats, int root) {
    Memory *m = call->m;
    Place place = {flats, 0, 0};
    Size begin = 0;
    do {
        char *values = slot(m, root, m->rounds + 1);
        const Size bytes = flats->bytes - begin < m->slot_bytes ? flats->bytes - begin : m->slot_bytes;
        if (m->rank == root) pack(&place, values, bytes);
        const int result = meet(call);
        if (result != SAME) return result;
        if (m->rank != root) unpack(&place, values, bytes);
        begin += m->slot_bytes;
    } while (begin < flats->bytes);
    return SAME;
}

static int all_gather_bytes(Call *call, const char *source, char *target, const Size *bounds) {
    Memory *m = call->m;
    const Size largest = largest_part(bounds, m->size);
    Size begin = 0;
    do {
        const uint64_t round = m->rounds + 1;
        Size low, high;
        step_of(bounds, m->rank, begin, m->slot_bytes, &low, &high);
        const char *mine = source + (low - bounds[m->rank]);
        memcpy(slot(m, m->rank, round), mine, (size_t)(high - low));
        const int result = meet(call);
        if (result != SAME) return result;
        if (target + low != mine) memcpy(target + low, mine, (size_t)(high - low));
        for (int step = 1; step < m->size; step++) { /* from the next rank on, so that not all read one slot at once */
            const int rank = (m->rank + step) % m->size;
            step_of(bounds, rank, begin, m->slot_bytes, &low, &high);
            memcpy(target + low, slot(m, rank, round), (size_t)(high - low));
        }
        begin += m->slot_bytes;
    } while (begin < largest);
    return SAME;
}

static int all_to_all_bytes(
    Call *call, const char *source, char *target, const Size *sent, const Size *received, Size largest) {
    Memory *m = call->m;
    const Size share = share_of(m);
    Size begin = 0;
    do {
        const uint64_t round = m->rounds + 1;
        Size low, high, from, to;
        publish_shares(m, source, sent, begin, share, slot(m, m->rank, round));
        const int result = meet(call);
        if (result != SAME) return result;
        step_of(received, m->rank, begin, share, &low, &high);
        step_of(sent, m->rank, begin, share, &from, &to);
        if (target + low != source + from) memcpy(target + low, source + from, (size_t)(high - low));
        for (int step = 1; step < m->size; step++) {
            const int rank = (m->rank + step) % m->size;
            step_of(received, rank, begin, share, &low, &high);
            memcpy(target + low, slot(m, rank, round) + share_begin(m, rank, m->rank, share), (size_t)(high - low));
        }
        begin += share;
    } while (begin < largest);
    return SAME;
}

/* -- The functions for Python -------------------------------------------------------------------------------------- */

typedef struct {
    PyTypeObject *memory;
    PyObject *digests_differ, *layouts_differ, *no_phases; /* of Python; see raise_as */
} State;

/* Takes the first and the last argument of each function: a Memory, and a Call of plain.py, which is a tuple. Until
   end_call the memory is this call's: it is not released, and no other thread, and no function that this call calls,
   begins another call. */
static int begin_call(Call *call, PyObject *module, PyObject *memory, PyObject *python_call) {
    const State *state = PyModule_GetState(module);
    const int is_memory = PyObject_IsInstance(memory, (PyObject *)state->memory);
    if (is_memory <= 0) {
        if (is_memory == 0) PyErr_SetString(PyExc_TypeError, "the first argument needs to be a Memory");
        return FAILED;
    }
    if (!PyTuple_Check(python_call) || PyTuple_Size(python_call) != 4) {
        PyErr_SetString(PyExc_TypeError, "the last argument needs to be a Call");
        return FAILED;
    }
    PyObject *phase = PyTuple_GetItem(python_call, 3);
    if (phase == state->no_phases) phase = Py_None;
    *call = (Call){.m = (Memory *)memory, .phase = phase, .check = PyTuple_GetItem(python_call, 2), .factor = 1.0};
    call->digest = PyLong_AsUnsignedLongLong(PyTuple_GetItem(python_call, 0));
    if (PyErr_Occurred()) return FAILED;
    call->layout = PyLong_AsUnsignedLongLong(PyTuple_GetItem(python_call, 1));
    if (PyErr_Occurred()) return FAILED;
    if (atomic_exchange(&call->m->is_busy, true)) {
        PyErr_SetString(PyExc_BufferError, "another call is using this shared memory");
        return FAILED;
    }
    if (call->m->mapping.buf == NULL) {
        atomic_store(&call->m->is_busy, false);
        PyErr_SetString(PyExc_ValueError, "the shared memory has been released");
        return FAILED;
    }
    return 0;
}

/* Gives a result of `meet`, or FAILED, to Python. */
static PyObject *end_call(Call *call, PyObject *module, int result) {
    const State *state = PyModule_GetState(module);
    atomic_store(&call->m->is_busy, false);
    if (result == SAME) Py_RETURN_NONE;
    if (result != FAILED) PyErr_SetNone(result == DIGESTS_DIFFER ? state->digests_differ : state->layouts_differ);
    return NULL;
}

static int needs(Size given, Size wanted, const char *name) {
    if (given == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%s needs %zd arguments, got %zd", name, wanted, given);
    return FAILED;
}

/* Returns the bounds of all ranks' parts in an array of some bytes, counted in bytes; NULL with an error. */
static Size *take_bounds(PyObject *bounds, int size, Size item, Size bytes) {
    const Size count = PySequence_Size(bounds);
    if (count != (Size)size + 1) {
        if (count >= 0) PyErr_SetString(PyExc_ValueError, "there is one bound more than ranks");
        return NULL;
    }
    Size *taken = PyMem_Calloc((size_t)count, sizeof *taken);
    if (taken == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (int rank = 0; rank <= size; rank++) {
        PyObject *given = PySequence_GetItem(bounds, rank);
        const Size bound = given == NULL ? -1 : PyLong_AsSsize_t(given), least = rank == 0 ? 0 : taken[rank - 1];
        Py_XDECREF(given);
        if (!PyErr_Occurred() && (bound < least / item || bound > bytes / item))
            PyErr_SetString(PyExc_ValueError, "the bounds need to ascend, and to lie within the array");
        if (PyErr_Occurred()) {
            PyMem_Free(taken);
            return NULL;
        }
        taken[rank] = bound * item;
    }
    return taken;
}

static Size part_of(const Size *bounds, int rank) { return bounds[rank + 1] - bounds[rank]; }

static PyObject *kernel_meet(PyObject *module, PyObject *const *arguments, Size count) {
    Call call;
    if (needs(count, 2, "meet") < 0 || begin_call(&call, module, arguments[0], arguments[1]) < 0) return NULL;
    leave_python(&call);
    const int result = meet(&call);
    enter_python(&call);
    return end_call(&call, module, result);
}

static int check_pairs(const List *sources, const List *targets) {
    if (sources->count != targets->count) return wrong("there are not as many targets as sources");
    for (Size number = 0; number < sources->count; number++)
        if (sources->spans[number].bytes != targets->spans[number].bytes)
            return wrong("a target has another size than its source");
    return 0;
}

/* all_reduce(memory, sources, targets, dtype, op, factor, with_squares, call) */
static PyObject *kernel_all_reduce(PyObject *module, PyObject *const *arguments, Size count) {
    Call call;
    if (needs(count, 8, "all_reduce") < 0 || begin_call(&call, module, arguments[0], arguments[7]) < 0) return NULL;
    const long code = PyLong_AsLong(arguments[3]), op = PyErr_Occurred() ? -1 : PyLong_AsLong(arguments[4]);
    call.factor = PyErr_Occurred() ? 1.0 : PyFloat_AsDouble(arguments[5]);
    Reduction reduction;
    const bool in_place = arguments[1] == arguments[2];
    List sources = {0}, targets = {0};
    int result = FAILED;
    const int with_squares = PyErr_Occurred() ? FAILED : PyObject_IsTrue(arguments[6]);
    if (with_squares < 0 || begin_reduction(&reduction, call.m, code, op, call.factor) < 0) goto end;
    reduction.with_squares = with_squares;
    if (take_list(&sources, arguments[1], in_place) < 0) goto end;
    if (!in_place && (take_list(&targets, arguments[2], true) < 0 || check_pairs(&sources, &targets) < 0)) goto end;
    if (sources.bytes % DTYPES[code].item != 0) {
        wrong("the arrays have another dtype");
        goto end;
    }
    leave_python(&call);
    if (sources.bytes <= SMALL_BYTES && sources.bytes <= call.m->slot_bytes)
        result = all_reduce_small(&call, &reduction, &sources, in_place ? &sources : &targets);
    else
        result = all_reduce_large(&call, &reduction, &sources, in_place ? &sources : &targets);
    enter_python(&call);
end:
    release_list(&sources);
    release_list(&targets);
    PyObject *ended = end_call(&call, module, result);
    if (ended == NULL || !with_squares) return ended;
    Py_DECREF(ended);
    return PyFloat_FromDouble(reduction.squares);
}

/* Takes a source that is read, and a target that is written to. */
static int take_pair(Py_buffer *source, Py_buffer *target, PyObject *const *arguments) {
    if (PyObject_GetBuffer(arguments[0], source, PyBUF_SIMPLE) < 0) return FAILED;
    return PyObject_GetBuffer(arguments[1], target, PyBUF_WRITABLE);
}

/* reduce_scatter(memory, source, target, bounds, dtype, op, call) */
static PyObject *kernel_reduce_scatter(PyObject *module, PyObject *const *arguments, Size count) {
    Call call;
    if (needs(count, 7, "reduce_scatter") < 0 || begin_call(&call, module, arguments[0], arguments[6]) < 0) return NULL;
    const long code = PyLong_AsLong(arguments[4]), op = PyErr_Occurred() ? -1 : PyLong_AsLong(arguments[5]);
    Reduction reduction;
    Py_buffer source = {0}, target = {0};
    Size *bounds = NULL;
    int result = FAILED;
    if (PyErr_Occurred() || begin_reduction(&reduction, call.m, code, op, 1.0) < 0) goto end;
    if (take_pair(&source, &target, arguments + 1) < 0) goto end;
    bounds = take_bounds(arguments[3], call.m->size, DTYPES[code].item, source.len);
    if (bounds == NULL) goto end;
    if (target.len != part_of(bounds, call.m->rank)) {
        wrong("the target has another size than this rank's part");
        goto end;
    }
    leave_python(&call);
    result = reduce_scatter_bytes(&call, &reduction, source.buf, target.buf, bounds);
    enter_python(&call);
end:
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    PyMem_Free(bounds);
    return end_call(&call, module, result);
}

/* broadcast(memory, flats, root, call) */
static PyObject *kernel_broadcast(PyObject *module, PyObject *const *arguments, Size count) {
    Call call;
    if (needs(count, 4, "broadcast") < 0 || begin_call(&call, module, arguments[0], arguments[3]) < 0) return NULL;
    const long root = PyLong_AsLong(arguments[2]);
    if (!PyErr_Occurred() && (root < 0 || root >= call.m->size)) wrong("no rank has the root's number");
    List flats = {0};
    int result = FAILED;
    if (!PyErr_Occurred() && take_list(&flats, arguments[1], root != call.m->rank) == 0) {
        leave_python(&call);
        result = broadcast_bytes(&call, &flats, (int)root);
        enter_python(&call);
    }
    release_list(&flats);
    return end_call(&call, module, result);
}

/* all_gather(memory, source, target, bounds, call) */
static PyObject *kernel_all_gather(PyObject *module, PyObject *const *arguments, Size count) {
    Call call;
    if (needs(count, 5, "all_gather") < 0 || begin_call(&call, module, arguments[0], arguments[4]) < 0) return NULL;
    Py_buffer source = {0}, target = {0};
    Size *bounds = NULL;
    int result = FAILED;
    if (take_pair(&source, &target, arguments + 1) < 0) goto end;
    bounds = take_bounds(arguments[3], call.m->size, 1, target.len);
    if (bounds == NULL) goto end;
    if (source.len != part_of(bounds, call.m->rank)) {
        wrong("the source has another size than this rank's part");
        goto end;
    }
    leave_python(&call);
    result = all_gather_bytes(&call, source.buf, target.buf, bounds);
    enter_python(&call);
end:
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    PyMem_Free(bounds);
    return end_call(&call, module, result);
}

/* all_to_all(memory, source, target, send_bounds, receive_bounds, largest, call) */
static PyObject *kernel_all_to_all(PyObject *module, PyObject *const *arguments, Size count) {
    Call call;
    if (needs(count, 7, "all_to_all") < 0 || begin_call(&call, module, arguments[0], arguments[6]) < 0) return NULL;
    const int size = call.m->size, rank = call.m->rank;
    Py_buffer source = {0}, target = {0};
    Size *sent = NULL, *received = NULL;
    int result = FAILED;
    const Size largest = PyLong_AsSsize_t(arguments[5]);
    if (PyErr_Occurred() || take_pair(&source, &target, arguments + 1) < 0) goto end;
    if ((sent = take_bounds(arguments[3], size, 1, source.len)) == NULL) goto end;
    if ((received = take_bounds(arguments[4], size, 1, target.len)) == NULL) goto end;
    if (part_of(sent, rank) != part_of(received, rank)) {
        wrong("this rank sends itself another size than it receives");
        goto end;
    }
    if (largest_part(sent, size) > largest || largest_part(received, size) > largest) {
        wrong("a part is larger than the largest");
        goto end;
    }
    leave_python(&call);
    result = all_to_all_bytes(&call, source.buf, target.buf, sent, received, largest);
    enter_python(&call);
end:
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    PyMem_Free(sent);
    PyMem_Free(received);
    return end_call(&call, module, result);
}

/* Orders what Python code writes into the memory, and what it reads there; costs nothing on x86-64. */
static PyObject *kernel_fence(PyObject *module, PyObject *nothing) {
    (void)module;
    (void)nothing;
    atomic_thread_fence(memory_order_acq_rel);
    Py_RETURN_NONE;
}

/* -- The type Memory, and the module ------------------------------------------------------------------------------- */

static int memory_init(Memory *m, PyObject *arguments, PyObject *names) {
    static char *const keys[] = {"mapping",     "rank",       "size",       "part_bytes",
                                 "slots_begin", "slot_bytes", "is_crowded", NULL};
    PyObject *mapping;
    int is_crowded;
    if (m->size != 0) {
        PyErr_SetString(PyExc_TypeError, "a Memory is made once");
        return FAILED;
    }
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "Oiinnnp", (char **)keys, &mapping, &m->rank, &m->size,
                                     &m->part_bytes, &m->slots_begin, &m->slot_bytes, &is_crowded))
        return FAILED;
    const Size part = m->part_bytes, begin = m->slots_begin, slot = m->slot_bytes, ranks = m->size;
    m->is_crowded = is_crowded;
    if (ranks < 1 || ranks > MAX_RANKS || m->rank < 0 || m->rank >= ranks) return wrong("there is no such rank");
    if (part < 0 || begin < 2 * LINE_BYTES || slot < 0 || (part | begin | slot) % LINE_BYTES != 0)
        return wrong("a part, its words and its slots need whole cache lines");
    if (slot / (ranks > 1 ? ranks - 1 : 1) < LINE_BYTES) return wrong("a slot needs a cache line for each other rank");
    Py_buffer taken;
    if (PyObject_GetBuffer(mapping, &taken, PyBUF_WRITABLE) < 0) return FAILED;
    if (begin > part || slot > (part - begin) / SLOTS || part > taken.len / ranks ||
        (uintptr_t)taken.buf % LINE_BYTES != 0) {
        PyBuffer_Release(&taken);
        return wrong("the mapping is too small for these ranks and slots, or does not begin with a cache line");
    }
    m->values = PyMem_Calloc((size_t)ranks, sizeof *m->values);
    if (m->values == NULL) {
        PyBuffer_Release(&taken);
        PyErr_NoMemory();
        return FAILED;
    }
    m->mapping = taken;
    return 0;
}

static void give_mapping_back(Memory *m) {
    PyBuffer_Release(&m->mapping);
    m->mapping.buf = NULL; /* no later call uses it */
}

static PyObject *memory_release(Memory *m, PyObject *nothing) {
    (void)nothing;
    if (atomic_exchange(&m->is_busy, true)) {
        PyErr_SetString(PyExc_BufferError, "a call is using this shared memory");
        return NULL;
    }
    give_mapping_back(m);
    atomic_store(&m->is_busy, false);
    Py_RETURN_NONE;
}

static void memory_dealloc(Memory *m) {
    PyTypeObject *type = Py_TYPE((PyObject *)m);
    give_mapping_back(m);
    PyMem_Free(m->values);
    freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(m);
    Py_DECREF(type);
}

static PyMemberDef memory_members[] = {
    {"rank", T_INT, offsetof(Memory, rank), READONLY, NULL},
    {"size", T_INT, offsetof(Memory, size), READONLY, NULL},
    {"slot_bytes", T_PYSSIZET, offsetof(Memory, slot_bytes), READONLY, NULL},
    {"rounds", T_ULONGLONG, offsetof(Memory, rounds), 0, "How many rounds this rank has completed."},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef memory_methods[] = {
    {"release", (PyCFunction)memory_release, METH_NOARGS, "Gives the buffer back. No later call uses it."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot memory_slots[] = {
    {Py_tp_doc, "The shared memory of a communicator, as one rank sees it."},
    {Py_tp_init, memory_init},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_members, memory_members},
    {Py_tp_methods, memory_methods},
    {0, NULL},
};
static PyType_Spec memory_spec = {
    "gradsync.communicators.shared_memory._kernels.Memory",
    sizeof(Memory),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    memory_slots,
};

/* raise_as(digests_differ, layouts_differ, no_phases): the errors that a meeting raises, and what trace.phases_of gives
   without a trace. */
static PyObject *kernel_raise_as(PyObject *module, PyObject *const *arguments, Size count) {
    State *state = PyModule_GetState(module);
    if (needs(count, 3, "raise_as") < 0) return NULL;
    PyObject **kept[] = {&state->digests_differ, &state->layouts_differ, &state->no_phases};
    for (int number = 0; number < 3; number++) {
        PyObject *before = *kept[number];
        *kept[number] = Py_NewRef(arguments[number]);
        Py_XDECREF(before);
    }
    Py_RETURN_NONE;
}

static int module_exec(PyObject *module) {
    State *state = PyModule_GetState(module);
    state->memory = (PyTypeObject *)PyType_FromModuleAndSpec(module, &memory_spec, NULL);
    if (state->memory == NULL || PyModule_AddType(module, state->memory) < 0) return FAILED;
    state->digests_differ = Py_NewRef(PyExc_RuntimeError); /* until raise_as says what */
    state->layouts_differ = Py_NewRef(PyExc_RuntimeError);
    state->no_phases = Py_NewRef(Py_None);
    return PyModule_AddIntConstant(module, "LAYOUT_VERSION", LAYOUT_VERSION);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    const State *state = PyModule_GetState(module);
    Py_VISIT(state->memory);
    Py_VISIT(state->digests_differ);
    Py_VISIT(state->layouts_differ);
    Py_VISIT(state->no_phases);
    return 0;
}

static int module_clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->memory);
    Py_CLEAR(state->digests_differ);
    Py_CLEAR(state->layouts_differ);
    Py_CLEAR(state->no_phases);
    return 0;
}

static void module_free(void *module) { module_clear(module); }

#define KERNEL(NAME, DOC) {#NAME, (PyCFunction)(void (*)(void))kernel_##NAME, METH_FASTCALL, DOC}
static PyMethodDef module_functions[] = {
    KERNEL(raise_as, "For kernels.py."),
    KERNEL(meet, "See plain.py."),
    KERNEL(all_reduce, "See plain.py."),
    KERNEL(reduce_scatter, "See plain.py."),
    KERNEL(broadcast, "See plain.py."),
    KERNEL(all_gather, "See plain.py."),
    KERNEL(all_to_all, "See plain.py."),
    {"fence", kernel_fence, METH_NOARGS, "See memory.py."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if defined(Py_mod_gil) && !defined(Py_LIMITED_API)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};
static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    "_kernels",
    "The inner loops over shared memory, in C; see plain.py.",
    sizeof(State),
    module_functions,
    module_slots,
    module_traverse,
    module_clear,
    module_free,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&module_definition); }
