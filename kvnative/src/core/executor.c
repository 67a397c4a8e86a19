/* Submits a task as one batch, now or behind its gate, and keeps the outcome for any number of waiters. */
#include "core/executor.h"

#include <stdio.h>
#include <string.h>

#include "core/columns.h"
#include "core/report.h"
#include "core/thread.h"

static const kvn_backend_vtable *calls(const kvn_task *task) { return task->backend->vtable; }

static bool is_over(const kvn_task *task) { return task->status != KVN_PENDING; }

/* ---- the outcome; the caller holds the mutex ---- */

static void end(kvn_task *task, int status)
{
    atomic_store_explicit(&task->ended, true, memory_order_release);
    kvn_ending_end_part(task->ending, status);
}

/* Called by the backend, with or without the mutex. */
static void end_batch(kvn_batch_end *batch_end, int status)
{
    end((kvn_task *)((char *)batch_end - offsetof(kvn_task, end)), status);
}

/* Ends a task for which the backend has no request; its outcome is set. */
static void settle_with_outcome(kvn_task *task)
{
    task->status = task->outcome.status;
    if (task->ending)
        end(task, task->outcome.status);
}

/* Ends a task that has submitted nothing. */
static void settle(kvn_task *task, int status)
{
    kvn_report *outcome = &task->outcome;
    size_t length;

    kvn_report_begin(outcome);
    outcome->status = status;
    if (status != KVN_OK) {
        uint64_t total;
        kvn_columns_total(&task->columns, &total);
        kvn_report_add_span(outcome, 0, task->columns.count);
        kvn_report_abandoned(outcome, status, task->columns.count, total);
        length = strlen(outcome->message);
        if (task->columns.after)
            snprintf(outcome->message + length, sizeof outcome->message - length,
                     "; " KVN_GATE_IS_SHUT);
    }
    settle_with_outcome(task);
}

/* Polls the request, and ends the task if the request has ended. No other thread may be in a call on the request. */
static void look(kvn_task *task)
{
    uint64_t bytes_done;

    task->status = calls(task)->poll(task->backend, task->request, &bytes_done);
    if (task->status == KVN_PENDING)
        return;
    calls(task)->release(task->backend, task->request);
    task->request = NULL;
}

/* ---- begin ---- */

void kvn_task_init(kvn_task *task, kvn_backend *backend, const kvn_columns *columns, kvn_ending *ending)
{
    memset(task, 0, offsetof(kvn_task, outcome));
    task->backend = backend;
    task->columns = *columns;
    task->end.call = end_batch;
    task->ending = ending;
    task->status = KVN_PENDING;
    if (ending)
        task->columns.end = &task->end;
    pthread_mutex_init(&task->mutex, NULL);
    kvn_cond_init(&task->changed);
}

/* Submits the batch. Returns false if its gate has to open first, or the backend has no room for it now. The caller
 * holds the mutex. */
static bool begin(kvn_task *task)
{
    int status;

    if (task->columns.count == 0) {
        settle(task, KVN_OK);
        return true;
    }
    status = calls(task)->submit(task->backend, &task->columns, &task->request, &task->outcome);
    if (status == KVN_PENDING)
        return false;
    if (status == KVN_OK)
        look(task); /* small batches have ended already */
    else
        settle_with_outcome(task); /* refused */
    return true;
}

/* Releases the mutex, which the caller holds. */
static int leave(kvn_task *task)
{
    const int status = task->status;

    pthread_mutex_unlock(&task->mutex);
    return status;
}

/* Called by a thread of the gate. It must not block, because other tasks need that thread. */
static bool open_gate(kvn_gate_waiter *waiter, int status, const kvn_failure *why)
{
    kvn_task *task = KVN_LISTED(&waiter->node, kvn_task, waiter.node);
    bool leaves = true;

    pthread_mutex_lock(&task->mutex);
    if (!is_over(task) && status == KVN_OK) {
        task->columns.after = NULL;
        task->columns.caller = KVN_CALLER_HURRIES;
        leaves = begin(task);
    } else if (!is_over(task)) {
        kvn_report_refuse(&task->outcome, task->columns.count, status, why->code,
                          "the event that it comes after: %.200s", why->message);
        settle_with_outcome(task);
    }
    if (leaves)
        pthread_cond_broadcast(&task->changed);
    pthread_mutex_unlock(&task->mutex);
    return leaves;
}

/* Called by the same thread, to give the batch to a backend that orders and had no room before. */
static bool pass_on(kvn_gate_waiter *waiter)
{
    kvn_task *task = KVN_LISTED(&waiter->node, kvn_task, waiter.node);
    bool leaves;

    pthread_mutex_lock(&task->mutex);
    leaves = is_over(task) || begin(task);
    if (leaves)
        pthread_cond_broadcast(&task->changed);
    pthread_mutex_unlock(&task->mutex);
    return leaves;
}

/* The caller holds the mutex, which the gate's thread needs to open the gate. */
static void wait_at_gate(kvn_task *task)
{
    kvn_gate *gate = task->columns.after;
    kvn_failure failure;

    task->waiter = (kvn_gate_waiter){.gate = gate, .open = open_gate};
    if (calls(task)->orders) {
        task->waiter.pass = pass_on;
        task->waiter.room = task->backend;
    }
    if (gate->enter(gate, &task->waiter, &failure) == KVN_OK)
        return;
    task->waiter.gate = NULL;
    kvn_report_refuse(&task->outcome, task->columns.count, failure.status, failure.code, "%s",
                      failure.message);
    settle_with_outcome(task);
}

