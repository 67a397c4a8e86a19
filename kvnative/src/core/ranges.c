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

    /* Differences of sorted starts cannot wrap; ends could. */
    for (size_t i = 1; i < count; i++)
        if (starts[order[i]] - starts[order[i - 1]] < nbytes[order[i - 1]]) {
            *other = (size_t)order[i];
            return (size_t)order[i - 1];
        }
    return KVN_NO_OVERLAP;
}

/* Finds the piece that holds a byte; *here is the piece of the previous byte, which is tried first. */
static inline bool find_piece(const uint64_t *firsts, const uint64_t *lasts, size_t num_pieces, uint64_t start,
                              size_t *here)
{
    size_t low = 0, high = num_pieces;

    if (*here < num_pieces && start >= firsts[*here] && start <= lasts[*here])
        return true;
    while (low < high) { /* the first that begins after the byte */
        const size_t middle = low + (high - low) / 2;
        if (firsts[middle] <= start)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0 || start > lasts[low - 1])
        return false;
    *here = low - 1;
    return true;
}

size_t kvn_ranges_locate(const uint64_t *firsts, const uint64_t *lasts, size_t num_pieces,
                         const uint64_t *starts, const uint64_t *nbytes, size_t count,
                         uint64_t *found, int *passes)
{
    size_t here = 0, i;
    int beyond = 0;

    for (i = 0; i < count && find_piece(firsts, lasts, num_pieces, starts[i], &here); i++) {
        found[i] = here;
        beyond |= nbytes[i] - 1 > lasts[here] - starts[i];
    }
    *passes = beyond;
    return i;
}

static inline bool extent_at(const kvn_pieces *pieces, uint64_t start, uint64_t nbytes, size_t *here,
                             uint64_t *extent)
{
    if (!find_piece(pieces->firsts, pieces->lasts, pieces->count, start, here))
        return false;
    *extent = pieces->owners == NULL ? *here : pieces->owners[*here];
    return nbytes - 1 <= pieces->lasts[*here] - start;
}

bool kvn_ranges_pair(const kvn_pieces *own, const kvn_pieces *peer, uint64_t num_peer_extents,
                     const uint64_t *local, const uint64_t *remote, const uint64_t *nbytes, size_t count,
                     uint64_t *pairs, bool *alike)
{
    size_t here = 0, there = 0;
    uint64_t ours = 0, theirs = 0;

    *alike = true;
    for (size_t i = 0; i < count; i++) {
        if (!extent_at(own, local[i], nbytes[i], &here, &ours) ||
            !extent_at(peer, remote[i], nbytes[i], &there, &theirs))
            return false;
        pairs[i] = ours * num_peer_extents + theirs;
        *alike &= pairs[i] == pairs[0];
    }
    return true;
}

size_t kvn_ranges_first_bad(const uint64_t *local, const uint64_t *remote, const uint64_t *nbytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const uint64_t last = nbytes[i] - 1;

        if (nbytes[i] == 0 || local[i] == 0 || remote[i] == 0 || local[i] + last < local[i] ||
            remote[i] + last < remote[i])
            return i;
    }
    return count;
}

enum { ROW = 3 }; /* address, size, device */

size_t kvn_rows_choose(const uint64_t *local, size_t num_local, const uint64_t *local_at,
                       const uint64_t *remote, size_t num_remote, const uint64_t *remote_at, size_t count,
                       uint64_t *here, uint64_t *there, uint64_t *nbytes, uint64_t *total)
{
    uint64_t sum = 0;
    size_t i;

    for (i = 0; i < count; i++) {
        const uint64_t a = local_at == NULL ? i : local_at[i], b = remote_at == NULL ? i : remote_at[i];

        if (a >= num_local || b >= num_remote || local[ROW * a + 1] != remote[ROW * b + 1])
            break;
        here[i] = local[ROW * a];
        there[i] = remote[ROW * b];
        sum += nbytes[i] = local[ROW * a + 1];
    }
    *total = sum;
    return i;
}
