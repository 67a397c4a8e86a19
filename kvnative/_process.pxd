from libc.stdint cimport int64_t, uint64_t

from kvnative._host cimport kvn_generations, kvn_failure, kvn_word
from kvnative._lower_c cimport kvn_columns
from kvnative._native cimport kvn_backend, kvn_pool


cdef extern from "host/generations.h" nogil:
    uint64_t kvn_generations_first_stale(
        const kvn_generations *table, const kvn_word *words, uint64_t count
    )


cdef extern from "process/peer.h" nogil:
    ctypedef struct kvn_peer:
        int pid
        int pidfd
        int proc
        kvn_generations generations

    int kvn_peer_open(int pid, kvn_peer *out, kvn_failure *failure)
    int kvn_peer_attach(
        kvn_peer *peer, int generations_fd, uint64_t inode, uint64_t num_slots, kvn_failure *failure
    )
    int kvn_peer_check(const kvn_peer *peer, kvn_failure *failure)
    int kvn_peer_probe(const kvn_peer *peer, uint64_t address, kvn_failure *failure)
    int kvn_peer_take_descriptor(
        const kvn_peer *peer, int fd, int *out, kvn_failure *failure
    )
    void kvn_peer_close(kvn_peer *peer)


cdef extern from "process/process.h" nogil:
    kvn_backend *kvn_process_create(kvn_pool *pool, int pid, int direction)
    bint kvn_process_read_now(int pid, const kvn_columns *batch)


cdef class Peer:
    cdef kvn_peer peer

    cdef int check_open(self) except -1
    cdef int64_t first_stale(self, bytes words) except -2
    # Return True if the process lives and still has the generations of all words.
    cdef bint is_good(self, bytes words) except -1
