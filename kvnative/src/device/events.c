/* Polls the events that transfers wait for, on one thread for each device. The file has more than 500 lines, because
 * one mutex guards points, waiters and the reused events of the library. */
#include "device/events.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "core/thread.h"

/* The pause between two polls: the shortest, and the longest if nothing happens for long. Each pause is a sixteenth
 * longer than the one before, so an event is seen late by about a sixteenth of the time that it took. When an event is
 * expected, because the events before it came at even intervals, as layers of a model do, the pause is the shortest. */
#define SOONEST_NS 20000
#define LATEST_NS 250000
#define PART 16
#define MAX_UNITS 64 /* of each kind, kept for reuse; further ones are destroyed */
#define MAX_FULL 8 /* backends without room that one look remembers */
#define MAX_HEADS 8 /* streams of which one look queries only the first point */
#define TIMER_SLACK_NS 1000 /* of the thread's sleep; the default of Linux is 50 us */

/* An event of the library, recorded for one point at a time. Reused when that point has been reached. */
typedef struct kvn_event_unit {
    struct kvn_event_unit *next;
    void *event;
    void *context;     /* in which it was created and is recorded */
    kvn_stream stream; /* of the library, to wait for an event of the program; NULL: not needed */
    kvn_stream of;     /* the stream that the point is on; NULL: unknown, or a default stream */
    uint64_t number;   /* points of one stream are reached in this order */
} kvn_event_unit;

struct kvn_events {
    kvn_device *device;
    pthread_mutex_t mutex; /* guards the fields below, and the waiters' nodes */
    pthread_cond_t changed;
    pthread_t thread;
    bool started;
    bool stopping;
    bool closed; /* units are not kept */
    kvn_list waiting;
    const kvn_gate_waiter *looked_at; /* the waiter that the thread is handling, without the mutex */
    kvn_event_unit *units[2];         /* free units, reached or not: without a stream, and with one */
    size_t num_units[2];
    uint64_t num_taken; /* number of points taken so far */
    uint64_t num_turns; /* number of looks; only the thread uses this and the next field */
    uint64_t num_behind; /* points behind others in the latest look */
};

/* ---- units ---- */

static bool is_reached(const kvn_events *events, const kvn_event_unit *unit)
{
    kvn_failure ignored; /* the unit stays in the list */

    return events->device->ops->query_event(events->device, unit->event, &ignored) == KVN_OK;
}

/* Takes a free unit of the context whose point was reached, or returns NULL. */
static kvn_event_unit *find_unit(kvn_events *events, bool streams, const void *context)
{
    kvn_event_unit **link = &events->units[streams], *unit;

    pthread_mutex_lock(&events->mutex);
    while ((unit = *link) && (unit->context != context || !is_reached(events, unit)))
        link = &unit->next;
    if (unit) {
        *link = unit->next;
        unit->next = NULL;
        events->num_units[streams]--;
    }
    pthread_mutex_unlock(&events->mutex);
    return unit;
}

static void destroy_unit(kvn_events *events, kvn_event_unit *unit)
{
    const kvn_device *device = events->device;
    kvn_failure ignored; /* a device whose work never ends keeps them */

    if (unit->stream)
        device->ops->drop_stream(device, unit->stream, &ignored);
    if (unit->event)
        device->ops->destroy_event(device, unit->event, &ignored);
    free(unit);
}

/* Makes a unit in the current context. */
static int make_unit(kvn_events *events, bool streams, kvn_event_unit **out, kvn_failure *failure)
{
    const kvn_device *device = events->device;
    void *context = device->ops->get_context(device);
    kvn_event_unit *unit = find_unit(events, streams, context);
    int status;

    *out = unit;
    if (unit)
        return KVN_OK;
    unit = calloc(1, sizeof *unit);
    if (!unit)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for an event");
    unit->context = context;
    status = device->ops->create_event(device, &unit->event, failure);
    if (status == KVN_OK && streams)
        status = device->ops->create_stream(device, &unit->stream, failure);
    if (status == KVN_OK)
        *out = unit;
    else
        destroy_unit(events, unit);
    return status;
}

static void destroy_units(kvn_events *events, kvn_event_unit *unit)
{
    void *previous = NULL;
    kvn_failure ignored; /* fails in a forked child, which must not use the unit */

    if (!unit || kvn_device_enter(events->device, &previous, &ignored) != KVN_OK)
        return;
    while (unit) {
        kvn_event_unit *next = unit->next;
        destroy_unit(events, unit);
        unit = next;
    }
    kvn_device_leave(events->device, previous);
}

