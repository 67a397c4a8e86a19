#include "ucx_one_sided.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ucx_mover.h"

/* UCX reads a key without being told its length: what a wrong one makes it read is ours, too. */
#define KEY_PADDING 4096

/* ---- keys ---- */

typedef struct unpacking {
    kvn_ucx_errand errand;
    kvn_ucx_one_sided *self;
    const kvn_ucx_one_sided_options *options;
    kvn_failure *failure;
} unpacking;

static void destroy_keys(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    kvn_ucx_one_sided *self = ((unpacking *)errand)->self;

    for (uint64_t i = 0; i < self->num_keys; i++)
        kvn_ucx_end_calls(end)->ucp_rkey_destroy(self->keys[i]);
    self->num_keys = 0;
}

static int unpack(kvn_ucx_one_sided *self, kvn_ucp_ep_h ep, const kvn_ucx_packed_key *packed,
                  kvn_failure *failure)
{
    const kvn_ucx_library *library = kvn_ucx_end_library(kvn_ucx_link_end(self->link));
    char *padded = calloc(1, packed->nbytes + KEY_PADDING);

    if (!padded)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a key");
    memcpy(padded, packed->bytes, packed->nbytes);
    const kvn_ucs_status status =
        library->calls.ucp_ep_rkey_unpack(ep, padded, &self->keys[self->num_keys]);
    free(padded);
    if (status != KVN_UCS_OK)
        return kvn_ucx_fail(library, "ucp_ep_rkey_unpack", status, failure);
    self->num_keys++;
    return KVN_OK;
}

static void unpack_all(kvn_ucx_end *end, kvn_ucx_errand *errand)
{
    const unpacking *it = (unpacking *)errand;
    kvn_ucx_one_sided *self = it->self;
    kvn_ucp_ep_h ep = kvn_ucx_link_endpoint(self->link);

    (void)end;
    if (kvn_ucx_link_has_failed(self->link, it->failure))
        return;
    if (!ep || !kvn_ucx_link_is_connected(self->link)) {
        kvn_fail(it->failure, KVN_INVALID, 0, "the link is not connected");
        return;
    }
    while (self->num_keys < it->options->num_keys &&
           unpack(self, ep, &it->options->keys[self->num_keys], it->failure) == KVN_OK)
        ;
}

static void unpack_keys(kvn_ucx_one_sided *self, const kvn_ucx_one_sided_options *options,
                        kvn_failure *failure)
{
    unpacking it = {
        .errand = {.run = unpack_all}, .self = self, .options = options, .failure = failure};

    kvn_ucx_do_and_wait(kvn_ucx_link_end(self->link), &it.errand);
}

/* ---- making and unmaking ---- */

static void dispose(kvn_ucx_one_sided *self)
{
    unpacking it = {.errand = {.run = destroy_keys}, .self = self};

    if (self->num_keys)
        kvn_ucx_do_and_wait(kvn_ucx_link_end(self->link), &it.errand);
    kvn_ucx_link_release(self->link);
    pthread_mutex_destroy(&self->error_mutex);
    free(self->ranges);
    free(self->places);
    free(self->keys);
    free(self);
}

static void destroy(kvn_backend *base) { dispose((kvn_ucx_one_sided *)base); }

static void capabilities(const kvn_backend *base, kvn_capabilities *out)
{
    const kvn_ucx_one_sided *self = (const kvn_ucx_one_sided *)base;
    *out = (kvn_capabilities){.max_batch = UINT64_MAX, .max_nbytes = UINT64_MAX,
                              .directions = self->direction, .asynchronous = 1};
}

static const char *last_error(const kvn_backend *base)
{
    kvn_ucx_one_sided *self = (kvn_ucx_one_sided *)base;

    pthread_mutex_lock(&self->error_mutex);
    memcpy(self->error_shown, self->error, sizeof self->error);
    pthread_mutex_unlock(&self->error_mutex);
    return self->error_shown;
}

static const kvn_backend_vtable vtable = {
    .name = "ucx-one-sided",
    .capabilities = capabilities,
    .submit = kvn_ucx_move_submit,
    .poll = kvn_ucx_move_poll,
    .wait = kvn_ucx_move_wait,
    .abort = kvn_ucx_move_abort,
    .release = kvn_ucx_move_release,
    .last_error = last_error,
    .destroy = destroy,
};

static int check_range(const kvn_ucx_one_sided_options *options, uint64_t i, kvn_failure *failure)
{
    const kvn_ucx_range *it = &options->ranges[i];

    if (it->nbytes < 1 || it->address + (it->nbytes - 1) < it->address)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "range %" PRIu64 " is at 0x%" PRIx64 " and has %" PRIu64
                        " bytes; it must have at least 1 and end at 2**64 or before",
                        i, it->address, it->nbytes);
    if (it->slot >= options->board_slots)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "slots: range %" PRIu64 " has %" PRIu64 "; the board has %" PRIu64, i,
                        it->slot, options->board_slots);
    if (it->key >= options->num_keys)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "keys: range %" PRIu64 " has %" PRIu64 "; there are %" PRIu64, i, it->key,
                        options->num_keys);
    return KVN_OK;
}

static int take_ranges(kvn_ucx_one_sided *self, const kvn_ucx_one_sided_options *options,
                       kvn_failure *failure)
{
    const uint64_t count = options->num_ranges;

    self->ranges = calloc(count + 1, sizeof *self->ranges);
    self->places = calloc(count + 1, sizeof *self->places);
    self->keys = calloc(options->num_keys + 1, sizeof(void *));
    if (!self->ranges || !self->places || !self->keys)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for %" PRIu64 " ranges", count);
    for (uint64_t i = 0; i < count; i++) {
        if (check_range(options, i, failure) != KVN_OK)
            return failure->status;
        self->ranges[i] = options->ranges[i];
        self->places[i] = (kvn_interval){
            .first = self->ranges[i].address,
            .last = self->ranges[i].address + (self->ranges[i].nbytes - 1),
            .index = i,
        };
    }
    kvn_intervals_sort(self->places, count);
    self->num_ranges = count;
    return KVN_OK;
}

int kvn_ucx_one_sided_create(kvn_ucx_mover *mover, kvn_ucx_regions *regions, kvn_ucx_link *link,
                             const kvn_ucx_one_sided_options *options, kvn_backend **out,
                             kvn_failure *failure)
{
    kvn_ucx_one_sided *self;

    if (options->direction != KVN_PEER_GET && options->direction != KVN_PEER_PUT)
        return kvn_fail(failure, KVN_INVALID, 0, "direction is %d; it must be KVN_PEER_GET or"
                        " KVN_PEER_PUT", options->direction);
    if (options->board_key >= options->num_keys)
        return kvn_fail(failure, KVN_INVALID, 0, "the board has key %" PRIu64 "; there are %" PRIu64,
                        options->board_key, options->num_keys);
    self = calloc(1, sizeof *self);
    if (!self)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for a backend");
    self->base.vtable = &vtable;
    self->mover = mover;
    self->regions = regions;
    self->link = link;
    kvn_ucx_link_hold(link);
    self->direction = options->direction;
    self->local_type = options->local_type;
    self->board = options->board;
    pthread_mutex_init(&self->error_mutex, NULL);
    failure->status = KVN_OK;
    if (take_ranges(self, options, failure) == KVN_OK)
        unpack_keys(self, options, failure);
    if (failure->status != KVN_OK) {
        dispose(self);
        return failure->status;
    }
    self->board_key = self->keys[options->board_key];
    *out = &self->base;
    return KVN_OK;
}
