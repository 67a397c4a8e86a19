/* What a transfer may have to come after, such as the work on a stream of the model's: no byte of it moves
 * before. Who opens a gate is its own matter; a task waits at it, or gives it to a backend that orders its
 * work behind it. */
#ifndef KVNATIVE_CORE_GATE_H
#define KVNATIVE_CORE_GATE_H

#include <stdbool.h>

#include "core/failure.h"
#include "core/list.h"

typedef struct kvn_gate kvn_gate;

/* Who waits at a gate; embed it where it stays in place until it was opened or has left. */
typedef struct kvn_gate_waiter {
    kvn_node node; /* the gate's, with `gate` */
    kvn_gate *gate;
    /* Once, by a thread of the gate's, without a lock of its own: KVN_OK, or why it never opens. */
    void (*open)(struct kvn_gate_waiter *waiter, int status, const kvn_failure *why);
    /* Now and then until it opens, by the same thread: whether it waits no more, as a backend keeps the order
     * from now on. NULL: none would. */
    bool (*pass)(struct kvn_gate_waiter *waiter);
    const void *room; /* the backend, with `pass`: where one finds no room, others of it would not */
} kvn_gate_waiter;

struct kvn_gate {
    /* Never calls `open` by itself. A failure: the waiter is not there. */
    int (*enter)(kvn_gate *gate, kvn_gate_waiter *waiter, kvn_failure *failure);
    /* On return `open` does not run and is not called any more; whether or not it had entered. Not from
     * within `open`, nor with a lock that `open` takes. */
    void (*leave)(kvn_gate *gate, kvn_gate_waiter *waiter);
};

#endif
