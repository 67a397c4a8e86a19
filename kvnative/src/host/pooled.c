#include "host/pooled.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/report.h"

struct kvn_request {
    kvn_job job;
    atomic_bool told; /* the backend has kept the message of this request's failure */
};

static kvn_pooled *pooled(const kvn_backend *self) { return (kvn_pooled *)self; }

int kvn_pooled_init(kvn_pooled *self, const kvn_backend_vtable *vtable, kvn_pool *pool,
                    kvn_move move)
{
    memset(self, 0, sizeof *self);
    self->base.vtable = vtable;
    self->pool = pool;
    self->move = move;
    self->piece = (kvn_piece_limits){.descriptors = UINT64_MAX, .nbytes = KVN_PIECE_MAX};
    self->capabilities = (kvn_capabilities){
        .max_batch = UINT64_MAX,
        .max_nbytes = UINT64_MAX,
        .directions = KVN_HOST_TO_HOST,
        .asynchronous = 1,
    };
    return pthread_mutex_init(&self->error_mutex, NULL);
}

void kvn_pooled_fini(kvn_pooled *self)
{
    pthread_mutex_destroy(&self->error_mutex);
    kvn_guard_destroy(self->guard);
}

void kvn_pooled_set_guard(kvn_backend *self, kvn_guard *guard) { pooled(self)->guard = guard; }

void kvn_pooled_capabilities(const kvn_backend *self, kvn_capabilities *out)
{
    *out = pooled(self)->capabilities;
}

/* Keeps the message of a failure; passes the status through. */
static int tell(kvn_pooled *self, int status, const kvn_report *report)
{
    if (status < 0) {
        pthread_mutex_lock(&self->error_mutex);
        memcpy(self->error, report->message, sizeof self->error);
        pthread_mutex_unlock(&self->error_mutex);
    }
    return status;
}

static int tell_once(kvn_backend *self, kvn_request *request, int status, const kvn_report *report)
{
    if (status < 0 && !atomic_exchange(&request->told, true))
        tell(pooled(self), status, report);
    return status;
}

int kvn_pooled_submit(kvn_backend *base, const kvn_columns *batch, kvn_request **out,
                      kvn_report *report)
{
    kvn_pooled *self = pooled(base);
    kvn_request *request;
    uint64_t total;
    int status = KVN_OK;

    *out = NULL;
    if (!kvn_columns_total(batch, &total))
        return tell(self, kvn_report_refuse(report, batch->count, KVN_INVALID, 0,
                                            "the sizes of %zu descriptors add up to more than "
                                            "2**64 - 1 bytes", batch->count), report);
    request = malloc(sizeof *request);
    if (!request)
        return tell(self, kvn_report_refuse(report, batch->count, KVN_NO_MEMORY, ENOMEM,
                                            "no memory for a request (%zu bytes)",
                                            sizeof *request), report);
    atomic_init(&request->told, false);
    kvn_job_init(&request->job, batch, self->move, self, self->piece);
    if (total <= self->inline_nbytes)
        kvn_job_run(&request->job, total);
    else
        status = kvn_job_submit(&request->job, self->pool, total, report);
    if (status != KVN_OK) {
        free(request);
        return tell(self, status, report);
    }
    *out = request;
    return KVN_OK;
}

int kvn_pooled_poll(kvn_backend *self, kvn_request *request, kvn_report *report)
{
    return tell_once(self, request, kvn_job_poll(&request->job, report), report);
}

int kvn_pooled_wait(kvn_backend *self, kvn_request *request, int64_t deadline_ns,
                    kvn_report *report)
{
    return tell_once(self, request, kvn_job_wait(&request->job, deadline_ns, report), report);
}

int kvn_pooled_abort(kvn_backend *self, kvn_request *request, int why, kvn_report *report)
{
    return tell_once(self, request, kvn_job_abort(&request->job, why, report), report);
}

void kvn_pooled_release(kvn_backend *self, kvn_request *request)
{
    (void)self;
    kvn_job_release(&request->job);
    free(request);
}

/* The text stays valid until the next call: for one caller at a time. */
const char *kvn_pooled_last_error(const kvn_backend *base)
{
    kvn_pooled *self = pooled(base);

    pthread_mutex_lock(&self->error_mutex);
    memcpy(self->error_shown, self->error, sizeof self->error);
    pthread_mutex_unlock(&self->error_mutex);
    return self->error_shown;
}
