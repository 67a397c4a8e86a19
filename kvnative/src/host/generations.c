/* Takes, renews and releases slots of the generation table, and compares them for peers. */
#include "host/generations.h"

#include <errno.h>
#include <inttypes.h>
#include <sys/random.h>

#include "core/thread.h"

#define KVN_GENERATIONS_MAX_SLOTS (UINT64_C(1) << 24)
#define KVN_GENERATIONS_START_BITS 48

static _Atomic uint64_t *slots_of(const kvn_generations *table) { return table->memory.address; }

static _Atomic uint64_t *deadlines_of(const kvn_generations *table)
{
    return slots_of(table) + table->num_slots;
}

static kvn_life *life_of(const kvn_generations *table)
{
    return (kvn_life *)(deadlines_of(table) + table->num_slots);
}

static uint64_t nbytes_of(uint64_t num_slots)
{
    return 2 * num_slots * sizeof(uint64_t) + sizeof(kvn_life);
}

static int bad_num_slots(uint64_t num_slots, kvn_failure *failure)
{
    return kvn_fail(failure, KVN_INVALID, 0,
                    "num_slots is %" PRIu64 "; it must be in [1, %" PRIu64 "]", num_slots,
                    KVN_GENERATIONS_MAX_SLOTS);
}

int kvn_generations_create(uint64_t num_slots, uint64_t num_leases, kvn_generations *out,
                           kvn_failure *failure)
{
    *out = (kvn_generations){.memory.fd = -1};
    if (num_slots < 1 || num_slots > KVN_GENERATIONS_MAX_SLOTS)
        return bad_num_slots(num_slots, failure);
    if (num_leases > KVN_GENERATIONS_MAX_SLOTS - num_slots)
        num_leases = KVN_GENERATIONS_MAX_SLOTS - num_slots;
    out->first_lease = out->next_lease = num_slots;
    out->num_slots = num_slots += num_leases;
    if (getrandom(&out->start, sizeof out->start, 0) != sizeof out->start)
        return kvn_fail(failure, KVN_FAILED, errno, "getrandom gave no random number");
    out->start = out->start >> (64 - KVN_GENERATIONS_START_BITS) & ~UINT64_C(1);
    const int status =
        kvn_arena_create("kvplan-generations", nbytes_of(num_slots), 1, KVN_PAGES_AUTO, -1,
                         &out->memory, failure);
    if (status == KVN_OK) {
        out->is_own = true;
        kvn_life_begin(life_of(out));
    }
    return status;
}

int kvn_generations_import(int pid, int fd, uint64_t inode, uint64_t num_slots,
                           kvn_generations *out, kvn_failure *failure)
{
    *out = (kvn_generations){.memory.fd = -1, .num_slots = num_slots};
    if (num_slots < 1 || num_slots > KVN_GENERATIONS_MAX_SLOTS)
        return bad_num_slots(num_slots, failure);
    return kvn_arena_import(pid, fd, inode, nbytes_of(num_slots), 0, &out->memory, failure);
}

void kvn_generations_close(kvn_generations *table)
{
    if (table->is_own && table->memory.address)
        kvn_life_end(life_of(table));
    kvn_arena_close(&table->memory);
}

int kvn_generations_owner(const kvn_generations *table) { return kvn_life_look(life_of(table)); }

int kvn_generations_take(kvn_generations *table, bool is_lease, uint64_t deadline_ns, uint64_t *slot,
                         uint64_t *generation, kvn_failure *failure)
{
    uint64_t *next = is_lease ? &table->next_lease : &table->next;
    const uint64_t first = is_lease ? table->first_lease : 0;
    const uint64_t count = (is_lease ? table->num_slots : table->first_lease) - first;

    for (uint64_t i = 0; i < count; i++) {
        const uint64_t candidate = first + (*next - first + i) % count;
        uint64_t seen = atomic_load_explicit(&slots_of(table)[candidate], memory_order_relaxed);
        if (seen % 2 != 0)
            continue;
        /* The deadline first: a peer that knows the generation finds this deadline or a later one. */
        atomic_store(&deadlines_of(table)[candidate], deadline_ns);
        const uint64_t taken = (seen ? seen : table->start) + 1;
        if (atomic_compare_exchange_strong(&slots_of(table)[candidate], &seen, taken)) {
            *next = candidate + 1;
            *slot = candidate;
            *generation = taken;
            return KVN_OK;
        }
    }
    return kvn_fail(failure, KVN_NO_MEMORY, ENOSPC,
                    "all %" PRIu64 " slots of the generation table are taken", count);
}

static int not_registered(uint64_t slot, uint64_t generation, kvn_failure *failure)
{
    return kvn_fail(failure, KVN_INVALID, 0,
                    "slot %" PRIu64 " is not registered with generation %" PRIu64, slot, generation);
}

int kvn_generations_renew(kvn_generations *table, uint64_t slot, uint64_t generation,
                          uint64_t deadline_ns, kvn_failure *failure)
{
    if (slot >= table->num_slots || generation % 2 == 0 ||
        atomic_load(&slots_of(table)[slot]) != generation)
        return not_registered(slot, generation, failure);
    atomic_store(&deadlines_of(table)[slot], deadline_ns);
    return KVN_OK;
}

int kvn_generations_release(kvn_generations *table, uint64_t slot, uint64_t generation,
                            kvn_failure *failure)
{
    uint64_t expected = generation;
    if (slot >= table->num_slots || generation % 2 == 0 ||
        !atomic_compare_exchange_strong(&slots_of(table)[slot], &expected, generation + 1))
        return not_registered(slot, generation, failure);
    /* Later writes of the owner to the range, and its reads of writers' tickets (writers.h), are ordered after the new
     * generation. So a peer that has read such a byte also sees the new generation. */
    atomic_thread_fence(memory_order_seq_cst);
    return KVN_OK;
}

static bool has_expired(const kvn_generations *table, uint64_t slot)
{
    /* The clock is read after the deadline: the branch depends on it, and clock_gettime has an ISB on Arm. */
    const uint64_t deadline =
        atomic_load_explicit(&deadlines_of(table)[slot], memory_order_acquire);
    return deadline != 0 && (uint64_t)kvn_now_ns() >= deadline;
}

uint64_t kvn_generations_first_stale(const kvn_generations *table, const kvn_word *words,
                                     uint64_t count)
{
    /* The reads of the transfer, or the ticket of its writes, are ordered before this check, and the acquires keep
     * later accesses after it. */
    atomic_thread_fence(memory_order_seq_cst);
    for (uint64_t i = 0; i < count; i++) {
        const kvn_word *it = &words[i];
        if (it->slot >= table->num_slots || has_expired(table, it->slot))
            return i;
        if (it->generation % 2 == 0 || /* the generation of a free slot, which no peer has */
            atomic_load_explicit(&slots_of(table)[it->slot], memory_order_acquire) !=
                it->generation)
            return i;
    }
    return count;
}
