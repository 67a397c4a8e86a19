/*
 * Events number their records; a wait is for the latest record at the time of the wait. A wait for an event without
 * a record blocks the stream if aclrtCreateEvent or aclrtCreateEventWithFlag created the event; it has no effect if
 * aclrtCreateEventExWithFlag did.
 */
#include <stdlib.h>

#include "core_log.h"
#include "core_stream.h"

struct sim_event {
    void *handle;
    void *context;
    sim_event_kind kind;
    uint32_t flags;
    unsigned references;
    uint64_t num_recorded;  /* records that were queued */
    uint64_t num_completed; /* number of the latest completed record */
    uint64_t num_reset;     /* records up to this number are ignored */
    int64_t completed_us;
    int waits_left;
    sim_stream *stream; /* of the latest record; holds a reference */
    uint64_t aborts;    /* aborts of that stream before the record */
    sim_event *next;
};

typedef struct {
    sim_event *event;
    uint64_t record;
    int is_done;
} marker;

static sim_event *events;

static int find(const void *handle, sim_event **found) {
    *found = events;
    while (*found && (*found)->handle != handle) {
        *found = (*found)->next;
    }
    if (!*found) {
        return sim_error(SIM_HANDLE, "%p is not an event, or it was destroyed", handle);
    }
    return 0;
}

static void drop(sim_event *event) {
    if (!--event->references) {
        if (event->stream) {
            sim_stream_drop(event->stream);
        }
        free(event);
    }
}

static int has_record(const sim_event *event) { return event->num_recorded > event->num_reset; }

static int is_complete(const sim_event *event) {
    return has_record(event) && event->num_completed >= event->num_recorded;
}

static int has_failed(const sim_event *event) {
    return event->stream && event->stream->failure->code;
}

/* Returns 1 if the latest record will never complete: its stream was aborted since, or its context failed. */
static int is_lost(const sim_event *event) {
    return (event->stream && sim_stream_aborts(event->stream) != event->aborts) || has_failed(event);
}

int sim_event_create(sim_event_kind kind, uint32_t flags, void **handle) {
    if (flags & ~0x7BU) {
        return sim_error(SIM_PARAM, "flag=0x%x of an event", flags);
    }
    sim_event *event = calloc(1, sizeof *event);
    if (!event) {
        sim_die("no host memory");
    }
    sim_lock();
    const sim_context *context = sim_context_current();
    int has_context = context != NULL;
    if (has_context) {
        *event = (sim_event){.handle = sim_handle_new(), .kind = kind, .flags = flags,
                             .context = sim_context_handle(context),
                             .references = 1, .next = events};
        events = event;
        *handle = event->handle;
    }
    sim_unlock();
    if (!has_context) {
        free(event);
        return sim_error(SIM_NO_CONTEXT, "the thread has no context");
    }
    sim_count(SIM_COUNT_EVENTS, 1);
    return 0;
}

int sim_event_destroy(void *handle) {
    sim_lock();
    sim_event *event;
    int code = find(handle, &event);
    if (!code) {
        sim_event **link = &events;
        while (*link != event) {
            link = &(*link)->next;
        }
        *link = event->next;
        drop(event);
    }
    sim_unlock();
    sim_count(SIM_COUNT_EVENTS, code ? 0 : -1);
    return code;
}

void *sim_event_context(void *handle) {
    sim_lock();
    sim_event *event = events;
    while (event && event->handle != handle) {
        event = event->next;
    }
    void *context = event ? event->context : NULL;
    sim_unlock();
    return context;
}

static marker *marker_new(sim_event *event, uint64_t record) {
    marker *made = calloc(1, sizeof *made);
    if (!made) {
        sim_die("no host memory");
    }
    event->references++;
    *made = (marker){event, record, 0};
    return made;
}

static void marker_dispose(void *argument) {
    marker *made = argument;
    sim_lock();
    drop(made->event);
    sim_unlock();
    free(made);
}

static int complete(void *argument, sim_stream *stream) {
    const marker *record = argument;
    (void)stream;
    sim_lock();
    if (record->event->num_completed < record->record) {
        record->event->num_completed = record->record;
        record->event->completed_us = sim_now_us();
    }
    pthread_cond_broadcast(&sim_progress);
    sim_unlock();
    return 0;
}

