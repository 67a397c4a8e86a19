"""Extents in memory: what bindings ask of tensors, and whether two columns hold the same."""

from cpython.buffer cimport PyBuffer_Release
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from kvnative._crossing cimport acquire_uint64

__all__ = ["extents_clash", "first_below", "first_different"]

cdef extern from "core/intervals.h" nogil:
    size_t kvn_first_below(const uint64_t *values, size_t count, uint64_t least)
    int kvn_extents_clash(uint64_t *written, size_t num_written, uint64_t written_nbytes,
                          uint64_t *read, size_t num_read, uint64_t read_nbytes,
                          uint64_t *scratch)


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
            starts = <uint64_t *>malloc(2 * (written + read) * sizeof(uint64_t))
            if starts is NULL:
                raise MemoryError(f"no memory to sort {written + read} addresses in")
            with nogil:
                memcpy(starts, dst.buf, written * sizeof(uint64_t))
                memcpy(starts + written, src.buf, read * sizeof(uint64_t))
                clash = kvn_extents_clash(starts, written, dst_nbytes, starts + written, read,
                                          src_nbytes, starts + written + read)
            free(starts)
            return clash
        finally:
            PyBuffer_Release(&src)
    finally:
        PyBuffer_Release(&dst)


def first_different(left, right, nbytes):
    """Index of the first pair of ranges that differ in a byte, or -1; all are in this process.

    Args:
        left, right, nbytes: contiguous uint64 columns of one length: two addresses, and the bytes
            from each on. The caller knows that they are mapped.

    Raises:
        TypeError, ValueError: not such columns.
    """
    cdef Py_buffer one, two, lengths
    cdef size_t index, count
    acquire_uint64(&one, left, "left")
    try:
        acquire_uint64(&two, right, "right")
        try:
            acquire_uint64(&lengths, nbytes, "nbytes")
            try:
                count = one.shape[0]
                if <size_t>two.shape[0] != count or <size_t>lengths.shape[0] != count:
                    raise ValueError("left, right and nbytes differ in length")
                with nogil:
                    index = first_different_of(<const uint64_t *>one.buf, <const uint64_t *>two.buf,
                                               <const uint64_t *>lengths.buf, count)
                return index if index < count else -1
            finally:
                PyBuffer_Release(&lengths)
        finally:
            PyBuffer_Release(&two)
    finally:
        PyBuffer_Release(&one)


cdef size_t first_different_of(const uint64_t *left, const uint64_t *right, const uint64_t *nbytes,
                               size_t count) noexcept nogil:
    cdef size_t index
    for index in range(count):
        if memcmp(<const void *><uintptr_t>left[index], <const void *><uintptr_t>right[index],
                  nbytes[index]) != 0:
            return index
    return count
