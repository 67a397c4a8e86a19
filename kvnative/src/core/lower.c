/* Lowers segments and tensor addresses to one array of descriptors, after checking all sums. */
#include "core/lower.h"

#include <stdlib.h>
#include <sys/mman.h>

#define CACHE_LINE ((size_t)64)
#define HUGE_PAGE ((size_t)2 << 20)

#define NUM_COLUMNS 3

static size_t round_up(size_t nbytes, size_t alignment)
{
    return (nbytes + alignment - 1) & ~(alignment - 1);
}

size_t kvn_column_stride(size_t count)
{
    return round_up(count * sizeof(uint64_t), CACHE_LINE);
}

/* A check makes one pass over all values, and searches for the bad one only if that pass fails. */

static int refuse(kvn_refusal *refusal, kvn_argument argument, size_t index, uint64_t value,
                  uint64_t most)
{
    *refusal = (kvn_refusal){argument, index, value, most};
    return -1;
}

int kvn_lower_count(kvn_recipe *recipe, size_t *nbytes, kvn_refusal *refusal)
{
    size_t runs = recipe->num_segments, count, total;
    if (recipe->num_repeats > 0) {
        runs = 0;
        for (size_t i = 0; i < recipe->num_segments; i++) {
            size_t times = 1;
            for (size_t level = 0; level < recipe->num_repeats; level++) {
                const uint64_t repeats = recipe->repeats[level].counts[i];
                const kvn_argument argument = (kvn_argument)(KVN_ARG_COUNTS + level);
                if (repeats == 0 || __builtin_mul_overflow(times, repeats, &times))
                    return refuse(refusal, argument, i, repeats, PTRDIFF_MAX);
            }
            if (__builtin_add_overflow(runs, times, &runs))
                return refuse(refusal, KVN_ARG_COUNTS, i, recipe->repeats[0].counts[i], PTRDIFF_MAX);
        }
    }
    recipe->num_runs = runs;
    if (__builtin_mul_overflow(recipe->num_pairs, runs, &count) ||
        __builtin_mul_overflow(count, NUM_COLUMNS * sizeof(uint64_t), &total) ||
        total > PTRDIFF_MAX - NUM_COLUMNS * CACHE_LINE)
        return refuse(refusal, KVN_ARG_NBYTES, recipe->num_segments, runs, PTRDIFF_MAX);
    *nbytes = NUM_COLUMNS * kvn_column_stride(count);
    return 0;
}

/* Bytes from the start to the end of a segment, at src or dst; 0 if that overflows. */
static uint64_t span(const kvn_recipe *recipe, size_t segment, int is_src)
{
    uint64_t nbytes = recipe->nbytes[segment], more;
    for (size_t level = 0; level < recipe->num_repeats; level++) {
        const kvn_repeat *repeat = &recipe->repeats[level];
        const uint64_t stride = is_src ? repeat->src_stride : repeat->dst_stride;
        if (__builtin_mul_overflow(repeat->counts[segment] - 1, stride, &more) ||
            __builtin_add_overflow(nbytes, more, &nbytes))
            return 0;
    }
    return nbytes;
}

static int check_src_or_dst(const kvn_recipe *recipe, kvn_argument offsets_argument,
                            kvn_argument bases_argument, kvn_refusal *refusal)
{
    const int is_src = offsets_argument == KVN_ARG_SRC_OFFSETS;
    const uint64_t *offsets = is_src ? recipe->src_offsets : recipe->dst_offsets;
    const uint64_t *bases = is_src ? recipe->src_bases : recipe->dst_bases;
    uint64_t end = 0, top = 0, wrapped = 0;
    if (recipe->num_repeats == 0) {
        for (size_t i = 0; i < recipe->num_segments; i++) {
            const uint64_t sum = offsets[i] + recipe->nbytes[i];
            wrapped |= sum < offsets[i];
            end = sum > end ? sum : end;
        }
    } else {
        for (size_t i = 0; i < recipe->num_segments; i++) {
            const uint64_t nbytes = span(recipe, i, is_src);
            const uint64_t sum = offsets[i] + nbytes;
            wrapped |= nbytes == 0 || sum < offsets[i];
            end = sum > end ? sum : end;
        }
    }
    for (size_t i = 0; i < recipe->num_pairs; i++)
        top = bases[i] > top ? bases[i] : top;
    if (!wrapped && top <= UINT64_MAX - end)
        return 0;

    for (size_t i = 0; i < recipe->num_segments; i++) {
        const uint64_t nbytes = span(recipe, i, is_src);
        if (nbytes == 0)
            return refuse(refusal, KVN_ARG_COUNTS, i, recipe->repeats[0].counts[i], 0);
        if (offsets[i] > UINT64_MAX - nbytes)
            return refuse(refusal, offsets_argument, i, offsets[i], UINT64_MAX - nbytes);
    }
    size_t i = 0;
    while (bases[i] <= UINT64_MAX - end)
        i++;
    return refuse(refusal, bases_argument, i, bases[i], UINT64_MAX - end);
}

