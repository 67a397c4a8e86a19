/* The protocol of an authenticated data connection: docs/internals/tcp-protocol.md.
 *
 * One end sends requests, the other answers them in order. A request is a head with its first range and run, then the
 * other ranges and runs; the bytes of a push follow. A pull gets an answer, the bytes, and a second answer, which says
 * if the memory was still registered when they were read; after a first answer that refuses, nothing follows. A push
 * gets one answer, after its bytes were read. Numbers are little-endian. */
#ifndef KVN_TCP_WIRE_H
#define KVN_TCP_WIRE_H

#include <stddef.h>
#include <stdint.h>

#define KVN_TCP_MAX_RANGES 64u
#define KVN_TCP_MAX_RUNS 1024u
#define KVN_TCP_MAX_NBYTES (16u << 20) /* moved by one request */

typedef enum kvn_tcp_kind { KVN_TCP_PULL = 1, KVN_TCP_PUSH = 2 } kvn_tcp_kind;

/* The reason for which memory is not moved. */
typedef enum kvn_tcp_reason {
    KVN_TCP_MOVED = 0,
    KVN_TCP_DEREGISTERED = 1,
    KVN_TCP_OUTSIDE = 2,   /* not all of it is registered */
    KVN_TCP_READ_ONLY = 3, /* a push to memory that is registered with writable=False */
    KVN_TCP_UNMAPPED = 4,  /* registered, but not mapped any more */
    KVN_TCP_DEVICE = 5,    /* it is on a device, which did not copy it */
    KVN_TCP_RELEASED = 6,  /* a lease (a range without runs) was released or has expired */
    KVN_TCP_NUM_REASONS
} kvn_tcp_reason;

/* Registered memory: its slot in the table, and the generation of the registration. */
typedef struct kvn_tcp_range {
    uint32_t slot;
    uint32_t reserved; /* 0 */
    uint64_t generation;
} kvn_tcp_range;

/* `count` pieces of `nbytes`, each `stride` bytes after the previous one, inside one range. */
typedef struct kvn_tcp_run {
    uint64_t address;
    uint32_t nbytes;
    uint32_t count;
    uint32_t stride;
    uint32_t range; /* index in the request */
} kvn_tcp_run;

typedef struct kvn_tcp_head {
    uint8_t kind;
    uint8_t reserved; /* 0 */
    uint16_t num_ranges;
    uint32_t num_runs;
    uint64_t nbytes; /* of all runs */
    uint64_t id;     /* repeated in the answers */
    kvn_tcp_range range;
    kvn_tcp_run run;
} kvn_tcp_head;

typedef struct kvn_tcp_answer {
    uint64_t id;
    uint32_t reason;
    uint32_t reserved; /* 0 */
    uint64_t offset;   /* of the first byte that was not moved, if there is a reason */
} kvn_tcp_answer;

_Static_assert(sizeof(kvn_tcp_range) == 16 && sizeof(kvn_tcp_run) == 24, "no padding");
_Static_assert(sizeof(kvn_tcp_head) == 64 && sizeof(kvn_tcp_answer) == 24, "no padding");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are sent as they are");

/* Bytes of the ranges and runs that do not fit into the head. */
#define KVN_TCP_MAX_TABLE                                                                          \
    ((KVN_TCP_MAX_RANGES - 1) * sizeof(kvn_tcp_range) +                                            \
     (KVN_TCP_MAX_RUNS - 1) * sizeof(kvn_tcp_run))

/* A request with its table. */
typedef struct kvn_tcp_request {
    kvn_tcp_head head;
    uint8_t table[KVN_TCP_MAX_TABLE]; /* the other ranges, then the other runs */
} kvn_tcp_request;

/* Bytes of the table that follows a checked head. */
static inline size_t kvn_tcp_table_nbytes(const kvn_tcp_head *head)
{
    return (head->num_ranges - 1u) * sizeof(kvn_tcp_range) +
           (head->num_runs - 1u) * sizeof(kvn_tcp_run);
}

static inline kvn_tcp_range *kvn_tcp_range_at(kvn_tcp_request *it, uint32_t index)
{
    return index == 0 ? &it->head.range : (kvn_tcp_range *)it->table + (index - 1);
}

static inline kvn_tcp_run *kvn_tcp_run_at(kvn_tcp_request *it, uint32_t index)
{
    const size_t ranges = (it->head.num_ranges - 1u) * sizeof(kvn_tcp_range);
    return index == 0 ? &it->head.run : (kvn_tcp_run *)(it->table + ranges) + (index - 1);
}

/* Return what is wrong with a head, or with the whole request; NULL: nothing. They accept any input: no number
 * overflows, and no index leaves the request. */
const char *kvn_tcp_check_head(const kvn_tcp_head *head);
const char *kvn_tcp_check_request(kvn_tcp_request *request);

/* A position in the bytes of a request. */
typedef struct kvn_tcp_place {
    uint32_t run;
    uint32_t piece; /* of the run */
    uint32_t skip;  /* bytes of the piece that are done */
} kvn_tcp_place;

#endif
