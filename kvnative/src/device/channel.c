/* Runs the work of one stream of a device, on a thread that waits for it. */
#include "device/channel.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/thread.h"

/* The longest time that an abort waits before it stops the stream. */
#define SLICE_MS 10

struct kvn_channel {
    kvn_device *device;
    pthread_t thread;
    pid_t pid;
    pthread_mutex_t mutex; /* guards the fields below, and the links of jobs */
    pthread_cond_t changed;
    pthread_cond_t progressed; /* a job has issued all its work, or has ended: for kvn_channel_await_issued */
    kvn_stream stream; /* written only by the thread; NULL: it must be made again */
    kvn_channel_job *running;
    bool issued;      /* the running job has issued all its work */
    bool interrupted; /* another thread has interrupted the running job */
    kvn_channel_job *head;
    kvn_channel_job *tail;
    unsigned load; /* number of queued and running jobs */
    bool started;  /* the thread has a stream, or `refused` is a failure */
    bool stopping;
    kvn_failure refused;
};

/* ---- faults ---- */

void kvn_channel_fault_begin(kvn_channel_fault *fault)
{
    *fault = (kvn_channel_fault){.failed = KVN_NO_DESCRIPTOR};
}

/* ---- the stream; on the channel's thread ---- */

int kvn_channel_ready(kvn_channel *channel, kvn_channel_fault *fault)
{
    const kvn_device *device = channel->device;
    kvn_stream stream = NULL;
    kvn_failure failure;
    int status;

    if (channel->stream)
        return KVN_OK;
    status = device->ops->set_context(device, device->context, &failure);
    if (status != KVN_OK)
        return kvn_fail(&fault->why, status, failure.code, "%.220s", failure.message);
    status = device->ops->create_stream(device, &stream, &failure);
    if (status != KVN_OK)
        return kvn_fail(&fault->why, status, failure.code, "no stream on device %d: %.200s",
                        (int)device->id, failure.message);
    pthread_mutex_lock(&channel->mutex);
    channel->stream = stream;
    pthread_mutex_unlock(&channel->mutex);
    return KVN_OK;
}

kvn_stream kvn_channel_stream(const kvn_channel *channel) { return channel->stream; }

/* Stops the work of the stream, and destroys it; another thread may interrupt it until then. A stream that can be
 * aborted but not destroyed is empty, and stays in use. Returns false if the system does neither, so that the work
 * continues; but true if it `has_ended`: then only the handle is lost. */
static bool drop_stream(kvn_channel *channel, bool has_ended)
{
    const kvn_device *device = channel->device;
    kvn_failure ignored; /* the error that led here is reported instead */
    bool aborted, destroyed;

    pthread_mutex_lock(&channel->mutex);
    aborted = device->ops->abort_stream(device, channel->stream, &ignored) == KVN_OK;
    destroyed = device->ops->drop_stream(device, channel->stream, &ignored) == KVN_OK;
    if (destroyed || (has_ended && !aborted))
        channel->stream = NULL;
    pthread_mutex_unlock(&channel->mutex);
    return aborted || !channel->stream;
}

int kvn_channel_poll(kvn_channel *channel, int ms, kvn_channel_fault *fault)
{
    const kvn_device *device = channel->device;
    int status;

    if (!channel->stream)
        return KVN_OK; /* nothing was issued since the abort */
    status = device->ops->wait_stream(device, channel->stream, ms, &fault->why);
    if (status < 0)
        drop_stream(channel, true); /* its work has ended, with an error */
    return status;
}

int kvn_channel_synchronize(kvn_channel *channel, const atomic_int *stop, kvn_channel_fault *fault)
{
    int status = KVN_PENDING;
    bool told = false;

    while (status == KVN_PENDING) {
        told = atomic_load(stop);
        if (told && channel->stream && drop_stream(channel, false))
            return KVN_CANCELLED;
        status = kvn_channel_poll(channel, SLICE_MS, fault);
    }
    /* A stream that cannot be aborted at once ends later with that code. */
    if (told && status < 0 && fault->why.code && fault->why.code == channel->device->ops->aborted_code) {
        kvn_channel_fault_begin(fault);
        return KVN_CANCELLED;
    }
    return status;
}

