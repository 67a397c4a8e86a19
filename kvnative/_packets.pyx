"""Takes packets out of a socket with the GIL held, so that several readers cannot reorder them.

Between the call that receives a packet and the one that puts it into the queue no other thread
runs, and no signal handler.
"""

from libc.errno cimport EAGAIN, errno
from libc.stdint cimport uint64_t
from posix.unistd cimport write

__all__ = ["LARGEST", "take_packets"]

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int fd, void *buffer, size_t nbytes, int flags)
    int MSG_DONTWAIT, MSG_TRUNC

cdef enum:
    MOST = 4096

LARGEST = MOST


def take_packets(packets, Py_ssize_t most, sender, queue, unread, int eventfd):
    """Move what has arrived, `most` packets at most, into a queue, and signal an eventfd.

    Args:
        packets: a socket; nothing has arrived at one that is closed.
        sender: what stands in the queue before the bytes of each packet.
        queue: a deque of pairs of the sender and the bytes.
        unread: a deque that gets a None for each.
        eventfd: is signalled if there were any.

    Returns:
        Whether more may come: it has not ended, and no packet was larger than `LARGEST`.
    """
    cdef char buffer[MOST]
    cdef uint64_t one = 1
    cdef ssize_t nbytes = 0
    cdef Py_ssize_t taken = 0
    cdef int fd = packets.fileno()
    cdef bint goes_on = fd >= 0
    while goes_on and taken < most:
        nbytes = recv(fd, buffer, MOST, MSG_DONTWAIT | MSG_TRUNC)
        if nbytes < 0 and errno == EAGAIN:
            break
        goes_on = 0 < nbytes <= MOST
        if goes_on:
            queue.append((sender, buffer[:nbytes]))
            unread.append(None)
            taken += 1
    if taken:
        write(eventfd, &one, sizeof(one))
    return goes_on
