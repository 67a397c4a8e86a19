/* Issues one-sided operations for a shard, checks guards, and stops aborted operations. */
#include "hccl/transfer.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SLICE_MS 10
/* The maximum of an RDMA operation is below 2 GiB. */
#define MAX_FRAGMENT (UINT64_C(1) << 30)
/* Descriptors between two checks of the stream's progress: at most twice as many are on it. A stream holds a few
 * thousand; a thread that issues more blocks inside HCCL, where no abort reaches it. */
#define PACE 1024
/* Pauses between two queries of HIXL's batches, or attempts to issue one. */
#define FIRST_PAUSE_NS 10000
#define LAST_PAUSE_NS 500000

/* ---- operations ---- */

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t round_up(uint64_t nbytes, uint64_t alignment)
{
    return (nbytes + alignment - 1) / alignment * alignment;
}

uint32_t kvn_transfer_gather(const kvn_transfer_context *t, kvn_cursor *at, uint64_t max_nbytes,
                            uint64_t alignment, kvn_fragment *out)
{
    const kvn_columns *shard = t->shard;
    const uint64_t *locals = t->transfer->is_put ? shard->src : shard->dst;
    const uint64_t *remotes = t->transfer->is_put ? shard->dst : shard->src;
    const uint32_t most = kvn_communicator_max_batch(t->communicator);
    uint64_t taken = 0;
    uint32_t count = 0;
    while (at->index < shard->count && count < most && taken < max_nbytes) {
        const uint64_t left = shard->nbytes[at->index] - at->skip;
        const uint64_t nbytes = least(least(left, MAX_FRAGMENT), max_nbytes - taken);
        if (nbytes) /* HCCL refuses empty operations */
            out[count++] = (kvn_fragment){locals[at->index] + at->skip,
                                          remotes[at->index] + at->skip, nbytes, at->index};
        taken += round_up(nbytes, alignment);
        if (nbytes == left)
            *at = (kvn_cursor){at->index + 1, 0};
        else
            at->skip += nbytes;
    }
    return count;
}

/* ---- calls and their results ---- */

/* Puts "descriptors a to b: " in front of the message. */
static void name_descriptors(kvn_transfer_context *t, const kvn_fragment *fragments, uint32_t count)
{
    char text[sizeof t->fault->why.message];
    const uint64_t first = fragments[0].index, last = fragments[count - 1].index;
    memcpy(text, t->fault->why.message, sizeof text);
    if (first == last) {
        t->fault->failed = first;
        snprintf(t->fault->why.message, sizeof text, "descriptor %" PRIu64 ": %.200s",
                 t->shard->first + first, text);
    } else {
        snprintf(t->fault->why.message, sizeof text, "descriptors %" PRIu64 " to %" PRIu64 ": %.190s",
                 t->shard->first + first, t->shard->first + last, text);
    }
}

/* ---- waiting ---- */

/* Sleeps between two calls of HIXL, each time longer. */
static void pause_for(long *ns)
{
    nanosleep(&(struct timespec){.tv_nsec = *ns}, NULL);
    *ns = *ns < LAST_PAUSE_NS ? 2 * *ns : LAST_PAUSE_NS;
}

/* Issues a batch, when HIXL has a channel for it. KVN_CANCELLED when halted. */
static int issue(kvn_transfer_context *t, bool is_put, kvn_one_sided *rows, uint32_t count)
{
    long pause_ns = FIRST_PAUSE_NS;
    int status;
    while (!kvn_is_halted(&t->halt)) {
        t->has_issued = true;
        status = kvn_communicator_issue(t->communicator, is_put, rows, count, &t->fault->why);
        if (status != KVN_PENDING)
            return status;
        pause_for(&pause_ns);
    }
    return KVN_CANCELLED;
}

