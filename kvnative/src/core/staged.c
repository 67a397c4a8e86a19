#include "core/staged.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "core/columns.h"
#include "core/report.h"

/* How many of the stages in flight an open looks at: enough to notice a failure and to keep stages of
 * several batches going, without making an open dearer the more is in flight. */
#define LOOKS_PER_OPEN 4

struct kvn_opened {
    kvn_task task;
    kvn_node in_flight; /* in the list, in the order in which they are looked at */
    uint64_t stage;
    uint32_t users; /* threads in a call on the task, without the mutex; the last one absorbs it */
    bool submitted; /* the task may be called */
    bool driven;    /* a thread waits in it */
    bool stopping;  /* a thread aborts it */
    bool through;   /* somebody has seen its outcome */
};

static kvn_opened *opened_of(const kvn_node *node) { return KVN_LISTED(node, kvn_opened, in_flight); }

static kvn_opened *first_opened(const kvn_staged *staged)
{
    return opened_of(kvn_list_first(&staged->in_flight));
}

static kvn_opened *opened_after(const kvn_staged *staged, const kvn_opened *it)
{
    return opened_of(kvn_list_after(&staged->in_flight, &it->in_flight));
}

/* ---- stages; with the mutex held unless said otherwise ---- */

static kvn_columns slice_of(const kvn_staged *staged, uint64_t stage)
{
    const uint64_t count = staged->columns.count, first = stage * staged->stage_size;
    const uint64_t last = count - first < staged->stage_size ? count : first + staged->stage_size;
    kvn_columns slice = kvn_columns_slice(&staged->columns, first, last);

    slice.caller = KVN_CALLER_COMPUTES;
    return slice;
}

uint32_t kvn_staged_spans(const kvn_staged *staged, uint64_t stage, kvn_span *spans)
{
    const kvn_stage *it = &staged->stages[stage];
    kvn_columns slice = slice_of(staged, stage);
    uint64_t first = stage * staged->stage_size;
    const kvn_report *report;

    if (it->state == KVN_STAGE_DONE)
        return 0;
    if (!it->opened) {
        spans[0] = (kvn_span){first, first + slice.count};
        return 1;
    }
    report = kvn_task_outcome(&it->opened->task);
    for (uint32_t i = 0; i < report->num_unconfirmed; i++)
        spans[i] = (kvn_span){report->unconfirmed[i].first + first,
                              report->unconfirmed[i].last + first};
    return report->num_unconfirmed;
}

static uint64_t count_unconfirmed(const kvn_staged *staged)
{
    uint64_t sum = 0;

    for (uint64_t stage = 0; stage < staged->num_stages; stage++) {
        const kvn_stage *it = &staged->stages[stage];
        if (it->opened)
            sum += kvn_report_unconfirmed(kvn_task_outcome(&it->opened->task));
        else if (it->state != KVN_STAGE_DONE)
            sum += slice_of(staged, stage).count;
    }
    return sum;
}

/* Settles the outcome if nothing moves and nothing will. */
static void settle_if_over(kvn_staged *staged)
{
    kvn_report *outcome = &staged->outcome;

    if (!staged->sealed || staged->num_moving > 0 || staged->settled)
        return;
    outcome->bytes_done = staged->bytes_done;
    if (outcome->status == KVN_PENDING) { /* no failure */
        uint64_t unconfirmed = count_unconfirmed(staged), total;
        outcome->status = unconfirmed > 0 ? staged->give_up : KVN_OK;
        kvn_columns_total(&staged->columns, &total);
        if (unconfirmed > 0)
            kvn_report_given_up(outcome, staged->give_up, unconfirmed, staged->columns.count, total);
    }
    staged->settled = true;
}

/* The first failure is the outcome's; what was given up is none. */
static void note_failure(kvn_staged *staged, uint64_t stage, const kvn_report *report)
{
    kvn_report *outcome = &staged->outcome;
    bool given_up = staged->give_up != KVN_OK && report->failed == KVN_NO_DESCRIPTOR &&
                    kvn_is_given_up(report->status);

    staged->sealed = true;
    if (given_up || outcome->status != KVN_PENDING)
        return;
    outcome->status = report->status;
    outcome->code = report->code;
    if (report->failed != KVN_NO_DESCRIPTOR)
        outcome->failed = report->failed + stage * staged->stage_size;
    memcpy(outcome->message, report->message, sizeof outcome->message);
}