/* ---- the thread ---- */

static kvn_channel_job *take(kvn_channel *channel)
{
    kvn_channel_job *job = channel->head;

    channel->head = job->next;
    if (!channel->head)
        channel->tail = NULL;
    job->queued = false;
    return job;
}

/* Sets the context of this thread, and makes the first stream. */
static void start(kvn_channel *channel)
{
    const kvn_device *device = channel->device;
    kvn_channel_fault fault;

    kvn_channel_fault_begin(&fault);
    kvn_device_begin_calls(device);
    kvn_channel_ready(channel, &fault);
    pthread_mutex_lock(&channel->mutex);
    channel->refused = fault.why;
    channel->started = true;
    pthread_cond_broadcast(&channel->changed);
    pthread_mutex_unlock(&channel->mutex);
}

static void destroy_stream(kvn_channel *channel)
{
    const kvn_device *device = channel->device;
    kvn_failure ignored;

    if (channel->stream &&
        device->ops->destroy_stream(device, channel->stream, &ignored) != KVN_OK)
        device->ops->drop_stream(device, channel->stream, &ignored);
}

static void *channel_main(void *argument)
{
    kvn_channel *channel = argument;

    start(channel);
    pthread_mutex_lock(&channel->mutex);
    for (;;) {
        while (!channel->head && !channel->stopping)
            pthread_cond_wait(&channel->changed, &channel->mutex);
        if (!channel->head)
            break;
        kvn_channel_job *job = take(channel);
        channel->running = job;
        channel->issued = false;
        channel->interrupted = false;
        pthread_mutex_unlock(&channel->mutex);
        job->run(job, channel);
        pthread_mutex_lock(&channel->mutex);
        channel->running = NULL;
        pthread_cond_broadcast(&channel->progressed);
        channel->load--;
    }
    pthread_mutex_unlock(&channel->mutex);
    destroy_stream(channel);
    return NULL;
}

static int start_thread(kvn_channel *channel)
{
    char name[16];

    snprintf(name, sizeof name, "kvn-%.6s-%d", channel->device->ops->name,
             (int)channel->device->id % 1000);
    return kvn_thread_start(&channel->thread, NULL, name, channel_main, channel);
}

/* ---- the channel ---- */

static void release(kvn_channel *channel)
{
    pthread_cond_destroy(&channel->progressed);
    pthread_cond_destroy(&channel->changed);
    pthread_mutex_destroy(&channel->mutex);
    free(channel);
}

int kvn_channel_begin(kvn_device *device, kvn_channel **out, kvn_failure *failure)
{
    kvn_channel *channel;
    int error;

    *out = NULL;
    if (kvn_device_check_process(device, failure) != KVN_OK)
        return failure->status;
    channel = calloc(1, sizeof *channel);
    if (!channel)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a channel of device %d",
                        (int)device->id);
    channel->device = device;
    channel->pid = getpid();
    pthread_mutex_init(&channel->mutex, NULL);
    pthread_cond_init(&channel->changed, NULL);
    kvn_cond_init(&channel->progressed);
    *out = channel;
    error = start_thread(channel);
    if (error) {
        *out = NULL;
        release(channel);
        return kvn_fail(failure, KVN_NO_MEMORY, error, "no thread for a channel of device %d: %s",
                        (int)device->id, strerror(error));
    }
    return KVN_OK;
}

int kvn_channel_create(kvn_device *device, kvn_channel **out, kvn_failure *failure)
{
    kvn_channel *channel;

    if (kvn_channel_begin(device, out, failure) != KVN_OK)
        return failure->status;
    channel = *out;
    pthread_mutex_lock(&channel->mutex);
    while (!channel->started)
        pthread_cond_wait(&channel->changed, &channel->mutex);
    pthread_mutex_unlock(&channel->mutex);
    if (channel->refused.status != KVN_OK) {
        *failure = channel->refused;
        *out = NULL;
        kvn_channel_destroy(channel);
        return failure->status;
    }
    return KVN_OK;
}

