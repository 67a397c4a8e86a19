"""Checks of many extents in memory at once: sizes, overlaps, and equal bytes."""

from cpython.buffer cimport PyBuffer_Release
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from kvnative._crossing cimport acquire_columns, acquire_uint64, release_columns

__all__ = ["extents_clash", "first_below", "first_different"]

cdef extern from "core/intervals.h" nogil:
    size_t kvn_first_below(const uint64_t *values, size_t count, uint64_t least)
    int kvn_extents_clash(uint64_t *written, size_t num_written, uint64_t written_nbytes,
                          uint64_t *read, size_t num_read, uint64_t read_nbytes,
                          uint64_t *scratch)


def first_below(values, uint64_t least):
    """Return the index of the first value below `least` in a contiguous uint64 column, or -1."""
    cdef Py_buffer column
    cdef size_t count, first
    acquire_uint64(&column, values, "values")
    count = column.shape[0]
    first = kvn_first_below(<const uint64_t *>column.buf, count, least)
    PyBuffer_Release(&column)
    return first if first < count else -1


def extents_clash(dst_bases, uint64_t dst_nbytes, src_bases, uint64_t src_nbytes):
    """Return whether a written extent shares a byte with another written or read one.

    Args:
        dst_bases, dst_nbytes: written extents: a contiguous uint64 column of addresses, and their
            size.
        src_bases, src_nbytes: read extents, which may overlap each other.
    """
    cdef Py_buffer columns[2]
    cdef uint64_t *starts
    cdef size_t written, read
    cdef bint clash
    acquire_columns(columns, (dst_bases, src_bases), ("dst_bases", "src_bases"), False)
    try:
        written, read = columns[0].shape[0], columns[1].shape[0]
        starts = <uint64_t *>malloc(2 * (written + read) * sizeof(uint64_t))
        if starts is NULL:
            raise MemoryError(f"no memory to sort {written + read} addresses in")
        with nogil:
            memcpy(starts, columns[0].buf, written * sizeof(uint64_t))
            memcpy(starts + written, columns[1].buf, read * sizeof(uint64_t))
            clash = kvn_extents_clash(starts, written, dst_nbytes, starts + written, read,
                                      src_nbytes, starts + written + read)
        free(starts)
        return clash
    finally:
        release_columns(columns, 2)


def first_different(left, right, nbytes):
    """Return the index of the first pair of ranges that differ in a byte, or -1.

    Args:
        left, right, nbytes: contiguous uint64 columns of the same length: addresses of mapped
            memory of this process, and sizes.
    """
    cdef Py_buffer columns[3]
    cdef size_t index, count
    acquire_columns(columns, (left, right, nbytes), ("left", "right", "nbytes"))
    count = columns[0].shape[0]
    with nogil:
        index = first_different_of(<const uint64_t *>columns[0].buf,
                                   <const uint64_t *>columns[1].buf,
                                   <const uint64_t *>columns[2].buf, count)
    release_columns(columns, 3)
    return index if index < count else -1


cdef size_t first_different_of(const uint64_t *left, const uint64_t *right, const uint64_t *nbytes,
                               size_t count) noexcept nogil:
    cdef size_t index
    for index in range(count):
        if memcmp(<const void *><uintptr_t>left[index], <const void *><uintptr_t>right[index],
                  nbytes[index]) != 0:
            return index
    return count
