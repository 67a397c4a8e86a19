/* The memory of this process that peers may reach: a row for each slot. Threads that move bytes check it before each
 * system call. Removing a row waits until no thread is in a call that began before. */
#ifndef KVN_TCP_TABLE_H
#define KVN_TCP_TABLE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "core/failure.h"
#include "core/thread.h"
#include "device/device.h"
#include "tcp/wire.h"

#define KVN_TCP_MAX_THREADS 16u

typedef struct kvn_tcp_row {
    uint64_t address;
    uint64_t nbytes; /* 0: free */
    uint64_t generation;
    bool writable;
    bool is_on_device; /* the table's */
    int64_t deadline_ns; /* of kvn_now_ns: from then on as if it were free; 0: never */
} kvn_tcp_row;

/* When a request was looked at: how many rows had been removed, and its earliest deadline, or 0. */
typedef struct kvn_tcp_checked {
    uint64_t removals;
    int64_t deadline_ns;
    bool has_device; /* some of it is memory of the table's device */
} kvn_tcp_checked;

typedef struct kvn_tcp_table {
    pthread_mutex_t mutex;
    kvn_tcp_row *rows;
    uint32_t num_rows;
    const kvn_device *device; /* NULL: all rows are of the host */
    /* These two are seq_cst at each place: a thread writes its epoch and reads the removals, who removes writes
     * those and reads the epochs, and one of them sees the other. There is no fence in between. */
    atomic_uint_fast64_t removals; /* rises before rows go */
    /* Of each thread that moves bytes: odd while it is in a system call on registered memory. */
    atomic_uint_fast64_t epochs[KVN_TCP_MAX_THREADS];
} kvn_tcp_table;

/* KVN_OK or KVN_NO_MEMORY. The device outlives it. */
int kvn_tcp_table_init(kvn_tcp_table *self, uint32_t num_rows, const kvn_device *device,
                       kvn_failure *failure);
void kvn_tcp_table_fini(kvn_tcp_table *self);
/* KVN_INVALID: the slot is out of range or taken, or the range is empty or wraps around. */
int kvn_tcp_table_add(kvn_tcp_table *self, uint64_t slot, const kvn_tcp_row *row,
                      kvn_failure *failure);
/* Removes a row: after the return no thread reads or writes the memory. False if the slot is free. */
bool kvn_tcp_table_remove(kvn_tcp_table *self, uint64_t slot);
/* Replaces the deadline. False if the slot is free. */
bool kvn_tcp_table_renew(kvn_tcp_table *self, uint64_t slot, int64_t deadline_ns);
/* Waits until each thread has left the call that it is in. */
void kvn_tcp_table_wait_for_threads(kvn_tcp_table *self);

/* Returns true if all memory of a checked request is registered as the request says; else `offset` is that of the first
 * byte that is not. */
kvn_tcp_reason kvn_tcp_table_check(kvn_tcp_table *self, kvn_tcp_request *request,
                                   kvn_tcp_checked *checked, uint64_t *offset);

/* Between these two calls a thread may move bytes of memory that it has checked, if the table did not change. */
static inline void kvn_tcp_table_enter(kvn_tcp_table *self, unsigned thread)
{
    atomic_fetch_add(&self->epochs[thread], 1);
}
static inline void kvn_tcp_table_leave(kvn_tcp_table *self, unsigned thread)
{
    atomic_fetch_add(&self->epochs[thread], 1);
}
static inline bool kvn_tcp_table_is_same(kvn_tcp_table *self, const kvn_tcp_checked *checked)
{
    return atomic_load(&self->removals) == checked->removals &&
           (checked->deadline_ns == 0 || kvn_now_ns() < checked->deadline_ns);
}
/* Where it lies; NULL: in the memory of the host. */
static inline const kvn_device *kvn_tcp_table_device(const kvn_tcp_table *self,
                                                     const kvn_tcp_range *range)
{
    return self->rows[range->slot].is_on_device ? self->device : NULL;
}

#endif
