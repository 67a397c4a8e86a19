#include "host/copy.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static void copy_plain(void *dst, const void *src, size_t nbytes) { memcpy(dst, src, nbytes); }
static bool always(void) { return true; }

#if defined(__x86_64__) || defined(__aarch64__)
/* Bytes up to the next multiple of `line`, a power of two. */
static size_t up_to_line(const void *dst, size_t line) { return -(uintptr_t)dst & (line - 1); }
#endif

#if defined(__x86_64__)

/* The three differ in width alone; a macro, because each needs its own target attribute. Stores of
 * this kind must be aligned. */
#define DEFINE_NON_TEMPORAL(name, isa, vector, load, store)                                        \
    __attribute__((target(isa))) static void name(void *dst, const void *src, size_t nbytes)       \
    {                                                                                              \
        enum { STEP = 4 * sizeof(vector) };                                                        \
        size_t head = up_to_line(dst, 64);                                                         \
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

DEFINE_NON_TEMPORAL(nt_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)
DEFINE_NON_TEMPORAL(nt_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
DEFINE_NON_TEMPORAL(nt_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)

/* Whether the processor has what a bit of leaf 7 says, and the system keeps the registers of `kept`. Not
 * __builtin_cpu_supports: what zig's own runtime says to it is always no. */
static bool has(unsigned bit, uint32_t kept)
{
    unsigned a, b, c, d;
    uint32_t low, high;

    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return false;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & kept) == kept && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit);
}

static bool has_avx2(void) { return has(bit_AVX2, 0x06); }

static bool has_avx512(void) { return has(bit_AVX512F, 0xe6); }

static void copy_movsb(void *dst, const void *src, size_t nbytes)
{
    __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(nbytes) : : "memory");
}

void kvn_copy_fence(void) { _mm_sfence(); }

#elif defined(__aarch64__)

/* 64 bytes a step. The pair loads and stores hint that the data is not read again soon. */
static void nt_ldnp(void *dst, const void *src, size_t nbytes)
{
    char *to = dst;
    const char *from = src;
    size_t head = up_to_line(dst, 64);

    if (nbytes < head + 64) {
        memcpy(dst, src, nbytes);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64)
        __asm__ volatile("ldnp q0, q1, [%1]\n\t"
                         "ldnp q2, q3, [%1, #32]\n\t"
                         "stnp q0, q1, [%0]\n\t"
                         "stnp q2, q3, [%0, #32]"
                         :
                         : "r"(to), "r"(from)
                         : "v0", "v1", "v2", "v3", "memory");
    memcpy(to, from, nbytes);
}

/* Bytes that DC ZVA clears; 0 where the system forbids it. */
static size_t zva_nbytes(void)
{
    uint64_t dczid;

    __asm__("mrs %0, dczid_el0" : "=r"(dczid));
    return dczid & 16 ? 0 : (size_t)4 << (dczid & 15);
}

/* Each line of the destination is cleared before it is written, which need not read it first. */
static void copy_dc_zva(void *dst, const void *src, size_t nbytes)
{
    size_t line = zva_nbytes(), head = up_to_line(dst, line);
    char *to = dst;
    const char *from = src;

    if (nbytes < head + line) {
        memcpy(dst, src, nbytes);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= line; nbytes -= line) {
        __asm__ volatile("dc zva, %0" : : "r"(to) : "memory");
        for (size_t i = 0; i < line; i += 16, to += 16, from += 16)
            vst1q_u8((uint8_t *)to, vld1q_u8((const uint8_t *)from));
    }
    memcpy(to, from, nbytes);
}

/* In smaller lines than a vector register nothing is gained. */
static bool has_dc_zva(void) { return zva_nbytes() >= 16; }

/* STNP and DC ZVA are ordered by a later release as other stores are. (LDNP alone may pass a load that its
 * address depends on; addresses here come from before.) */
void kvn_copy_fence(void) {}

#else

void kvn_copy_fence(void) {}

#endif

typedef struct row {
    const char *name;
    const char *needs;
    kvn_copy copy; /* NULL: of another architecture */
    bool (*is_here)(void);
} row;

static const row ROWS[KVN_NUM_STRATEGIES] = {
    [KVN_COPY_MEMCPY] = {"memcpy", "nothing", copy_plain, always},
#if defined(__x86_64__)
    [KVN_COPY_MOVSB] = {"movsb", "an x86-64 processor", copy_movsb, always},
    [KVN_COPY_NT_SSE2] = {"nt-sse2", "an x86-64 processor", nt_sse2, always},
    [KVN_COPY_NT_AVX2] = {"nt-avx2", "AVX2", nt_avx2, has_avx2},
    [KVN_COPY_NT_AVX512] = {"nt-avx512", "AVX-512", nt_avx512, has_avx512},
#else
    [KVN_COPY_MOVSB] = {"movsb", "an x86-64 processor", NULL, NULL},
    [KVN_COPY_NT_SSE2] = {"nt-sse2", "an x86-64 processor", NULL, NULL},
    [KVN_COPY_NT_AVX2] = {"nt-avx2", "an x86-64 processor", NULL, NULL},
    [KVN_COPY_NT_AVX512] = {"nt-avx512", "an x86-64 processor", NULL, NULL},
#endif
#if defined(__aarch64__)
    [KVN_COPY_NT_LDNP] = {"nt-ldnp", "an aarch64 processor", nt_ldnp, always},
    [KVN_COPY_DC_ZVA] = {"dc-zva", "DC ZVA, which this system forbids", copy_dc_zva, has_dc_zva},
#else
    [KVN_COPY_NT_LDNP] = {"nt-ldnp", "an aarch64 processor", NULL, NULL},
    [KVN_COPY_DC_ZVA] = {"dc-zva", "an aarch64 processor", NULL, NULL},
#endif
};

const char *kvn_strategy_name(unsigned strategy)
{
    return strategy < KVN_NUM_STRATEGIES ? ROWS[strategy].name : NULL;
}

const char *kvn_strategy_needs(unsigned strategy) { return ROWS[strategy].needs; }

kvn_copy kvn_copy_function(unsigned strategy)
{
    const row *it = &ROWS[strategy];

    return it->copy && it->is_here() ? it->copy : NULL;
}

kvn_strategy kvn_widest_non_temporal(void)
{
    static const kvn_strategy WIDEST_FIRST[] = {KVN_COPY_NT_AVX512, KVN_COPY_NT_AVX2,
                                                KVN_COPY_NT_SSE2};

    for (unsigned i = 0; i < sizeof WIDEST_FIRST / sizeof *WIDEST_FIRST; i++)
        if (kvn_copy_function(WIDEST_FIRST[i]))
            return WIDEST_FIRST[i];
    return KVN_COPY_MEMCPY;
}
