/* Keeps the ranges that peers may reach, and waits for the threads that use them when one is removed. */
#include "tcp/table.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#define SPINS 1000 /* a system call lasts some 10 us */
#define PAUSE_NS 50000

int kvn_tcp_table_init(kvn_tcp_table *self, uint32_t num_rows, const kvn_device *device,
                       kvn_failure *failure)
{
    /* A separate mapping: unused rows cost no memory, and malloc's heap stays small. */
    self->rows = mmap(NULL, num_rows * sizeof *self->rows, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (self->rows == MAP_FAILED)
        return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM, "no memory for %" PRIu32 " ranges", num_rows);
    self->num_rows = num_rows;
    self->device = device;
    pthread_mutex_init(&self->mutex, NULL);
    atomic_init(&self->removals, 0);
    for (unsigned i = 0; i < KVN_TCP_MAX_THREADS; i++)
        atomic_init(&self->epochs[i], 0);
    return KVN_OK;
}

void kvn_tcp_table_fini(kvn_tcp_table *self)
{
    pthread_mutex_destroy(&self->mutex);
    munmap(self->rows, self->num_rows * sizeof *self->rows);
}

int kvn_tcp_table_add(kvn_tcp_table *self, uint64_t slot, const kvn_tcp_row *row,
                      kvn_failure *failure)
{
    int status = KVN_OK;

    if (slot >= self->num_rows)
        return kvn_fail(failure, KVN_INVALID, 0, "slot is %" PRIu64 "; it must be below %" PRIu32,
                        slot, self->num_rows);
    if (row->nbytes == 0 || row->address + (row->nbytes - 1) < row->address)
        return kvn_fail(failure, KVN_INVALID, 0,
                        "a range of %" PRIu64 " bytes at 0x%" PRIx64 " is empty or ends past 2**64",
                        row->nbytes, row->address);
    pthread_mutex_lock(&self->mutex);
    if (self->rows[slot].nbytes != 0)
        status = kvn_fail(failure, KVN_INVALID, 0, "slot %" PRIu64 " has a range already", slot);
    else
        self->rows[slot] = *row;
    pthread_mutex_unlock(&self->mutex);
    return status;
}

void kvn_tcp_table_wait_for_threads(kvn_tcp_table *self)
{
    for (unsigned i = 0; i < KVN_TCP_MAX_THREADS; i++) {
        const uint64_t epoch = atomic_load(&self->epochs[i]);
        for (unsigned spun = 0; epoch % 2 == 1 && atomic_load(&self->epochs[i]) == epoch; spun++)
            if (spun < SPINS)
                sched_yield();
            else
                nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
}

bool kvn_tcp_table_renew(kvn_tcp_table *self, uint64_t slot, int64_t deadline_ns)
{
    bool was_there;

    pthread_mutex_lock(&self->mutex);
    was_there = slot < self->num_rows && self->rows[slot].nbytes != 0;
    if (was_there) {
        self->rows[slot].deadline_ns = deadline_ns;
        atomic_fetch_add(&self->removals, 1); /* readers of the old row check again */
    }
    pthread_mutex_unlock(&self->mutex);
    return was_there;
}

bool kvn_tcp_table_remove(kvn_tcp_table *self, uint64_t slot)
{
    bool was_there;

    pthread_mutex_lock(&self->mutex);
    was_there = slot < self->num_rows && self->rows[slot].nbytes != 0;
    if (was_there) {
        self->rows[slot].nbytes = 0;
        /* A thread enters before it reads this; wait for threads that have not seen it. */
        atomic_fetch_add(&self->removals, 1);
    }
    pthread_mutex_unlock(&self->mutex);
    if (was_there)
        kvn_tcp_table_wait_for_threads(self);
    return was_there;
}

/* Bytes of a run before the first that lies outside of the row. */
static uint64_t inside(const kvn_tcp_row *row, const kvn_tcp_run *run)
{
    const uint64_t step = run->count > 1 ? run->stride : run->nbytes;
    const uint64_t room = row->nbytes - (run->address - row->address);

    if (run->address < row->address || run->address - row->address >= row->nbytes)
        return 0;
    return room / step * run->nbytes + (room % step < run->nbytes ? room % step : run->nbytes);
}

static bool stands(const kvn_tcp_table *self, const kvn_tcp_range *range)
{
    const kvn_tcp_row *row;

    if (range->slot >= self->num_rows)
        return false;
    row = &self->rows[range->slot];
    return row->nbytes != 0 && row->generation == range->generation &&
           (row->deadline_ns == 0 || kvn_now_ns() < row->deadline_ns);
}

/* Adds to `offset`, which counts bytes of the request, the bytes of the run that may be moved. */
static kvn_tcp_reason check_run(const kvn_tcp_table *self, const kvn_tcp_range *range,
                                const kvn_tcp_run *run, bool is_write, uint64_t *offset)
{
    const uint64_t nbytes = (uint64_t)(run->count - 1) * run->stride + run->nbytes;
    const kvn_tcp_row *row;

    if (range->slot >= self->num_rows)
        return KVN_TCP_OUTSIDE;
    row = &self->rows[range->slot];
    if (!stands(self, range))
        return KVN_TCP_DEREGISTERED;
    if (is_write && !row->writable)
        return KVN_TCP_READ_ONLY;
    if (run->address < row->address || nbytes > row->nbytes ||
        run->address - row->address > row->nbytes - nbytes) {
        *offset += inside(row, run);
        return KVN_TCP_OUTSIDE;
    }
    *offset += (uint64_t)run->nbytes * run->count;
    return KVN_TCP_MOVED;
}

kvn_tcp_reason kvn_tcp_table_check(kvn_tcp_table *self, kvn_tcp_request *request,
                                   kvn_tcp_checked *checked, uint64_t *offset)
{
    const bool is_write = request->head.kind == KVN_TCP_PUSH;
    kvn_tcp_reason reason = KVN_TCP_MOVED;

    *offset = 0;
    pthread_mutex_lock(&self->mutex);
    *checked = (kvn_tcp_checked){.removals = atomic_load(&self->removals)};
    for (uint32_t i = 0; i < request->head.num_runs && reason == KVN_TCP_MOVED; i++) {
        const kvn_tcp_run *run = kvn_tcp_run_at(request, i);
        const kvn_tcp_range *range = kvn_tcp_range_at(request, run->range);
        reason = check_run(self, range, run, is_write, offset);
        checked->has_device |= reason == KVN_TCP_MOVED && self->rows[range->slot].is_on_device;
    }
    for (uint32_t i = 0; i < request->head.num_ranges && reason == KVN_TCP_MOVED; i++) {
        const kvn_tcp_range *range = kvn_tcp_range_at(request, i);
        if (!stands(self, range)) {
            reason = KVN_TCP_RELEASED; /* a lease: the ranges of all runs were checked above */
            *offset = 0;
            break;
        }
        const int64_t deadline_ns = self->rows[range->slot].deadline_ns;
        if (deadline_ns != 0 && (checked->deadline_ns == 0 || deadline_ns < checked->deadline_ns))
            checked->deadline_ns = deadline_ns;
    }
    pthread_mutex_unlock(&self->mutex);
    return reason;
}
