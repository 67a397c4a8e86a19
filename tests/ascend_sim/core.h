/*
 * Parts of the core for the ACL simulator beyond sim.h: creation and destruction of contexts, streams and
 * events. Handles are addresses in unreadable space and are never reused, so that stale or dereferenced
 * handles are detected.
 */
#ifndef KVSIM_CORE_H
#define KVSIM_CORE_H

#include <pthread.h>

#include "sim.h"

enum {
    SIM_INVALID = 100000,
    SIM_PARAM = 107000,
    SIM_DEVICE_ID = 107001,
    SIM_NO_CONTEXT = 107002,
    SIM_STREAM_CONTEXT = 107003,
    SIM_UNALIGNED = 107008,
    SIM_HANDLE = 107017,
    SIM_STREAM_ABORT = 107023,
    SIM_UNSUPPORTED = 207000,
    SIM_NO_MEMORY = 207001,
    SIM_NO_RESOURCE = 207005,
    SIM_NO_STREAM = 207008,
    SIM_DMA = 507013,
    SIM_DRIVER = 507899,
    SIM_STREAM_TIMEOUT = 507046,
    SIM_EVENT_TIMEOUT = 507047,
    SIM_ALREADY_REGISTERED = 507910,
    SIM_NOT_REGISTERED = 507911,
};

typedef struct sim_context sim_context;
typedef struct sim_event sim_event;

/* Guards contexts, streams and events. Work runs without it. */
SIM_API void sim_lock(void);
SIM_API void sim_unlock(void);
/* Signalled whenever an operation ends, an event completes or a stream is aborted. */
extern pthread_cond_t sim_progress;
extern pthread_mutex_t sim_mutex;

SIM_API void *sim_handle_new(void);
SIM_API int64_t sim_now_us(void);
/* Waits for the condition until the time, -1 for ever; the lock is held. Whether time is over. */
int sim_wait_until(pthread_cond_t *condition, int64_t deadline_us);
void sim_condition_init(pthread_cond_t *condition);

/* ---- reserved space ---- */

/* Address space of a device, or 0; never given twice. */
SIM_API uint64_t sim_space_take(uint64_t nbytes, uint64_t alignment);
/* The next one who takes that many gets these, which were taken before. */
SIM_API void sim_space_give(uint64_t address, uint64_t nbytes);
/* Bytes that all processes hold on the device; adds change for this one unless that exceeds limit. */
SIM_API int sim_hbm_change(int device, int64_t change, uint64_t limit, uint64_t *used);

void sim_memory_totals(uint64_t *device_bytes, uint64_t *pinned, uint64_t *registered);

/* ---- contexts ---- */

SIM_API int sim_device_set(int device);
SIM_API int sim_device_reset(int device, int force);
SIM_API int sim_context_create(int device, void **handle);
SIM_API int sim_context_destroy(void *handle, int force);
/* NULL: the thread has none then. */
SIM_API int sim_context_set(void *handle);
/* From the first error of its work on nothing goes on in the context, which keeps the error. */
SIM_API void sim_context_stop_on_failure(void *handle);
/* Returns the error with which the context has failed, or 0. */
SIM_API int sim_context_failed(void *handle);
/* Lets such a context fail. */
SIM_API void sim_context_fail(void *handle, int code);
SIM_API int sim_context_get(void **handle);
/* With the lock: the thread's context, NULL where it has none. */
sim_context *sim_context_current(void);
int sim_context_device(const sim_context *context);
void *sim_context_handle(const sim_context *context);
/* With the lock: NULL where the handle names none. */
sim_context *sim_context_find(const void *handle);
/* With the lock: the context stops on failure, and with what it has failed since (0: it has not). */
typedef struct {
    int stops;
    int code;
} sim_context_failure;
sim_context_failure *sim_context_failure_of(const sim_context *context);
/* With the lock: where its default stream is kept. */
sim_stream **sim_context_default_stream(sim_context *context);
/* Waits for all streams of the thread's context. */
SIM_API int sim_context_wait(int timeout_ms);
SIM_API int sim_peer_access(int device, int peer, int change);

/* ---- streams ---- */

SIM_API int sim_stream_create(uint32_t flags, void **handle);
SIM_API int sim_stream_destroy(void *handle, int force);
/* Destroys it without waiting: its work goes on. */
SIM_API int sim_stream_leave(void *handle);
/* Returns the number of a context's streams that have not been destroyed. */
SIM_API int sim_context_streams(void *context);
/* Returns 1 if all work of the context's streams is done, including destroyed streams. */
SIM_API int sim_streams_are_idle(void *context);
/* Waits until all work of the context's streams is done; returns 0, or the first error. */
SIM_API int sim_context_wait_for(void *context);
SIM_API int sim_stream_abort(sim_stream *stream);
/* Once for a stream; to stop is for all streams of its context, and from its first error none goes on. */
SIM_API int sim_stream_set_failure_mode(sim_stream *stream, int stops);
/* 1 all is done, 0 not yet, or an error of the work. */
SIM_API int sim_stream_is_idle(sim_stream *stream, int *idle);
/* Destroys the streams of a context, or of all contexts for NULL; force drops their pending work. */
void sim_streams_destroy(const sim_context *context, int force);
int sim_streams_wait(const sim_context *context, int timeout_ms);
/* With the lock: how often it was aborted. */
uint64_t sim_stream_aborts(const sim_stream *stream);
void sim_stream_hold(sim_stream *stream);
void sim_stream_drop(sim_stream *stream);

/* ---- events ---- */

typedef enum { SIM_EVENT_PLAIN, SIM_EVENT_FLAGGED, SIM_EVENT_EX } sim_event_kind;
#define SIM_EVENT_FLAG_SYNC 0x1U
#define SIM_EVENT_FLAG_TIME 0x8U

SIM_API int sim_event_create(sim_event_kind kind, uint32_t flags, void **handle);
SIM_API int sim_event_destroy(void *handle);
/* Returns the context in which the event was made, or NULL for an unknown event. */
SIM_API void *sim_event_context(void *handle);
SIM_API int sim_event_record(void *handle, sim_stream *stream, const sim_fault *fault);
SIM_API int sim_event_reset(void *handle, sim_stream *stream);
SIM_API int sim_event_stream_wait(void *handle, sim_stream *stream, const sim_fault *fault);
SIM_API int sim_event_synchronize(void *handle, int timeout_ms);
SIM_API int sim_event_is_complete(void *handle, int *complete);
SIM_API int sim_event_waits_done(void *handle, int *done);
SIM_API int sim_event_elapsed_ms(float *milliseconds, void *start, void *end);

#endif
