/* Layered tasks: layer i has the descriptors [i * layer_size, (i + 1) * layer_size), and the call that opens it
 * submits them as a task. All layers have one outcome, in indices of the whole array.
 *
 * The first failing layer, or an abort, seals the array: no further layer opens. The outcome comes once the layers in
 * flight have ended. All calls but init and release are thread-safe. */
#ifndef KVNATIVE_CORE_LAYERED_H
#define KVNATIVE_CORE_LAYERED_H

#include "core/executor.h"
#include "core/list.h"

typedef enum kvn_layer_state {
    KVN_LAYER_WAITING, /* not open; none of its bytes was moved */
    KVN_LAYER_MOVING,
    KVN_LAYER_DONE,
    KVN_LAYER_FAILED /* opened, but not confirmed completely */
} kvn_layer_state;

typedef struct kvn_opened kvn_opened; /* a layer that is in flight or has failed */

typedef struct kvn_layer {
    kvn_opened *opened; /* NULL: waiting, done, or refused for lack of memory */
    kvn_layer_state state;
} kvn_layer;

/* Embed it where it stays in place until kvn_layered_release; the fields are layered.c's. */
typedef struct kvn_layered {
    kvn_backend *backend;
    kvn_columns columns;
    kvn_ending *ending; /* a part for each layer in flight, and one until the array is sealed */
    uint64_t layer_size;
    uint64_t num_layers;
    pthread_mutex_t mutex;  /* guards everything below; taken before a task's own */
    pthread_cond_t changed; /* a layer was submitted or has ended, or an abort sealed the array */
    kvn_layer *layers;
    kvn_list in_flight;     /* layers, in polling order */
    uint64_t num_waiting;
    uint64_t num_moving;
    uint64_t bytes_done; /* of ended layers */
    int give_up;         /* KVN_OK, or the reason of the abort */
    bool sealed;         /* no layer opens any more */
    bool settled;
    kvn_report outcome;  /* without spans, which kvn_layered_spans returns for each layer */
} kvn_layered;

/* Makes a layered task without open layers; `layer_size` >= 1. Returns the outcome of a batch without descriptors,
 * KVN_NO_MEMORY, after which it must not be released, or KVN_PENDING. The backend, the columns and the ending (with one
 * part) must outlive the outcome. */
int kvn_layered_init(kvn_layered *layered, kvn_backend *backend, const kvn_columns *columns,
                     uint64_t layer_size, kvn_ending *ending);
/* Submits layer `layer` < num_layers, behind the gate `after` (or NULL), which must outlive the task. *opened: 1 if
 * this call submitted it, 0 if it was open or the array is sealed. Returns KVN_PENDING or the outcome. */
int kvn_layered_open(kvn_layered *layered, uint64_t layer, kvn_gate *after, int *opened);
/* Like those of a task. A wait also sleeps while no layer is in flight but some may still be opened. */
int kvn_layered_poll(kvn_layered *layered);
int kvn_layered_wait(kvn_layered *layered, int64_t deadline_ns);
int kvn_layered_abort(kvn_layered *layered, int why);
/* True once no layer can be opened: all are open, one has failed, or the task was aborted. Never blocks. */
bool kvn_layered_is_sealed(kvn_layered *layered);
/* Writes a consistent snapshot of the num_layers states. */
void kvn_layered_states(kvn_layered *layered, uint8_t *states);
/* The bytes that have moved so far. */
uint64_t kvn_layered_bytes_done(kvn_layered *layered);
/* The outcome, after it has come, without spans. */
const kvn_report *kvn_layered_outcome(const kvn_layered *layered);
/* Writes the unconfirmed descriptors of a layer to `spans` (room for KVN_MAX_SPANS), ascending and disjoint, and
 * returns the number of spans. Call it after the outcome. */
uint32_t kvn_layered_spans(const kvn_layered *layered, uint64_t layer, kvn_span *spans);
/* Call it once, after the outcome, when no thread is in another call. */
void kvn_layered_release(kvn_layered *layered);

#endif
