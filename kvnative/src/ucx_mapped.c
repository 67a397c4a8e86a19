#include "ucx_mapped.h"

#include <sys/mman.h>
#include <unistd.h>

bool kvn_ucx_is_mapped(uint64_t address, uint64_t nbytes)
{
    const uint64_t in_page = (uint64_t)sysconf(_SC_PAGESIZE) - 1;
    const uint64_t begin = address & ~in_page, last = (address + nbytes - 1) | in_page;

    if (nbytes == 0)
        return true;
    /* Starts no writing, of files either; but it fails where a page is not mapped, and finds that out from
     * the mappings: mincore would walk the pages. A length that wraps would be none to it. */
    return last > begin && last - begin != UINT64_MAX &&
           msync((void *)(uintptr_t)begin, last - begin + 1, MS_ASYNC) == 0;
}

static uint64_t first_in(const kvn_ucx_batch *batch, const kvn_ucx_section *section, uint32_t piece,
                         uint32_t end)
{
    uint64_t low = UINT64_MAX, high = 0, found;
    uint32_t middle;

    for (uint32_t i = piece; i < end; i++) {
        const uint64_t local = batch->local[section->from.index + i];
        const uint64_t begin = local + kvn_ucx_piece_begin(section, i);
        const uint64_t behind = local + kvn_ucx_piece_end(batch, section, i);

        if (begin == behind)
            continue;
        if (behind < begin) /* past the end of all addresses */
            return section->from.index + i;
        low = begin < low ? begin : low;
        high = behind > high ? behind : high;
    }
    if (low >= high || kvn_ucx_is_mapped(low, high - low))
        return KVN_NO_DESCRIPTOR;
    if (end - piece == 1)
        return section->from.index + piece;
    /* What is between them need not be mapped: each half for itself. */
    middle = piece + (end - piece) / 2;
    found = first_in(batch, section, piece, middle);
    return found != KVN_NO_DESCRIPTOR ? found : first_in(batch, section, middle, end);
}

uint64_t kvn_ucx_first_unmapped(const kvn_ucx_batch *batch, const kvn_ucx_section *section,
                                uint32_t piece, uint32_t skip, uint64_t nbytes)
{
    uint64_t left = nbytes + skip;
    uint32_t end = piece;

    for (; left > 0 && end < section->num_pieces; end++) {
        const uint64_t length =
            kvn_ucx_piece_end(batch, section, end) - kvn_ucx_piece_begin(section, end);
        left -= length < left ? length : left;
    }
    return first_in(batch, section, piece, end);
}
