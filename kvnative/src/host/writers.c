/* Keeps the table in which peers announce their writes, and waits for announced writes. */
#include "host/writers.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "core/thread.h"
#include "host/identity.h"

#define MAX_ENTRIES (UINT64_C(1) << 16)
#define BY_PROCESS 1u /* lowest bit of a ticket's number */
#define SPIN_NS 20000       /* a piece takes some 50 us: most waits end within two spins */
#define NAP_NS 50000
#define SEEN_NS 200000     /* within this time no other program has memory at the same addresses */
#define DEATH_LOOK_NS 2000000 /* a check takes some 20 us */
#define GLANCE_ENTRIES 32u /* some 30 ns each */
#define YIELDS 1000u /* tries for a place; after them NAPS tries with naps between them, for about a second */
#define NAPS 10000u

/* The first bytes of an entry's page. docs/internals/memory-ordering.md says which orders are needed: on both sides a
 * fence between a ticket and the check of a generation, and a release where the ticket is removed. */
typedef struct entry {
    _Atomic uint64_t process; /* its kvn_identity; 0: free */
    _Atomic uint64_t closed;  /* the gate is closed for good: no peer takes the entry again */
    _Atomic uint64_t tickets[KVN_WRITER_TICKETS]; /* 0: none */
    _Atomic uint64_t passed[KVN_WRITER_TICKETS];  /* for each ticket: written through the gate */
} entry;

/* The page before the first entry. */
typedef struct header {
    _Atomic uint64_t used; /* no entry from here on was ever taken */
} header;