void kvn_channel_destroy(kvn_channel *channel)
{
    if (!channel || !kvn_channel_is_ours(channel))
        return; /* a forked child has no such thread, and may have inherited a locked mutex */
    pthread_mutex_lock(&channel->mutex);
    channel->stopping = true;
    pthread_cond_broadcast(&channel->changed);
    pthread_mutex_unlock(&channel->mutex);
    pthread_join(channel->thread, NULL);
    release(channel);
}

kvn_device *kvn_channel_device(const kvn_channel *channel) { return channel->device; }

bool kvn_channel_is_ours(const kvn_channel *channel) { return channel->pid == getpid(); }

/* ---- jobs ---- */

void kvn_channel_submit(kvn_channel *channel, kvn_channel_job *job)
{
    pthread_mutex_lock(&channel->mutex);
    job->next = NULL;
    job->queued = true;
    if (channel->tail)
        channel->tail->next = job;
    else
        channel->head = job;
    channel->tail = job;
    channel->load++;
    pthread_cond_signal(&channel->changed);
    pthread_mutex_unlock(&channel->mutex);
}

bool kvn_channel_dequeue(kvn_channel *channel, kvn_channel_job *job)
{
    kvn_channel_job *before = NULL;
    bool queued;

    pthread_mutex_lock(&channel->mutex);
    queued = job->queued;
    if (queued) {
        for (kvn_channel_job *at = channel->head; at != job; at = at->next)
            before = at;
        if (before)
            before->next = job->next;
        else
            channel->head = job->next;
        if (channel->tail == job)
            channel->tail = before;
        job->queued = false;
        channel->load--;
        pthread_cond_broadcast(&channel->progressed);
    }
    pthread_mutex_unlock(&channel->mutex);
    return queued;
}

void kvn_channel_interrupt(kvn_channel *channel, const kvn_channel_job *job)
{
    void *previous = NULL;
    kvn_failure ignored;

    if (kvn_device_enter(channel->device, &previous, &ignored) != KVN_OK)
        return;
    pthread_mutex_lock(&channel->mutex);
    if (channel->running == job) {
        channel->interrupted = true;
        if (channel->stream)
            channel->device->ops->abort_stream(channel->device, channel->stream, &ignored);
    }
    pthread_mutex_unlock(&channel->mutex);
    kvn_device_leave(channel->device, previous);
}

bool kvn_channel_settle(kvn_channel *channel)
{
    bool interrupted;

    pthread_mutex_lock(&channel->mutex);
    interrupted = channel->interrupted;
    channel->running = NULL;
    pthread_cond_broadcast(&channel->progressed);
    pthread_mutex_unlock(&channel->mutex);
    return interrupted;
}

/* ---- after a job ---- */

void kvn_channel_note_issued(kvn_channel *channel)
{
    pthread_mutex_lock(&channel->mutex);
    channel->issued = true;
    pthread_cond_broadcast(&channel->progressed);
    pthread_mutex_unlock(&channel->mutex);
}

bool kvn_channel_await_issued(kvn_channel *channel, const kvn_channel_job *job, int64_t deadline_ns)
{
    bool in_time = true;

    pthread_mutex_lock(&channel->mutex);
    while (in_time && (job->queued || (channel->running == job && !channel->issued)))
        in_time = kvn_cond_wait(&channel->progressed, &channel->mutex, deadline_ns);
    pthread_mutex_unlock(&channel->mutex);
    return in_time;
}

/* The mutex prevents an abort of the stream meanwhile. */
int kvn_channel_record(kvn_channel *channel, const kvn_channel_job *job, void *event, kvn_failure *failure)
{
    int status = KVN_OK;

    pthread_mutex_lock(&channel->mutex);
    if (channel->running == job && channel->issued && channel->stream) {
        status = channel->device->ops->record_event(channel->device, event, channel->stream, failure);
        status = status == KVN_OK ? KVN_PENDING : status;
    }
    pthread_mutex_unlock(&channel->mutex);
    return status;
}

unsigned kvn_channel_load(kvn_channel *channel)
{
    unsigned load;

    pthread_mutex_lock(&channel->mutex);
    load = channel->load;
    pthread_mutex_unlock(&channel->mutex);
    return load;
}
