/* Backends over a communicator: one-sided puts and gets, direct or through staging memory, with guards that detect
 * deregistered memory. The second part is the context of a shard, which runs on the channel's thread. */
#ifndef KVN_HCCL_TRANSFER_H
#define KVN_HCCL_TRANSFER_H

#include "core/columns.h"
#include "device/stream_backend.h"
#include "hccl/communicator.h"
#include "hccl/staging.h"

#define KVN_HCCL_MAX_BATCH 256

#define KVN_HCCL_TICKETS 256 /* maximum number of simultaneous puts with leases in a process */

/* Announcements of this process's writes with leases: a word for each transfer, in memory of its device. Owners read
 * there their tag and a number, or 0. See announced.c. */
typedef struct kvn_tickets {
    uint64_t address; /* on the device */
    atomic_bool is_taken[KVN_HCCL_TICKETS];
    atomic_uint num_announced;
} kvn_tickets;

/* The name of a lease in messages. */
typedef struct kvn_lease_name {
    char text[128];
} kvn_lease_name;

typedef struct kvn_transfer_options {
    kvn_direction direction; /* KVN_PEER_GET or KVN_PEER_PUT */
    /* Remote words, and their expected values after the data was moved; copied. At most KVN_MAX_GUARDS. */
    const uint64_t *guard_addresses;
    const uint64_t *guard_words;
    uint32_t num_guards;
    const kvn_lease_name *lease_names; /* for the last guards; copied */
    uint32_t num_leases;
    kvn_tickets *tickets; /* NULL: not announced; else a put with leases */
    uint32_t tag;         /* of the owner */
    kvn_staging *staging; /* NULL: local memory is in bound regions */
    bool local_on_device;
} kvn_transfer_options;

/* The communicator, the tickets and the staging outlive the backend. NULL with errno set (EINVAL, ENOMEM). */
kvn_backend *kvn_transfer_create(kvn_communicator *communicator,
                                 const kvn_transfer_options *options);

/* ---- a shard in flight ---- */

/* A `stop` for kvn_channel_synchronize that stops at once. */
static const atomic_int KVN_ALWAYS = 1;

typedef struct kvn_transfer {
    kvn_stream_backend backend;
    kvn_communicator *communicator;
    kvn_staging *staging;
    bool is_put;
    bool local_on_device;
    uint32_t num_guards;
    uint64_t *guard_addresses;
    uint64_t *guard_words;
    uint32_t num_leases;
    kvn_lease_name *lease_names;
    kvn_tickets *tickets;
    uint32_t tag;
} kvn_transfer;

typedef struct kvn_transfer_context {
    const kvn_transfer *transfer;
    kvn_communicator *communicator;
    kvn_channel *channel;
    const kvn_device *device;
    const kvn_columns *shard;
    kvn_halt halt;
    kvn_channel_fault *fault;
    bool is_untouched; /* it failed before any call of HCCL */
    bool has_issued;   /* there are operations that were not waited for */
} kvn_transfer_context;

/* Bytes that one operation moves: (a piece of) a descriptor. */
typedef struct kvn_fragment {
    uint64_t local;
    uint64_t remote;
    uint64_t nbytes;
    uint64_t index; /* of its descriptor */
} kvn_fragment;

/* Takes the next fragments, at most one batch and `max_nbytes`, with each place rounded up to `alignment` bytes.
 * Returns 0 if none is left. */
uint32_t kvn_transfer_gather(const kvn_transfer_context *t, kvn_cursor *at, uint64_t max_nbytes,
                            uint64_t alignment, kvn_fragment *out);

/* Issues a batch; a failure names the descriptors of `fragments`. KVN_CANCELLED when halted. */
int kvn_transfer_issue(kvn_transfer_context *t, kvn_one_sided *rows, const kvn_fragment *fragments,
                      uint32_t count);
/* Blocks until all work on the communicator's stream has ended. KVN_CANCELLED when halted: the stream was aborted.
 * After the return, with any status, no byte moves. */
int kvn_transfer_synchronize(kvn_transfer_context *t, kvn_channel_fault *fault);
/* The same between two operations of a transfer; also checks for operations that failed without stopping the stream. */
int kvn_transfer_catch_up(kvn_transfer_context *t);
/* Aborts the communicator's stream; after the return no byte moves. */
int kvn_transfer_stop(kvn_transfer_context *t, kvn_channel_fault *fault);

/* Issues the read of the guards' words. Compare them after a wait for the stream. */
int kvn_transfer_read_guards(kvn_transfer_context *t);
/* Reads and compares the words. The stream must be empty, and is empty afterwards. */
int kvn_transfer_check_guards(kvn_transfer_context *t);

/* Moves the shard and compares the guards; after the return none of its operations is in flight. */
int kvn_transfer_move(kvn_transfer_context *t);
/* The same for a put with leases, which it announces to the owner: KVN_UNMAPPED, without further rounds, if a
 * lease has ended. */
int kvn_transfer_announced(kvn_transfer_context *t);

/* Moves the shard through staging memory. A failure may leave work on the communicator's stream, but not on others. */
int kvn_transfer_staged(kvn_transfer_context *t);

static inline kvn_one_sided kvn_row(uint64_t local, uint64_t remote, uint64_t nbytes)
{
    /* Count bytes for all element types: HCCL only multiplies the count by the size of the type. Every version has
     * UINT8, unlike the narrow types of KV caches. */
    return (kvn_one_sided){.local = local, .remote = remote, .count = nbytes,
                           .data_type = KVN_HCCL_UINT8};
}

#endif