static void keep_unit(kvn_events *events, kvn_event_unit *unit)
{
    const kvn_device *device = events->device;
    const bool streams = unit->stream != NULL;
    kvn_event_unit **units = &events->units[streams];
    bool is_kept;

    pthread_mutex_lock(&events->mutex);
    /* Units in another context of the program are not kept: the program may destroy that context at any time. */
    is_kept = !events->closed && events->num_units[streams] < MAX_UNITS &&
              (unit->context == device->context || unit->context == device->primary);
    unit->next = is_kept ? *units : NULL;
    if (is_kept) {
        *units = unit;
        events->num_units[streams]++;
    }
    pthread_mutex_unlock(&events->mutex);
    if (!is_kept)
        destroy_units(events, unit);
}

/* ---- how often the thread polls ---- */

typedef struct pace {
    int64_t pause_ns;
    int64_t latest_ns;   /* time at which the latest event was seen */
    int64_t interval_ns; /* from the event before it to the latest one; 0: there was none before */
} pace;

/* The time of the next look, after one that has seen an event or has not. */
static int64_t next_look(pace *it, bool has_seen, int64_t now_ns)
{
    const int64_t passed = now_ns - it->latest_ns, part = it->interval_ns / PART;
    const int64_t spread = part > 2 * SOONEST_NS ? part : 2 * SOONEST_NS; /* both ends of the interval are seen late */
    const int64_t early = it->interval_ns - spread, late = it->interval_ns + spread;

    if (has_seen) {
        *it = (pace){SOONEST_NS, now_ns, it->latest_ns ? passed : 0};
        return now_ns + SOONEST_NS;
    }
    it->pause_ns += it->pause_ns / PART;
    if (it->pause_ns > LATEST_NS)
        it->pause_ns = LATEST_NS;
    if (passed >= early && passed < late)
        return now_ns + SOONEST_NS;
    if (passed < early && early < passed + it->pause_ns)
        return it->latest_ns + early;
    return now_ns + it->pause_ns;
}

/* ---- the thread ---- */

static kvn_gate_waiter *waiter_of(const kvn_node *node)
{
    return KVN_LISTED(node, kvn_gate_waiter, node);
}

/* Returns true if the waiter has left the list. One whose backend has no room stays, and is not queried again. The
 * caller holds the mutex, which is released meanwhile. */
static bool look(kvn_events *events, kvn_gate_waiter *waiter)
{
    int status = KVN_OK;
    bool is_over = false;
    kvn_failure why;

    events->looked_at = waiter;
    pthread_mutex_unlock(&events->mutex);
    if (!waiter->is_open)
        status = kvn_event_query((const kvn_event *)waiter->gate, &why);
    if (status != KVN_PENDING) {
        waiter->is_open = true;
        is_over = waiter->open(waiter, status, &why);
    }
    pthread_mutex_lock(&events->mutex);
    if (is_over)
        kvn_list_remove(&waiter->node);
    events->looked_at = NULL;
    pthread_cond_broadcast(&events->changed);
    return is_over;
}

/* Returns true if the waiter has left the list, because a backend keeps its order now. The caller holds the mutex,
 * which is released meanwhile. */
static bool pass(kvn_events *events, kvn_gate_waiter *waiter)
{
    bool has_passed;

    events->looked_at = waiter;
    pthread_mutex_unlock(&events->mutex);
    has_passed = waiter->pass(waiter);
    pthread_mutex_lock(&events->mutex);
    if (has_passed)
        kvn_list_remove(&waiter->node);
    events->looked_at = NULL;
    pthread_cond_broadcast(&events->changed);
    return has_passed;
}

static bool is_among(const void *const *full, size_t count, const void *room)
{
    while (count > 0 && full[count - 1] != room)
        count--;
    return count > 0;
}

/* Lets waiters of each backend pass, up to the first that finds no room, since the others come after it. Begins again
 * when one has passed, as others may have come and gone. The caller holds the mutex, which is released meanwhile. */
static void pass_on(kvn_events *events)
{
    const void *full[MAX_FULL];
    size_t num_full = 0;
    kvn_node *node = kvn_list_first(&events->waiting);

    while (node && num_full < MAX_FULL && !events->stopping) {
        kvn_gate_waiter *waiter = waiter_of(node);

        if (waiter->pass && !waiter->is_open && !is_among(full, num_full, waiter->room)) {
            if (pass(events, waiter)) {
                node = kvn_list_first(&events->waiting);
                continue;
            }
            full[num_full++] = waiter->room;
        }
        node = kvn_list_after(&events->waiting, node);
    }
}

static const kvn_event_unit *unit_of(const kvn_gate_waiter *waiter) { return ((const kvn_event *)waiter->gate)->unit; }

