#include "hccl/transfer.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "hccl/passage.h"

/* ---- the end of a transfer that failed ---- */

/* Appends what HCCL itself thinks to the message. Its result. */
static kvn_hccl_result ask_hccl(kvn_passage *p)
{
    char *message = p->fault->why.message, text[200];
    const size_t room = sizeof p->fault->why.message, end = strlen(message);
    const kvn_hccl_result result =
        kvn_communicator_async_error(p->communicator, text, sizeof text);
    if (result != KVN_HCCL_SUCCESS)
        snprintf(message + end, room - end, "%s%s", end ? "; " : "", text);
    return result;
}

/* The transfer failed, though the connection seems well: perhaps because the owner has deregistered
 * the memory. Then the guards say so, which is a better answer than the vendor's. */
static int blame_owner(kvn_passage *p, int status)
{
    kvn_channel_fault guards, *fault = p->fault;
    int answer;
    if (p->transfer->num_guards == 0)
        return status;
    kvn_channel_fault_begin(&guards);
    p->fault = &guards;
    answer = kvn_channel_ready(p->channel, &guards);
    if (answer == KVN_OK)
        answer = kvn_guards_read(p);
    if (answer == KVN_OK)
        answer = kvn_passage_synchronize(p, &guards);
    else
        kvn_passage_synchronize(p, &guards);
    if (answer == KVN_OK)
        answer = kvn_guards_compare(p);
    p->fault = fault;
    if (answer != KVN_UNMAPPED)
        return status;
    *fault = guards;
    return KVN_UNMAPPED;
}

/* Whoever aborts a request aborts its stream too: then what failed here failed for that. */
static int give_up(kvn_passage *p)
{
    kvn_channel_fault *fault = p->fault;
    if (fault->why.code == KVN_ACL_STREAM_ABORTED)
        fault->why.message[0] = '\0';
    fault->why.code = 0;
    fault->failed = KVN_NO_DESCRIPTOR;
    return kvn_communicator_halted(p->communicator, fault);
}

static int wind_up(kvn_passage *p, int status)
{
    const bool is_halted = kvn_is_halted(&p->halt);
    kvn_channel_fault ignored;
    kvn_channel_fault_begin(&ignored);
    /* Batches before the one at fault are on the stream. */
    kvn_passage_synchronize(p, &ignored);
    if (is_halted)
        status = give_up(p);
    if (p->is_untouched)
        return status;
    kvn_communicator_disturb(p->communicator);
    if (is_halted) {
        if (status == KVN_CANCELLED)
            ask_hccl(p);
        return status;
    }
    return ask_hccl(p) == KVN_HCCL_SUCCESS ? blame_owner(p, status) : status;
}

/* ---- the backend ---- */

static int move(kvn_stream_backend *base, kvn_channel *channel, const kvn_columns *part,
                const atomic_int *stop, kvn_channel_fault *fault)
{
    const kvn_transfer *self = (const kvn_transfer *)base;
    kvn_passage p = {
        .transfer = self,
        .communicator = self->communicator,
        .channel = channel,
        .acl = kvn_acl_of(kvn_channel_device(channel)),
        .part = part,
        .halt = kvn_communicator_halt(self->communicator, stop),
        .fault = fault,
    };
    int status = kvn_communicator_begin(self->communicator, fault);
    if (status != KVN_OK)
        return status;
    status = self->staging ? kvn_move_staged(&p) : kvn_move_direct(&p);
    if (status == KVN_OK)
        status = kvn_guards_compare(&p);
    else
        status = wind_up(&p, status);
    kvn_communicator_end(self->communicator);
    return status;
}

static void destroy(kvn_backend *base)
{
    kvn_transfer *self = (kvn_transfer *)base;
    kvn_stream_backend_fini(&self->backend);
    free(self->guard_addresses);
    free(self);
}

/* One allocation for both columns. */
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
    return true;
}

kvn_backend *kvn_transfer_create(kvn_communicator *communicator,
                                 const kvn_transfer_options *options)
{
    kvn_transfer *self;
    int error;
    if (options->num_guards > KVN_MAX_GUARDS ||
        (options->direction != KVN_PEER_GET && options->direction != KVN_PEER_PUT)) {
        errno = EINVAL;
        return NULL;
    }
    self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    error = kvn_stream_backend_init(&self->backend, options->staging ? "hccl-staged" : "hccl",
                                    destroy, kvn_communicator_channels(communicator), 1,
                                    options->direction, move);
    if (!error && !copy_guards(self, options)) {
        kvn_stream_backend_fini(&self->backend);
        error = ENOMEM;
    }
    if (error) {
        free(self);
        errno = error;
        return NULL;
    }
    self->communicator = communicator;
    self->staging = options->staging;
    self->is_put = options->direction == KVN_PEER_PUT;
    self->local_on_device = options->local_on_device;
    return &self->backend.base;
}
