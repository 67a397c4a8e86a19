#include "core/intervals.h"

#include <stdbool.h>
#include <stdlib.h>

static int by_place(const void *left, const void *right)
{
    const kvn_interval *a = left, *b = right;

    if (a->first != b->first)
        return a->first < b->first ? -1 : 1;
    return a->last < b->last ? -1 : a->last > b->last;
}

void kvn_intervals_sort(kvn_interval *items, size_t count)
{
    qsort(items, count, sizeof *items, by_place);
    for (size_t i = 0; i < count; i++)
        items[i].reach =
            i > 0 && items[i - 1].reach > items[i].last ? items[i - 1].reach : items[i].last;
}

static bool holds(const kvn_interval *it, uint64_t first, uint64_t last)
{
    return it->first <= first && last <= it->last;
}

size_t kvn_intervals_find(const kvn_interval *items, size_t count, uint64_t address, uint64_t nbytes,
                          size_t hint)
{
    const uint64_t last = address + (nbytes - 1);
    size_t low = 0, high = count;

    if (last < address)
        return KVN_NO_INTERVAL;
    if (hint < count && holds(&items[hint], address, last))
        return hint;
    while (low < high) { /* the first that begins behind the address */
        const size_t middle = low + (high - low) / 2;
        if (items[middle].first <= address)
            low = middle + 1;
        else
            high = middle;
    }
    for (size_t i = low; i > 0 && items[i - 1].reach >= last; i--)
        if (holds(&items[i - 1], address, last))
            return i - 1;
    return KVN_NO_INTERVAL;
}
