"""Another process on this host: held so that it cannot be mistaken, and its memory reached."""

cimport cython
from libc.stdint cimport uint64_t

from kvnative._host cimport check, kvn_refusal, unsigned

__all__ = ["Peer"]


@cython.final
cdef class Peer:
    """Holds the living process `pid` by a pidfd, so that a later process of that pid is not it.

    Compare its start time (`/proc/<pid>/stat`) with the expected one, then `attach` its board.
    ProcessLookupError when there is no such process; PermissionError where /proc hides it.
    """

    cdef kvn_peer peer

    def __cinit__(self):
        self.peer.pidfd = self.peer.proc = -1

    def __init__(self, int pid):
        cdef kvn_refusal refusal
        if self.peer.pidfd >= 0:
            raise TypeError("a peer is held once")
        check(kvn_peer_open(pid, &self.peer, &refusal), &refusal)

    cdef int check_open(self) except -1:
        if self.peer.pidfd < 0:
            raise ValueError("the peer is closed")
        return 0

    def attach(self, int board_fd, inode, num_slots):
        """Maps the peer's registration board, read-only.

        ProcessLookupError when the peer has exited, closed the board or executes another program;
        PermissionError when the system refuses access; ValueError when it is no board.
        """
        cdef uint64_t number = unsigned("inode", inode), slots = unsigned("num_slots", num_slots)
        cdef kvn_refusal refusal
        self.check_open()
        check(kvn_peer_attach(&self.peer, board_fd, number, slots, &refusal), &refusal)

    def check(self, const uint64_t[::1] slots, const uint64_t[::1] generations):
        """Index of the first slot that no longer has its generation, or -1 when all have.

        ProcessLookupError or PermissionError as `attach`. Everything that was read from the peer
        before the call was read while it lived and had those generations.
        """
        cdef uint64_t count = slots.shape[0], stale = 0
        cdef kvn_refusal refusal
        cdef int status
        self.check_open()
        if slots.shape[0] != generations.shape[0]:
            raise ValueError(f"{slots.shape[0]} slots, but {generations.shape[0]} generations")
        if count:
            stale = kvn_board_first_stale(&self.peer.board, &slots[0], &generations[0], count)
        check(kvn_peer_check(&self.peer, &refusal), &refusal)
        return stale if stale < count else -1

    def probe(self, address):
        """Reads one byte at `address` of the peer by process_vm_readv.

        PermissionError or another OSError when the system does not allow that, ProcessLookupError
        when the peer has exited, ValueError when the address is not mapped there.
        """
        cdef uint64_t where = unsigned("address", address)
        cdef kvn_refusal refusal
        self.check_open()
        check(kvn_peer_probe(&self.peer, where, &refusal), &refusal)

    @property
    def pid(self):
        return self.peer.pid

    @property
    def closed(self):
        return self.peer.pidfd < 0

    def close(self):
        """Lets go of the process; idempotent."""
        kvn_peer_close(&self.peer)

    def __dealloc__(self):
        kvn_peer_close(&self.peer)
