#include "core/lower.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define CACHE_LINE ((size_t)64)
#define HUGE_PAGE ((size_t)2 << 20)

/* A third layout is one more row here (and a KVN_MAX_WORDS that holds it); Python finds it by name. */
static const kvn_layout layouts[] = {
    {"columns", "T{Q:dst:Q:src:Q:nbytes:}", KVN_COLUMNS, 3, {KVN_DST, KVN_SRC, KVN_NBYTES}, 0},
    {"hccl", "T{Q:local:Q:remote:Q:count:i:data_type:I:reserved:}", KVN_ROWS, 4,
     {KVN_LOCAL, KVN_REMOTE, KVN_NBYTES, KVN_CONSTANT}, KVN_HCCL_UINT8},
};

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "hccl: data_type is the low half of its word");

const kvn_layout *kvn_layout_at(size_t index)
{
    return index < sizeof layouts / sizeof *layouts ? &layouts[index] : NULL;
}

const kvn_layout *kvn_layout_named(const char *name)
{
    const kvn_layout *layout = NULL;
    for (size_t i = 0; (layout = kvn_layout_at(i)) && strcmp(layout->name, name) != 0; i++)
        ;
    return layout;
}

static size_t round_up(size_t nbytes, size_t alignment)
{
    return (nbytes + alignment - 1) & ~(alignment - 1);
}

size_t kvn_column_stride(size_t count)
{
    return round_up(count * sizeof(uint64_t), CACHE_LINE);
}

int kvn_lower_nbytes(const kvn_layout *layout, size_t num_pairs, size_t num_segments,
                     size_t *nbytes)
{
    size_t count, total;
    if (__builtin_mul_overflow(num_pairs, num_segments, &count) ||
        __builtin_mul_overflow(count, layout->num_words * sizeof(uint64_t), &total) ||
        total > PTRDIFF_MAX - KVN_MAX_WORDS * CACHE_LINE)
        return -1;
    *nbytes = layout->form == KVN_COLUMNS ? layout->num_words * kvn_column_stride(count) : total;
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

/* What fills one word of the rows: base + column[segment], or a constant (no column). */
typedef struct source {
    const uint64_t *column;
    const uint64_t *bases; /* by pair; NULL: `add` for all */
    uint64_t add;
} source;

static source source_of(kvn_word word, const kvn_recipe *recipe, const kvn_layout *layout,
                        kvn_side local)
{
    if (word == KVN_LOCAL)
        word = local == KVN_LOCAL_DST ? KVN_DST : KVN_SRC;
    else if (word == KVN_REMOTE)
        word = local == KVN_LOCAL_DST ? KVN_SRC : KVN_DST;
    switch (word) {
    case KVN_DST:
        return (source){recipe->dst_offsets, recipe->dst_bases, 0};
    case KVN_SRC:
        return (source){recipe->src_offsets, recipe->src_bases, 0};
    case KVN_NBYTES:
        return (source){recipe->nbytes, NULL, 0};
    default:
        return (source){NULL, NULL, layout->constant};
    }
}

/* Plain stores on purpose: streaming ones took 1.05 to 1.3 times as long for a million descriptors
 * (which the executor is about to read), and the compiler vectorises these. */
static void lower_columns(const kvn_recipe *recipe, const source *words, uint32_t num_words,
                          uint64_t *out)
{
    const size_t n = recipe->num_segments;
    const size_t stride = kvn_column_stride(recipe->num_pairs * n) / sizeof *out;
    for (size_t pair = 0; pair < recipe->num_pairs; pair++) {
        for (uint32_t w = 0; w < num_words; w++) {
            const uint64_t *restrict column = words[w].column;
            uint64_t *restrict to = out + w * stride + pair * n;
            const uint64_t base = words[w].bases ? words[w].bases[pair] : words[w].add;
            for (size_t i = 0; i < n; i++)
                to[i] = base + (column ? column[i] : 0);
        }
    }
}

static void lower_rows(const kvn_recipe *recipe, const source *words, uint32_t num_words,
                       uint64_t *out)
{
    static const uint64_t nothing = 0;
    const uint64_t *column[KVN_MAX_WORDS];
    size_t step[KVN_MAX_WORDS];
    uint64_t base[KVN_MAX_WORDS];
    for (uint32_t w = 0; w < num_words; w++) {
        column[w] = words[w].column ? words[w].column : &nothing;
        step[w] = words[w].column != NULL;
    }
    uint64_t *restrict row = out;
    for (size_t pair = 0; pair < recipe->num_pairs; pair++) {
        for (uint32_t w = 0; w < num_words; w++)
            base[w] = words[w].bases ? words[w].bases[pair] : words[w].add;
        for (size_t i = 0; i < recipe->num_segments; i++, row += num_words)
            for (uint32_t w = 0; w < num_words; w++)
                row[w] = base[w] + column[w][i * step[w]];
    }
}

void kvn_lower(const kvn_recipe *recipe, const kvn_layout *layout, kvn_side local, void *out)
{
    source words[KVN_MAX_WORDS];
    for (uint32_t w = 0; w < layout->num_words; w++)
        words[w] = source_of(layout->words[w], recipe, layout, local);
    if (layout->form == KVN_COLUMNS)
        lower_columns(recipe, words, layout->num_words, out);
    else
        lower_rows(recipe, words, layout->num_words, out);
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