int sim_event_record(void *handle, sim_stream *stream, const sim_fault *fault) {
    sim_fault shown = *fault;
    if (shown.kind == SIM_FAULT_SYNC) {
        shown.kind = SIM_FAULT_PARTIAL; /* the event is recorded, because a wait for it would never end */
    }
    sim_lock();
    sim_event *event;
    int code = find(handle, &event);
    marker *record = NULL;
    if (!code) {
        record = marker_new(event, ++event->num_recorded);
        if (event->stream) {
            sim_stream_drop(event->stream);
        }
        event->stream = stream;
        event->aborts = sim_stream_aborts(stream);
        sim_stream_hold(stream);
    }
    sim_unlock();
    return code ? code : sim_stream_enqueue(stream, &shown, complete, marker_dispose, record, 0);
}

static int hold_back(void *argument, sim_stream *stream) {
    const marker *wait = argument;
    sim_lock();
    while (wait->event->num_completed < wait->record && !stream->is_stopping &&
           !stream->failure->code && !has_failed(wait->event)) {
        sim_wait_until(&sim_progress, -1);
    }
    sim_unlock();
    return 0;
}

static void wait_dispose(void *argument) {
    sim_lock();
    ((marker *)argument)->event->waits_left--;
    sim_unlock();
    marker_dispose(argument);
}

int sim_event_stream_wait(void *handle, sim_stream *stream, const sim_fault *fault) {
    sim_lock();
    sim_event *event;
    marker *wait = NULL;
    int code = find(handle, &event);
    if (!code && event->kind == SIM_EVENT_EX && !(event->flags & SIM_EVENT_FLAG_SYNC)) {
        code = sim_error(SIM_UNSUPPORTED, "an event without ACL_EVENT_SYNC cannot be waited for");
    } else if (!code && (has_record(event) || event->kind != SIM_EVENT_EX)) {
        wait = marker_new(event, event->num_recorded + (has_record(event) ? 0 : 1));
        event->waits_left++;
    }
    sim_unlock();
    return wait ? sim_stream_enqueue(stream, fault, hold_back, wait_dispose, wait, 0) : code;
}

static int forget(void *argument, sim_stream *stream) {
    (void)argument;
    (void)stream;
    return 0;
}

int sim_event_reset(void *handle, sim_stream *stream) {
    sim_lock();
    sim_event *event;
    marker *reset = NULL;
    int code = find(handle, &event);
    if (!code && (event->kind != SIM_EVENT_FLAGGED || !(event->flags & SIM_EVENT_FLAG_SYNC))) {
        code = sim_error(SIM_UNSUPPORTED, "only events of aclrtCreateEventWithFlag with "
                                          "ACL_EVENT_SYNC can be reset");
    } else if (!code) {
        event->num_reset = event->num_recorded;
        reset = marker_new(event, 0);
    }
    sim_unlock();
    return reset ? sim_stream_enqueue(stream, NULL, forget, marker_dispose, reset, 0) : code;
}

int sim_event_synchronize(void *handle, int timeout_ms) {
    int64_t deadline = timeout_ms < 0 ? -1 : sim_now_us() + (int64_t)timeout_ms * 1000;
    sim_lock();
    sim_event *event;
    int code = find(handle, &event);
    if (!code) {
        event->references++;
        uint64_t record = has_record(event) ? event->num_recorded : 0;
        while (event->num_completed < record && !code) {
            if (is_lost(event)) {
                code = sim_error(SIM_STREAM_ABORT, "the event's stream was aborted");
            } else if (sim_wait_until(&sim_progress, deadline)) {
                code = sim_error(SIM_EVENT_TIMEOUT, "the event is not complete");
            }
        }
        drop(event);
    }
    sim_unlock();
    return code;
}

int sim_event_is_complete(void *handle, int *done) {
    sim_lock();
    sim_event *event;
    int code = find(handle, &event);
    if (!code) {
        *done = is_complete(event) || (event->kind == SIM_EVENT_EX && !has_record(event));
    }
    sim_unlock();
    return code;
}

int sim_event_waits_done(void *handle, int *done) {
    sim_lock();
    sim_event *event;
    int code = find(handle, &event);
    if (!code && event->kind == SIM_EVENT_EX) {
        code = sim_error(SIM_UNSUPPORTED, "not for events of aclrtCreateEventExWithFlag");
    } else if (!code) {
        *done = !event->waits_left;
    }
    sim_unlock();
    return code;
}

int sim_event_elapsed_ms(float *milliseconds, void *start, void *end) {
    sim_lock();
    sim_event *first, *last;
    int code = find(start, &first);
    code = code ? code : find(end, &last);
    if (!code && (!is_complete(first) || !is_complete(last))) {
        code = sim_error(SIM_PARAM, "both events must have been recorded and completed");
    } else if (!code) {
        *milliseconds = (float)(last->completed_us - first->completed_us) / 1000;
    }
    sim_unlock();
    return code;
}
