/* The common part of backends that move bytes with a pool: those of the host and of another process. The struct of such
 * a backend has a `kvn_pooled` as its first member, with `move` filled in. All calls of the vtable but `destroy` are
 * shared. */
#ifndef KVNATIVE_HOST_POOLED_H
#define KVNATIVE_HOST_POOLED_H

#include "host/pool.h"
#include "host/writers.h"

typedef struct kvn_pooled {
    kvn_backend base;         /* vtable: own name and destroy, the rest kvn_pooled_* */
    kvn_pool *pool;           /* not owned */
    kvn_move move;            /* called with the kvn_pooled as context */
    kvn_piece_limits piece;
    kvn_guard *guard;         /* owned; entered around each written piece; NULL: none */
    uint64_t inline_nbytes;   /* submit itself moves batches up to this size */
} kvn_pooled;

void kvn_pooled_init(kvn_pooled *self, const kvn_backend_vtable *vtable, kvn_pool *pool,
                     kvn_move move);
void kvn_pooled_fini(kvn_pooled *self);
/* Takes over the guard. Call it before the first batch. */
void kvn_pooled_set_guard(kvn_backend *self, kvn_guard *guard);

int kvn_pooled_submit(kvn_backend *self, const kvn_columns *batch, kvn_request **out,
                      kvn_report *report);
int kvn_pooled_poll(kvn_backend *self, kvn_request *request, uint64_t *bytes_done);
int kvn_pooled_wait(kvn_backend *self, kvn_request *request, int64_t deadline_ns);
int kvn_pooled_abort(kvn_backend *self, kvn_request *request, int why);
void kvn_pooled_release(kvn_backend *self, kvn_request *request);

/* The vtable of such a backend: KVN_POOLED_VTABLE("host", destroy) */
#define KVN_POOLED_VTABLE(name_, destroy_)                                                        \
    {                                                                                             \
        .name = (name_), .submit = kvn_pooled_submit, .poll = kvn_pooled_poll,                    \
        .wait = kvn_pooled_wait, .abort = kvn_pooled_abort,                                       \
        .release = kvn_pooled_release, .destroy = (destroy_)                                      \
    }

#endif
