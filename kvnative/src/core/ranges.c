#include "core/ranges.h"

#include <string.h>

#define DIGIT_BITS 8
#define NUM_DIGITS (1 << DIGIT_BITS)

size_t kvn_ranges_scratch(size_t count)
{
    return 3 * count;
}

static int ascends(const uint64_t *keys, const uint64_t *order, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (keys[order[i - 1]] > keys[order[i]])
            return 0;
    return 1;
}

/* Sorts `order` by the keys that it names; equal keys keep their order. By digits, of which those that
 * all keys have in common cost nothing: addresses differ in few. */
static void sort_order(const uint64_t *keys, uint64_t *order, size_t count, uint64_t *other)
{
    uint64_t differing = 0;
    uint64_t *from = order, *to = other;

    if (ascends(keys, order, count))
        return;
    for (size_t i = 1; i < count; i++)
        differing |= keys[i] ^ keys[0];
    for (unsigned shift = 0; shift < 64; shift += DIGIT_BITS) {
        size_t places[NUM_DIGITS] = {0}, next = 0;

        if ((differing >> shift & (NUM_DIGITS - 1)) == 0)
            continue;
        for (size_t i = 0; i < count; i++)
            places[keys[i] >> shift & (NUM_DIGITS - 1)]++;
        for (size_t digit = 0; digit < NUM_DIGITS; digit++) {
            const size_t here = places[digit];
            places[digit] = next;
            next += here;
        }
        for (size_t i = 0; i < count; i++)
            to[places[keys[from[i]] >> shift & (NUM_DIGITS - 1)]++] = from[i];
        uint64_t *const swapped = from;
        from = to;
        to = swapped;
    }
    if (from != order)
        memcpy(order, from, count * sizeof *order);
}

static void number(uint64_t *order, size_t count)
{
    for (size_t i = 0; i < count; i++)
        order[i] = i;
}

size_t kvn_ranges_arrange(const kvn_ranges *from, size_t count, kvn_ranges *to, uint64_t *scratch)
{
    uint64_t *const order = scratch;
    size_t last = 0;

    if (count == 0)
        return 0;
    number(order, count);
    sort_order(from->src, order, count, scratch + count);
    if (from->groups != NULL)
        sort_order(from->groups, order, count, scratch + count);
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
    uint64_t *const order = scratch;

    number(order, count);
    sort_order(starts, order, count, scratch + count);
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
