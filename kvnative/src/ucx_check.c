#include "ucx_check.h"

#include <stdbool.h>

/* With counts that were compared with their limits already: no sum below can overflow. */
static const char *check_tables(kvn_ucx_tables *tables, const uint8_t *payload, size_t nbytes,
                                uint64_t most)
{
    const size_t pieces = 16 * (size_t)tables->num_pieces, ranges = 16 * (size_t)tables->num_ranges;

    if (nbytes < pieces + ranges)
        return "its tables are longer than its payload";
    tables->pieces = payload;
    tables->ranges = payload + pieces;
    tables->data = tables->ranges + ranges;
    tables->nbytes = 0;
    for (uint32_t i = 0; i < tables->num_pieces; i++) {
        const kvn_wire_piece piece = kvn_ucx_piece_at(tables, i);
        if (piece.nbytes == 0)
            continue;
        if (piece.range >= tables->num_ranges)
            return "a piece lies in a range that it does not name";
        if (piece.address > UINT64_MAX - piece.nbytes)
            return "a piece goes beyond the last address";
        tables->nbytes += piece.nbytes;
        if (tables->nbytes > most)
            return "its pieces are larger in all than is allowed";
    }
    return NULL;
}

static bool copy_header(void *out, size_t size, const void *header, size_t header_nbytes)
{
    if (header_nbytes != size)
        return false;
    memcpy(out, header, size);
    return true;
}

const char *kvn_ucx_check_pull(const void *header, size_t header_nbytes, const void *payload,
                               size_t nbytes, kvn_wire_pull *out, kvn_ucx_tables *tables)
{
    if (!copy_header(out, sizeof *out, header, header_nbytes))
        return "its header has another length";
    if (out->num_pieces == 0 || out->num_pieces > KVN_WIRE_PULL_PIECES)
        return "its number of pieces is not allowed";
    if (out->num_ranges > KVN_WIRE_RANGES)
        return "it names more ranges than is allowed";
    if (out->first > UINT64_MAX - out->num_pieces)
        return "the number of its first piece is impossible";
    tables->num_pieces = out->num_pieces;
    tables->num_ranges = out->num_ranges;
    if (nbytes != 16 * ((size_t)out->num_pieces + out->num_ranges))
        return "its payload is not as long as its tables";
    return check_tables(tables, payload, nbytes, KVN_WIRE_PART_NBYTES);
}

const char *kvn_ucx_check_push(const void *header, size_t header_nbytes, const void *payload,
                               size_t nbytes, kvn_wire_push *out, kvn_ucx_tables *tables)
{
    const char *wrong;

    if (!copy_header(out, sizeof *out, header, header_nbytes))
        return "its header has another length";
    if (out->num_pieces == 0 || out->num_pieces > KVN_WIRE_PUSH_PIECES)
        return "its number of pieces is not allowed";
    if (out->num_ranges > KVN_WIRE_RANGES)
        return "it names more ranges than is allowed";
    if (out->first > UINT64_MAX - out->num_pieces)
        return "the number of its first piece is impossible";
    if (out->flags != 0 && out->flags != KVN_WIRE_ASK &&
        out->flags != (KVN_WIRE_ASK | KVN_WIRE_LAST))
        return "its flags are unknown";
    tables->num_pieces = out->num_pieces;
    tables->num_ranges = out->num_ranges;
    wrong = check_tables(tables, payload, nbytes, KVN_WIRE_DATA_NBYTES);
    if (wrong)
        return wrong;
    if ((size_t)((const uint8_t *)payload + nbytes - tables->data) != tables->nbytes)
        return "its data is not as long as its pieces";
    return NULL;
}

const char *kvn_ucx_check_data(const void *header, size_t header_nbytes, size_t nbytes,
                               kvn_wire_data *out)
{
    if (!copy_header(out, sizeof *out, header, header_nbytes))
        return "its header has another length";
    if (nbytes > KVN_WIRE_DATA_NBYTES)
        return "it is longer than is allowed";
    return out->flags & ~(uint32_t)KVN_WIRE_FINAL ? "its flags are unknown" : NULL;
}

const char *kvn_ucx_check_done(const void *header, size_t header_nbytes, size_t nbytes,
                               kvn_wire_done *out)
{
    if (!copy_header(out, sizeof *out, header, header_nbytes))
        return "its header has another length";
    if (nbytes > 0)
        return "it has a payload";
    if (out->reason > KVN_WIRE_NO_MEMORY)
        return "its reason is unknown";
    return out->of > KVN_WIRE_OF_PUSH ? "it answers an unknown kind of request" : NULL;
}

const char *kvn_ucx_check_cancel(const void *header, size_t header_nbytes, size_t nbytes,
                                 kvn_wire_cancel *out)
{
    if (!copy_header(out, sizeof *out, header, header_nbytes))
        return "its header has another length";
    if (nbytes > 0)
        return "it has a payload";
    return out->of > KVN_WIRE_OF_PUSH ? "it ends an unknown kind of request" : NULL;
}
