"""Extents of tensors in memory: the questions of every binding, answered without their arrays."""

from cpython.buffer cimport PyBuffer_Release
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from kvnative._crossing cimport acquire_uint64

__all__ = ["extents_clash", "first_below"]

cdef extern from "core/intervals.h" nogil:
    size_t kvn_first_below(const uint64_t *values, size_t count, uint64_t least)
    int kvn_extents_clash(uint64_t *written, size_t num_written, uint64_t written_nbytes,
                          uint64_t *read, size_t num_read, uint64_t read_nbytes)


def first_below(values, uint64_t least):
    """Index of the first of `values`, a contiguous uint64 column, that is below `least`, or -1.

    TypeError, ValueError: `values` is no such column.
    """
    cdef Py_buffer column
    cdef size_t count, first
    acquire_uint64(&column, values, "values")
    count = column.shape[0]
    first = kvn_first_below(<const uint64_t *>column.buf, count, least)
    PyBuffer_Release(&column)
    return first if first < count else -1


def extents_clash(dst_bases, uint64_t dst_nbytes, src_bases, uint64_t src_nbytes):
    """Whether an extent to be written shares a byte with another one, written or read.

    Args:
        dst_bases, dst_nbytes: the extents written: a contiguous uint64 column of addresses, and
            the bytes from each on.
        src_bases, src_nbytes: those read, which may share bytes with each other.

    Raises:
        TypeError, ValueError: not such a column.
        MemoryError: no memory to sort the addresses in.
    """
    cdef Py_buffer dst, src
    cdef uint64_t *starts
    cdef size_t written, read
    cdef bint clash
    acquire_uint64(&dst, dst_bases, "dst_bases")
    try:
        acquire_uint64(&src, src_bases, "src_bases")
        try:
            written, read = dst.shape[0], src.shape[0]
            starts = <uint64_t *>malloc((written + read) * sizeof(uint64_t))
            if starts is NULL:
                raise MemoryError(f"no memory to sort {written + read} addresses in")
            with nogil:
                memcpy(starts, dst.buf, written * sizeof(uint64_t))
                memcpy(starts + written, src.buf, read * sizeof(uint64_t))
                clash = kvn_extents_clash(starts, written, dst_nbytes, starts + written, read,
                                          src_nbytes)
            free(starts)
            return clash
        finally:
            PyBuffer_Release(&src)
    finally:
        PyBuffer_Release(&dst)
