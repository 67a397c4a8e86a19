/* Points in the work of the program's streams that transfers wait for. A point is taken in the caller's thread, after
 * which the program may record the event again or destroy it. One thread of the library polls all points, and opens
 * them as gates. So no other thread waits for a point, and a point that is never reached delays no other one.
 *
 * A backend that works on a stream can leave the order to the device instead (kvn_event_order). */
#ifndef KVN_DEVICE_EVENTS_H
#define KVN_DEVICE_EVENTS_H

#include "core/gate.h"
#include "device/device.h"

typedef struct kvn_events kvn_events;

/* A point; its gate opens once it is reached. */
typedef struct kvn_event {
    kvn_gate gate; /* first, so that its address is that of the kvn_event */
    kvn_events *events;
    struct kvn_event_unit *unit; /* for events.c */
} kvn_event;

/* Makes the events of a device, which must outlive them. NULL: no memory. */
kvn_events *kvn_events_create(kvn_device *device);
/* Destroys what is kept for reuse, and keeps nothing from now on. Points stay until given back. Idempotent. */
void kvn_events_close(kvn_events *events);
/* Call it once all points were given back. Work behind a point that is never reached is left to the device. */
void kvn_events_destroy(kvn_events *events);

/* Takes the point behind all that was issued to `stream` of the program. NULL is the default stream of the primary
 * context. */
int kvn_event_take_stream(kvn_events *events, kvn_stream stream, kvn_event *out, kvn_failure *failure);
/* Takes the point at which `event` of the program was last recorded. */
int kvn_event_take(kvn_events *events, void *event, kvn_event *out, kvn_failure *failure);
/* Gives back a point that nothing waits for. */
void kvn_event_give_back(kvn_event *event);

/* ---- with the device's context current ---- */

/* The point that `gate` belongs to; NULL: the gate is not that of a point on `device`. */
kvn_event *kvn_event_of(const kvn_device *device, kvn_gate *gate);
/* KVN_OK if the point was reached, KVN_PENDING, or the reason why it never will be. */
int kvn_event_query(const kvn_event *event, kvn_failure *failure);
/* Makes later work of `stream` wait for the point. */
int kvn_event_order(const kvn_event *event, kvn_stream stream, kvn_failure *failure);

#endif