int kvn_transfer_issue(kvn_transfer_context *t, kvn_one_sided *rows, const kvn_fragment *fragments,
                       uint32_t count)
{
    const int status = issue(t, t->transfer->is_put, rows, count);
    if (status != KVN_OK && status != KVN_CANCELLED)
        name_descriptors(t, fragments, count);
    return status;
}

/* Waits after an abort, or after an error, which also stops the stream. Operations may continue though their stream is
 * empty, and others own the memory after this transfer. */
static void let_unfold(kvn_transfer_context *t)
{
    const uint32_t ms = kvn_communicator_unfold_ms(t->communicator);
    struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
    while (t->has_issued && nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
    t->has_issued = false;
}

/* Waits for HIXL's batches, which are on no stream of kvplan, or ends their client: the caller lets them unfold. */
static int drain(kvn_transfer_context *t, kvn_channel_fault *fault)
{
    long pause_ns = FIRST_PAUSE_NS;
    int status;
    while ((status = kvn_communicator_poll(t->communicator, &fault->why)) == KVN_PENDING) {
        if (kvn_is_halted(&t->halt)) {
            status = KVN_CANCELLED;
            break;
        }
        pause_for(&pause_ns);
    }
    if (status != KVN_OK)
        kvn_communicator_abort(t->communicator);
    return status;
}

int kvn_transfer_stop(kvn_transfer_context *t, kvn_channel_fault *fault)
{
    kvn_communicator_abort(t->communicator);
    const int status = kvn_channel_synchronize(t->channel, &KVN_ALWAYS, fault);
    let_unfold(t);
    return status;
}

/* Handles the end of all work on the stream: done, failed or aborted. */
static int ended(kvn_transfer_context *t, int status)
{
    if (status < 0)
        let_unfold(t);
    return status;
}

int kvn_transfer_synchronize(kvn_transfer_context *t, kvn_channel_fault *fault)
{
    int status = drain(t, fault);
    if (status < 0 && status != KVN_CANCELLED)
        return ended(t, status);
    status = KVN_PENDING;
    while (status == KVN_PENDING) {
        if (kvn_is_halted(&t->halt))
            return kvn_transfer_stop(t, fault);
        status = kvn_channel_poll(t->channel, SLICE_MS, fault);
    }
    return ended(t, status);
}

/* Checks for operations that failed without stopping the stream and its events. If the peer has gone, HCCL would
 * otherwise try each further operation for seconds. */
static int look_at_connection(kvn_transfer_context *t)
{
    char text[256];
    int status;
    t->fault->why.code = kvn_communicator_async_error(t->communicator, text, sizeof text);
    if (t->fault->why.code == KVN_HCCL_SUCCESS)
        return KVN_OK;
    status = kvn_transfer_synchronize(t, t->fault); /* the stream's own error is more specific */
    return status == KVN_OK ? KVN_FAILED : status;
}

int kvn_transfer_catch_up(kvn_transfer_context *t)
{
    const int status = kvn_transfer_synchronize(t, t->fault);
    return status == KVN_OK ? look_at_connection(t) : status;
}

/* Blocks until the event on the communicator's stream has happened, or the stream has failed. */
static int wait_for_event(kvn_transfer_context *t, void *event)
{
    int status;
    while ((status = t->device->ops->query_event(t->device, event, &t->fault->why)) == KVN_PENDING) {
        if (kvn_is_halted(&t->halt))
            return KVN_CANCELLED;
        status = ended(t, kvn_channel_poll(t->channel, 1, t->fault));
        if (status < 0)
            return status;
    }
    return status == KVN_OK ? look_at_connection(t) : status;
}

/* ---- guards ---- */

int kvn_transfer_read_guards(kvn_transfer_context *t)
{
    const kvn_transfer *transfer = t->transfer;
    const uint32_t most = kvn_communicator_max_batch(t->communicator);
    const uint64_t words = kvn_communicator_device_words(t->communicator);
    const uint64_t nbytes = transfer->num_guards * sizeof(uint64_t);
    kvn_one_sided rows[KVN_HCCL_MAX_BATCH];
    int settled = drain(t, t->fault); /* HIXL promises no order between batches */
    for (uint32_t first = 0; settled == KVN_OK && first < transfer->num_guards; first += most) {
        const uint32_t left = transfer->num_guards - first, count = left < most ? left : most;
        for (uint32_t i = 0; i < count; i++)
            rows[i] = kvn_row(words + (first + i) * sizeof(uint64_t),
                              transfer->guard_addresses[first + i], sizeof(uint64_t));
        const int status = issue(t, false, rows, count); /* others own the words, too, after this transfer */
        if (status != KVN_OK)
            return status;
    }
    if (settled == KVN_OK && nbytes > 0)
        settled = drain(t, t->fault); /* before the copy, which is on the stream */
    if (settled != KVN_OK || nbytes == 0)
        return settled;
    return t->device->ops->copy_async(
        t->device, KVN_DEVICE_TO_HOST, (uintptr_t)kvn_communicator_host_words(t->communicator), words,
        nbytes, kvn_channel_stream(t->channel), &t->fault->why);
}

static int compare_guards(kvn_transfer_context *t)
{
    const kvn_transfer *transfer = t->transfer;
    const uint64_t *words = kvn_communicator_host_words(t->communicator);
    const uint32_t first_lease = transfer->num_guards - transfer->num_leases;
    for (uint32_t i = 0; i < transfer->num_guards; i++) {
        if (words[i] == transfer->guard_words[i])
            continue;
        kvn_channel_fault_begin(t->fault);
        if (i >= first_lease)
            return kvn_fail(&t->fault->why, KVN_UNMAPPED, 0, "%s was released or moved by the peer, or has expired",
                            transfer->lease_names[i - first_lease].text);
        return kvn_fail(&t->fault->why, KVN_UNMAPPED, 0,
                        "the peer has deregistered the memory meanwhile (guard %" PRIu32
                        ": word at 0x%" PRIx64 " is %" PRIu64 ", expected %" PRIu64 ")",
                        i, transfer->guard_addresses[i], words[i], transfer->guard_words[i]);
    }
    return KVN_OK;
}

/* ---- directly ---- */

/* HCCL's own error would not name the memory. */
static int check_local(kvn_transfer_context *t, const kvn_fragment *fragments, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const kvn_fragment *it = &fragments[i];
        if (kvn_communicator_covers(t->communicator, it->local, it->nbytes))
            continue;
        t->is_untouched = true;
        t->fault->failed = it->index;
        return kvn_fail(&t->fault->why, KVN_INVALID, 0,
                        "descriptor %" PRIu64 ": local memory [0x%" PRIx64 ", 0x%" PRIx64
                        ") is in no region that is bound to the communicator",
                        t->shard->first + it->index, it->local, it->local + it->nbytes);
    }
    return KVN_OK;
}