static uint64_t page_size(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

static header *header_of(const kvn_arena *memory) { return memory->address; }

static entry *entry_at(const kvn_arena *memory, uint64_t page_nbytes, uint64_t index)
{
    return (entry *)((char *)memory->address + (index + 1) * page_nbytes);
}

static uint64_t table_nbytes(uint64_t num_entries) { return (num_entries + 1) * page_size(); }

static int check_num_entries(uint64_t num_entries, kvn_failure *failure)
{
    if (num_entries >= 1 && num_entries <= MAX_ENTRIES)
        return KVN_OK;
    return kvn_fail(failure, KVN_INVALID, 0,
                    "num_entries is %" PRIu64 "; it must be in [1, %" PRIu64 "]", num_entries,
                    MAX_ENTRIES);
}

/* ---- the owner ---- */

int kvn_writers_create(uint64_t num_entries, kvn_writers *out, kvn_failure *failure)
{
    *out = (kvn_writers){.memory.fd = -1, .num_entries = num_entries, .page_nbytes = page_size()};
    int status = check_num_entries(num_entries, failure);
    if (status != KVN_OK)
        return status;
    status = kvn_arena_create("kvplan-writers", table_nbytes(num_entries), 0, KVN_PAGES_AUTO, -1,
                              &out->memory, failure);
    if (status != KVN_OK)
        return status;
    out->gates = mmap(NULL, out->memory.nbytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE, out->memory.fd, 0);
    out->stopped = calloc(num_entries, sizeof *out->stopped);
    if (out->gates != MAP_FAILED && out->stopped)
        return KVN_OK;
    if (out->gates == MAP_FAILED)
        out->gates = NULL;
    kvn_writers_close(out);
    return kvn_fail(failure, KVN_NO_MEMORY, ENOMEM,
                    "no memory for a writer table of %" PRIu64 " entries", num_entries);
}

void kvn_writers_hide(kvn_writers *writers)
{
    if (writers->memory.fd >= 0)
        close(writers->memory.fd);
    writers->memory.fd = -1;
}

void kvn_writers_close(kvn_writers *writers)
{
    if (writers->gates)
        munmap(writers->gates, writers->memory.nbytes);
    free(writers->stopped);
    writers->gates = NULL;
    writers->stopped = NULL;
    kvn_arena_close(&writers->memory);
}

static entry *owned_entry(const kvn_writers *writers, uint64_t index)
{
    return entry_at(&writers->memory, writers->page_nbytes, index);
}

static void rest(int64_t waited_ns)
{
    const struct timespec nap = {.tv_nsec = NAP_NS};
    if (waited_ns < SPIN_NS)
        sched_yield();
    else
        nanosleep(&nap, NULL);
}

/* An entry whose tickets are waited for. */
typedef struct waiting {
    entry *it;
    int64_t deadline_ns;
    int64_t look_ns; /* time of the next check if the peer lives */
    uint64_t dead;   /* the dead process that the entry belongs to */
    bool is_cut;     /* its gate was closed */
} waiting;

/* Waits for a ticket to end. Returns false if it has not at the deadline. Removes the ticket of a dead peer. */
static bool wait_for(waiting *on, uint64_t place, uint64_t number)
{
    _Atomic uint64_t *ticket = &on->it->tickets[place];
    const int64_t began_ns = kvn_now_ns();
    while (atomic_load_explicit(ticket, memory_order_acquire) == number) {
        const int64_t now_ns = kvn_now_ns();
        const uint64_t process = atomic_load(&on->it->process);
        if (now_ns >= on->look_ns && process != on->dead) {
            on->look_ns = now_ns + DEATH_LOOK_NS;
            if (!kvn_identity_lives(process))
                on->dead = process;
        }
        if (process == on->dead) {
            atomic_compare_exchange_strong(ticket, &number, 0);
            return true;
        }
        if (now_ns >= on->deadline_ns)
            return false;
        rest(now_ns - began_ns);
    }
    return true;
}

/* Protects the page of a peer's gate: from now on its calls of process_vm_writev write nothing. */
static void close_gate(kvn_writers *writers, uint64_t index, waiting *on)
{
    if (on->is_cut)
        return;
    on->is_cut = true;
    atomic_store(&on->it->closed, 1);
    mprotect(writers->gates + (index + 1) * writers->page_nbytes, writers->page_nbytes, PROT_NONE);
}

/* Returns the number of tickets in `left` of peers that have mapped the memory that they write. */
static uint64_t drain_entry(kvn_writers *writers, uint64_t index, int64_t deadline_ns,
                            kvn_ticket *left)
{
    entry *it = owned_entry(writers, index);
    const int pid = kvn_identity_pid(atomic_load(&it->process));
    /* Tickets are loaded after the fence of kvn_generations_release. A peer that made no progress before gets no
     * further time until it does. */
    const bool stopped = atomic_load(&writers->stopped[index]);
    const int64_t look_ns = kvn_now_ns() + DEATH_LOOK_NS;
    waiting on = {it, stopped ? 0 : deadline_ns, look_ns, UINT64_MAX, false};
    uint64_t count = 0, found[KVN_WRITER_TICKETS];
    bool stands = false;
    if (on.look_ns > on.deadline_ns)
        on.look_ns = on.deadline_ns;
    /* Read all tickets at one time: a ticket that is renewed during another wait would be found again. */
    for (uint64_t place = 0; place < KVN_WRITER_TICKETS; place++)
        found[place] = atomic_load_explicit(&it->tickets[place], memory_order_acquire);
    for (uint64_t place = 0; place < KVN_WRITER_TICKETS; place++) {
        uint64_t number = found[place];
        if (number == 0 || wait_for(&on, place, number))
            continue;
        stands = true;
        if (number & BY_PROCESS) {
            close_gate(writers, index, &on);
            atomic_compare_exchange_strong(&it->tickets[place], &number, 0);
        } else {
            left[count++] = (kvn_ticket){index, place, number, pid};
        }
    }
    atomic_store(&writers->stopped[index], stands);
    return count;
}

/* Number of entries that may have been taken. Peers can write to this header too. */
static uint64_t used_entries(const kvn_writers *writers)
{
    const uint64_t used = atomic_load(&header_of(&writers->memory)->used);
    return used < writers->num_entries ? used : writers->num_entries;
}

bool kvn_writers_are_idle(kvn_writers *writers)
{
    const uint64_t used = used_entries(writers);
    if (used > GLANCE_ENTRIES)
        return false;
    for (uint64_t index = 0; index < used; index++) {
        entry *it = owned_entry(writers, index);
        for (uint64_t place = 0; place < KVN_WRITER_TICKETS; place++)
            if (atomic_load_explicit(&it->tickets[place], memory_order_acquire) != 0)
                return false;
        atomic_store_explicit(&writers->stopped[index], 0, memory_order_relaxed);
    }
    return true;
}

uint64_t kvn_writers_drain(kvn_writers *writers, int64_t deadline_ns, uint64_t *next,
                           kvn_ticket left[KVN_WRITER_TICKETS])
{
    uint64_t count = 0;
    const uint64_t used = used_entries(writers);
    while (count == 0 && *next < used)
        count = drain_entry(writers, (*next)++, deadline_ns, left);
    return count;
}

bool kvn_writers_has(const kvn_writers *writers, const kvn_ticket *ticket)
{
    entry *it = owned_entry(writers, ticket->entry);
    uint64_t number = ticket->number;
    if (atomic_load_explicit(&it->tickets[ticket->place], memory_order_acquire) != number)
        return false;
    if (kvn_identity_lives(atomic_load(&it->process)) && kvn_process_has_mapped(ticket->pid, writers->memory.inode))
        return true;
    atomic_compare_exchange_strong(&it->tickets[ticket->place], &number, 0);
    return false;
}

/* ---- a peer ---- */

static entry *taken_entry(const kvn_writer *writer)
{
    return entry_at(&writer->table, writer->page_nbytes, writer->entry);
}

/* Takes the entry if it is free or, with `from_dead`, if its process is dead. */
static bool take(kvn_writer *writer, uint64_t index, bool from_dead)
{
    entry *it = entry_at(&writer->table, writer->page_nbytes, index);
    uint64_t seen = atomic_load(&it->process);
    if (atomic_load(&it->closed) || (seen != 0 && (!from_dead || kvn_identity_lives(seen))))
        return false;
    if (!atomic_compare_exchange_strong(&it->process, &seen, writer->process))
        return false;
    for (uint64_t place = 0; place < KVN_WRITER_TICKETS; place++)
        atomic_store(&it->tickets[place], 0);
    writer->entry = index;
    return true;
}

static int take_entry(kvn_writer *writer, uint64_t num_entries, kvn_failure *failure)
{
    for (int from_dead = 0; from_dead < 2; from_dead++)
        for (uint64_t i = 0; i < num_entries; i++) {
            if (!take(writer, i, from_dead))
                continue;
            _Atomic uint64_t *used = &header_of(&writer->table)->used;
            uint64_t seen = atomic_load(used);
            while (seen < i + 1 && !atomic_compare_exchange_weak(used, &seen, i + 1))
                ;
            return KVN_OK;
        }
    return kvn_fail(failure, KVN_NO_MEMORY, ENOSPC,
                    "all %" PRIu64 " entries of the writer table of process %d are taken",
                    num_entries, writer->pid);
}

int kvn_writer_open(int pid, int generations_fd, uint64_t generations_inode, uint64_t num_slots,
                    int table_fd, uint64_t table_inode, uint64_t num_entries, uint64_t gates, kvn_writer *out,
                    kvn_failure *failure)
{
    *out = (kvn_writer){
        .pid = pid,
        .self = getpid(),
        .generations.memory.fd = -1,
        .table.fd = -1,
        .page_nbytes = page_size(),
        .process = kvn_identity_of(getpid()),
        /* Begin at the time, so that no ticket equals one that a former user of the entry has left. */
        .last = (uint64_t)kvn_now_ns(),
    };
    int status = check_num_entries(num_entries, failure);
    if (status == KVN_OK)
        status = kvn_generations_import(pid, generations_fd, generations_inode, num_slots,
                                        &out->generations, failure);
    if (status == KVN_OK)
        status = kvn_arena_import(pid, table_fd, table_inode, table_nbytes(num_entries), 1,
                                  &out->table, failure);
    if (status == KVN_OK)
        status = take_entry(out, num_entries, failure);
    if (status != KVN_OK) {
        out->self = 0; /* no entry to give back */
        kvn_writer_close(out);
        return status;
    }
    out->gate = gates + (out->entry + 1) * out->page_nbytes;
    return KVN_OK;
}

void kvn_writer_close(kvn_writer *writer)
{
    if (writer->table.address && writer->self == getpid()) {
        uint64_t process = writer->process;
        atomic_compare_exchange_strong(&taken_entry(writer)->process, &process, 0);
    }
    kvn_arena_close(&writer->table);
    kvn_generations_close(&writer->generations);
}

/* ---- guards ---- */

kvn_guard *kvn_guard_create(kvn_writer *writer, const kvn_word *words, uint64_t count)
{
    kvn_guard *guard = malloc(sizeof *guard + count * sizeof *words);
    if (!guard)
        return NULL;
    guard->writer = writer;
    guard->count = count;
    for (uint64_t i = 0; i < count; i++)
        guard->words[i] = words[i];
    return guard;
}

void kvn_guard_destroy(kvn_guard *guard) { free(guard); }

static int refuse(kvn_fault *fault, int status, uint64_t descriptor, int pid, const char *why)
{
    snprintf(fault->message, sizeof fault->message, "descriptor %" PRIu64 ": process %d %s",
             descriptor, pid, why);
    return status;
}

/* Puts a ticket into the entry. Returns false if no place becomes free in `most_tries`. */
static bool take_place(kvn_writer *writer, entry *it, bool by_process, uint64_t most_tries,
                       kvn_announcement *out)
{
    const uint64_t turn = /* only has to differ each time */
        atomic_fetch_add_explicit(&writer->last, 1, memory_order_relaxed) + 1;
    out->number = turn << 1 | (by_process ? BY_PROCESS : 0);
    for (uint64_t tries = 0; tries < most_tries; tries++) {
        uint64_t none = 0;
        out->place = (turn + tries) % KVN_WRITER_TICKETS;
        if (atomic_load_explicit(&it->tickets[out->place], memory_order_relaxed) == 0 &&
            atomic_compare_exchange_strong(&it->tickets[out->place], &none, out->number))
            return true;
        if ((tries + 1) % KVN_WRITER_TICKETS == 0) /* all places are taken */
            rest(tries < YIELDS * KVN_WRITER_TICKETS ? 0 : SPIN_NS);
    }
    return false;
}

/* Call it after putting the ticket. It begins with a fence: if an owner's release does not see the ticket, this
 * check sees the release. A seq_cst ticket would not be enough, since the loads after it are only acquires. */
static bool is_stale(const kvn_guard *guard)
{
    return kvn_generations_first_stale(&guard->writer->generations, guard->words, guard->count) <
           guard->count;
}

static int enter(kvn_guard *guard, bool by_process, uint64_t most_tries, uint64_t descriptor, kvn_announcement *out,
                 kvn_fault *fault)
{
    kvn_writer *writer = guard->writer;
    entry *it = taken_entry(writer);
    if (!take_place(writer, it, by_process, most_tries, out))
        return KVN_PENDING;
    const bool stale = is_stale(guard);
    if (!stale && !atomic_load(&it->closed))
        return KVN_OK;
    kvn_guard_leave(guard, out);
    return stale ? refuse(fault, KVN_UNMAPPED, descriptor, writer->pid,
                          "has deregistered the memory that this transfer uses")
                 : refuse(fault, KVN_PEER_GONE, descriptor, writer->pid,
                          "has stopped waiting for a write of this process, which did not run, and "
                          "takes no more of its writes: link again");
}

int kvn_guard_enter(kvn_guard *guard, bool by_process, uint64_t descriptor,
                    kvn_announcement *out, kvn_fault *fault)
{
    if (!guard)
        return KVN_OK;
    /* Count tries, not time: a clock continues while this process is stopped. */
    const int status = enter(guard, by_process, (YIELDS + NAPS) * KVN_WRITER_TICKETS, descriptor, out, fault);
    return status != KVN_PENDING
               ? status
               : refuse(fault, KVN_FAILED, descriptor, guard->writer->pid,
                        "has as many announced writes of this link as fit, and none of them ends: wait "
                        "for transfers before you begin more");
}

/* With fewer tries than places, no try sleeps. */
int kvn_guard_enter_now(kvn_guard *guard, uint64_t descriptor, kvn_announcement *out, kvn_fault *fault)
{
    return enter(guard, false, KVN_WRITER_TICKETS - 1, descriptor, out, fault);
}

bool kvn_guard_try_enter(kvn_guard *guard, kvn_announcement *out)
{
    kvn_fault ignored = {0};

    return kvn_guard_enter_now(guard, 0, out, &ignored) == KVN_OK;
}

int kvn_guard_renew(kvn_guard *guard, kvn_announcement *announcement, kvn_failure *failure)
{
    kvn_announcement renewed;

    if (!take_place(guard->writer, taken_entry(guard->writer), false, KVN_WRITER_TICKETS - 1, &renewed))
        return KVN_OK;
    if (is_stale(guard)) {
        kvn_guard_leave(guard, &renewed); /* the first still stands */
        return kvn_fail(failure, KVN_UNMAPPED, 0,
                        "process %d has deregistered the memory that this transfer uses", guard->writer->pid);
    }
    kvn_guard_leave(guard, announcement);
    *announcement = renewed;
    return KVN_OK;
}

void kvn_guard_leave(kvn_guard *guard, const kvn_announcement *announcement)
{
    if (!guard)
        return;
    entry *it = taken_entry(guard->writer);
    /* The ticket is gone if the owner has closed the gate. Release: the bytes, of any kind of store, come before. */
    uint64_t number = announcement->number;
    atomic_compare_exchange_strong_explicit(&it->tickets[announcement->place], &number, 0,
                                            memory_order_release, memory_order_relaxed);
}

int kvn_guard_look_for_owner(const kvn_guard *guard)
{
    kvn_writer *writer = guard->writer;
    const int64_t now_ns = kvn_now_ns();
    uint64_t process = 0;
    if (now_ns - atomic_load_explicit(&writer->seen_ns, memory_order_relaxed) < SEEN_NS)
        return 0;
    struct iovec local = {&process, sizeof process};
    struct iovec remote = {(void *)(uintptr_t)writer->gate, sizeof process};
    const ssize_t nbytes = process_vm_readv(writer->pid, &local, 1, &remote, 1, 0);
    if (nbytes < 0 && errno != EFAULT)
        return errno;
    if (nbytes != sizeof process || process != writer->process)
        return ESRCH;
    atomic_store_explicit(&writer->seen_ns, now_ns, memory_order_relaxed);
    return 0;
}

uint64_t kvn_guard_gate(const kvn_guard *guard, const kvn_announcement *announcement)
{
    return guard->writer->gate + offsetof(entry, passed) + announcement->place * sizeof(uint64_t);
}

bool kvn_guard_has_passed(const kvn_guard *guard, const kvn_announcement *announcement)
{
    return atomic_load(&taken_entry(guard->writer)->passed[announcement->place]) ==
           announcement->number;
}
