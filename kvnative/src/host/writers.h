/* The writer table: how a process knows which of its peers are writing to its memory right now.
 *
 * It is a memfd that the owner shows to its peers, which map it writable; an entry of it, one page,
 * belongs to one link of a peer. Its tickets announce the pieces that the peer writes (core/announce.h).
 *
 * What an owner finds may be of other registrations than the one that it releases. So a ticket that stands for
 * long, as that of a transfer behind an event, is renewed: another is put in, the generations are looked at, and
 * only where all stand the first is taken out. Who has found the first and released nothing of this transfer goes
 * on then; who has, finds one of the two until the transfer was given up.
 *
 * A peer that died is not waited for. One that is stopped with its ticket in place is waited for
 * until a deadline. If it writes by process_vm_writev, its gate is then closed: each such call
 * begins with a word in the owner's own mapping of the entry, and fails there before it has written
 * anything else. What it has mapped cannot be taken from it; such tickets are reported to the owner. */
#ifndef KVN_WRITERS_H
#define KVN_WRITERS_H

#include <stdbool.h>

#include "host/generations.h"
#include "host/job.h"

#define KVN_WRITER_TICKETS 62 /* of one entry: pieces, or batches of a device, at once */

/* ---- the owner ---- */

typedef struct kvn_writers {
    kvn_arena memory;
    uint64_t num_entries;
    uint64_t page_nbytes;
    char *gates;              /* the same pages again, which only peers write to */
    _Atomic uint8_t *stopped; /* by entry: its peer did not move on when it was last waited for */
} kvn_writers;

/* A ticket that stands, and whose it is. */
typedef struct kvn_ticket {
    uint64_t entry;
    uint64_t place;
    uint64_t number;
    int pid;
} kvn_ticket;

int kvn_writers_create(uint64_t num_entries, kvn_writers *out, kvn_failure *failure);
void kvn_writers_hide(kvn_writers *writers); /* no peer finds it any more; who has it keeps it */
void kvn_writers_close(kvn_writers *writers);

/* Whether no ticket stands now in any of the entries that were ever taken. False where that is not seen at
 * a glance: there are more than a few entries. */
bool kvn_writers_are_idle(kvn_writers *writers);
/* Waits until no ticket stands any more that stands now in the entries from `*next` on, or until the
 * deadline; then closes the gates of those that write by address. Stops behind an entry with tickets
 * of a peer that has mapped what it writes to: returns how many, and they are in `left`. 0: all
 * entries are through. */
uint64_t kvn_writers_drain(kvn_writers *writers, int64_t deadline_ns, uint64_t *next,
                           kvn_ticket left[KVN_WRITER_TICKETS]);
/* Whether the ticket stands, and its peer lives and has the table; else it is taken out. */
bool kvn_writers_has(const kvn_writers *writers, const kvn_ticket *ticket);

/* ---- a peer ---- */

typedef struct kvn_writer {
    int pid;       /* of the owner */
    int self;      /* this process: a forked child has no part in it */
    kvn_generations generations;
    kvn_arena table;
    uint64_t page_nbytes;
    uint64_t entry;
    uint64_t process; /* this one, as the entry names it */
    uint64_t gate;    /* address of the entry in the owner */
    _Atomic uint64_t last; /* ticket number */
    _Atomic int64_t seen_ns; /* when the owner was last looked for and found */
} kvn_writer;

/* Takes an entry of the table of process `pid`, whose registrations are in the given generation table. */
int kvn_writer_open(int pid, int generations_fd, uint64_t generations_inode, uint64_t num_slots,
                    int table_fd, uint64_t table_inode, uint64_t num_entries, uint64_t gates, kvn_writer *out,
                    kvn_failure *failure);
void kvn_writer_close(kvn_writer *writer); /* no guard of it is left; idempotent */

/* What a backend asks before it writes to registrations, given by their words. */
typedef struct kvn_guard {
    kvn_writer *writer;
    uint64_t count;
    kvn_word words[];
} kvn_guard;

typedef struct kvn_announcement {
    uint64_t place;
    uint64_t number;
} kvn_announcement;

/* A copy of the words; NULL when there is no memory. The writer must outlive it. */
kvn_guard *kvn_guard_create(kvn_writer *writer, const kvn_word *words, uint64_t count);
void kvn_guard_destroy(kvn_guard *guard); /* of NULL: nothing */

/* Announces a piece. A failure, with `fault` filled in: the owner has released a registration, or
 * closed the gate; then nothing is announced. `by_process`: it is written by process_vm_writev.
 * Without a guard all is well. */
int kvn_guard_enter(kvn_guard *guard, bool by_process, uint64_t descriptor,
                    kvn_announcement *out, kvn_fault *fault);
/* As kvn_guard_enter, of what is mapped here, for one who does not wait for a place: false where that
 * would wait, or fail. */
bool kvn_guard_try_enter(kvn_guard *guard, kvn_announcement *out);
/* Puts another announcement in the place of one that lasts, so that an owner that waits need not wait for its
 * end: KVN_OK. Or the owner has released a registration: `failure` says so, and the announcement stays until
 * kvn_guard_leave. It stays, too, where no place is free: KVN_OK. */
int kvn_guard_renew(kvn_guard *guard, kvn_announcement *announcement, kvn_failure *failure);
/* The piece is written. */
void kvn_guard_leave(kvn_guard *guard, const kvn_announcement *announcement);

/* For process_vm_writev: 0 if process `pid` is still the owner, which no pid says by itself: it may
 * be another process's by now, or that of another program. Else an errno: ESRCH, EPERM, ENOSYS. A
 * system call, of 1 us, unless that was so within the last 0.2 ms. */
int kvn_guard_look_for_owner(const kvn_guard *guard);
/* Where the ticket's number is to be written first in each call, and whether it has arrived: if not,
 * what the call has written went elsewhere. */
uint64_t kvn_guard_gate(const kvn_guard *guard, const kvn_announcement *announcement);
bool kvn_guard_has_passed(const kvn_guard *guard, const kvn_announcement *announcement);

#endif
