/* A channel: one stream of a device and one thread of ours, which has the context set and alone
 * touches the stream; and a queue of jobs that the thread runs one after another. So nobody has to
 * poll for a transfer to advance, and a stream that hangs holds up no thread of the caller's.
 *
 * A stream that was aborted or that reported an error is replaced by a new one. While none can be
 * made, jobs fail and say why; each tries again. */
#ifndef KVN_DEVICE_CHANNEL_H
#define KVN_DEVICE_CHANNEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"

typedef struct kvn_channel kvn_channel;

/* Why work on a channel stopped. */
typedef struct kvn_channel_fault {
    kvn_failure why;    /* code and message; the status is what the call returns */
    uint64_t failed;    /* index in the shard of the descriptor at fault; KVN_NO_DESCRIPTOR: unknown */
    uint64_t confirmed; /* leading descriptors of the shard that arrived for certain */
} kvn_channel_fault;

/* Preset: no code, an unknown descriptor, nothing confirmed, "". */
void kvn_channel_fault_begin(kvn_channel_fault *fault);

/* Embed it in what the thread is to do; it must stay in place until it ran or was taken back. */
typedef struct kvn_channel_job {
    struct kvn_channel_job *next; /* channel.c's, as `queued` */
    bool queued;
    /* On the channel's thread, which looks at the job no more once this was called. */
    void (*run)(struct kvn_channel_job *job, kvn_channel *channel);
} kvn_channel_job;

/* Starts the thread, sets the context there and makes the stream. The device outlives the channel. */
int kvn_channel_create(kvn_device *device, kvn_channel **out, kvn_failure *failure);
/* No job is left. Ends the thread and destroys the stream; in a forked child it only forgets. */
void kvn_channel_destroy(kvn_channel *channel);
kvn_device *kvn_channel_device(const kvn_channel *channel);
/* False in a forked child of the process that made it. */
bool kvn_channel_is_ours(const kvn_channel *channel);

/* Queues the job behind the others. */
void kvn_channel_submit(kvn_channel *channel, kvn_channel_job *job);
/* Takes a job back that has not begun. False: it runs, or has run. */
bool kvn_channel_dequeue(kvn_channel *channel, kvn_channel_job *job);
/* Aborts what the job has streams for, if it runs: for a thread that is blocked in a call (copies of
 * pageable memory wait, full streams do) and so cannot look whether it is to stop. It may enter such
 * a call after this: then another interrupt is due. */
void kvn_channel_interrupt(kvn_channel *channel, const kvn_channel_job *job);
/* Waits until the job has given all its work to the stream, or is over. False: the deadline passed before. */
bool kvn_channel_await_issued(kvn_channel *channel, const kvn_channel_job *job, int64_t deadline_ns);
/* Records `event` behind the work of a job that has given all of it to the stream: KVN_PENDING. KVN_OK: it is
 * over, and there is nothing to be behind. With the device's context current. */
int kvn_channel_record(kvn_channel *channel, const kvn_channel_job *job, void *event, kvn_failure *failure);
/* Jobs queued and running: a hint of where the next is served first. */
unsigned kvn_channel_load(kvn_channel *channel);

/* ---- on its thread ---- */

/* Makes sure that there is a stream: call it before the job's first use of kvn_channel_stream. */
int kvn_channel_ready(kvn_channel *channel, kvn_channel_fault *fault);
kvn_stream kvn_channel_stream(const kvn_channel *channel);
/* The job uses this stream too, from here on: an interrupt aborts both. NULL before it is destroyed or
 * given to others. Whether the job was interrupted. */
bool kvn_channel_also_uses(kvn_channel *channel, kvn_stream stream);
/* All that the job will ever do is on the stream, or done: for kvn_channel_await_issued. */
void kvn_channel_note_issued(kvn_channel *channel);
/* Waits for all that was issued, and looks every 10 ms whether *stop is set: then the stream is
 * aborted and replaced, and KVN_CANCELLED returned. An error of the stream, or one that only shows
 * here: its status, with `fault` filled in and the stream replaced. On return nothing that was
 * issued touches memory any more, whatever it returns. */
int kvn_channel_synchronize(kvn_channel *channel, const atomic_int *stop,
                            kvn_channel_fault *fault);
/* From here on the job cannot be interrupted. True if it was before: then what was issued may be dropped
 * in spite of any success. */
bool kvn_channel_settle(kvn_channel *channel);
/* Waits at most `ms` for all that was issued: KVN_PENDING when it is not through, else KVN_OK or the
 * failure as of kvn_channel_synchronize. */
int kvn_channel_poll(kvn_channel *channel, int ms, kvn_channel_fault *fault);

#endif
