/* A communicator: HCCL's connection between this process's device and one of a peer. It has two ranks, its own channel,
 * and the regions that it may read and write. With HIXL, it is a client of the peer's server.
 *
 * All calls are thread-safe; a communicator makes one call of HCCL at a time. */
#ifndef KVN_HCCL_COMMUNICATOR_H
#define KVN_HCCL_COMMUNICATOR_H

#include "hccl/connection.h"
#include "hccl/words.h"

typedef enum kvn_communicator_state {
    KVN_COMM_OPEN,      /* regions may be bound */
    KVN_COMM_PREPARING, /* a thread is in prepare */
    KVN_COMM_READY,
    KVN_COMM_FAILED, /* prepare failed */
    KVN_COMM_CLOSED
} kvn_communicator_state;

/* Flags that stop a transfer: its request was aborted, or the peer was given up. */
typedef struct kvn_halt {
    const atomic_int *stop;       /* the request's */
    const atomic_bool *cancelled; /* the communicator's */
} kvn_halt;

static inline bool kvn_is_halted(const kvn_halt *halt)
{
    return atomic_load(halt->stop) || atomic_load(halt->cancelled);
}

typedef struct kvn_communicator kvn_communicator;

/* Makes the channel and initializes the communicator; a process initializes one at a time. */
int kvn_communicator_create(kvn_hccl *hccl, kvn_device *device,
                            const kvn_communicator_options *options, kvn_communicator **out,
                            kvn_failure *failure);
/* Call it once, after close, when no backend is left. A forked child leaks the communicator. */
void kvn_communicator_destroy(kvn_communicator *self);

/* Call it before prepare. The region must stay in place until it is unbound or the communicator is closed. */
int kvn_communicator_bind(kvn_communicator *self, kvn_region *region, kvn_failure *failure);
/* May be called at any time; waits for a prepare. The region is unbound after the return, also after a failure. */
int kvn_communicator_unbind(kvn_communicator *self, kvn_region *region, kvn_failure *failure);
/* Blocks until the peer prepares too, at most `timeout_s` seconds (1 or more) for each step of HCCL. */
int kvn_communicator_prepare(kvn_communicator *self, int timeout_s, kvn_failure *failure);
/* Unbinds all regions and destroys the connection; waits for the running transfer. KVN_PENDING if another thread is in
 * prepare: that thread then closes, as soon as HCCL returns. Idempotent. */
int kvn_communicator_close(kvn_communicator *self, kvn_failure *failure);

/* Gives up the peer: transfers that are queued, running or submitted later end with KVN_PEER_GONE and `message`. Does
 * not wait. */
void kvn_communicator_cancel(kvn_communicator *self, const char *message);

/* Does not wait. */
kvn_communicator_state kvn_communicator_state_of(kvn_communicator *self);
/* Returns true if an operation failed in HCCL or was stopped. */
bool kvn_communicator_is_disturbed(const kvn_communicator *self);
/* Returns HCCL's asynchronous error, and writes a text for messages; 0: no error, or HCCL does not report errors. */
kvn_hccl_result kvn_communicator_async_error(kvn_communicator *self, char *text, size_t room);

/* ---- for transfers, on the channel's thread ---- */

kvn_channel **kvn_communicator_channels(kvn_communicator *self); /* an array of one */
uint32_t kvn_communicator_max_batch(const kvn_communicator *self);
/* Returns the flags of a transfer with this `stop`. */
kvn_halt kvn_communicator_halt(const kvn_communicator *self, const atomic_int *stop);
/* Returns KVN_PEER_GONE, with the message, if the communicator was cancelled, else KVN_CANCELLED. */
int kvn_communicator_why_halted(kvn_communicator *self, kvn_failure *failure);
/* Begins a transfer, which keeps the connection until its end. KVN_FAILED if the connection is not ready. */
int kvn_communicator_begin(kvn_communicator *self, kvn_failure *failure);
void kvn_communicator_end(kvn_communicator *self);
void kvn_communicator_disturb(kvn_communicator *self);
/* Returns the time in which operations may still run after an abort of their stream. */
uint32_t kvn_communicator_unfold_ms(const kvn_communicator *self);
/* Issues one HcclBatchPut or Get of 1 to max_batch descriptors on the channel's stream. */
int kvn_communicator_issue(kvn_communicator *self, bool is_put, kvn_one_sided *descriptors,
                           uint32_t count, kvn_failure *failure);
/* Returns true if its operations are not on the channel's stream, but batches of HIXL to be polled. */
bool kvn_communicator_is_polled(const kvn_communicator *self);
/* KVN_PENDING while such batches are in flight. */
int kvn_communicator_poll(kvn_communicator *self, kvn_failure *failure);
/* Stops these batches. After that, no batch can be issued. */
void kvn_communicator_abort(kvn_communicator *self);
/* Returns true if [address, address + nbytes) lies in one bound region of this side. */
bool kvn_communicator_covers(kvn_communicator *self, uint64_t address, uint64_t nbytes);
/* Returns two events for the running transfer. */
void **kvn_communicator_events(kvn_communicator *self);
/* These return KVN_MAX_GUARDS words for the running transfer: in bound device memory, and in pinned host memory. */
uint64_t kvn_communicator_device_words(const kvn_communicator *self);
uint64_t *kvn_communicator_host_words(const kvn_communicator *self);

#endif