/* A point that the current look found not reached. The unit is only compared, because it may be freed by now. */
typedef struct head {
    const kvn_event_unit *unit;
    kvn_stream of;
    uint64_t number;
} head;

/* The findings of one look. */
typedef struct look_state {
    head heads[MAX_HEADS];
    size_t num_heads;
    uint64_t num_behind; /* points behind one of these */
} look_state;

/* True if the point cannot be reached, because the look found it or an earlier one of its stream not reached. */
static bool is_behind(const look_state *state, const kvn_event_unit *unit)
{
    for (size_t i = 0; i < state->num_heads; i++) {
        const head *first = &state->heads[i];
        if (unit == first->unit || (unit->of && unit->of == first->of && unit->number > first->number))
            return true;
    }
    return false;
}

/* Looks at all waiters. Each query takes a lock of the driver that launches of the model need, so a point is queried
 * only once a look, and of points that follow each other on a stream only the first. A handle may be that of a
 * destroyed stream, whose points have no order with those of its successor: so each look queries one of the others, in
 * turn. The caller holds the mutex, which is released meanwhile; waiters may come and go then, so it begins again when
 * one has left. Returns true if one has left. */
static bool look_at_all(kvn_events *events)
{
    const uint64_t exception = events->num_turns++ % (events->num_behind + 1);
    kvn_node *node = kvn_list_first(&events->waiting);
    look_state state = {0};
    bool any = false;

    while (node && !events->stopping) {
        kvn_gate_waiter *waiter = waiter_of(node);
        const kvn_event_unit *unit = unit_of(waiter);
        const head point = {unit, unit->of, unit->number};
        const bool is_queried = !waiter->is_open;

        if (is_queried && is_behind(&state, unit) && state.num_behind++ != exception) {
            node = kvn_list_after(&events->waiting, node);
            continue;
        }
        if (look(events, waiter)) {
            any = true;
            node = kvn_list_first(&events->waiting);
            continue;
        }
        if (is_queried && !waiter->is_open && state.num_heads < MAX_HEADS)
            state.heads[state.num_heads++] = point;
        node = kvn_list_after(&events->waiting, node);
    }
    events->num_behind = state.num_behind;
    return any;
}

static void *events_main(void *argument)
{
    kvn_events *events = argument;
    pace pace = {.pause_ns = SOONEST_NS};
    kvn_failure ignored; /* without a context each query fails, and says so */

    prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS);
    kvn_device_begin_calls(events->device);
    events->device->ops->set_context(events->device, events->device->context, &ignored);
    pthread_mutex_lock(&events->mutex);
    while (!events->stopping) {
        if (!kvn_list_first(&events->waiting)) {
            pthread_cond_wait(&events->changed, &events->mutex);
            pace.pause_ns = SOONEST_NS;
            continue;
        }
        const bool has_seen = look_at_all(events);
        pass_on(events);
        const int64_t at_ns = next_look(&pace, has_seen, kvn_now_ns());
        if (!events->stopping && kvn_list_first(&events->waiting))
            kvn_cond_wait(&events->changed, &events->mutex, at_ns);
    }
    pthread_mutex_unlock(&events->mutex);
    return NULL;
}

/* The caller holds the mutex. */
static int start(kvn_events *events, kvn_failure *failure)
{
    char name[16];
    int error;

    if (events->started)
        return KVN_OK;
    snprintf(name, sizeof name, "kvn-%.3s-ev-%d", events->device->ops->name,
             (int)events->device->id % 1000);
    error = kvn_thread_start(&events->thread, NULL, name, events_main, events);
    if (error)
        return kvn_fail(failure, KVN_NO_MEMORY, error, "no thread for events of device %d: %s",
                        (int)events->device->id, strerror(error));
    events->started = true;
    return KVN_OK;
}

/* ---- the gate ---- */

static int enter(kvn_gate *gate, kvn_gate_waiter *waiter, kvn_failure *failure)
{
    kvn_events *events = ((kvn_event *)gate)->events;
    int status;

    pthread_mutex_lock(&events->mutex);
    status = start(events, failure);
    if (status == KVN_OK) {
        kvn_list_push_back(&events->waiting, &waiter->node);
        pthread_cond_broadcast(&events->changed);
    }
    pthread_mutex_unlock(&events->mutex);
    return status;
}

static void leave(kvn_gate *gate, kvn_gate_waiter *waiter)
{
    kvn_events *events = ((kvn_event *)gate)->events;

    pthread_mutex_lock(&events->mutex);
    while (events->looked_at == waiter)
        pthread_cond_wait(&events->changed, &events->mutex);
    kvn_list_remove(&waiter->node);
    pthread_mutex_unlock(&events->mutex);
}

