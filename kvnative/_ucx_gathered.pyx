"""The backend that pulls and pushes over UCX by messages which carry many blocks each."""

from cpython.buffer cimport PyBuffer_Release
from libc.errno cimport EINVAL, errno
from libc.stdint cimport uint64_t

from kvnative._backend cimport Backend
from kvnative._crossing cimport acquire_uint64
from kvnative._native cimport KVN_PEER_GET, KVN_PEER_PUT, kvn_backend
from kvnative._ucx cimport UcxNativeLink

__all__ = ["gathered_backend"]

cdef dict DIRECTIONS = {"get": KVN_PEER_GET, "put": KVN_PEER_PUT}
cdef tuple COLUMNS = ("slots", "generations", "addresses", "nbytes")


def gathered_backend(UcxNativeLink link not None, str direction not None, slots, generations,
                     addresses, nbytes, bint hands_over=False) -> Backend:
    """Return a backend whose remote addresses are those of the link's peer.

    The four columns are of uint64 and of one length: the ranges of the peer that it may use, as the
    peer gave them to `UcxEnd.add_range`. A descriptor that lies in none of them is refused with
    KVN_UNMAPPED, and so is, by the peer, one whose range it has removed or does not let be written.
    A transfer ends likewise when it comes to memory that is not mapped any more, at either end.

    Args:
        direction: "get", from the peer, or "put".
        hands_over: the end's own thread begins a transfer if it sleeps, and not who submits it: for
            who submits to several ends at once.

    Raises:
        ValueError: another direction; columns of several lengths; an empty range, or one that ends
            beyond 2**64; the link's end is one-sided.
        TypeError: what is no column of uint64.
    """
    cdef Py_buffer columns[4]
    cdef kvn_gathered_ranges ranges
    cdef kvn_backend *backend
    cdef int way, held = 0
    link.check_made()
    link.end.check_serves()
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; it must be 'get' or 'put'")
    way = DIRECTIONS[direction]
    try:
        for name, column in zip(COLUMNS, (slots, generations, addresses, nbytes), strict=True):
            acquire_uint64(&columns[held], column, name)
            held += 1
            if columns[held - 1].shape[0] != columns[0].shape[0]:
                raise ValueError(f"{columns[0].shape[0]} slots, but {columns[held - 1].shape[0]}"
                                 f" {name}")
        ranges.slots = <const uint64_t *>columns[0].buf
        ranges.generations = <const uint64_t *>columns[1].buf
        ranges.addresses = <const uint64_t *>columns[2].buf
        ranges.nbytes = <const uint64_t *>columns[3].buf
        ranges.count = columns[0].shape[0]
        backend = kvn_gathered_create(link.end.serve, link.link, way, &ranges, hands_over)
        if backend is NULL and errno == EINVAL:
            raise ValueError("a range is empty, ends beyond 2**64 or has a slot of 2**32 or more")
        return Backend.adopt(backend, link, "gathered backend")
    finally:
        while held > 0:
            held -= 1
            PyBuffer_Release(&columns[held])
