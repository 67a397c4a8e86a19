/* What a peer sends is looked at here before anything acts on it: lengths, counts, indices and sums,
 * of messages that may have been made to do harm. What passes can be walked through without a further
 * look, and is at most as large as ucx_wire.h says. Whether the ranges may be used is another
 * question: ucx_ranges.h. */
#ifndef KVN_UCX_CHECK_H
#define KVN_UCX_CHECK_H

#include <stddef.h>
#include <string.h>

#include "ucx_wire.h"

/* The tables of a PULL or a PUSH, as they lie in the payload: at any address. */
typedef struct kvn_ucx_tables {
    const uint8_t *pieces;
    const uint8_t *ranges;
    const uint8_t *data; /* of a PUSH */
    uint32_t num_pieces;
    uint32_t num_ranges;
    uint64_t nbytes; /* of all pieces */
} kvn_ucx_tables;

static inline kvn_wire_piece kvn_ucx_piece_at(const kvn_ucx_tables *tables, uint32_t index)
{
    kvn_wire_piece piece;
    memcpy(&piece, tables->pieces + 16 * (size_t)index, sizeof piece);
    return piece;
}

static inline kvn_wire_range kvn_ucx_range_at(const kvn_ucx_tables *tables, uint32_t index)
{
    kvn_wire_range range;
    memcpy(&range, tables->ranges + 16 * (size_t)index, sizeof range);
    return range;
}

/* Each copies the header out and returns NULL, or what is wrong with the message. */
const char *kvn_ucx_check_pull(const void *header, size_t header_nbytes, const void *payload,
                               size_t nbytes, kvn_wire_pull *out, kvn_ucx_tables *tables);
const char *kvn_ucx_check_push(const void *header, size_t header_nbytes, const void *payload,
                               size_t nbytes, kvn_wire_push *out, kvn_ucx_tables *tables);
const char *kvn_ucx_check_data(const void *header, size_t header_nbytes, size_t nbytes,
                               kvn_wire_data *out);
const char *kvn_ucx_check_done(const void *header, size_t header_nbytes, size_t nbytes,
                               kvn_wire_done *out);
const char *kvn_ucx_check_cancel(const void *header, size_t header_nbytes, size_t nbytes,
                                 kvn_wire_cancel *out);

#endif
