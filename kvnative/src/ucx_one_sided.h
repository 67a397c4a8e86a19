/* Reading and writing a peer's memory over UCX without its help: one get or put for each descriptor, many in
 * flight, where the transport does that itself (RDMA, or the kernel between processes of one host).
 *
 * Before a transfer and after it the words of the ranges that it used are read from the peer's board: if one
 * is not what this side was told, the owner has ended the registration, and the transfer is KVN_UNMAPPED.
 * The look before keeps requests for memory that is gone off the wire, where they would end the link. */
#ifndef KVN_UCX_ONE_SIDED_H
#define KVN_UCX_ONE_SIDED_H

#include "kvnative/backend.h"
#include "ucx_link.h"
#include "ucx_region.h"

/* What an end has for it, made once. */
typedef struct kvn_ucx_mover kvn_ucx_mover;

/* The end owns it; it goes with the end. */
int kvn_ucx_mover_create(kvn_ucx_end *end, kvn_ucx_mover **out, kvn_failure *failure);

/* A range of the peer's: what it holds on the board, and which of the keys opens it. */
typedef struct kvn_ucx_range {
    uint64_t address;
    uint64_t nbytes;
    uint64_t slot;
    uint64_t generation;
    uint64_t key;
} kvn_ucx_range;

/* As packed by the peer's UCX. */
typedef struct kvn_ucx_packed_key {
    const void *bytes;
    size_t nbytes;
} kvn_ucx_packed_key;

typedef struct kvn_ucx_one_sided_options {
    kvn_direction direction; /* KVN_PEER_GET or KVN_PEER_PUT */
    const kvn_ucx_range *ranges; /* copied, as what follows */
    uint64_t num_ranges;
    const kvn_ucx_packed_key *keys;
    uint64_t num_keys;
    uint64_t board; /* address of the word of slot 0 */
    uint64_t board_slots;
    uint64_t board_key; /* which of the keys */
    int local_type; /* KVN_UCS_MEMORY_ of local memory that is in no region of this end */
} kvn_ucx_one_sided_options;

/* The link is connected. The regions outlive the backend. */
int kvn_ucx_one_sided_create(kvn_ucx_mover *mover, kvn_ucx_regions *regions, kvn_ucx_link *link,
                             const kvn_ucx_one_sided_options *options, kvn_backend **out,
                             kvn_failure *failure);

#endif
