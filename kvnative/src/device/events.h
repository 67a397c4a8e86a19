/* Points in the work of other streams that transfers come after. Each is taken once, in the caller's thread:
 * the event that it was taken from can be recorded again, or destroyed, and nothing more is asked of the
 * stream. One thread of ours asks the device whether they were reached, and opens them as gates: so no other thread
 * has to wait for one, none holds up another, and those that are never reached hold up nothing.
 *
 * A backend that works on a stream can let the device keep the order instead (kvn_event_order). */
#ifndef KVN_DEVICE_EVENTS_H
#define KVN_DEVICE_EVENTS_H

#include "core/gate.h"
#include "device/device.h"

typedef struct kvn_events kvn_events;

/* A point that was taken: a gate, which opens when it is reached. */
typedef struct kvn_event {
    kvn_gate gate; /* first: a gate of this kind is one */
    kvn_events *events;
    struct kvn_event_unit *unit; /* events.c's */
} kvn_event;

/* All of one device, which outlives them. NULL: no memory. */
kvn_events *kvn_events_create(kvn_device *device);
/* No more are taken; those that are go when they are given back. Any number of times. */
void kvn_events_close(kvn_events *events);
/* None that was taken is left. What stands behind a point that is never reached is left to the device. */
void kvn_events_destroy(kvn_events *events);

/* Takes the point that `stream` of the program is at: all that was issued to it. NULL is the default stream of
 * the primary context. */
int kvn_event_take_stream(kvn_events *events, kvn_stream stream, kvn_event *out, kvn_failure *failure);
/* Takes the point that `event` of the program was last recorded at. */
int kvn_event_take(kvn_events *events, void *event, kvn_event *out, kvn_failure *failure);
/* Nothing waits at it any more. */
void kvn_event_give_back(kvn_event *event);

/* ---- with the device's context current ---- */

/* The point behind a gate that was taken of `device`; NULL: the gate is another. */
kvn_event *kvn_event_of(const kvn_device *device, kvn_gate *gate);
/* KVN_OK: it was reached; KVN_PENDING; or why it never will be. */
int kvn_event_query(const kvn_event *event, kvn_failure *failure);
/* What is issued to `stream` from here on comes after it. */
int kvn_event_order(const kvn_event *event, kvn_stream stream, kvn_failure *failure);

#endif
