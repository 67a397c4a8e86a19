#include "host/copy.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static const char *const STRATEGY_NAMES[KVN_NUM_STRATEGIES] = {"auto", "memcpy", "non-temporal",
                                                               "movsb"};

const char *kvn_strategy_name(kvn_strategy strategy)
{
    return (unsigned)strategy < KVN_NUM_STRATEGIES ? STRATEGY_NAMES[strategy] : NULL;
}

static void copy_plain(void *dst, const void *src, size_t nbytes) { memcpy(dst, src, nbytes); }

#if defined(__x86_64__)

/* Bytes up to the next multiple of a cache line: non-temporal stores must be aligned. */
static size_t to_line(const void *dst) { return -(uintptr_t)dst & 63; }

/* The three differ in width alone; a macro, because each needs its own target attribute. */
#define DEFINE_NON_TEMPORAL(name, isa, vector, load, store)                                        \
    __attribute__((target(isa))) static void name(void *dst, const void *src, size_t nbytes)       \
    {                                                                                              \
        enum { STEP = 4 * sizeof(vector) };                                                        \
        size_t head = to_line(dst);                                                                \
        char *to = dst;                                                                            \
        const char *from = src;                                                                    \
                                                                                                   \
        if (nbytes < head + STEP) {                                                                \
            memcpy(dst, src, nbytes);                                                              \
            return;                                                                                \
        }                                                                                          \
        memcpy(to, from, head);                                                                    \
        to += head, from += head, nbytes -= head;                                                  \
        for (; nbytes >= STEP; to += STEP, from += STEP, nbytes -= STEP) {                         \
            vector a = load((const void *)from);                                                   \
            vector b = load((const void *)(from + sizeof(vector)));                                \
            vector c = load((const void *)(from + 2 * sizeof(vector)));                            \
            vector d = load((const void *)(from + 3 * sizeof(vector)));                            \
            store((void *)to, a);                                                                  \
            store((void *)(to + sizeof(vector)), b);                                               \
            store((void *)(to + 2 * sizeof(vector)), c);                                           \
            store((void *)(to + 3 * sizeof(vector)), d);                                           \
        }                                                                                          \
        memcpy(to, from, nbytes);                                                                  \
    }

DEFINE_NON_TEMPORAL(non_temporal_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)
DEFINE_NON_TEMPORAL(non_temporal_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
DEFINE_NON_TEMPORAL(non_temporal_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)

static void copy_movsb(void *dst, const void *src, size_t nbytes)
{
    __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(nbytes) : : "memory");
}

static kvn_copy best_non_temporal(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return non_temporal_avx512;
    if (__builtin_cpu_supports("avx2"))
        return non_temporal_avx2;
    return non_temporal_sse2;
}

void kvn_copy_fence(void) { _mm_sfence(); }

#else

static void copy_movsb(void *dst, const void *src, size_t nbytes) { memcpy(dst, src, nbytes); }
static kvn_copy best_non_temporal(void) { return copy_plain; }
void kvn_copy_fence(void) {}

#endif

kvn_copy kvn_copy_function(kvn_strategy strategy)
{
    switch (strategy) {
    case KVN_COPY_NON_TEMPORAL:
        return best_non_temporal();
    case KVN_COPY_MOVSB:
        return copy_movsb;
    default:
        return copy_plain;
    }
}