/* ---- taking points ---- */

/* Small handles name default streams, of which a thread may have its own. */
static void number(kvn_events *events, kvn_stream stream, kvn_event_unit *unit)
{
    pthread_mutex_lock(&events->mutex);
    unit->of = (uintptr_t)stream > 2 ? stream : NULL;
    unit->number = events->num_taken++;
    pthread_mutex_unlock(&events->mutex);
}

static int record(kvn_events *events, kvn_stream stream, kvn_event_unit **unit, kvn_failure *failure)
{
    const kvn_device *device = events->device;
    void *previous = NULL;
    int status = kvn_device_enter_stream(device, stream, &previous, failure);

    if (status != KVN_OK)
        return status;
    status = make_unit(events, false, unit, failure);
    if (status == KVN_OK)
        status = device->ops->record_event(device, (*unit)->event, stream, failure);
    if (status == KVN_OK)
        number(events, stream, *unit);
    kvn_device_leave_stream(device, previous);
    return status;
}

/* A stream of the library waits for the event and does nothing else, so an event recorded there marks the point. */
static int follow(kvn_events *events, void *event, kvn_event_unit **unit, kvn_failure *failure)
{
    const kvn_device *device = events->device;
    void *previous = NULL;
    int status = kvn_device_enter(device, &previous, failure);

    if (status != KVN_OK)
        return status;
    if (device->ops->check_event)
        status = device->ops->check_event(device, event, failure);
    if (status == KVN_OK)
        status = make_unit(events, true, unit, failure);
    if (status == KVN_OK)
        status = device->ops->wait_event(device, (*unit)->stream, event, failure);
    if (status == KVN_OK)
        status = device->ops->record_event(device, (*unit)->event, (*unit)->stream, failure);
    kvn_device_leave(device, previous);
    return status;
}

static int take(kvn_events *events, int status, kvn_event_unit *unit, kvn_event *out)
{
    if (status != KVN_OK)
        destroy_units(events, unit);
    if (status == KVN_OK)
        *out = (kvn_event){.gate = {.enter = enter, .leave = leave}, .events = events, .unit = unit};
    return status;
}

int kvn_event_take_stream(kvn_events *events, kvn_stream stream, kvn_event *out, kvn_failure *failure)
{
    kvn_event_unit *unit = NULL;
    const int status = record(events, stream, &unit, failure);

    return take(events, status, unit, out);
}

int kvn_event_take(kvn_events *events, void *event, kvn_event *out, kvn_failure *failure)
{
    kvn_event_unit *unit = NULL;
    const int status = follow(events, event, &unit, failure);

    return take(events, status, unit, out);
}

void kvn_event_give_back(kvn_event *event) { keep_unit(event->events, event->unit); }

kvn_event *kvn_event_of(const kvn_device *device, kvn_gate *gate)
{
    kvn_event *event = (kvn_event *)gate;

    return gate && gate->enter == enter && event->events->device == device ? event : NULL;
}

int kvn_event_query(const kvn_event *event, kvn_failure *failure)
{
    const kvn_device *device = event->events->device;

    return device->ops->query_event(device, event->unit->event, failure);
}

int kvn_event_order(const kvn_event *event, kvn_stream stream, kvn_failure *failure)
{
    const kvn_device *device = event->events->device;

    return device->ops->wait_event(device, stream, event->unit->event, failure);
}

/* ---- all of them ---- */

kvn_events *kvn_events_create(kvn_device *device)
{
    kvn_events *events = calloc(1, sizeof *events);

    if (!events)
        return NULL;
    events->device = device;
    pthread_mutex_init(&events->mutex, NULL);
    kvn_cond_init(&events->changed);
    kvn_list_init(&events->waiting);
    return events;
}

void kvn_events_close(kvn_events *events)
{
    kvn_event_unit *units[2];

    pthread_mutex_lock(&events->mutex);
    events->closed = true;
    memcpy(units, events->units, sizeof units);
    memset(events->units, 0, sizeof events->units);
    memset(events->num_units, 0, sizeof events->num_units);
    pthread_mutex_unlock(&events->mutex);
    destroy_units(events, units[0]);
    destroy_units(events, units[1]);
}

void kvn_events_destroy(kvn_events *events)
{
    kvn_events_close(events);
    pthread_mutex_lock(&events->mutex);
    events->stopping = true;
    pthread_cond_broadcast(&events->changed);
    pthread_mutex_unlock(&events->mutex);
    if (events->started)
        pthread_join(events->thread, NULL);
    pthread_cond_destroy(&events->changed);
    pthread_mutex_destroy(&events->mutex);
    free(events);
}
