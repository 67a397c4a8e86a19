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

int kvn_lower_nbytes(size_t num_pairs, size_t num_segments, size_t *nbytes)
{
    size_t count, total;
    if (__builtin_mul_overflow(num_pairs, num_segments, &count) ||
        __builtin_mul_overflow(count, NUM_COLUMNS * sizeof(uint64_t), &total) ||
        total > PTRDIFF_MAX - NUM_COLUMNS * CACHE_LINE)
        return -1;
    *nbytes = NUM_COLUMNS * kvn_column_stride(count);
    return 0;
}

/* The checks: a pass that only says whether all is well, then a search where it is not. */

static int refuse(kvn_refusal *refusal, kvn_argument argument, size_t index, uint64_t value,
                  uint64_t most)
{
    *refusal = (kvn_refusal){argument, index, value, most};
    return -1;
}

static int check_src_or_dst(const kvn_recipe *recipe, kvn_argument offsets_argument,
                            kvn_argument bases_argument, kvn_refusal *refusal)
{
    const int is_src = offsets_argument == KVN_ARG_SRC_OFFSETS;
    const uint64_t *offsets = is_src ? recipe->src_offsets : recipe->dst_offsets;
    const uint64_t *bases = is_src ? recipe->src_bases : recipe->dst_bases;
    uint64_t end = 0, top = 0, wrapped = 0;
    for (size_t i = 0; i < recipe->num_segments; i++) {
        const uint64_t sum = offsets[i] + recipe->nbytes[i];
        wrapped |= sum < offsets[i];
        end = sum > end ? sum : end;
    }
    for (size_t i = 0; i < recipe->num_pairs; i++)
        top = bases[i] > top ? bases[i] : top;
    if (!wrapped && top <= UINT64_MAX - end)
        return 0;

    for (size_t i = 0; i < recipe->num_segments; i++)
        if (offsets[i] > UINT64_MAX - recipe->nbytes[i])
            return refuse(refusal, offsets_argument, i, offsets[i],
                          UINT64_MAX - recipe->nbytes[i]);
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
        const uint64_t nbytes = recipe->nbytes[i];
        if (nbytes == 0 || nbytes > most - sum)
            return refuse(refusal, KVN_ARG_NBYTES, i, nbytes, most - sum);
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

/* Plain stores on purpose: non-temporal ones took 1.05 to 1.3 times as long for a million descriptors
 * (which the executor is about to read), and the compiler vectorises these. */
void kvn_lower(const kvn_recipe *recipe, uint64_t *out)
{
    const size_t n = recipe->num_segments;
    const size_t stride = kvn_column_stride(recipe->num_pairs * n) / sizeof *out;
    for (size_t pair = 0; pair < recipe->num_pairs; pair++) {
        uint64_t *to = out + pair * n;
        add_base(to, recipe->dst_bases[pair], recipe->dst_offsets, n);
        add_base(to + stride, recipe->src_bases[pair], recipe->src_offsets, n);
        add_base(to + 2 * stride, 0, recipe->nbytes, n);
    }
}

void *kvn_descriptors_alloc(size_t nbytes)
{
    if (nbytes < HUGE_PAGE)
        return aligned_alloc(CACHE_LINE, round_up(nbytes ? nbytes : 1, CACHE_LINE));
    const size_t length = round_up(nbytes, HUGE_PAGE);
    void *buffer = aligned_alloc(HUGE_PAGE, length);
    if (buffer)
        madvise(buffer, length, MADV_HUGEPAGE); /* fewer faults; where refused, small pages do */
    return buffer;
}

void kvn_descriptors_free(void *buffer)
{
    free(buffer);
}
