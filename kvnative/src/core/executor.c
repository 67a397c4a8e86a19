#include "core/executor.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "core/clock.h"
#include "core/job.h"
#include "core/report.h"

static const kvn_backend_vtable *calls(const kvn_task *task) { return task->backend->vtable; }

/* ---- one batch after another; with the mutex held ---- */

/* Settles the task by what the batch [first, first + batch_count) came to. */
static void settle(kvn_task *task, const kvn_report *batch)
{
    kvn_report *outcome = &task->outcome;

    kvn_report_copy(outcome, batch);
    outcome->bytes_done += task->bytes_before;
    if (outcome->failed != KVN_NO_DESCRIPTOR)
        outcome->failed += task->first;
    for (uint32_t i = 0; i < outcome->num_unconfirmed; i++) {
        outcome->unconfirmed[i].first += task->first;
        outcome->unconfirmed[i].last += task->first;
    }
    kvn_report_add_span(outcome, task->first + task->batch_count, task->columns.count);
    kvn_report_merge_spans(outcome);
    /* Of several batches, the message tells of all; of one, the backend's own says more. */
    if (outcome->failed == KVN_NO_DESCRIPTOR && task->batch_count != task->columns.count &&
        kvn_is_given_up(outcome->status)) {
        uint64_t total;
        kvn_columns_total(&task->columns, &total);
        kvn_report_abandoned(outcome, outcome->status, task->columns.count, total);
    }
    task->settled = true;
}

/* No batch is left, or none may begin. */
static void settle_between(kvn_task *task, int status)
{
    kvn_report nothing;

    kvn_report_begin(&nothing);
    nothing.status = status;
    task->batch_count = 0;
    settle(task, &nothing);
}

static void issue(kvn_task *task)
{
    uint64_t left = task->columns.count - task->first;
    kvn_columns batch = {
        .dst = task->columns.dst + task->first,
        .src = task->columns.src + task->first,
        .nbytes = task->columns.nbytes + task->first,
        .count = left < task->max_batch ? left : task->max_batch,
        .first = task->columns.first + task->first,
        .beside = task->columns.beside,
        .waits = task->columns.waits,
    };
    kvn_report report;

    task->batch_count = batch.count;
    if (calls(task)->submit(task->backend, &batch, &task->request, &report) != KVN_OK)
        settle(task, &report);
}

/* Looks at the current batch; if it is through, settles the task or issues the next. Only when no
 * other thread is in a call on the request. */
static void step(kvn_task *task)
{
    kvn_report report;
    int status = calls(task)->poll(task->backend, task->request, &report);

    task->bytes_now = task->bytes_before + report.bytes_done;
    if (status == KVN_PENDING)
        return;
    calls(task)->release(task->backend, task->request);
    task->request = NULL;
    if (status != KVN_OK || task->first + task->batch_count == task->columns.count) {
        settle(task, &report);
        return;
    }
    task->bytes_before += report.bytes_done;
    task->first += task->batch_count;
    if (task->give_up)
        settle_between(task, task->give_up);
    else
        issue(task);
}

/* ---- submit ---- */

void kvn_task_init(kvn_task *task, kvn_backend *backend, const kvn_columns *columns)
{
    memset(task, 0, offsetof(kvn_task, outcome));
    task->backend = backend;
    task->columns = *columns;
    pthread_mutex_init(&task->mutex, NULL);
    kvn_cond_init(&task->changed);
}

/* Index of the first descriptor larger than `max_nbytes`; count if there is none. */
static uint64_t find_oversized(const kvn_columns *columns, uint64_t max_nbytes)
{
    uint64_t i = 0;

    if (max_nbytes == UINT64_MAX)
        return columns->count;
    while (i < columns->count && columns->nbytes[i] <= max_nbytes)
        i++;
    return i;
}

