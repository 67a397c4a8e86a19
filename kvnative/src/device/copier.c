/* Begins copies of staged memory, and waits for them. */
#include "device/copier.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "device/copy.h"

int kvn_copier_init(kvn_copier *self, kvn_device *device, kvn_failure *failure)
{
    bool are_made = true;

    *self = (kvn_copier){.device = device};
    if (kvn_channel_begin(device, &self->channel, failure) != KVN_OK)
        return failure->status;
    for (int i = 0; i < KVN_DEVICE_TO_DEVICE; i++) {
        self->backends[i] = kvn_device_copy_create(device, &self->channel, 1, (kvn_direction)(i + 1));
        are_made &= self->backends[i] != NULL;
    }
    if (are_made)
        return KVN_OK;
    kvn_copier_fini(self);
    return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for the copies of staging");
}

void kvn_copier_fini(kvn_copier *self)
{
    for (int i = 0; i < KVN_DEVICE_TO_DEVICE; i++)
        if (self->backends[i])
            self->backends[i]->vtable->destroy(self->backends[i]);
    kvn_channel_destroy(self->channel);
    memset(self, 0, sizeof *self);
}

void kvn_copier_start(const kvn_copier *self, kvn_direction direction, const kvn_columns *batch, kvn_staged_copy *out)
{
    out->backend = self->backends[direction - 1];
    out->request = NULL;
    out->report.status = KVN_OK;
    if (batch->count > 0)
        out->backend->vtable->submit(out->backend, batch, &out->request, &out->report);
}

static void release(kvn_staged_copy *self)
{
    self->backend->vtable->release(self->backend, self->request);
    self->request = NULL;
}

int kvn_staged_copy_wait(kvn_staged_copy *self, int64_t deadline_ns, kvn_failure *failure)
{
    kvn_report *report = &self->report;
    char number[48];

    if (self->request) {
        if (self->backend->vtable->wait(self->backend, self->request, deadline_ns) == KVN_PENDING)
            return KVN_PENDING;
        release(self);
    }
    if (report->status == KVN_OK)
        return KVN_OK;
    const int length = snprintf(number, sizeof number, "descriptor %" PRIu64 ": ", report->failed);
    const bool is_numbered = strncmp(report->message, number, (size_t)length) == 0;
    return kvn_fail(failure, report->status, report->code, "%.240s", report->message + (is_numbered ? length : 0));
}

void kvn_staged_copy_abort(kvn_staged_copy *self)
{
    if (!self->request)
        return;
    self->backend->vtable->abort(self->backend, self->request, KVN_CANCELLED);
    release(self);
}
