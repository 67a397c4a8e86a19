/* The writer table: shows a process which of its peers write to its memory now.
 *
 * Peers map this memfd of the owner writable. An entry, one page, belongs to one link of a peer; its tickets announce
 * the pieces that the peer writes (core/announce.h).
 *
 * An owner may find tickets of other registrations than the one that it releases. So a peer renews a ticket that lasts
 * long, such as that of a transfer behind an event: it adds a second ticket, checks the generations, and removes the
 * first one only if all are valid. An owner that waits for the first ticket but has released nothing of this transfer
 * then continues; an owner that has released some of it finds one of the two tickets until the transfer is abandoned.
 *
 * Owners do not wait for a dead peer, and wait for a stopped one until a deadline. Then they close the gate of a peer
 * that writes by process_vm_writev: each of its calls begins with a word in the owner's mapping of the entry, and
 * fails there before other bytes. Memory that a peer has mapped cannot be taken away, so these tickets are reported to
 * the owner. */
#ifndef KVN_WRITERS_H
#define KVN_WRITERS_H

#include <stdbool.h>

#include "host/generations.h"
#include "host/job.h"

#define KVN_WRITER_TICKETS 62 /* of one entry: simultaneous pieces, or batches of a device */

/* ---- the owner ---- */

typedef struct kvn_writers {
    kvn_arena memory;
    uint64_t num_entries;
    uint64_t page_nbytes;
    char *gates;              /* a second mapping of the pages, which only peers write to */
    _Atomic uint8_t *stopped; /* by entry: the peer made no progress during the last wait */
} kvn_writers;

/* A ticket in the table, and the process that announced it. */
typedef struct kvn_ticket {
    uint64_t entry;
    uint64_t place;
    uint64_t number;
    int pid;
} kvn_ticket;

int kvn_writers_create(uint64_t num_entries, kvn_writers *out, kvn_failure *failure);
void kvn_writers_hide(kvn_writers *writers); /* no new peer finds the table; present ones keep it */
void kvn_writers_close(kvn_writers *writers);

/* True if no entry has a ticket. May return False without a full check if there are more than a few entries. */
bool kvn_writers_are_idle(kvn_writers *writers);
/* Waits until all present tickets of the entries from `*next` on are gone, or until the deadline; then closes the gates
 * of peers that write by address. Stops after an entry with tickets of a peer that has mapped the memory, and returns
 * their number, with the tickets in `left`. 0: no entry is left. */
uint64_t kvn_writers_drain(kvn_writers *writers, int64_t deadline_ns, uint64_t *next,
                           kvn_ticket left[KVN_WRITER_TICKETS]);
/* True if the ticket is in the table and its peer lives and maps the table. Removes the ticket of a dead peer. */
bool kvn_writers_has(const kvn_writers *writers, const kvn_ticket *ticket);

/* ---- a peer ---- */

typedef struct kvn_writer {
    int pid;       /* of the owner */
    int self;      /* this process; a forked child must not use the entry */
    kvn_generations generations;
    kvn_arena table;
    uint64_t page_nbytes;
    uint64_t entry;
    uint64_t process; /* this process, as in the entry */
    uint64_t gate;    /* address of the entry in the owner */
    _Atomic uint64_t last; /* ticket number */
    _Atomic int64_t seen_ns; /* time of the last successful check of the owner */
} kvn_writer;

/* Takes an entry in the writer table of process `pid`, with its generation table. */
int kvn_writer_open(int pid, int generations_fd, uint64_t generations_inode, uint64_t num_slots,
                    int table_fd, uint64_t table_inode, uint64_t num_entries, uint64_t gates, kvn_writer *out,
                    kvn_failure *failure);
void kvn_writer_close(kvn_writer *writer); /* no guard of it is left; idempotent */

/* Guards writes to the registrations `words`. */
typedef struct kvn_guard {
    kvn_writer *writer;
    uint64_t count;
    kvn_word words[];
} kvn_guard;

typedef struct kvn_announcement {
    uint64_t place;
    uint64_t number;
} kvn_announcement;

/* Makes a guard with a copy of the words; NULL: out of memory. The writer must outlive it. */
kvn_guard *kvn_guard_create(kvn_writer *writer, const kvn_word *words, uint64_t count);
void kvn_guard_destroy(kvn_guard *guard); /* no effect on NULL */

/* Announces a piece, which is written by process_vm_writev if `by_process`. Fails, with `fault` filled in, if the owner
 * has released a registration or closed the gate, or if no place is free for a second. A NULL guard succeeds. */
int kvn_guard_enter(kvn_guard *guard, bool by_process, uint64_t descriptor,
                    kvn_announcement *out, kvn_fault *fault);
/* Like kvn_guard_enter for mapped memory, but returns KVN_PENDING instead of waiting for a place. */
int kvn_guard_enter_now(kvn_guard *guard, uint64_t descriptor, kvn_announcement *out, kvn_fault *fault);
/* The same, but returns false if the piece is not announced, for any reason. */
bool kvn_guard_try_enter(kvn_guard *guard, kvn_announcement *out);
/* Replaces a long announcement by a new one, so that owners of other registrations need not wait for it. Fails if the
 * owner has released a registration; the announcement then stays until kvn_guard_leave. If no place is free, it stays
 * too, and the result is KVN_OK. */
int kvn_guard_renew(kvn_guard *guard, kvn_announcement *announcement, kvn_failure *failure);
/* Removes the announcement of a written piece. */
void kvn_guard_leave(kvn_guard *guard, const kvn_announcement *announcement);

/* A check for process_vm_writev: 0 if process `pid` is still the owner and runs the same program, which a pid does not
 * show; else ESRCH, EPERM or ENOSYS. Makes at most one system call, of 1 us, in 0.2 ms. */
int kvn_guard_look_for_owner(const kvn_guard *guard);
/* The address to which each call first writes the ticket's number; and true once that has arrived. A call that moved
 * bytes without it has written to another process. */
uint64_t kvn_guard_gate(const kvn_guard *guard, const kvn_announcement *announcement);
bool kvn_guard_has_passed(const kvn_guard *guard, const kvn_announcement *announcement);

#endif