bool kvn_refuse_oversized(kvn_backend *backend, const kvn_columns *columns, kvn_report *report)
{
    kvn_capabilities limits;
    uint64_t index;

    backend->vtable->capabilities(backend, &limits);
    index = find_oversized(columns, limits.max_nbytes);
    if (index == columns->count)
        return false;
    kvn_report_refuse(report, columns->count, KVN_INVALID, 0,
                      "descriptor %" PRIu64 " is %" PRIu64
                      " bytes: the backend %s takes at most %" PRIu64 " in one descriptor",
                      columns->first + index, columns->nbytes[index], backend->vtable->name,
                      limits.max_nbytes);
    report->failed = index;
    return true;
}

/* With the mutex held. */
static void begin(kvn_task *task)
{
    kvn_capabilities limits;

    task->begun = true;
    calls(task)->capabilities(task->backend, &limits);
    task->max_batch = limits.max_batch;
    if (kvn_refuse_oversized(task->backend, &task->columns, &task->outcome)) {
        task->settled = true;
    } else if (task->columns.count == 0) {
        settle_between(task, KVN_OK);
    } else {
        issue(task);
        if (!task->settled && task->batch_count == task->columns.count)
            step(task); /* small batches are through already */
    }
}

/* With the mutex held; gives it up. */
static int leave(kvn_task *task)
{
    int status = task->settled ? task->outcome.status : KVN_PENDING;

    pthread_mutex_unlock(&task->mutex);
    return status;
}

/* The mutex is held until the first batch is issued: whoever aborts the task comes before or after. */
int kvn_task_begin(kvn_task *task)
{
    pthread_mutex_lock(&task->mutex);
    if (!task->settled)
        begin(task);
    pthread_cond_broadcast(&task->changed);
    return leave(task);
}

/* ---- poll, wait, abort ---- */

static bool is_in_use(const kvn_task *task) { return task->driven || task->aborting > 0; }

/* A thread is done with the request: the last one out looks at it for all. */
static void let_go(kvn_task *task)
{
    if (!is_in_use(task) && !task->settled)
        step(task);
    pthread_cond_broadcast(&task->changed);
}

int kvn_task_poll(kvn_task *task)
{
    pthread_mutex_lock(&task->mutex);
    if (!task->settled && task->begun && !is_in_use(task))
        step(task);
    return leave(task);
}

int kvn_task_wait(kvn_task *task, int64_t deadline_ns)
{
    kvn_report ignored; /* step() reads the outcome when all threads are out */
    int status;

    pthread_mutex_lock(&task->mutex);
    while (!task->settled) {
        if (!task->begun || is_in_use(task)) {
            if (!kvn_cond_wait(&task->changed, &task->mutex, deadline_ns))
                break;
            continue;
        }
        task->driven = true;
        pthread_mutex_unlock(&task->mutex);
        status = calls(task)->wait(task->backend, task->request, deadline_ns, &ignored);
        pthread_mutex_lock(&task->mutex);
        task->driven = false;
        let_go(task);
        if (status == KVN_PENDING)
            break;
    }
    return leave(task);
}

int kvn_task_abort(kvn_task *task, int why)
{
    kvn_report ignored;

    pthread_mutex_lock(&task->mutex);
    if (task->settled)
        return leave(task);
    task->give_up = why;
    if (!task->begun) {
        settle_between(task, why);
        pthread_cond_broadcast(&task->changed);
        return leave(task);
    }
    task->aborting++;
    pthread_mutex_unlock(&task->mutex);
    calls(task)->abort(task->backend, task->request, why, &ignored);
    pthread_mutex_lock(&task->mutex);
    task->aborting--;
    let_go(task);
    while (!task->settled && is_in_use(task))
        kvn_cond_wait(&task->changed, &task->mutex, KVN_FOREVER);
    return leave(task);
}

int kvn_task_report(kvn_task *task, kvn_report *report)
{
    pthread_mutex_lock(&task->mutex);
    if (task->settled) {
        kvn_report_copy(report, &task->outcome);
    } else {
        kvn_report_begin(report);
        report->bytes_done = task->bytes_now;
    }
    return leave(task);
}

const kvn_report *kvn_task_outcome(const kvn_task *task) { return &task->outcome; }

void kvn_task_release(kvn_task *task)
{
    pthread_cond_destroy(&task->changed);
    pthread_mutex_destroy(&task->mutex);
}