/* The bytes of one pair must fit num_pairs times. */
static int check_nbytes(const kvn_recipe *recipe, uint64_t *total, kvn_refusal *refusal)
{
    const uint64_t most = recipe->num_pairs ? UINT64_MAX / recipe->num_pairs : UINT64_MAX;
    uint64_t sum = 0;
    for (size_t i = 0; i < recipe->num_segments; i++) {
        uint64_t nbytes = recipe->nbytes[i];
        for (size_t level = 0; level < recipe->num_repeats; level++)
            if (__builtin_mul_overflow(nbytes, recipe->repeats[level].counts[i], &nbytes))
                return refuse(refusal, KVN_ARG_NBYTES, i, recipe->nbytes[i], most - sum);
        if (nbytes == 0 || nbytes > most - sum)
            return refuse(refusal, KVN_ARG_NBYTES, i, recipe->nbytes[i], most - sum);
        sum += nbytes;
    }
    *total = sum * recipe->num_pairs;
    return 0;
}

int kvn_lower_check(const kvn_recipe *recipe, uint64_t *total_nbytes, kvn_refusal *refusal)
{
    if (check_nbytes(recipe, total_nbytes, refusal) != 0)
        return -1;
    if (check_src_or_dst(recipe, KVN_ARG_SRC_OFFSETS, KVN_ARG_SRC_BASES, refusal) != 0)
        return -1;
    return check_src_or_dst(recipe, KVN_ARG_DST_OFFSETS, KVN_ARG_DST_BASES, refusal);
}

/* to[i] = base + column[i] */
static void add_base(uint64_t *restrict to, uint64_t base, const uint64_t *restrict column, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = base + column[i];
}

/* Writes the runs of one pair at base addresses 0: each segment as often as it repeats. */
static void expand(const kvn_recipe *recipe, uint64_t *dst, uint64_t *src, uint64_t *nbytes)
{
    const kvn_repeat none = {NULL, 0, 0};
    const kvn_repeat *inner = &recipe->repeats[recipe->num_repeats - 1];
    const kvn_repeat *outer = recipe->num_repeats == 2 ? &recipe->repeats[0] : &none;
    for (size_t i = 0; i < recipe->num_segments; i++) {
        const uint64_t outer_times = outer->counts ? outer->counts[i] : 1;
        const uint64_t inner_times = inner->counts[i];
        uint64_t from = recipe->src_offsets[i], to = recipe->dst_offsets[i];
        for (uint64_t o = 0; o < outer_times; o++) {
            for (uint64_t n = 0; n < inner_times; n++) {
                dst[n] = to + n * inner->dst_stride;
                src[n] = from + n * inner->src_stride;
                nbytes[n] = recipe->nbytes[i];
            }
            dst += inner_times;
            src += inner_times;
            nbytes += inner_times;
            from += outer->src_stride;
            to += outer->dst_stride;
        }
    }
}

/* Plain stores, which the compiler vectorises: non-temporal ones took 1.05 to 1.3 times as long for a million
 * descriptors, which the executor is about to read. */
void kvn_lower(const kvn_recipe *recipe, uint64_t *out)
{
    const size_t n = recipe->num_runs;
    const size_t stride = kvn_column_stride(recipe->num_pairs * n) / sizeof *out;
    const uint64_t *dst = recipe->dst_offsets, *src = recipe->src_offsets, *nbytes = recipe->nbytes;
    size_t pairs = recipe->num_pairs;
    if (recipe->num_repeats > 0 && pairs > 0) {
        /* All pairs are made from the offsets, which are kept in the place of the last pair. */
        uint64_t *last = out + (pairs - 1) * n;
        expand(recipe, last, last + stride, last + 2 * stride);
        dst = last;
        src = last + stride;
        nbytes = last + 2 * stride;
        pairs--;
    }
    for (size_t pair = 0; pair < pairs; pair++) {
        uint64_t *to = out + pair * n;
        add_base(to, recipe->dst_bases[pair], dst, n);
        add_base(to + stride, recipe->src_bases[pair], src, n);
        add_base(to + 2 * stride, 0, nbytes, n);
    }
    if (pairs < recipe->num_pairs) {
        uint64_t *last = out + pairs * n;
        for (size_t i = 0; i < n; i++) {
            last[i] += recipe->dst_bases[pairs];
            last[stride + i] += recipe->src_bases[pairs];
        }
    }
}

void *kvn_descriptors_alloc(size_t nbytes)
{
    if (nbytes < HUGE_PAGE)
        return aligned_alloc(CACHE_LINE, round_up(nbytes ? nbytes : 1, CACHE_LINE));
    const size_t length = round_up(nbytes, HUGE_PAGE);
    void *buffer = aligned_alloc(HUGE_PAGE, length);
    if (buffer)
        madvise(buffer, length, MADV_HUGEPAGE); /* saves faults; if the kernel refuses, small pages remain */
    return buffer;
}

void kvn_descriptors_free(void *buffer)
{
    free(buffer);
}
