/* Copies host memory by memcpy, or by stores that write past the caches if this processor has them. */
#include "host/copy.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

void kvn_copy_plain(void *dst, const void *src, size_t nbytes) { memcpy(dst, src, nbytes); }

#if defined(__x86_64__)

#define LINE 64 /* of a cache */

#define SHORT 1024 /* bytes that memcpy copies faster */

/* Non-temporal stores must be aligned. */
__attribute__((target("avx2"))) static void copy_past_caches(void *dst, const void *src, size_t nbytes)
{
    enum { WIDTH = sizeof(__m256i), STEP = 4 * WIDTH };
    size_t head = -(uintptr_t)dst & (LINE - 1);
    char *to = dst;
    const char *from = src;

    if (nbytes < SHORT) {
        memcpy(dst, src, nbytes);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= STEP; to += STEP, from += STEP, nbytes -= STEP) {
        __m256i a = _mm256_loadu_si256((const void *)from);
        __m256i b = _mm256_loadu_si256((const void *)(from + WIDTH));
        __m256i c = _mm256_loadu_si256((const void *)(from + 2 * WIDTH));
        __m256i d = _mm256_loadu_si256((const void *)(from + 3 * WIDTH));
        _mm256_stream_si256((void *)to, a);
        _mm256_stream_si256((void *)(to + WIDTH), b);
        _mm256_stream_si256((void *)(to + 2 * WIDTH), c);
        _mm256_stream_si256((void *)(to + 3 * WIDTH), d);
    }
    memcpy(to, from, nbytes);
}

/* Checks processor and system for AVX2. __builtin_cpu_supports is always false in zig's runtime. */
static bool has_avx2(void)
{
    const uint32_t kept = 0x06;
    unsigned a, b, c, d;
    uint32_t low, high;

    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return false;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & kept) == kept && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

kvn_copy kvn_copy_past_caches(void) { return has_avx2() ? copy_past_caches : NULL; }

void kvn_copy_fence(void) { _mm_sfence(); }

#else

kvn_copy kvn_copy_past_caches(void) { return NULL; }

void kvn_copy_fence(void) {}

#endif
