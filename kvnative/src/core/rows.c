#include "core/rows.h"

#include <string.h>

/* A pair of rows in one number, of which the order is that of its source, then its destination. */
typedef uint64_t pair;

static pair pair_of(int64_t src, int64_t dst) { return (uint64_t)src << 32 | (uint64_t)dst; }
static uint64_t src_of(pair it) { return it >> 32; }
static uint64_t dst_of(pair it) { return it & UINT32_MAX; }

enum { INSERTED = 24, DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS };

static size_t words_of(uint64_t bits) { return (size_t)(bits / 64 + 1); }

/* Two arrays of pairs, and a bit for each row of the destination. */
size_t kvn_rows_scratch(const kvn_rows *rows, size_t count)
{
    return (2 * count + words_of(rows->dst_count)) * sizeof(uint64_t);
}

static void sort_few(pair *pairs, size_t count)
{
    for (size_t i = 1; i < count; i++) {
        const pair it = pairs[i];
        size_t at = i;
        for (; at > 0 && pairs[at - 1] > it; at--)
            pairs[at] = pairs[at - 1];
        pairs[at] = it;
    }
}

/* By digits, the lowest first; those that no pair has anything in are passed over. */
static pair *sort_many(pair *pairs, pair *other, size_t count, pair used)
{
    for (unsigned shift = 0; shift < 64; shift += DIGIT_BITS) {
        size_t starts[DIGITS] = {0}, begin = 0;
        if ((used >> shift & (DIGITS - 1)) == 0)
            continue;
        for (size_t i = 0; i < count; i++)
            starts[pairs[i] >> shift & (DIGITS - 1)]++;
        for (size_t digit = 0; digit < DIGITS; digit++) {
            const size_t with = starts[digit];
            starts[digit] = begin;
            begin += with;
        }
        for (size_t i = 0; i < count; i++)
            other[starts[pairs[i] >> shift & (DIGITS - 1)]++] = pairs[i];
        pair *const sorted = other;
        other = pairs;
        pairs = sorted;
    }
    return pairs;
}

/* Makes the pairs; false where a row is out of range, or is written twice. */
static bool pair_up(const kvn_rows *rows, const int64_t *src, const int64_t *dst, size_t count,
                    uint64_t *seen, pair *pairs, pair *used, bool *sorted)
{
    pair last = 0;
    *used = 0;
    *sorted = true;
    if (count > 1)
        memset(seen, 0, words_of(rows->dst_count) * sizeof *seen);
    for (size_t i = 0; i < count; i++) {
        /* What is negative is beyond any count. */
        const uint64_t to = (uint64_t)dst[i];
        if ((uint64_t)src[i] >= rows->src_count || to >= rows->dst_count)
            return false;
        if (count > 1) {
            const uint64_t bit = UINT64_C(1) << to % 64;
            if (seen[to / 64] & bit)
                return false;
            seen[to / 64] |= bit;
        }
        pairs[i] = pair_of(src[i], dst[i]);
        *used |= pairs[i];
        *sorted &= i == 0 || last < pairs[i];
        last = pairs[i];
    }
    return true;
}

/* Whether a row is both read and written, if both sides are one cache. */
static bool clashes(const kvn_rows *rows, const int64_t *src, const int64_t *dst, size_t count,
                    const uint64_t *seen)
{
    if (!rows->is_one || count == 1)
        return rows->is_one && src[0] == dst[0];
    for (size_t i = 0; i < count; i++)
        if ((uint64_t)src[i] < rows->dst_count && seen[src[i] / 64] >> src[i] % 64 & 1)
            return true;
    return false;
}

size_t kvn_rows_merge(const kvn_rows *rows, const int64_t *src, const int64_t *dst, size_t count,
                      void *scratch, uint64_t *src_offsets, uint64_t *dst_offsets, uint64_t *nbytes)
{
    const uint64_t stride = rows->stride;
    pair *pairs = scratch, used;
    size_t segments = 0;
    bool sorted;

    uint64_t *const seen = (uint64_t *)(pairs + 2 * count);
    if (!pair_up(rows, src, dst, count, seen, pairs, &used, &sorted) ||
        clashes(rows, src, dst, count, seen))
        return 0;
    if (!sorted && count <= INSERTED)
        sort_few(pairs, count);
    else if (!sorted)
        pairs = sort_many(pairs, pairs + count, count, used);
    for (size_t i = 0; i < count; i++) {
        /* A segment goes on where both sides do. */
        if (i > 0 && pairs[i] == pairs[i - 1] + pair_of(1, 1)) {
            nbytes[segments - 1] += stride;
            continue;
        }
        src_offsets[segments] = src_of(pairs[i]) * stride;
        dst_offsets[segments] = dst_of(pairs[i]) * stride;
        nbytes[segments++] = stride;
    }
    return segments;
}
