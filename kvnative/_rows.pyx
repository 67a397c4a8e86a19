"""Whole rows between two memories: the addresses are checked once, and each request is lowered."""

cimport cython
from cpython.buffer cimport (
    PyBUF_FULL_RO,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.long cimport PyLong_AsLongLong
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from numpy import ndarray

from kvnative._crossing cimport acquire_uint64
from kvnative._lower cimport lower_recipe
from kvnative._lower_c cimport kvn_recipe
from kvnative._process cimport Peer
from kvnative._writers cimport (
    WriteGuard, kvn_announcement, kvn_guard_leave, kvn_guard_try_enter
)

__all__ = ["Rows"]

cdef extern from "core/rows.h" nogil:
    ctypedef struct kvn_rows:
        uint64_t src_count
        uint64_t dst_count
        uint64_t stride
        bint is_one
    enum:
        FEW "KVN_ROWS_FEW"  # rows: what they need lies on the stack
    size_t kvn_rows_scratch(const kvn_rows *rows, size_t count)
    size_t kvn_rows_merge(
        const kvn_rows *rows, const int64_t *src, const int64_t *dst, size_t count, void *scratch,
        uint64_t *src_offsets, uint64_t *dst_offsets, uint64_t *nbytes
    )

cdef tuple NAMES = ("nbytes", "src_rows", "dst_rows", "src_bases", "dst_bases")

cdef enum:
    MANY = 512  # are lowered without the GIL
    MOST = 0x7FFFFFFF  # rows of a cache


@cython.final
cdef class Rows:
    """Rows of tensor pairs that are `stride` bytes apart on both sides, and moved whole.

    Args:
        src_bases, dst_bases: contiguous uint64 columns of addresses, one per tensor pair.
        src_count, dst_count: rows of each tensor.
        stride: bytes of a row.
        is_one: whether both sides are one cache, of which no row may be read and written.

    Raises:
        TypeError: a column that is not uint64.
        ValueError: columns of unequal length, a count or stride of 0, or more than 2**31 - 1 rows.
        OverflowError: the end of a tensor passes 2**64 - 1.
    """
    cdef kvn_rows rows
    cdef object src_bases
    cdef object dst_bases
    cdef Py_buffer src
    cdef Py_buffer dst
    cdef int held
    cdef Py_ssize_t pairs  # of tensors; none before they are made

    def __init__(self, src_bases, dst_bases, uint64_t src_count, uint64_t dst_count,
                 uint64_t stride, bint is_one=False):
        if self.held:
            raise TypeError("rows are made once")
        if not (1 <= src_count <= MOST and 1 <= dst_count <= MOST and stride >= 1):
            raise ValueError(f"src_count={src_count}, dst_count={dst_count}, stride={stride}:"
                             f" expected at least 1, and at most {MOST} rows")
        acquire_uint64(&self.src, src_bases, "src_bases")
        self.held = 1
        acquire_uint64(&self.dst, dst_bases, "dst_bases")
        self.held = 2
        if self.src.shape[0] != self.dst.shape[0]:
            raise ValueError(f"dst_bases: expected {self.src.shape[0]} items, as in src_bases,"
                             f" got {self.dst.shape[0]}")
        self.rows.src_count, self.rows.dst_count, self.rows.stride = src_count, dst_count, stride
        self.rows.is_one = is_one
        self.pairs = self.src.shape[0]

    def __dealloc__(self):
        if self.held > 0:
            PyBuffer_Release(&self.src)
        if self.held > 1:
            PyBuffer_Release(&self.dst)

    def lower(self, src_rows, dst_rows):
        """Descriptors of rows `src_rows[i]` to rows `dst_rows[i]` of each tensor pair.

        They are those of a plan that is coalesced by sorting. None: the planner is to be asked,
        which refuses what is wrong, and takes what is unusual: rows that are no list or tuple of
        int and no int64 array, that are out of range, written twice, read and written in one cache,
        none at all, or not as many on both sides.
        """
        cdef int64_t few[2 * FEW]
        cdef int64_t *many = NULL
        cdef int64_t *tables = few
        cdef Py_ssize_t count = table_length(src_rows)
        if not 1 <= count <= <Py_ssize_t>self.rows.dst_count or count != table_length(dst_rows):
            return None
        if count > FEW:
            many = tables = <int64_t *>malloc(2 * count * sizeof(int64_t))
            if many is NULL:
                raise MemoryError
        try:
            if not read_table(src_rows, tables, count):
                return None
            if not read_table(dst_rows, tables + count, count):
                return None
            return self.lower_tables(tables, tables + count, count)
        finally:
            free(many)

    def move_now(self, Peer peer not None, bytes words not None, WriteGuard guard,
                 dict living not None, cache_id, entry, src_rows, dst_rows, uint64_t most):
        """Moves rows by plain copies, in this thread, with the GIL, between two checks of the peer.

        The addresses are of this process: memory of the peer is mapped here. With a guard that is
        the destination, and each write is announced. Of this process, `entry` has the rows while it
        is what `living` has by `cache_id`. Returns the bytes that were moved. 0: nothing was moved,
        as they are more than `most` or than a few rows, or as `lower` would have the planner asked,
        or a check has failed; or the last one has, and what was moved does not count.
        """
        cdef kvn_announcement announced
        cdef int64_t src[FEW]
        cdef int64_t dst[FEW]
        cdef uint64_t columns[3 * FEW]
        cdef uint64_t scratch[2 * FEW]
        cdef Py_ssize_t count = table_length(src_rows)
        cdef Py_ssize_t pair, i
        cdef size_t segments
        cdef uint64_t total
        cdef char *src_base
        cdef char *dst_base
        if count < 1 or count > FEW or count != table_length(dst_rows):
            return 0
        total = <uint64_t>self.pairs * <uint64_t>count * self.rows.stride
        if self.rows.stride > most or total > most:
            return 0
        if not read_table(src_rows, src, count) or not read_table(dst_rows, dst, count):
            return 0
        segments = kvn_rows_merge(&self.rows, src, dst, count, scratch, columns, columns + FEW,
                                  columns + 2 * FEW)
        if segments == 0 or living.get(cache_id) is not entry:
            return 0
        # From here on nothing of Python runs: no other thread, signal handler or finalizer.
        peer.check_open()
        if not peer.is_good(words):
            return 0
        if guard is not None and not kvn_guard_try_enter(guard.guard, &announced):
            return 0
        for pair in range(self.pairs):
            src_base = <char *><uintptr_t>(<const uint64_t *>self.src.buf)[pair]
            dst_base = <char *><uintptr_t>(<const uint64_t *>self.dst.buf)[pair]
            for i in range(<Py_ssize_t>segments):
                memcpy(dst_base + columns[FEW + i], src_base + columns[i], columns[2 * FEW + i])
        if guard is not None:
            kvn_guard_leave(guard.guard, &announced)
        return total if peer.is_good(words) else 0

    cdef lower_tables(self, const int64_t *src, const int64_t *dst, Py_ssize_t count):
        cdef uint64_t few[3 * FEW]
        cdef uint64_t small[2 * FEW]
        cdef uint64_t *columns = few
        cdef void *scratch = small
        cdef size_t needed = kvn_rows_scratch(&self.rows, count)
        cdef void *allocated = NULL
        cdef size_t segments
        cdef kvn_recipe recipe
        if count > FEW:
            allocated = malloc(needed + 3 * count * sizeof(uint64_t))
            if allocated is NULL:
                raise MemoryError
            columns = <uint64_t *>allocated
            scratch = columns + 3 * count
        try:
            if count > MANY:
                with nogil:
                    segments = kvn_rows_merge(&self.rows, src, dst, count, scratch, columns,
                                              columns + count, columns + 2 * count)
            else:
                segments = kvn_rows_merge(&self.rows, src, dst, count, scratch, columns,
                                          columns + count, columns + 2 * count)
            if segments == 0:
                return None
            recipe.src_offsets, recipe.dst_offsets = columns, columns + count
            recipe.nbytes = columns + 2 * count
            recipe.num_segments, recipe.num_repeats = segments, 0
            recipe.src_bases = <const uint64_t *>self.src.buf
            recipe.dst_bases = <const uint64_t *>self.dst.buf
            recipe.num_pairs = self.pairs
            return lower_recipe(&recipe, NAMES, None)
        finally:
            free(allocated)


cdef Py_ssize_t table_length(object rows) except -2:
    """Entries of a block table of a usual type; -1: it is of another."""
    if type(rows) is list:
        return len(<list>rows)
    if type(rows) is tuple:
        return len(<tuple>rows)
    if type(rows) is ndarray:  # of a masked array, say, not all entries count
        return rows.shape[0] if rows.ndim == 1 else -1
    return -1


cdef bint read_table(object rows, int64_t *table, Py_ssize_t count) except -1:
    """Whether all entries are what a block table usually has: int, within 64 bits."""
    cdef Py_ssize_t i
    cdef object entry
    if type(rows) is list or type(rows) is tuple:
        if len(rows) != count:  # another thread has changed it
            return False
        for i in range(count):
            try:
                entry = rows[i]
                if type(entry) is not int:
                    return False
                table[i] = PyLong_AsLongLong(entry)
            except (OverflowError, IndexError):  # or another thread takes entries out
                return False
        return True
    return read_array(rows, table, count)


cdef bint read_array(object rows, int64_t *table, Py_ssize_t count) except -1:
    cdef Py_buffer column
    cdef const char *letter
    cdef Py_ssize_t i
    try:
        PyObject_GetBuffer(rows, &column, PyBUF_FULL_RO)
    except (BufferError, ValueError):  # of dates, say, or strings of any length
        return False
    try:
        letter = column.format
        if letter is NULL or column.itemsize != 8 or column.ndim != 1 or column.shape[0] != count:
            return False
        if letter[0] in (c"@", c"="):
            letter += 1
        if letter[0] not in (c"l", c"q") or letter[1] != 0:
            return False
        for i in range(count):
            # Not as int64: an array may lie at any address.
            memcpy(&table[i], <const char *>column.buf + i * column.strides[0], sizeof(int64_t))
        return True
    finally:
        PyBuffer_Release(&column)
