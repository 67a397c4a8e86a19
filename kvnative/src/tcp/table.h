/* The memory of this process that peers may reach: a row for each slot. Threads that move bytes check it before each
 * system call. Removing a row waits for calls that began before. */
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
    bool is_on_device; /* on the table's device */
    int64_t deadline_ns; /* by kvn_now_ns; the row counts as free from then on; 0: never */
} kvn_tcp_row;

/* The state at the check of a request: the count of removals, and the request's earliest deadline, or 0. */
typedef struct kvn_tcp_checked {
    uint64_t removals;
    int64_t deadline_ns;
    bool has_device; /* some of it is memory of the table's device */
} kvn_tcp_checked;

typedef struct kvn_tcp_table {
    pthread_mutex_t mutex;
    kvn_tcp_row *rows;
    uint32_t num_rows;
    const kvn_device *device; /* NULL: all rows are in host memory */
    /* These two are always seq_cst, without a fence: a thread writes its epoch, then reads the removals; a remover
     * writes the removals, then reads the epochs. One of them sees the other. */
    atomic_uint_fast64_t removals; /* rises after a row was cleared or renewed */
    /* One for each thread that moves bytes: odd while the thread is in a system call on registered memory. */
    atomic_uint_fast64_t epochs[KVN_TCP_MAX_THREADS];
} kvn_tcp_table;

/* KVN_OK or KVN_NO_MEMORY. The device outlives the table. */
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

/* Returns KVN_TCP_MOVED if all memory of a well-formed request is registered as the request says; else `offset` is that
 * of the first byte that is not. */
kvn_tcp_reason kvn_tcp_table_check(kvn_tcp_table *self, kvn_tcp_request *request,
                                   kvn_tcp_checked *checked, uint64_t *offset);

/* Between these two calls a thread may move bytes of checked memory, if the table has not changed. */
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
/* The device of a range; NULL: host memory. */
static inline const kvn_device *kvn_tcp_table_device(const kvn_tcp_table *self,
                                                     const kvn_tcp_range *range)
{
    return self->rows[range->slot].is_on_device ? self->device : NULL;
}

#endif
