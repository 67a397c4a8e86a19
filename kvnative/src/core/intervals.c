/* Finds which of several sorted ranges of addresses holds a piece of memory. */
#include "core/intervals.h"

#include <stdbool.h>
#include <stdlib.h>

#include "core/sort.h"

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
    while (low < high) { /* the first that begins after the address */
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

/* ---- extents ---- */

size_t kvn_first_below(const uint64_t *values, size_t count, uint64_t least)
{
    size_t i = 0;
    while (i < count && values[i] >= least)
        i++;
    return i;
}

static uint64_t start_at(const void *item, const void *unused)
{
    (void)unused;
    return *(const uint64_t *)item;
}

int kvn_extents_clash(uint64_t *written, size_t num_written, uint64_t written_nbytes,
                      uint64_t *read, size_t num_read, uint64_t read_nbytes, uint64_t *scratch)
{
    written = kvn_sort(written, scratch, num_written, sizeof *written, start_at, NULL);
    read = kvn_sort(read, scratch + num_written, num_read, sizeof *read, start_at, NULL);
    /* Differences of sorted starts cannot wrap; ends could. */
    for (size_t i = 1; i < num_written; i++)
        if (written[i] - written[i - 1] < written_nbytes)
            return 1;
    /* Merge both lists: an extent that ends before the next start of the other list ends before all later ones. */
    size_t w = 0, r = 0;
    while (w < num_written && r < num_read) {
        if (written[w] <= read[r]) {
            if (read[r] - written[w] < written_nbytes)
                return 1;
            w++;
        } else {
            if (written[w] - read[r] < read_nbytes)
                return 1;
            r++;
        }
    }
    return 0;
}