/* Call it after a batch; see PACE. */
static int keep_pace(kvn_transfer_context *t, uint64_t *since, uint64_t *laps)
{
    void **events = kvn_communicator_events(t->communicator);
    const uint64_t lap = *laps;
    int status;
    if (*since < PACE)
        return KVN_OK;
    *since = 0;
    if (kvn_communicator_is_polled(t->communicator))
        return drain(t, t->fault);
    *laps += 1;
    status = t->device->ops->record_event(t->device, events[lap % 2], kvn_channel_stream(t->channel), &t->fault->why);
    return status == KVN_OK && lap ? wait_for_event(t, events[(lap + 1) % 2]) : status;
}

static int move_directly(kvn_transfer_context *t)
{
    kvn_fragment fragments[KVN_HCCL_MAX_BATCH];
    kvn_one_sided rows[KVN_HCCL_MAX_BATCH];
    kvn_cursor at = {0, 0};
    uint64_t since = 0, laps = 0;
    uint32_t count;
    int status;
    while ((count = kvn_transfer_gather(t, &at, UINT64_MAX, 1, fragments)) > 0) {
        status = check_local(t, fragments, count);
        for (uint32_t i = 0; i < count; i++)
            rows[i] = kvn_row(fragments[i].local, fragments[i].remote, fragments[i].nbytes);
        if (status == KVN_OK)
            status = kvn_transfer_issue(t, rows, fragments, count);
        since += count;
        if (status == KVN_OK && at.index < t->shard->count)
            status = keep_pace(t, &since, &laps);
        if (status != KVN_OK)
            return status;
    }
    status = kvn_transfer_read_guards(t);
    return status == KVN_OK ? kvn_transfer_synchronize(t, t->fault) : status;
}

