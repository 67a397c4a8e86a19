/* A channel: a stream of a device, and a thread that runs queued jobs on it one after another. Only this thread, with
 * the context set, issues copies to the stream. So transfers advance without polling, and a hanging stream blocks no
 * thread of the caller.
 *
 * A stream that was aborted or reported an error is replaced. If that fails, the job fails with the reason, and the
 * next job tries again. */
#ifndef KVN_DEVICE_CHANNEL_H
#define KVN_DEVICE_CHANNEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"

typedef struct kvn_channel kvn_channel;

/* The failure of a job on a channel. */
typedef struct kvn_channel_fault {
    kvn_failure why;    /* code and message; the call returns the status */
    uint64_t failed;    /* index in the shard of the descriptor at fault, not confirmed; KVN_NO_DESCRIPTOR: unknown */
    uint64_t confirmed; /* leading descriptors of the shard that have certainly arrived */
} kvn_channel_fault;

/* Clears a fault: no code, an unknown descriptor, none confirmed, "". */
void kvn_channel_fault_begin(kvn_channel_fault *fault);

/* A job. Embed it in a struct that stays in place until the job has run or was taken back. */
typedef struct kvn_channel_job {
    struct kvn_channel_job *next; /* for channel.c, like `queued` */
    bool queued;
    /* Called by the channel's thread, which does not use the job after this call. */
    void (*run)(struct kvn_channel_job *job, kvn_channel *channel);
} kvn_channel_job;

/* Starts the thread, sets the context there and makes the stream. The device outlives the channel. */
int kvn_channel_create(kvn_device *device, kvn_channel **out, kvn_failure *failure);
/* Like kvn_channel_create, but does not wait for the context and the stream. If they fail, each job tries them again,
 * and reports the reason if that fails. */
int kvn_channel_begin(kvn_device *device, kvn_channel **out, kvn_failure *failure);
/* Ends the thread and destroys the stream, once no job is left. In a forked child both are leaked. */
void kvn_channel_destroy(kvn_channel *channel);
kvn_device *kvn_channel_device(const kvn_channel *channel);
/* False in a forked child of the process that made it. */
bool kvn_channel_is_ours(const kvn_channel *channel);

/* Queues the job behind the others. */
void kvn_channel_submit(kvn_channel *channel, kvn_channel_job *job);
/* Takes back a job that has not begun; false if it has. */
bool kvn_channel_dequeue(kvn_channel *channel, kvn_channel_job *job);
/* Aborts the stream of a running job, whose thread may be blocked in a call (by a copy of pageable memory or a full
 * stream) and so cannot check whether to stop. If the thread enters such a call later, interrupt again. */
void kvn_channel_interrupt(kvn_channel *channel, const kvn_channel_job *job);
/* Waits until the job has issued all its work or has ended; false at the deadline. */
bool kvn_channel_await_issued(kvn_channel *channel, const kvn_channel_job *job, int64_t deadline_ns);
/* Records `event` behind the work of a job that has issued all of it: KVN_PENDING; or KVN_OK if the job has ended. With
 * the device's context current. */
int kvn_channel_record(kvn_channel *channel, const kvn_channel_job *job, void *event, kvn_failure *failure);
/* Number of queued and running jobs, a hint for the choice of a channel. */
unsigned kvn_channel_load(kvn_channel *channel);

/* ---- on its thread ---- */

/* Makes a stream if there is none. Call it before the first kvn_channel_stream of a job. */
int kvn_channel_ready(kvn_channel *channel, kvn_channel_fault *fault);
kvn_stream kvn_channel_stream(const kvn_channel *channel);
/* Reports to kvn_channel_await_issued that the job has issued all its work. */
void kvn_channel_note_issued(kvn_channel *channel);
/* Waits for all issued work, and checks *stop every 10 ms: if set, aborts and replaces the stream and returns
 * KVN_CANCELLED. After an error of the stream returns its status, with `fault` filled in and the stream replaced. After
 * the return, in all cases, no issued work touches memory. */
int kvn_channel_synchronize(kvn_channel *channel, const atomic_int *stop,
                            kvn_channel_fault *fault);
/* Ends the time in which the job can be interrupted. Returns true if it was: then issued work may be dropped, even if
 * calls succeeded. */
bool kvn_channel_settle(kvn_channel *channel);
/* Waits at most `ms` for all issued work: KVN_PENDING if it is not done, else like kvn_channel_synchronize. */
int kvn_channel_poll(kvn_channel *channel, int ms, kvn_channel_fault *fault);

#endif
