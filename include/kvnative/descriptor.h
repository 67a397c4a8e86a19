/* Descriptors of copies: destination, source and size. Addresses are uint64_t, as in ACL and HCCL records; sizes are
 * bytes. */
#ifndef KVNATIVE_DESCRIPTOR_H
#define KVNATIVE_DESCRIPTOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The next action of the thread that submits: a hint for backends. */
typedef enum kvn_caller {
    KVN_CALLER_RETURNS,
    KVN_CALLER_WAITS,    /* at once, for this batch, which the thread itself may move */
    KVN_CALLER_COMPUTES, /* for long, so leave it a core */
    KVN_CALLER_HURRIES,  /* it serves other batches: `submit` waits for no transfer, copies nothing, and may return
                          * KVN_PENDING */
} kvn_caller;

struct kvn_failure;

/* The callbacks of a batch. They are called even if no thread waits for the outcome. */
typedef struct kvn_batch_end {
    /* Called once, when the backend no longer touches a byte of the batch and its report is complete: from any thread,
     * `submit`'s included, and possibly with locks held. No call on the request returns the outcome before this call
     * has returned; `wait` then waits only for this call. `status` is that of the outcome. The callback takes no
     * lock of a backend, and calls no backend. */
    void (*call)(struct kvn_batch_end *self, int status);
    /* Called by backends of devices, every few milliseconds while the batch is in flight, by one thread at a time and
     * not after `call`; never blocks. KVN_OK, or the reason why the backend must stop touching the bytes of the batch.
     * NULL: they may always be touched. */
    int (*look)(struct kvn_batch_end *self, struct kvn_failure *why);
} kvn_batch_end;

/* Columns: the arguments of aclrtMemcpyBatch (void **dsts, void **srcs, size_t *sizes), and of all backends. The caller
 * owns the three arrays. */
typedef struct kvn_columns {
    const uint64_t *dst;
    const uint64_t *src;
    const uint64_t *nbytes;
    size_t count;
    uint64_t first; /* index of descriptor 0 in the array that the batch is a slice of; set by the executor */
    uint32_t caller; /* kvn_caller */
    struct kvn_gate *after; /* the gate that must open first; NULL: none. Only for a backend that `orders` */
    kvn_batch_end *end; /* NULL: none. Every backend calls it, except for a batch that `submit` refuses */
} kvn_columns;

/* Rows: HcclOneSideOpDesc, 32 bytes. `count` elements of `data_type`; kvplan always counts bytes. */
typedef struct kvn_one_sided {
    uint64_t local;
    uint64_t remote;
    uint64_t count;
    int32_t data_type;
    uint32_t reserved;
} kvn_one_sided;

#define KVN_HCCL_UINT8 7

#ifndef __cplusplus
_Static_assert(sizeof(kvn_one_sided) == 32, "HcclOneSideOpDesc is 32 bytes");
_Static_assert(offsetof(kvn_one_sided, remote) == 8, "remoteAddr at 8");
_Static_assert(offsetof(kvn_one_sided, count) == 16, "count at 16");
_Static_assert(offsetof(kvn_one_sided, data_type) == 24, "dataType at 24");
#endif

#ifdef __cplusplus
}
#endif
#endif