/* ---- the end of a failed transfer ---- */

/* Appends HCCL's own error to the message, and returns it. */
static kvn_hccl_result ask_hccl(kvn_transfer_context *t)
{
    char *message = t->fault->why.message, text[200];
    const size_t room = sizeof t->fault->why.message, end = strlen(message);
    const kvn_hccl_result result =
        kvn_communicator_async_error(t->communicator, text, sizeof text);
    if (result != KVN_HCCL_SUCCESS)
        snprintf(message + end, room - end, "%s%s", end ? "; " : "", text);
    return result;
}

/* Reports that the peer has gone: its generation table, which it frees last, cannot be read. */
static int lose_owner(kvn_channel_fault *fault)
{
    char text[sizeof fault->why.message];

    memcpy(text, fault->why.message, sizeof text);
    snprintf(fault->why.message, sizeof text, "the peer has closed its engine, or cannot be reached: its generation "
             "table cannot be read. %.150s", text);
    return KVN_PEER_GONE;
}

/* Checks if a transfer over an intact connection failed because the owner has deregistered the memory. The guards give
 * a better answer than the vendor. */
static int blame_owner(kvn_transfer_context *t, int status)
{
    kvn_channel_fault guards, *fault = t->fault;
    int answer;
    if (t->transfer->num_guards == 0)
        return status;
    kvn_channel_fault_begin(&guards);
    t->fault = &guards;
    answer = kvn_channel_ready(t->channel, &guards);
    if (answer == KVN_OK)
        answer = kvn_transfer_read_guards(t);
    if (answer == KVN_OK)
        answer = kvn_transfer_synchronize(t, &guards);
    else
        kvn_transfer_synchronize(t, &guards);
    if (answer == KVN_OK)
        answer = compare_guards(t);
    t->fault = fault;
    if (answer == KVN_UNMAPPED) {
        *fault = guards;
        return answer;
    }
    return answer == KVN_OK || kvn_is_halted(&t->halt) ? status : lose_owner(fault);
}

/* Concludes an aborted transfer: the abort also stopped its stream, which explains its failure. */
static int give_up(kvn_transfer_context *t)
{
    kvn_channel_fault *fault = t->fault;
    if (fault->why.code == t->device->ops->aborted_code)
        fault->why.message[0] = '\0';
    fault->why.code = 0;
    fault->failed = KVN_NO_DESCRIPTOR;
    return kvn_communicator_why_halted(t->communicator, &fault->why);
}

static int end_failed(kvn_transfer_context *t, int status)
{
    const bool is_halted = kvn_is_halted(&t->halt);
    kvn_channel_fault ignored;
    kvn_channel_fault_begin(&ignored);
    /* The batches before the failed one are on the stream: wait for them. Those of HIXL are not, and only the end of
     * their client stops what a failed call has begun. */
    if (kvn_communicator_is_polled(t->communicator) && t->has_issued && !t->is_untouched)
        kvn_transfer_stop(t, &ignored);
    else
        kvn_transfer_synchronize(t, &ignored);
    if (is_halted)
        status = give_up(t);
    if (t->is_untouched)
        return status;
    kvn_communicator_disturb(t->communicator);
    if (is_halted) {
        if (status == KVN_CANCELLED)
            ask_hccl(t);
        return status;
    }
    /* HIXL's client may have been given up with the transfer: that says nothing about the owner. */
    return ask_hccl(t) == KVN_HCCL_SUCCESS && !kvn_communicator_is_polled(t->communicator) ? blame_owner(t, status)
                                                                                           : status;
}

