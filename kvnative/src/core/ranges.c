/* Orders and merges copies between address ranges, and locates ranges among pieces of memory. */
#include "core/ranges.h"

#include <stdbool.h>

#include "core/sort.h"

size_t kvn_ranges_scratch(size_t count) { return 2 * count; }

static uint64_t key_at(const void *index, const void *keys)
{
    return ((const uint64_t *)keys)[*(const uint64_t *)index];
}

/* Numbers the ranges from 0, in the first half of the scratch memory. */
static uint64_t *numbered(uint64_t *scratch, size_t count)
{
    for (size_t i = 0; i < count; i++)
        scratch[i] = i;
    return scratch;
}

/* Sorts the numbers by the keys of their ranges, into either half. */
static uint64_t *sort_by(const uint64_t *keys, uint64_t *order, uint64_t *scratch, size_t count)
{
    uint64_t *const other = order == scratch ? scratch + count : scratch;

    return kvn_sort(order, other, count, sizeof *order, key_at, keys);
}

size_t kvn_ranges_arrange(const kvn_ranges *from, size_t count, kvn_ranges *to, uint64_t *scratch)
{
    uint64_t *order;
    size_t last = 0;

    if (count == 0)
        return 0;
    order = sort_by(from->src, numbered(scratch, count), scratch, count);
    if (from->groups != NULL)
        order = sort_by(from->groups, order, scratch, count);
    for (size_t i = 0; i < count; i++) {
        const uint64_t it = order[i];
        const uint64_t group = from->groups == NULL ? 0 : from->groups[it];

        if (i > 0 && to->src[last] + to->nbytes[last] == from->src[it] &&
            to->dst[last] + to->nbytes[last] == from->dst[it] &&
            (from->groups == NULL || to->groups[last] == group)) {
            to->nbytes[last] += from->nbytes[it];
            continue;
        }
        last += i > 0;
        to->src[last] = from->src[it];
        to->dst[last] = from->dst[it];
        to->nbytes[last] = from->nbytes[it];
        if (from->groups != NULL)
            to->groups[last] = group;
    }
    return last + 1;
}

size_t kvn_ranges_overlap(const uint64_t *starts, const uint64_t *nbytes, size_t count,
                          uint64_t *scratch, size_t *other)
{
    const uint64_t *const order = sort_by(starts, numbered(scratch, count), scratch, count);

    /* Of sorted starts the differences cannot wrap, as ends could. */
    for (size_t i = 1; i < count; i++)
        if (starts[order[i]] - starts[order[i - 1]] < nbytes[order[i - 1]]) {
            *other = (size_t)order[i];
            return (size_t)order[i - 1];
        }
    return KVN_NO_OVERLAP;
}

size_t kvn_ranges_locate(const uint64_t *firsts, const uint64_t *lasts, size_t num_pieces,
                         const uint64_t *starts, const uint64_t *nbytes, size_t count,
                         uint64_t *found, int *passes)
{
    size_t here = 0;
    int beyond = 0;

    for (size_t i = 0; i < count; i++) {
        const uint64_t start = starts[i];

        /* Most ranges lie where the one before did. */
        if (here >= num_pieces || start < firsts[here] || start > lasts[here]) {
            size_t low = 0, high = num_pieces;

            while (low < high) { /* the first that begins behind the range */
                const size_t middle = low + (high - low) / 2;
                if (firsts[middle] <= start)
                    low = middle + 1;
                else
                    high = middle;
            }
            if (low == 0 || start > lasts[low - 1]) {
                *passes = beyond;
                return i;
            }
            here = low - 1;
        }
        found[i] = here;
        beyond |= nbytes[i] - 1 > lasts[here] - start;
    }
    *passes = beyond;
    return count;
}
