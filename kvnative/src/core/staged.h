/* Moves a column array slice by slice: stage i is descriptors [i * stage_size, (i + 1) * stage_size),
 * and is submitted by whoever opens it, as a task of its own. All stages have one outcome, in the
 * indices of the whole array.
 *
 * The first stage that fails, or an abort, seals the array: no further stage opens. The outcome comes
 * when those in flight are through. All calls but init and release may come from several threads. */
#ifndef KVNATIVE_CORE_STAGED_H
#define KVNATIVE_CORE_STAGED_H

#include "core/executor.h"
#include "core/list.h"

typedef enum kvn_stage_state {
    KVN_STAGE_WAITING, /* not open; nothing of it was moved */
    KVN_STAGE_MOVING,
    KVN_STAGE_DONE,
    KVN_STAGE_FAILED /* opened and not confirmed whole */
} kvn_stage_state;

typedef struct kvn_opened kvn_opened; /* a stage in flight, or one that failed */

typedef struct kvn_stage {
    kvn_opened *opened; /* NULL while waiting and when done */
    kvn_stage_state state;
} kvn_stage;

/* Embed it where it stays in place until kvn_staged_release; the fields are staged.c's. */
typedef struct kvn_staged {
    kvn_backend *backend;
    kvn_columns columns;
    uint64_t stage_size;
    uint64_t num_stages;
    pthread_mutex_t mutex;  /* guards everything below; taken before a task's own */
    pthread_cond_t changed; /* a stage was submitted, is through or is let go; or the outcome came */
    kvn_stage *stages;
    kvn_list in_flight;     /* stages, in the order in which they are looked at */
    uint64_t num_waiting;
    uint64_t num_moving;
    uint64_t bytes_done; /* of stages that are through */
    int give_up;         /* KVN_OK, or why it was aborted */
    bool sealed;         /* no stage opens any more */
    bool settled;
    kvn_report outcome;  /* without spans: kvn_staged_spans has them, however many */
} kvn_staged;

/* Nothing moves yet. `stage_size` >= 1. Returns the outcome where there is one already (there are no
 * descriptors), otherwise KVN_PENDING. KVN_NO_MEMORY alone makes nothing to release. The backend and the columns must outlive the outcome. */
int kvn_staged_init(kvn_staged *staged, kvn_backend *backend, const kvn_columns *columns,
                    uint64_t stage_size);
/* Submits stage `stage` < num_stages. *opened: 1 if this call did, 0 if it is open already or
 * the array is sealed. Returns KVN_PENDING or the outcome. */
int kvn_staged_open(kvn_staged *staged, uint64_t stage, int *opened);
/* As for a task. A wait also sleeps while nothing is in flight and stages may still be opened. */
int kvn_staged_poll(kvn_staged *staged);
int kvn_staged_wait(kvn_staged *staged, int64_t deadline_ns);
int kvn_staged_abort(kvn_staged *staged, int why);
/* Whether no stage opens any more: all are open, one has failed, or it was aborted. Never blocks. */
bool kvn_staged_is_sealed(kvn_staged *staged);
/* Writes num_stages states, of one moment. */
void kvn_staged_states(kvn_staged *staged, uint8_t *states);
/* Bytes moved so far, and the outcome if there is one; without spans. */
int kvn_staged_report(kvn_staged *staged, kvn_report *report);
/* The unconfirmed descriptors of one stage, ascending and disjoint, into `spans` (KVN_MAX_SPANS of
 * them); returns how many. After the outcome. */
uint32_t kvn_staged_spans(const kvn_staged *staged, uint64_t stage, kvn_span *spans);
/* After the outcome, once, when no thread is in another call. */
void kvn_staged_release(kvn_staged *staged);

#endif