static void leave_gate(kvn_task *task)
{
    if (task->waiter.gate)
        task->waiter.gate->leave(task->waiter.gate, &task->waiter);
}

/* The mutex is held until the batch is submitted, so that an abort comes before or after. */
int kvn_task_begin(kvn_task *task)
{
    pthread_mutex_lock(&task->mutex);
    if (!is_over(task) && ((task->columns.after && !calls(task)->orders) || !begin(task)))
        wait_at_gate(task);
    pthread_cond_broadcast(&task->changed);
    return leave(task);
}

/* ---- poll, wait, abort ---- */

static bool is_in_use(const kvn_task *task)
{
    return task->driven || task->aborting > 0 || task->ordering > 0;
}

/* Ends a thread's call on the request; the last thread looks at the request for all. The caller holds the mutex. */
static void let_go(kvn_task *task)
{
    if (task->request && !is_in_use(task))
        look(task);
    pthread_cond_broadcast(&task->changed);
}

int kvn_task_poll(kvn_task *task)
{
    pthread_mutex_lock(&task->mutex);
    if (task->request && !is_in_use(task))
        look(task);
    return leave(task);
}

bool kvn_task_has_ended(const kvn_task *task)
{
    return atomic_load_explicit(&task->ended, memory_order_acquire);
}

int kvn_task_wait(kvn_task *task, int64_t deadline_ns)
{
    int status;

    pthread_mutex_lock(&task->mutex);
    while (!is_over(task)) {
        if (!task->request || is_in_use(task)) {
            if (!kvn_cond_wait(&task->changed, &task->mutex, deadline_ns))
                break;
            continue;
        }
        task->driven = true;
        pthread_mutex_unlock(&task->mutex);
        status = calls(task)->wait(task->backend, task->request, deadline_ns);
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
    pthread_mutex_lock(&task->mutex);
    if (is_over(task))
        return leave(task);
    if (!task->request) {
        settle(task, why);
        pthread_cond_broadcast(&task->changed);
        leave(task);
        leave_gate(task);
        return why;
    }
    task->aborting++;
    pthread_mutex_unlock(&task->mutex);
    calls(task)->abort(task->backend, task->request, why);
    pthread_mutex_lock(&task->mutex);
    task->aborting--;
    let_go(task);
    while (task->request && is_in_use(task))
        kvn_cond_wait(&task->changed, &task->mutex, KVN_FOREVER);
    return leave(task);
}

int kvn_task_block_stream(kvn_task *task, void *stream, int64_t deadline_ns, kvn_failure *why)
{
    int status = KVN_OK;

    if (!calls(task)->block_stream)
        return kvn_fail(why, KVN_UNSUPPORTED, 0,
                        "no stream can wait for it, because the bytes are not moved by work on a device's streams; "
                        "wait for it on the host");
    pthread_mutex_lock(&task->mutex);
    if (!is_over(task) && !task->request)
        status = kvn_fail(why, KVN_UNSUPPORTED, 0,
                          "no stream can wait for it yet, because " KVN_GATE_IS_SHUT
                          ", and it is given to the device then; wait for it on the host");
    if (is_over(task) || status != KVN_OK) {
        pthread_mutex_unlock(&task->mutex);
        return status;
    }
    task->ordering++;
    pthread_mutex_unlock(&task->mutex);
    status = calls(task)->block_stream(task->backend, task->request, stream, deadline_ns, why);
    pthread_mutex_lock(&task->mutex);
    task->ordering--;
    let_go(task);
    pthread_mutex_unlock(&task->mutex);
    return status;
}

static bool is_at_gate(const kvn_task *task) { return task->waiter.gate && !task->request && !is_over(task); }

void kvn_task_cancel_held(kvn_task *task)
{
    pthread_mutex_lock(&task->mutex);
    if (is_at_gate(task)) {
        settle(task, KVN_CANCELLED);
        pthread_cond_broadcast(&task->changed);
    } else if (task->columns.after && task->request && calls(task)->cancel_held) {
        calls(task)->cancel_held(task->backend, task->request);
    }
    pthread_mutex_unlock(&task->mutex);
}

bool kvn_task_is_held(kvn_task *task)
{
    bool held;

    pthread_mutex_lock(&task->mutex);
    held = is_at_gate(task);
    pthread_mutex_unlock(&task->mutex);
    return held;
}

uint64_t kvn_task_bytes_done(kvn_task *task)
{
    uint64_t bytes_done = 0;

    pthread_mutex_lock(&task->mutex);
    if (task->request)
        calls(task)->poll(task->backend, task->request, &bytes_done);
    else if (is_over(task))
        bytes_done = task->outcome.bytes_done;
    pthread_mutex_unlock(&task->mutex);
    return bytes_done;
}

const kvn_report *kvn_task_outcome(const kvn_task *task) { return &task->outcome; }

void kvn_task_release(kvn_task *task)
{
    leave_gate(task);
    pthread_cond_destroy(&task->changed);
    pthread_mutex_destroy(&task->mutex);
}
