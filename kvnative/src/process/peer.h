/* Another process on this host, held so that it cannot be mistaken: a pidfd (a reused pid is not
 * it), its /proc directory, and its generation table (after an exec it is not there any more). */
#ifndef KVN_PEER_H
#define KVN_PEER_H

#include "host/generations.h"

typedef struct kvn_peer {
    int pid;
    int pidfd;    /* -1 when closed */
    int proc;     /* O_PATH descriptor of /proc/<pid>: leads nowhere once the process is gone */
    int generations_fd; /* the peer's number of it */
    kvn_generations generations;
} kvn_peer;

/* Takes hold of the process; nothing of its memory is looked at yet. The caller compares the start
 * time that /proc shows with the expected one, and only then attaches the generation table. */
int kvn_peer_open(int pid, kvn_peer *out, kvn_failure *failure);
int kvn_peer_attach(kvn_peer *peer, int generations_fd, uint64_t inode, uint64_t num_slots,
                    kvn_failure *failure);

/* KVN_OK while the process lives and still runs the program that made the generation table;
 * KVN_PEER_GONE or KVN_DENIED otherwise. It asks the system only where the table does not say. */
int kvn_peer_check(const kvn_peer *peer, kvn_failure *failure);

/* KVN_OK when the system lets this process reach `address` of the peer by process_vm_readv. */
int kvn_peer_probe(const kvn_peer *peer, uint64_t address, kvn_failure *failure);

/* A descriptor of this process's own for what descriptor `fd` of the peer is, as dup has it. KVN_DENIED: only
 * who may attach to the peer may do so; KVN_UNMAPPED: it has no such descriptor. */
int kvn_peer_take_descriptor(const kvn_peer *peer, int fd, int *out, kvn_failure *failure);

void kvn_peer_close(kvn_peer *peer); /* idempotent */

#endif
