"""Receipt of packets with the GIL held, so that several readers cannot reorder them.

No other thread, signal handler or finalizer runs between the call that receives a packet and the
one that puts it into the queue: all objects that the garbage collector tracks are made earlier.
Without a GIL a mutex excludes other readers.
"""

from libc.errno cimport EAGAIN, errno
from libc.stdint cimport uint64_t
from posix.unistd cimport write

__all__ = ["LARGEST", "take_packets"]

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int fd, void *buffer, size_t nbytes, int flags)
    int MSG_DONTWAIT, MSG_TRUNC

cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    static PyMutex kvn_readers; /* no critical section: appending to the queue may interrupt it */
    #define kvn_readers_lock() PyMutex_Lock(&kvn_readers)
    #define kvn_readers_unlock() PyMutex_Unlock(&kvn_readers)
    #else
    #define kvn_readers_lock() ((void)0)
    #define kvn_readers_unlock() ((void)0)
    #endif
    """
    void kvn_readers_lock()
    void kvn_readers_unlock()

cdef enum:
    MOST = 4096

LARGEST = MOST


def take_packets(packets, Py_ssize_t most, sender, queue, unread, int eventfd):
    """Move at most `most` packets that have arrived into a queue, and signal an eventfd.

    Args:
        packets: a socket; a closed one has no packets.
        sender: first item of the queue's entries.
        queue: deque of lists [sender, bytes].
        unread: deque that gets a None for each packet.
        eventfd: signalled if a packet was moved.

    Returns:
        False once the socket has ended, or after a packet larger than `LARGEST`.
    """
    cdef char buffer[MOST]
    cdef uint64_t one = 1
    cdef ssize_t nbytes = 0
    cdef Py_ssize_t taken = 0
    cdef int fd = packets.fileno()
    cdef bint goes_on = fd >= 0
    cdef list entry
    kvn_readers_lock()
    try:
        while goes_on and taken < most:
            entry = [sender, None]
            nbytes = recv(fd, buffer, MOST, MSG_DONTWAIT | MSG_TRUNC)
            if nbytes < 0 and errno == EAGAIN:
                break
            goes_on = 0 < nbytes <= MOST
            if goes_on:
                entry[1] = buffer[:nbytes]
                unread.append(None)  # first, because a reader of the packet also pops this
                queue.append(entry)
                taken += 1
    finally:
        kvn_readers_unlock()
    if taken:
        write(eventfd, &one, sizeof(one))
    return goes_on
