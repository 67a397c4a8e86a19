#include "core/extents.h"

#include <stdlib.h>

size_t kvn_first_below(const uint64_t *values, size_t count, uint64_t least)
{
    size_t i = 0;
    while (i < count && values[i] >= least)
        i++;
    return i;
}

static int compare(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void sort(uint64_t *starts, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (starts[i - 1] > starts[i]) {
            qsort(starts, count, sizeof *starts, compare);
            return;
        }
}

int kvn_extents_clash(uint64_t *written, size_t num_written, uint64_t written_nbytes,
                      uint64_t *read, size_t num_read, uint64_t read_nbytes)
{
    sort(written, num_written);
    sort(read, num_read);
    /* Of sorted starts the differences cannot wrap, as ends could. */
    for (size_t i = 1; i < num_written; i++)
        if (written[i] - written[i - 1] < written_nbytes)
            return 1;
    /* Both lists in one ascending sequence: an extent that ends before the next start of the other
     * list ends before all that follow. */
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
