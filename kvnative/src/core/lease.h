/* Who may touch a descriptor array: any number of readers (NumPy views, tasks in flight) or one
 * writer (lowering into it again). Nobody waits: what cannot be granted is refused at once. */
#ifndef KVN_LEASE_H
#define KVN_LEASE_H

#include <stdint.h>

#define KVN_BEING_WRITTEN (-1)

/* 0, or -1 while the array is being written. */
static inline int kvn_lease_read(int64_t *leases)
{
    int64_t readers = __atomic_load_n(leases, __ATOMIC_RELAXED);
    do {
        if (readers == KVN_BEING_WRITTEN)
            return -1;
    } while (!__atomic_compare_exchange_n(leases, &readers, readers + 1, 1, __ATOMIC_ACQUIRE,
                                          __ATOMIC_RELAXED));
    return 0;
}

static inline void kvn_lease_done(int64_t *leases)
{
    __atomic_fetch_sub(leases, 1, __ATOMIC_RELEASE);
}

/* 0, or -1 while anybody reads or writes. */
static inline int kvn_lease_write(int64_t *leases)
{
    int64_t nobody = 0;
    return __atomic_compare_exchange_n(leases, &nobody, KVN_BEING_WRITTEN, 0, __ATOMIC_ACQUIRE,
                                       __ATOMIC_RELAXED)
               ? 0
               : -1;
}

static inline void kvn_lease_written(int64_t *leases)
{
    __atomic_store_n(leases, 0, __ATOMIC_RELEASE);
}

static inline int64_t kvn_lease_count(const int64_t *leases)
{
    return __atomic_load_n(leases, __ATOMIC_RELAXED);
}

#endif
