/* Runs a transfer layer by layer: each layer moves once it is opened, and all have one outcome. */
#include "core/layered.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/columns.h"
#include "core/report.h"
#include "core/thread.h"

/* Layers in flight that an open polls, to notice a failure. A constant, so that the cost of an open does not grow with
 * the layers in flight. */
#define LOOKS_PER_OPEN 4

struct kvn_opened {
    kvn_task task;
    kvn_node in_flight; /* in the list, in polling order */
    uint64_t layer;
    uint32_t users; /* threads in a call on the task, without the mutex; the last one absorbs it */
    bool submitted; /* the task may be called */
    bool driven;    /* a thread waits in it */
    bool stopping;  /* a thread aborts it */
    bool through;   /* its outcome has come; the last user includes it */
};

static kvn_opened *opened_of(const kvn_node *node) { return KVN_LISTED(node, kvn_opened, in_flight); }

static kvn_opened *first_opened(const kvn_layered *layered)
{
    return opened_of(kvn_list_first(&layered->in_flight));
}

static kvn_opened *opened_after(const kvn_layered *layered, const kvn_opened *it)
{
    return opened_of(kvn_list_after(&layered->in_flight, &it->in_flight));
}

/* ---- layers; the caller holds the mutex unless a comment says otherwise ---- */

static kvn_columns slice_of(const kvn_layered *layered, uint64_t layer)
{
    const uint64_t count = layered->columns.count, first = layer * layered->layer_size;
    const uint64_t last = count - first < layered->layer_size ? count : first + layered->layer_size;
    kvn_columns slice = kvn_columns_slice(&layered->columns, first, last);

    slice.caller = KVN_CALLER_COMPUTES;
    return slice;
}

