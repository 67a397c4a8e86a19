/* A backend that reaches a peer's memory by one connection. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/columns.h"
#include "core/report.h"
#include "tcp/link.h"

typedef struct backend {
    kvn_backend base;
    kvn_tcp_client *client;
    kvn_direction direction;
    const kvn_device *device; /* NULL: the local side is host memory */
    kvn_tcp_known known;
} backend;

static int submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out, kvn_report *report)
{
    backend *self = (backend *)base;
    const bool is_pull = self->direction == KVN_PEER_GET;
    kvn_request *it;
    uint64_t total;

    *out = NULL;
    if (!kvn_columns_total(batch, &total))
        return kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                 "the descriptors have 2**64 bytes or more in total");
    it = calloc(1, sizeof *it);
    if (!it)
        return kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                 "no memory for a transfer");
    it->client = self->client;
    it->known = &self->known;
    it->device = self->device;
    it->batch = *batch;
    it->local = is_pull ? batch->dst : batch->src;
    it->remote = is_pull ? batch->src : batch->dst;
    it->kind = is_pull ? KVN_TCP_PULL : KVN_TCP_PUSH;
    it->total = it->uncut = total;
    it->report = report;
    kvn_report_begin(report);
    kvn_tcp_client_begin(it, batch->caller);
    *out = it;
    return KVN_OK;
}

static int outcome(const kvn_request *it) { return atomic_load(&it->finished) ? it->report->status : KVN_PENDING; }

static int poll(kvn_backend *base, kvn_request *it, uint64_t *bytes_done)
{
    (void)base;
    *bytes_done = atomic_load_explicit(&it->moved, memory_order_relaxed);
    return outcome(it);
}

static int wait(kvn_backend *base, kvn_request *it, int64_t deadline_ns)
{
    (void)base;
    kvn_tcp_client_wait(it, deadline_ns);
    return outcome(it);
}

static int give_up(kvn_backend *base, kvn_request *it, int why)
{
    (void)base;
    kvn_tcp_client_give_up(it, why);
    return outcome(it);
}

static void release(kvn_backend *base, kvn_request *it)
{
    (void)base;
    kvn_tcp_client_let_go(it);
    free(it);
}

static void destroy(kvn_backend *base)
{
    backend *self = (backend *)base;

    free(self->known.places);
    free(self->known.ranges);
    free(self);
}

static const kvn_backend_vtable vtable = {
    .name = "tcp",
    .submit = submit,
    .poll = poll,
    .wait = wait,
    .abort = give_up,
    .release = release,
    .destroy = destroy,
};

kvn_backend *kvn_tcp_backend_create(kvn_tcp_client *client, kvn_direction direction,
                                    const kvn_device *device, const kvn_tcp_known *known)
{
    backend *self = calloc(1, sizeof *self);

    if (!self)
        return NULL;
    self->base.vtable = &vtable;
    self->client = client;
    self->direction = direction;
    self->device = device;
    self->known = *known;
    return &self->base;
}