/* ---- the backend ---- */

int kvn_transfer_check_guards(kvn_transfer_context *t)
{
    int status = kvn_transfer_read_guards(t);
    if (status == KVN_OK)
        status = kvn_transfer_synchronize(t, t->fault);
    return status == KVN_OK ? compare_guards(t) : end_failed(t, status);
}

int kvn_transfer_move(kvn_transfer_context *t)
{
    const int status = t->transfer->staging ? kvn_transfer_staged(t) : move_directly(t);
    return status == KVN_OK ? compare_guards(t) : end_failed(t, status);
}

static int move(kvn_stream_backend *base, kvn_channel *channel, const kvn_columns *shard,
                const atomic_int *stop, kvn_channel_fault *fault)
{
    const kvn_transfer *self = (const kvn_transfer *)base;
    kvn_transfer_context t = {
        .transfer = self,
        .communicator = self->communicator,
        .channel = channel,
        .device = kvn_channel_device(channel),
        .shard = shard,
        .halt = kvn_communicator_halt(self->communicator, stop),
        .fault = fault,
    };
    int status = kvn_communicator_begin(self->communicator, &fault->why);
    if (status != KVN_OK)
        return status;
    status = self->tickets ? kvn_transfer_announced(&t) : kvn_transfer_move(&t);
    kvn_communicator_end(self->communicator);
    return status;
}

static void destroy(kvn_backend *base)
{
    kvn_transfer *self = (kvn_transfer *)base;
    kvn_stream_backend_end(&self->backend);
    free(self->guard_addresses);
    free(self->lease_names);
    free(self);
}

/* Makes one allocation for both columns. Returns false if memory is short; the caller frees the old one. */
static bool copy_guards(kvn_transfer *self, const kvn_transfer_options *options)
{
    const uint32_t count = options->num_guards;
    if (count == 0)
        return true;
    self->guard_addresses = malloc(2 * count * sizeof(uint64_t));
    if (!self->guard_addresses)
        return false;
    self->guard_words = self->guard_addresses + count;
    self->num_guards = count;
    memcpy(self->guard_addresses, options->guard_addresses, count * sizeof(uint64_t));
    memcpy(self->guard_words, options->guard_words, count * sizeof(uint64_t));
    if (options->num_leases == 0)
        return true;
    self->lease_names = malloc(options->num_leases * sizeof *self->lease_names);
    if (!self->lease_names)
        return false;
    memcpy(self->lease_names, options->lease_names, options->num_leases * sizeof *self->lease_names);
    self->num_leases = options->num_leases;
    return true;
}

kvn_backend *kvn_transfer_create(kvn_communicator *communicator,
                                 const kvn_transfer_options *options)
{
    kvn_transfer *self;
    int error;
    if (options->num_guards > KVN_MAX_GUARDS || options->num_leases > options->num_guards ||
        (options->direction != KVN_PEER_GET && options->direction != KVN_PEER_PUT)) {
        errno = EINVAL;
        return NULL;
    }
    self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    error = kvn_stream_backend_init(&self->backend, options->staging ? "hccl-staged" : "hccl",
                                    destroy, kvn_communicator_channels(communicator), 1, move);
    if (!error && !copy_guards(self, options))
        error = ENOMEM;
    if (error) {
        free(self->guard_addresses);
        free(self);
        errno = error;
        return NULL;
    }
    self->communicator = communicator;
    self->staging = options->staging;
    self->tickets = options->tickets;
    self->tag = options->tag;
    self->is_put = options->direction == KVN_PEER_PUT;
    self->local_on_device = options->local_on_device;
    return &self->backend.base;
}
