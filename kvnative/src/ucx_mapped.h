/* Whether memory is still mapped, asked of the kernel right before it is read, written or shown to UCX: its
 * owner may have unmapped it without a word, and to touch it then would end the process.
 *
 * Not closed is the time between the answer and the copy, which is that of one message: about 50 us; nor that
 * until UCX has sent what it was shown, whose system call fails then, and with it the link. And the kernel is
 * not asked how it is mapped: what tells that as well, PROCMAP_QUERY, takes Linux 6.11 and twice as long. */
#ifndef KVN_UCX_MAPPED_H
#define KVN_UCX_MAPPED_H

#include "ucx_cut.h"

/* Costs a system call, about 0.25 us, however long it is. */
bool kvn_ucx_is_mapped(uint64_t address, uint64_t nbytes);

/* Looks at the local memory of the pieces that the next `nbytes` of a section lie in, from `skip` into piece
 * `piece` on: with one call where nothing between them is unmapped. The descriptor of the first that is not
 * mapped, or KVN_NO_DESCRIPTOR. What is not in the section is not looked at. */
uint64_t kvn_ucx_first_unmapped(const kvn_ucx_batch *batch, const kvn_ucx_section *section,
                                uint32_t piece, uint32_t skip, uint64_t nbytes);

#endif
