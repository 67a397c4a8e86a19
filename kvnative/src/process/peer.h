/* Another process on this host, held so that it cannot be mistaken: a pidfd (a reused pid is not
 * it), its /proc directory, and its registration board (after an exec it is not there any more). */
#ifndef KVN_PEER_H
#define KVN_PEER_H

#include "host/board.h"

typedef struct kvn_peer {
    int pid;
    int pidfd;    /* -1 when closed */
    int proc;     /* O_PATH descriptor of /proc/<pid>: leads nowhere once the process is gone */
    int board_fd; /* the peer's number of it */
    kvn_board board;
} kvn_peer;

/* Takes hold of the process; nothing of its memory is looked at yet. The caller compares the start
 * time that /proc shows with the expected one, and only then attaches the board. */
int kvn_peer_open(int pid, kvn_peer *out, kvn_failure *failure);
int kvn_peer_attach(kvn_peer *peer, int board_fd, uint64_t inode, uint64_t num_slots,
                    kvn_failure *failure);

/* KVN_OK while the process lives and still runs the program that made the board;
 * KVN_PEER_GONE or KVN_DENIED otherwise. A few microseconds. */
int kvn_peer_check(const kvn_peer *peer, kvn_failure *failure);

/* KVN_OK when the system lets this process reach `address` of the peer by process_vm_readv. */
int kvn_peer_probe(const kvn_peer *peer, uint64_t address, kvn_failure *failure);

void kvn_peer_close(kvn_peer *peer); /* idempotent */

#endif
