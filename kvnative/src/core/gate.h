/* A gate: an event, such as the end of work on a stream of the model, before which no byte of a transfer moves. A task
 * waits at the gate, or passes it to a backend that orders its own work behind the event. */
#ifndef KVNATIVE_CORE_GATE_H
#define KVNATIVE_CORE_GATE_H

#include <stdbool.h>

#include "core/failure.h"
#include "core/list.h"

typedef struct kvn_gate kvn_gate;

/* Text of messages about tasks that still wait. */
#define KVN_GATE_IS_SHUT "the event that it comes after has not come"

/* A waiter at a gate. Its memory stays in place until the gate has opened or the waiter has left. */
typedef struct kvn_gate_waiter {
    kvn_node node; /* in the gate's list */
    kvn_gate *gate;
    bool is_open;  /* set by the gate: `open` was called and returned false */
    /* Called by a thread of the gate without locks: KVN_OK, or why the gate never opens. It must not block, because
     * this thread opens all gates. False, only after KVN_OK: the batch found no room, so it is called again later. */
    bool (*open)(struct kvn_gate_waiter *waiter, int status, const kvn_failure *why);
    /* Called by the same thread from time to time until the gate opens: gives the batch to a backend that keeps the
     * order itself, if there is room now. True: it did, and the waiter has left. NULL: the backend keeps no order. */
    bool (*pass)(struct kvn_gate_waiter *waiter);
    const void *room; /* the backend, with `pass`: if one waiter finds no room, neither do others of this backend */
} kvn_gate_waiter;

struct kvn_gate {
    /* Adds the waiter, and never calls `open` itself. After a failure the waiter is not at the gate. */
    int (*enter)(kvn_gate *gate, kvn_gate_waiter *waiter, kvn_failure *failure);
    /* Removes the waiter, or does nothing if it is not at the gate. After the return `open` does not run and is not
     * called. Must not be called from within `open`, nor with a lock that `open` takes. */
    void (*leave)(kvn_gate *gate, kvn_gate_waiter *waiter);
};

#endif