uint32_t kvn_layered_spans(const kvn_layered *layered, uint64_t layer, kvn_span *spans)
{
    const kvn_layer *it = &layered->layers[layer];
    kvn_columns slice = slice_of(layered, layer);
    uint64_t first = layer * layered->layer_size;
    const kvn_report *report;

    if (it->state == KVN_LAYER_DONE)
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

static uint64_t count_unconfirmed(const kvn_layered *layered)
{
    uint64_t sum = 0;

    for (uint64_t layer = 0; layer < layered->num_layers; layer++) {
        const kvn_layer *it = &layered->layers[layer];
        if (it->opened)
            sum += kvn_report_unconfirmed(kvn_task_outcome(&it->opened->task));
        else if (it->state != KVN_LAYER_DONE)
            sum += slice_of(layered, layer).count;
    }
    return sum;
}

/* Prevents further layers from opening. */
static void seal(kvn_layered *layered)
{
    if (layered->sealed)
        return;
    layered->sealed = true;
    kvn_ending_end_part(layered->ending, KVN_OK);
}

/* Settles the outcome if no layer moves or will move. */
static void settle_if_over(kvn_layered *layered)
{
    kvn_report *outcome = &layered->outcome;

    if (!layered->sealed || layered->num_moving > 0 || layered->settled)
        return;
    outcome->bytes_done = layered->bytes_done;
    if (outcome->status == KVN_PENDING) { /* no failure */
        uint64_t unconfirmed = count_unconfirmed(layered), total;
        outcome->status = unconfirmed > 0 ? layered->give_up : KVN_OK;
        kvn_columns_total(&layered->columns, &total);
        if (unconfirmed > 0)
            kvn_report_given_up(outcome, layered->give_up, unconfirmed, layered->columns.count, total);
    }
    layered->settled = true;
}

/* Cancels layers at a gate after a failure, because their gate may never open. */
static void cancel_held(kvn_layered *layered)
{
    for (kvn_opened *it = first_opened(layered); it; it = opened_after(layered, it))
        if (it->submitted)
            kvn_task_cancel_held(&it->task);
}

/* The first failure becomes the outcome; aborted layers do not count. */
static void note_failure(kvn_layered *layered, uint64_t layer, const kvn_report *report)
{
    kvn_report *outcome = &layered->outcome;
    bool given_up = layered->give_up != KVN_OK && report->failed == KVN_NO_DESCRIPTOR &&
                    kvn_is_given_up(report->status);

    seal(layered);
    if (given_up || outcome->status != KVN_PENDING)
        return;
    outcome->status = report->status;
    outcome->code = report->code;
    if (report->failed != KVN_NO_DESCRIPTOR)
        outcome->failed = report->failed + layer * layered->layer_size;
    memcpy(outcome->message, report->message, sizeof outcome->message);
    cancel_held(layered);
}

/* Includes the outcome of an ended layer. No other thread may be in a call on it. */
static void absorb(kvn_layered *layered, kvn_opened *it)
{
    kvn_layer *layer = &layered->layers[it->layer];
    const kvn_report *report = kvn_task_outcome(&it->task);
    bool done = report->status == KVN_OK;

    kvn_list_remove(&it->in_flight);
    layered->num_moving--;
    layered->bytes_done += report->bytes_done;
    layer->state = done ? KVN_LAYER_DONE : KVN_LAYER_FAILED;
    if (!done)
        note_failure(layered, it->layer, report);
    kvn_task_release(&it->task);
    if (done) {
        layer->opened = NULL;
        free(it);
    }
    settle_if_over(layered);
    pthread_cond_broadcast(&layered->changed);
}

/* Ends a thread's call on the task, which returned `status`. */
static void let_go(kvn_layered *layered, kvn_opened *it, int status)
{
    it->users--;
    if (status != KVN_PENDING)
        it->through = true;
    if (it->through && it->users == 0)
        absorb(layered, it);
}

/* Polls up to `most` layers in flight; those that continue move to the end. Waits for the outcome of a
 * layer that has ended: its backend may not report it to a poll yet. */
static void look(kvn_layered *layered, uint64_t most)
{
    uint64_t looks = layered->num_moving < most ? layered->num_moving : most;

    for (; looks > 0; looks--) {
        kvn_opened *it = first_opened(layered);
        int status;

        if (!it)
            break;
        kvn_list_push_back(&layered->in_flight, &it->in_flight);
        if (!it->submitted || it->through || it->driven)
            continue;
        it->users++;
        pthread_mutex_unlock(&layered->mutex);
        status = kvn_task_has_ended(&it->task) ? kvn_task_wait(&it->task, KVN_FOREVER) : kvn_task_poll(&it->task);
        pthread_mutex_lock(&layered->mutex);
        let_go(layered, it, status);
    }
}

/* ---- init, open ---- */

int kvn_layered_init(kvn_layered *layered, kvn_backend *backend, const kvn_columns *columns,
                     uint64_t layer_size, kvn_ending *ending)
{
    memset(layered, 0, offsetof(kvn_layered, outcome));
    layered->backend = backend;
    layered->columns = *columns;
    layered->ending = ending;
    layered->layer_size = layer_size;
    layered->num_layers = columns->count / layer_size + (columns->count % layer_size > 0);
    layered->layers = calloc(layered->num_layers > 0 ? layered->num_layers : 1, sizeof(kvn_layer));
    if (!layered->layers)
        return KVN_NO_MEMORY;
    pthread_mutex_init(&layered->mutex, NULL);
    kvn_cond_init(&layered->changed);
    kvn_list_init(&layered->in_flight);
    layered->num_waiting = layered->num_layers;
    kvn_report_begin(&layered->outcome);
    if (layered->num_layers == 0)
        seal(layered);
    settle_if_over(layered);
    return layered->settled ? layered->outcome.status : KVN_PENDING;
}

/* The caller holds the mutex, which this releases. */
static int leave(kvn_layered *layered)
{
    int status = layered->settled ? layered->outcome.status : KVN_PENDING;

    pthread_mutex_unlock(&layered->mutex);
    return status;
}

static void refuse_open(kvn_layered *layered, uint64_t layer)
{
    kvn_report refusal;

    kvn_report_refuse(&refusal, slice_of(layered, layer).count, KVN_NO_MEMORY, ENOMEM,
                      "no memory for a layer in flight (%zu bytes)", sizeof(kvn_opened));
    layered->layers[layer].state = KVN_LAYER_FAILED;
    layered->num_waiting--;
    note_failure(layered, layer, &refusal);
    settle_if_over(layered);
    pthread_cond_broadcast(&layered->changed);
}

static kvn_opened *begin(kvn_layered *layered, uint64_t layer)
{
    kvn_opened *it = malloc(sizeof *it);

    if (!it) {
        refuse_open(layered, layer);
        return NULL;
    }
    it->in_flight = (kvn_node){NULL, NULL};
    it->layer = layer;
    it->users = 1;
    it->submitted = it->driven = it->stopping = it->through = false;
    kvn_list_push_back(&layered->in_flight, &it->in_flight);
    layered->layers[layer] = (kvn_layer){it, KVN_LAYER_MOVING};
    layered->num_waiting--;
    layered->num_moving++;
    kvn_ending_add(layered->ending);
    if (layered->num_waiting == 0)
        seal(layered);
    return it;
}

int kvn_layered_open(kvn_layered *layered, uint64_t layer, kvn_gate *after, int *opened)
{
    kvn_opened *it = NULL;
    int status;

    pthread_mutex_lock(&layered->mutex);
    look(layered, LOOKS_PER_OPEN);
    if (!layered->sealed && layered->layers[layer].state == KVN_LAYER_WAITING)
        it = begin(layered, layer);
    *opened = it != NULL;
    if (it) {
        kvn_columns slice = slice_of(layered, layer);
        slice.after = after;
        pthread_mutex_unlock(&layered->mutex);
        kvn_task_init(&it->task, layered->backend, &slice, layered->ending);
        status = kvn_task_begin(&it->task);
        pthread_mutex_lock(&layered->mutex);
        it->submitted = true;
        if (layered->outcome.status != KVN_PENDING) /* another layer has failed meanwhile */
            kvn_task_cancel_held(&it->task);
        if (status == KVN_PENDING)
            pthread_cond_broadcast(&layered->changed); /* waiting threads can help, and an abort must stop it */
        let_go(layered, it, status);
    }
    return leave(layered);
}

/* ---- poll, wait, abort ---- */

int kvn_layered_poll(kvn_layered *layered)
{
    pthread_mutex_lock(&layered->mutex);
    look(layered, UINT64_MAX);
    return leave(layered);
}

/* The first layer in flight that no other thread waits in. */
static kvn_opened *find_undriven(const kvn_layered *layered)
{
    kvn_opened *it = first_opened(layered);

    while (it && (!it->submitted || it->through || it->driven))
        it = opened_after(layered, it);
    return it;
}

int kvn_layered_wait(kvn_layered *layered, int64_t deadline_ns)
{
    pthread_mutex_lock(&layered->mutex);
    look(layered, UINT64_MAX);
    while (!layered->settled) {
        kvn_opened *it = find_undriven(layered);
        int status;

        if (!it) {
            if (!kvn_cond_wait(&layered->changed, &layered->mutex, deadline_ns))
                break;
            continue;
        }
        it->driven = true;
        it->users++;
        pthread_mutex_unlock(&layered->mutex);
        status = kvn_task_wait(&it->task, deadline_ns);
        pthread_mutex_lock(&layered->mutex);
        it->driven = false;
        let_go(layered, it, status);
        if (status == KVN_PENDING) {
            pthread_cond_broadcast(&layered->changed); /* another thread may wait in the layer */
            break;
        }
    }
    return leave(layered);
}

static kvn_opened *find_going_on(const kvn_layered *layered)
{
    kvn_opened *it = first_opened(layered);

    while (it && (!it->submitted || it->through || it->stopping))
        it = opened_after(layered, it);
    return it;
}

int kvn_layered_abort(kvn_layered *layered, int why)
{
    pthread_mutex_lock(&layered->mutex);
    if (!layered->settled && layered->give_up == KVN_OK) {
        layered->give_up = why;
        seal(layered);
        settle_if_over(layered);
        pthread_cond_broadcast(&layered->changed);
    }
    while (!layered->settled) {
        kvn_opened *it = find_going_on(layered);
        int status;

        if (!it) {
            kvn_cond_wait(&layered->changed, &layered->mutex, KVN_FOREVER);
            continue;
        }
        it->stopping = true;
        it->users++;
        pthread_mutex_unlock(&layered->mutex);
        status = kvn_task_abort(&it->task, why);
        pthread_mutex_lock(&layered->mutex);
        let_go(layered, it, status);
    }
    return leave(layered);
}

/* ---- the outcome ---- */

bool kvn_layered_is_sealed(kvn_layered *layered)
{
    bool sealed;

    pthread_mutex_lock(&layered->mutex);
    sealed = layered->sealed;
    pthread_mutex_unlock(&layered->mutex);
    return sealed;
}

void kvn_layered_states(kvn_layered *layered, uint8_t *states)
{
    pthread_mutex_lock(&layered->mutex);
    for (uint64_t layer = 0; layer < layered->num_layers; layer++)
        states[layer] = (uint8_t)layered->layers[layer].state;
    pthread_mutex_unlock(&layered->mutex);
}

uint64_t kvn_layered_bytes_done(kvn_layered *layered)
{
    uint64_t bytes_done;

    pthread_mutex_lock(&layered->mutex);
    bytes_done = layered->bytes_done;
    for (kvn_opened *it = first_opened(layered); it; it = opened_after(layered, it))
        if (it->submitted)
            bytes_done += kvn_task_bytes_done(&it->task);
    pthread_mutex_unlock(&layered->mutex);
    return bytes_done;
}

const kvn_report *kvn_layered_outcome(const kvn_layered *layered) { return &layered->outcome; }

void kvn_layered_release(kvn_layered *layered)
{
    for (uint64_t layer = 0; layer < layered->num_layers; layer++)
        free(layered->layers[layer].opened);
    free(layered->layers);
    pthread_cond_destroy(&layered->changed);
    pthread_mutex_destroy(&layered->mutex);
}
