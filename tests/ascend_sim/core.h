/*
 * Parts of the core that the ACL and CUDA simulators use beyond sim.h: contexts, streams, events, address space.
 * Handles are unreadable addresses and are never reused, so stale or dereferenced handles are detected.
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

/* The lock guards contexts, streams and events. Work runs without the lock. */
SIM_API void sim_lock(void);
SIM_API void sim_unlock(void);
/* Broadcast when an operation ends, an event completes, or a stream is aborted. */
extern pthread_cond_t sim_progress;
extern pthread_mutex_t sim_mutex;

SIM_API void *sim_handle_new(void);
SIM_API int64_t sim_now_us(void);
/* Call with the lock held. Returns 1 at the deadline; -1: no deadline. */
int sim_wait_until(pthread_cond_t *condition, int64_t deadline_us);
void sim_condition_init(pthread_cond_t *condition);

/* ---- reserved space ---- */

/* Returns device address space, or 0. An address is returned again only after sim_space_give. */
SIM_API uint64_t sim_space_take(uint64_t nbytes, uint64_t alignment);
/* Reuses the address for the next sim_space_take of the same size. */
SIM_API void sim_space_give(uint64_t address, uint64_t nbytes);
/* Adds `change` to this process's bytes on the device; *used: the bytes of all processes after that. Returns 1, and
 * adds nothing, if *used would exceed `limit`. */
SIM_API int sim_hbm_change(int device, int64_t change, uint64_t limit, uint64_t *used);

void sim_memory_totals(uint64_t *device_bytes, uint64_t *pinned, uint64_t *registered);

/* ---- contexts ---- */

SIM_API int sim_device_set(int device);
SIM_API int sim_device_reset(int device, int force);
SIM_API int sim_context_create(int device, void **handle);
SIM_API int sim_context_destroy(void *handle, int force);
/* Makes the context current in this thread; NULL: none. */
SIM_API int sim_context_set(void *handle);
/* Makes the first error of its work fail the context: its queued work is dropped, and later calls get the error. */
SIM_API void sim_context_stop_on_failure(void *handle);
/* Returns the error that has failed the context, or 0. */
SIM_API int sim_context_failed(void *handle);
/* Fails the context, as an error of its work does. */
SIM_API void sim_context_fail(void *handle, int code);
SIM_API int sim_context_get(void **handle);
/* The thread's context, or NULL. Call with the lock held. */
sim_context *sim_context_current(void);
int sim_context_device(const sim_context *context);
void *sim_context_handle(const sim_context *context);
/* Returns NULL for an unknown handle. Call with the lock held. */
sim_context *sim_context_find(const void *handle);
/* Guarded by the lock. */
typedef struct {
    int stops; /* an error of the work fails the context */
    int code;  /* that has failed the context; 0: none */
} sim_context_failure;
sim_context_failure *sim_context_failure_of(const sim_context *context);
/* The place of the context's default stream, which is NULL before its first use. Call with the lock held. */
sim_stream **sim_context_default_stream(sim_context *context);
/* Waits for all streams of the thread's context. */
SIM_API int sim_context_wait(int timeout_ms);
/* change: 1 enables, -1 disables, 0 asks. Returns 1 if `device` may access memory of `peer`, 0 if not, or minus an
 * error code. */
SIM_API int sim_peer_access(int device, int peer, int change);

/* ---- streams ---- */

SIM_API int sim_stream_create(uint32_t flags, void **handle);
SIM_API int sim_stream_destroy(void *handle, int force);
/* Destroys the handle; the stream itself ends after its work. */
SIM_API int sim_stream_leave(void *handle);
/* Returns the number of a context's streams that have not been destroyed. */
SIM_API int sim_context_streams(void *context);
/* Returns 1 if all work of the context's streams is done, including destroyed streams. */
SIM_API int sim_streams_are_idle(void *context);
/* Waits until all work of the context's streams is done; returns 0, or the first error. */
SIM_API int sim_context_wait_for(void *context);
SIM_API int sim_stream_abort(sim_stream *stream);
/* Call it once for a stream. `stops`: the first error stops all streams of the context. */
SIM_API int sim_stream_set_failure_mode(sim_stream *stream, int stops);
/* Sets *idle to 1 if all work is done, otherwise to 0. Returns 0, or an error of the work. */
SIM_API int sim_stream_is_idle(sim_stream *stream, int *idle);
/* Destroys the streams of a context; `force` drops their pending work. */
void sim_streams_destroy(const sim_context *context, int force);
int sim_streams_wait(const sim_context *context, int timeout_ms);
/* The number of aborts of the stream. Call with the lock held. */
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
