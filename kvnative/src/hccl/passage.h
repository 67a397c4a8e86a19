/* One part on its way over a communicator: what the direct and the staged movers share. All of it
 * runs on the channel's thread. */
#ifndef KVN_HCCL_PASSAGE_H
#define KVN_HCCL_PASSAGE_H

#include "core/columns.h"
#include "hccl/transfer.h"
#include "device/streamed.h"

#define KVN_HCCL_MAX_BATCH 256

/* For kvn_channel_synchronize: stop now. */
static const atomic_int KVN_ALWAYS = 1;

typedef struct kvn_transfer {
    kvn_streamed streamed;
    kvn_communicator *communicator;
    kvn_staging *staging;
    bool is_put;
    bool local_on_device;
    uint32_t num_guards;
    uint64_t *guard_addresses;
    uint64_t *guard_words;
} kvn_transfer;

typedef struct kvn_passage {
    const kvn_transfer *transfer;
    kvn_communicator *communicator;
    kvn_channel *channel;
    const kvn_acl *acl;
    const kvn_columns *part;
    kvn_halt halt;
    kvn_channel_fault *fault;
    bool is_untouched; /* it failed before HCCL had to do with that */
} kvn_passage;

/* Bytes that one operation moves: (a piece of) a descriptor. */
typedef struct kvn_fragment {
    uint64_t local;
    uint64_t remote;
    uint64_t nbytes;
    uint64_t index; /* of its descriptor */
} kvn_fragment;

/* Takes the next fragments, at most one batch of them and `max_nbytes` in all, each place rounded up
 * to `alignment` bytes. 0 when nothing is left. */
uint32_t kvn_passage_gather(const kvn_passage *p, kvn_cursor *at, uint64_t max_nbytes,
                            uint64_t alignment, kvn_fragment *out);

/* One batch; `fragments` tell for a message what the rows are. KVN_CANCELLED when halted. */
int kvn_passage_issue(kvn_passage *p, kvn_one_sided *rows, const kvn_fragment *fragments,
                      uint32_t count);
/* A call of ACL failed. */
int kvn_passage_fail(kvn_passage *p, const char *call, aclError code);
/* Blocks until the event has happened. Meanwhile looks whether the transfer was halted, and whether
 * the communicator's stream or `other` (NULL: none) has failed, on which the event may wait. */
int kvn_passage_wait(kvn_passage *p, aclrtEvent event, aclrtStream other);
/* Blocks until all on the communicator's stream is through. KVN_CANCELLED when halted: the stream was
 * aborted. */
int kvn_passage_synchronize(kvn_passage *p, kvn_channel_fault *fault);

/* Issues the reading of the guards' words; kvn_guards_compare after the stream was waited for. */
int kvn_guards_read(kvn_passage *p);
int kvn_guards_compare(kvn_passage *p);

/* The two movers: issue, wait. On failure they may leave work on the communicator's stream, nothing on
 * others. */
int kvn_move_direct(kvn_passage *p);
int kvn_move_staged(kvn_passage *p);

static inline kvn_one_sided kvn_row(uint64_t local, uint64_t remote, uint64_t nbytes)
{
    /* Bytes, whatever the elements are: HCCL multiplies count by the size of the type and does no
     * more with it, and UINT8 is in every version, which the narrow types of KV caches are not. */
    return (kvn_one_sided){.local = local, .remote = remote, .count = nbytes,
                           .data_type = KVN_HCCL_UINT8};
}

#endif
