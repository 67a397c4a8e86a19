/* An event that a transfer waits for, such as work on a stream of the model: no byte moves before it. A task waits at
 * the gate, or passes it to a backend that orders its own work behind it. */
#ifndef KVNATIVE_CORE_GATE_H
#define KVNATIVE_CORE_GATE_H

#include <stdbool.h>

#include "core/failure.h"
#include "core/list.h"

typedef struct kvn_gate kvn_gate;

/* A waiter at a gate. Its memory stays in place until the gate has opened or the waiter has left. */
typedef struct kvn_gate_waiter {
    kvn_node node; /* the gate's, with `gate` */
    kvn_gate *gate;
    bool is_open;  /* the gate's: `open` was called, and has found no room */
    /* Called by a thread of the gate without locks: KVN_OK, or why the gate never opens. It must not block, because
     * this thread opens all gates. False, only after KVN_OK: there is no room now, so it is called again later. */
    bool (*open)(struct kvn_gate_waiter *waiter, int status, const kvn_failure *why);
    /* Now and then until it opens, by the same thread: whether it waits no more, as a backend keeps the order
     * from now on. NULL: none would. */
    bool (*pass)(struct kvn_gate_waiter *waiter);
    const void *room; /* the backend, with `pass`: where one finds no room, others of it would not */
} kvn_gate_waiter;

struct kvn_gate {
    /* Never calls `open` itself. After a failure the waiter is not at the gate. */
    int (*enter)(kvn_gate *gate, kvn_gate_waiter *waiter, kvn_failure *failure);
    /* On return `open` does not run and is not called any more; whether or not it had entered. Not from
     * within `open`, nor with a lock that `open` takes. */
    void (*leave)(kvn_gate *gate, kvn_gate_waiter *waiter);
};

#endif
