/* Times copies of one batch with several tunings in turn, on threads of its own. */
#include "host/measure.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "core/thread.h"
#include "host/host.h"

#define IN_A_ROW 3

typedef struct mover {
    kvn_pool *pool;
    kvn_backend *backend;
} mover;

typedef struct measurement {
    const kvn_candidate *candidates;
    unsigned count, rounds;
    const kvn_columns *batch;
    size_t at_once; /* descriptors of a copy */
    size_t next;    /* the first descriptor of the next copy */
    int64_t deadline_ns;
    int64_t *ns;
    int64_t wanted_ns; /* processor time, if each thread had a processor */
    int64_t given_ns;
    int done; /* complete rounds; -1: see `error` */
    int error;
} measurement;

static bool open_mover(mover *it, const kvn_candidate *candidate)
{
    it->pool = kvn_pool_create(candidate->threads, NULL, 0);
    if (!it->pool)
        return false;
    kvn_pool_tune(it->pool, &candidate->tuning);
    it->backend = kvn_host_create(it->pool);
    return it->backend != NULL;
}

static void close_mover(mover *it)
{
    if (it->backend)
        it->backend->vtable->destroy(it->backend);
    kvn_pool_destroy(it->pool);
}

/* The descriptors of the next copy, which are in no cache if the whole batch is larger than the caches. */
static kvn_columns next_part(measurement *self)
{
    kvn_columns part = *self->batch;

    if (self->next + self->at_once > part.count)
        self->next = 0;
    part.dst += self->next;
    part.src += self->next;
    part.nbytes += self->next;
    part.count = self->at_once;
    self->next += self->at_once;
    return part;
}

/* Nanoseconds of one copy; -1 with errno set. */
static int64_t copy_once(const mover *it, const kvn_columns *batch)
{
    const kvn_backend_vtable *calls = it->backend->vtable;
    int64_t start = kvn_now_ns();
    kvn_request *request;
    kvn_report report;

    if (calls->submit(it->backend, batch, &request, &report) != KVN_OK) {
        errno = ENOMEM; /* our own ranges are not refused for another reason */
        return -1;
    }
    calls->wait(it->backend, request, KVN_FOREVER);
    calls->release(it->backend, request);
    return kvn_now_ns() - start;
}

/* Processor time of this thread and the workers. */
static int64_t cpu_ns(const mover *movers, unsigned count)
{
    struct timespec ran = {0};
    int64_t sum;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ran);
    sum = ran.tv_sec * INT64_C(1000000000) + ran.tv_nsec;
    for (unsigned i = 0; i < count; i++)
        sum += kvn_pool_cpu_ns(movers[i].pool);
    return sum;
}

static int measure_rounds(measurement *self, const mover *movers)
{
    unsigned round = 0;

    for (; round < self->rounds; round++)
        for (unsigned i = 0; i < self->count; i++) {
            int64_t fastest = INT64_MAX;
            for (int turn = 0; turn < IN_A_ROW; turn++) {
                const kvn_columns part = next_part(self);
                int64_t took = copy_once(&movers[i], &part);
                if (took < 0)
                    return -1;
                if (took < fastest)
                    fastest = took;
                self->wanted_ns += took * self->candidates[i].threads;
                if (kvn_now_ns() >= self->deadline_ns)
                    return (int)round;
            }
            self->ns[round * self->count + i] = fastest;
        }
    return (int)round;
}

/* Runs on a separate thread, whose processor time includes no other work. */
static void *measure_main(void *argument)
{
    measurement *self = argument;
    mover *movers = calloc(self->count, sizeof *movers);
    bool opened = movers != NULL;

    for (unsigned i = 0; opened && i < self->count; i++)
        opened = open_mover(&movers[i], &self->candidates[i]);
    if (opened) {
        self->given_ns = -cpu_ns(movers, self->count);
        self->done = measure_rounds(self, movers);
        self->given_ns += cpu_ns(movers, self->count);
    }
    self->error = errno;
    for (unsigned i = 0; movers && i < self->count; i++)
        close_mover(&movers[i]);
    free(movers);
    return NULL;
}

int kvn_measure(const kvn_candidate *candidates, unsigned count, const kvn_columns *batch,
                size_t at_once, unsigned rounds, int64_t deadline_ns, int64_t *ns, double *share)
{
    kvn_columns whole = *batch;
    measurement self = {
        .candidates = candidates,
        .count = count,
        .rounds = rounds,
        .batch = &whole,
        .at_once = at_once,
        .deadline_ns = deadline_ns,
        .ns = ns,
        .done = -1,
    };
    pthread_t thread;
    int error;

    whole.caller = KVN_CALLER_WAITS;
    error = kvn_thread_start(&thread, NULL, "kvn-measure", measure_main, &self);
    if (error == 0)
        error = pthread_join(thread, NULL);
    if (error == 0 && self.done < 0)
        error = self.error;
    *share = self.wanted_ns > 0 ? (double)self.given_ns / (double)self.wanted_ns : 0;
    if (error == 0)
        return self.done;
    errno = error;
    return -1;
}
