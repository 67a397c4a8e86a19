/* Another process on this host: its pidfd, which never names a later process with the same pid; its /proc directory;
 * and its generation table, which an exec removes. */
#ifndef KVN_PEER_H
#define KVN_PEER_H

#include "host/generations.h"

typedef struct kvn_peer {
    int pid;
    int pidfd;    /* -1: closed */
    int proc;     /* O_PATH descriptor of /proc/<pid>; look-ups in it fail once the process has ended */
    int generations_fd; /* number of the table's descriptor in the peer */
    kvn_generations generations;
} kvn_peer;

/* Opens the process without access to its memory. The caller compares the start time of /proc with the expected one
 * before it attaches the generation table. */
int kvn_peer_open(int pid, kvn_peer *out, kvn_failure *failure);
int kvn_peer_attach(kvn_peer *peer, int generations_fd, uint64_t inode, uint64_t num_slots,
                    kvn_failure *failure);

/* KVN_OK while the process lives and runs the program that made the generation table; else KVN_PEER_GONE or
 * KVN_DENIED. Makes no system call if the table says that it lives. */
int kvn_peer_check(const kvn_peer *peer, kvn_failure *failure);

/* KVN_OK if process_vm_readv and process_vm_writev at `address` of the peer are permitted. */
int kvn_peer_probe(const kvn_peer *peer, uint64_t address, kvn_failure *failure);

/* Duplicates descriptor `fd` of the peer into this process. KVN_DENIED: this process may not attach to the peer;
 * KVN_UNMAPPED: the peer does not have the descriptor. */
int kvn_peer_take_descriptor(const kvn_peer *peer, int fd, int *out, kvn_failure *failure);

void kvn_peer_close(kvn_peer *peer); /* idempotent */

#endif