/* The stage is through, and no other thread is in a call on it. */
static void absorb(kvn_staged *staged, kvn_opened *it)
{
    kvn_stage *stage = &staged->stages[it->stage];
    const kvn_report *report = kvn_task_outcome(&it->task);
    bool done = report->status == KVN_OK;

    kvn_list_remove(&it->in_flight);
    staged->num_moving--;
    staged->bytes_done += report->bytes_done;
    stage->state = done ? KVN_STAGE_DONE : KVN_STAGE_FAILED;
    if (!done)
        note_failure(staged, it->stage, report);
    kvn_task_release(&it->task);
    if (done) {
        stage->opened = NULL;
        free(it);
    }
    settle_if_over(staged);
    pthread_cond_broadcast(&staged->changed);
}

/* A call on the task is over; it returned `status`. */
static void let_go(kvn_staged *staged, kvn_opened *it, int status)
{
    it->users--;
    if (status != KVN_PENDING)
        it->through = true;
    if (it->through && it->users == 0)
        absorb(staged, it);
}

/* Looks, without waiting, at up to `most` of the stages in flight; those that go on come last. */
static void look(kvn_staged *staged, uint64_t most)
{
    uint64_t looks = staged->num_moving < most ? staged->num_moving : most;

    for (; looks > 0; looks--) {
        kvn_opened *it = first_opened(staged);
        int status;

        if (!it)
            break;
        kvn_list_push_back(&staged->in_flight, &it->in_flight);
        if (!it->submitted || it->through || it->driven)
            continue;
        it->users++;
        pthread_mutex_unlock(&staged->mutex);
        status = kvn_task_poll(&it->task);
        pthread_mutex_lock(&staged->mutex);
        let_go(staged, it, status);
    }
}

/* ---- init, open ---- */

int kvn_staged_init(kvn_staged *staged, kvn_backend *backend, const kvn_columns *columns,
                    uint64_t stage_size)
{
    memset(staged, 0, offsetof(kvn_staged, outcome));
    staged->backend = backend;
    staged->columns = *columns;
    staged->stage_size = stage_size;
    staged->num_stages = columns->count / stage_size + (columns->count % stage_size > 0);
    staged->stages = calloc(staged->num_stages > 0 ? staged->num_stages : 1, sizeof(kvn_stage));
    if (!staged->stages)
        return KVN_NO_MEMORY;
    pthread_mutex_init(&staged->mutex, NULL);
    kvn_cond_init(&staged->changed);
    kvn_list_init(&staged->in_flight);
    staged->num_waiting = staged->num_stages;
    kvn_report_begin(&staged->outcome);
    staged->sealed = staged->num_stages == 0;
    settle_if_over(staged);
    return staged->settled ? staged->outcome.status : KVN_PENDING;
}

/* With the mutex held; gives it up. */
static int leave(kvn_staged *staged)
{
    int status = staged->settled ? staged->outcome.status : KVN_PENDING;

    pthread_mutex_unlock(&staged->mutex);
    return status;
}

static void refuse_open(kvn_staged *staged, uint64_t stage)
{
    kvn_report refusal;

    kvn_report_refuse(&refusal, slice_of(staged, stage).count, KVN_NO_MEMORY, ENOMEM,
                      "no memory for a stage in flight (%zu bytes)", sizeof(kvn_opened));
    staged->stages[stage].state = KVN_STAGE_FAILED;
    staged->num_waiting--;
    note_failure(staged, stage, &refusal);
    settle_if_over(staged);
    pthread_cond_broadcast(&staged->changed);
}

static kvn_opened *begin(kvn_staged *staged, uint64_t stage)
{
    kvn_opened *it = malloc(sizeof *it);

    if (!it) {
        refuse_open(staged, stage);
        return NULL;
    }
    it->in_flight = (kvn_node){NULL, NULL};
    it->stage = stage;
    it->users = 1;
    it->submitted = it->driven = it->stopping = it->through = false;
    kvn_list_push_back(&staged->in_flight, &it->in_flight);
    staged->stages[stage] = (kvn_stage){it, KVN_STAGE_MOVING};
    staged->num_waiting--;
    staged->num_moving++;
    if (staged->num_waiting == 0)
        staged->sealed = true;
    return it;
}

int kvn_staged_open(kvn_staged *staged, uint64_t stage, int *opened)
{
    kvn_opened *it = NULL;
    int status;

    pthread_mutex_lock(&staged->mutex);
    look(staged, LOOKS_PER_OPEN);
    if (!staged->sealed && staged->stages[stage].state == KVN_STAGE_WAITING)
        it = begin(staged, stage);
    *opened = it != NULL;
    if (it) {
        kvn_columns slice = slice_of(staged, stage);
        pthread_mutex_unlock(&staged->mutex);
        kvn_task_init(&it->task, staged->backend, &slice);
        status = kvn_task_begin(&it->task);
        pthread_mutex_lock(&staged->mutex);
        it->submitted = true;
        if (status == KVN_PENDING)
            pthread_cond_broadcast(&staged->changed); /* who waits may help, who aborts must stop it */
        let_go(staged, it, status);
    }
    return leave(staged);
}

/* ---- poll, wait, abort ---- */

int kvn_staged_poll(kvn_staged *staged)
{
    pthread_mutex_lock(&staged->mutex);
    look(staged, UINT64_MAX);
    return leave(staged);
}

/* The first stage in flight that no other thread waits in. */
static kvn_opened *find_undriven(const kvn_staged *staged)
{
    kvn_opened *it = first_opened(staged);

    while (it && (!it->submitted || it->through || it->driven))
        it = opened_after(staged, it);
    return it;
}

int kvn_staged_wait(kvn_staged *staged, int64_t deadline_ns)
{
    pthread_mutex_lock(&staged->mutex);
    look(staged, UINT64_MAX);
    while (!staged->settled) {
        kvn_opened *it = find_undriven(staged);
        int status;

        if (!it) {
            if (!kvn_cond_wait(&staged->changed, &staged->mutex, deadline_ns))
                break;
            continue;
        }
        it->driven = true;
        it->users++;
        pthread_mutex_unlock(&staged->mutex);
        status = kvn_task_wait(&it->task, deadline_ns);
        pthread_mutex_lock(&staged->mutex);
        it->driven = false;
        let_go(staged, it, status);
        if (status == KVN_PENDING)
            break;
    }
    return leave(staged);
}

static kvn_opened *find_going_on(const kvn_staged *staged)
{
    kvn_opened *it = first_opened(staged);

    while (it && (!it->submitted || it->through || it->stopping))
        it = opened_after(staged, it);
    return it;
}

int kvn_staged_abort(kvn_staged *staged, int why)
{
    int give_up;

    pthread_mutex_lock(&staged->mutex);
    if (!staged->settled && staged->give_up == KVN_OK) {
        staged->give_up = why;
        staged->sealed = true;
        settle_if_over(staged);
        pthread_cond_broadcast(&staged->changed);
    }
    give_up = staged->give_up;
    while (!staged->settled) {
        kvn_opened *it = find_going_on(staged);
        int status;

        if (!it) {
            kvn_cond_wait(&staged->changed, &staged->mutex, KVN_FOREVER);
            continue;
        }
        it->stopping = true;
        it->users++;
        pthread_mutex_unlock(&staged->mutex);
        status = kvn_task_abort(&it->task, give_up);
        pthread_mutex_lock(&staged->mutex);
        let_go(staged, it, status);
    }
    return leave(staged);
}

/* ---- what it has come to ---- */

bool kvn_staged_is_sealed(kvn_staged *staged)
{
    bool sealed;

    pthread_mutex_lock(&staged->mutex);
    sealed = staged->sealed;
    pthread_mutex_unlock(&staged->mutex);
    return sealed;
}

void kvn_staged_states(kvn_staged *staged, uint8_t *states)
{
    pthread_mutex_lock(&staged->mutex);
    for (uint64_t stage = 0; stage < staged->num_stages; stage++)
        states[stage] = (uint8_t)staged->stages[stage].state;
    pthread_mutex_unlock(&staged->mutex);
}

int kvn_staged_report(kvn_staged *staged, kvn_report *report)
{
    pthread_mutex_lock(&staged->mutex);
    if (staged->settled) {
        kvn_report_copy(report, &staged->outcome);
        return leave(staged);
    }
    kvn_report_begin(report);
    report->bytes_done = staged->bytes_done;
    for (kvn_opened *it = first_opened(staged); it; it = opened_after(staged, it)) {
        kvn_report part;
        if (!it->submitted)
            continue;
        kvn_task_report(&it->task, &part);
        report->bytes_done += part.bytes_done;
    }
    return leave(staged);
}

void kvn_staged_release(kvn_staged *staged)
{
    for (uint64_t stage = 0; stage < staged->num_stages; stage++)
        free(staged->stages[stage].opened);
    free(staged->stages);
    pthread_cond_destroy(&staged->changed);
    pthread_mutex_destroy(&staged->mutex);
}
