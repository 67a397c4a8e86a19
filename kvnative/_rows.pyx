"""Lowering of block tables between two memories whose addresses are checked once."""

cimport cython
from cpython.buffer cimport (
    PyBUF_FULL_RO,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.list cimport PyList_Size
from cpython.long cimport PyLong_AsLongLong
from cpython.tuple cimport PyTuple_Size
from libc.stddef cimport size_t
from libc.stdint cimport (
    int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
)
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from numpy import ndarray

from kvnative._crossing cimport acquire_columns, release_columns
from kvnative._lower cimport lower_recipe
from kvnative._lower_c cimport kvn_recipe
from kvnative._process cimport Peer
from kvnative._writers cimport (
    WriteGuard, kvn_announcement, kvn_guard_leave, kvn_guard_try_enter
)

__all__ = ["RowLowering"]

cdef extern from "core/rows.h" nogil:
    enum:
        FEW "KVN_ROWS_FEW"  # rows at most: scratch memory is on the stack
        LEVELS "KVN_ROWS_LEVELS"
    ctypedef struct kvn_rows_side:
        uint64_t count
        uint64_t tokens
        uint64_t row_stride
        uint64_t token_stride
        uint64_t start
        bint is_slot
    ctypedef struct kvn_level:
        uint64_t times
        uint64_t src_stride
        uint64_t dst_stride
    ctypedef struct kvn_rows:
        kvn_rows_side src
        kvn_rows_side dst
        uint64_t run
        kvn_level levels[6]
        size_t num_levels
        kvn_level kv
        bint is_one
        bint orders_ties
    ctypedef struct kvn_rows_table:
        const int64_t *rows
        size_t count
        uint64_t skipped
        bint is_lease
    ctypedef struct kvn_rows_request:
        kvn_rows_table src
        kvn_rows_table dst
        uint64_t num_tokens
    ctypedef struct kvn_run:
        uint64_t src
        uint64_t dst
        uint64_t nbytes
    ctypedef struct kvn_rows_cut:
        size_t num_runs
    bint kvn_rows_fit(const kvn_rows *rows, uint64_t src_nbytes, uint64_t dst_nbytes)
    size_t kvn_rows_scratch(const kvn_rows *rows, const kvn_rows_request *request)
    bint kvn_rows_cut_up(
        const kvn_rows *rows, kvn_rows_request request, void *scratch, kvn_rows_cut *cut
    )
    size_t kvn_rows_room(const kvn_rows_cut *cut)
    const uint64_t *kvn_rows_columns(
        const kvn_rows *rows, kvn_rows_cut *cut, kvn_run *room, size_t *num
    )

cdef tuple NAMES = ("nbytes", "src_rows", "dst_rows", "src_bases", "dst_bases")

cdef enum:
    MANY = 512  # runs: more are expanded without the GIL


cdef kvn_rows_side side_of(given) except *:
    cdef kvn_rows_side side
    (side.count, side.tokens, side.row_stride, side.token_stride, side.start, side.is_slot) = given
    return side


cdef kvn_level level_of(given) except *:
    cdef kvn_level level
    level.times, level.src_stride, level.dst_stride = given
    return level


@cython.final
cdef class RowLowering:
    """Turns block tables into descriptors of tensor pairs, by a template of the planner.

    Args:
        src_bases, dst_bases: contiguous uint64 columns of addresses, one for each tensor pair.
        src, dst: for each side (rows, tokens of a row, bytes from row to row, bytes from token to
            token, offset of the first moved byte in a token, whether it is one slot). If
            rows are copied as bytes, each byte counts as a token.
        run: number of bytes that are contiguous on both sides in every cut.
        levels: axes other than that of tokens, each as (times, src_stride, dst_stride).
        kv: level of keys and values, or None. A request with this level and more than two in total
            is left to the planner, which turns the level into tensor pairs.
        src_nbytes, dst_nbytes: size of each tensor from its base address on.
        is_one: both sides are one cache, in which no row may be both read and written.
        orders_ties: runs of the same source are in order of their destinations.
    """
    cdef kvn_rows rows
    cdef Py_buffer bases[2]  # of the source and the destination
    cdef bint held
    cdef Py_ssize_t pairs  # of tensors; 0 before __init__

    def __init__(self, src_bases, dst_bases, src, dst, uint64_t run, levels, kv,
                 uint64_t src_nbytes, uint64_t dst_nbytes, bint is_one=False,
                 bint orders_ties=False):
        cdef Py_ssize_t i
        cdef kvn_rows rows
        if self.held:
            raise TypeError("rows are made once")
        if len(levels) > LEVELS:
            raise ValueError(f"levels: expected at most {LEVELS}, got {len(levels)}")
        rows.src, rows.dst, rows.run = side_of(src), side_of(dst), run
        rows.num_levels = len(levels)
        for i in range(len(levels)):
            rows.levels[i] = level_of(levels[i])
        rows.kv = level_of((0, 0, 0) if kv is None else kv)
        rows.is_one, rows.orders_ties = is_one, orders_ties
        if not kvn_rows_fit(&rows, src_nbytes, dst_nbytes):
            raise ValueError(f"src={src}, dst={dst}, run={run}, levels={levels}: rows reach beyond"
                             f" {src_nbytes} bytes at src or {dst_nbytes} at dst, or a number is 0")
        acquire_columns(self.bases, (src_bases, dst_bases), ("src_bases", "dst_bases"))
        self.held = True
        self.rows = rows
        self.pairs = self.bases[0].shape[0]

    def __dealloc__(self):
        if self.held:
            release_columns(self.bases, 2)

    def lower(self, src_rows, dst_rows, int64_t num_tokens=0, int64_t src_token=0,
              int64_t dst_token=0, bint src_is_lease=False, bint dst_is_lease=False):
        """Return the descriptors of a request, and the number of runs of each tensor pair.

        The descriptors are those of a plan that is coalesced by sorting; runs are counted before
        adjacent ones are merged.

        Args:
            src_rows, dst_rows: block tables, or the one slot.
            num_tokens: number of tokens to move; 0 moves whole rows.
            src_token, dst_token: number of tokens to skip.
            src_is_lease, dst_is_lease: the table is a tuple of all blocks of a request. Tokens
                beyond the other table are left out.

        Returns:
            None leaves the request to the planner, which refuses wrong tables and accepts unusual
            ones: other than lists or tuples of int and arrays of integers.
        """
        cdef int64_t few_rows[2 * FEW]
        cdef kvn_run few_pieces[2 * FEW]
        cdef int64_t *tables = few_rows
        cdef void *scratch = few_pieces
        cdef void *allocated = NULL
        cdef size_t needed
        cdef kvn_rows_request request
        cdef kvn_rows_cut cut
        cdef Py_ssize_t src_count = table_length(src_rows, src_is_lease)
        cdef Py_ssize_t dst_count = table_length(dst_rows, dst_is_lease)
        if not self.can_have(src_count, dst_count) or min(num_tokens, src_token, dst_token) < 0:
            return None
        memset(&request, 0, sizeof(request))
        request.num_tokens = num_tokens
        request.src.count, request.dst.count = src_count, dst_count
        request.src.skipped, request.dst.skipped = src_token, dst_token
        request.src.is_lease, request.dst.is_lease = src_is_lease, dst_is_lease
        if src_count > FEW or dst_count > FEW:
            needed = kvn_rows_scratch(&self.rows, &request)
            allocated = scratch = malloc(needed + (src_count + dst_count) * sizeof(int64_t))
            if needed == 0 or allocated is NULL:
                free(allocated)
                raise MemoryError
            tables = <int64_t *>(<char *>allocated + needed)
        try:
            request.src.rows, request.dst.rows = tables, tables + src_count
            if not read_table(src_rows, tables, src_count):
                return None
            if not read_table(dst_rows, tables + src_count, dst_count):
                return None
            if not kvn_rows_cut_up(&self.rows, request, scratch, &cut):
                return None
            return self.lower_cut(&cut), cut.num_runs
        finally:
            free(allocated)

    def move_now(self, Peer peer not None, bytes words not None, WriteGuard guard,
                 dict living not None, cache_id, entry, src_rows, dst_rows, uint64_t most,
                 int64_t num_tokens=0, int64_t src_token=0, int64_t dst_token=0):
        """Copy rows in this thread with the GIL held, and check the peer before and after.

        Memory of the peer is mapped here. With a guard the peer's memory is the destination, and
        the write is announced. The local cache is valid while `living[cache_id]` is `entry`.

        Args:
            words: registrations of the peer, and the lease.
            most: number of bytes that may be moved.
            src_rows, dst_rows, num_tokens, src_token, dst_token: as for `lower`; a table of a
                subclass of tuple is a whole lease.

        Returns:
            The number of bytes that were moved. 0 if the request is too large or is for the
            planner, or if a check failed. If that was the last one, the copied bytes do not count.
        """
        cdef kvn_announcement announced
        cdef int64_t tables[2 * FEW]
        cdef kvn_run pieces[2 * FEW]
        cdef kvn_run room[2 * FEW]
        cdef kvn_rows_request request
        cdef kvn_rows_cut cut
        cdef const uint64_t *columns
        cdef bint src_is_lease = isinstance(src_rows, tuple) and type(src_rows) is not tuple
        cdef bint dst_is_lease = isinstance(dst_rows, tuple) and type(dst_rows) is not tuple
        cdef Py_ssize_t src_count = table_length(src_rows, src_is_lease)
        cdef Py_ssize_t dst_count = table_length(dst_rows, dst_is_lease)
        cdef Py_ssize_t pair
        cdef size_t i
        cdef size_t num = 0
        cdef uint64_t total = 0
        cdef char *src_base
        cdef char *dst_base
        if not self.can_have(src_count, dst_count) or src_count > FEW or dst_count > FEW:
            return 0
        if min(num_tokens, src_token, dst_token) < 0:
            return 0
        memset(&request, 0, sizeof(request))
        request.num_tokens = num_tokens
        request.src.skipped, request.dst.skipped = src_token, dst_token
        request.src.is_lease, request.dst.is_lease = src_is_lease, dst_is_lease
        request.src.rows, request.src.count = tables, src_count
        request.dst.rows, request.dst.count = tables + src_count, dst_count
        if not read_table(src_rows, tables, src_count):
            return 0
        if not read_table(dst_rows, tables + src_count, dst_count):
            return 0
        if not kvn_rows_cut_up(&self.rows, request, pieces, &cut) or kvn_rows_room(&cut) > 2 * FEW:
            return 0
        columns = kvn_rows_columns(&self.rows, &cut, room, &num)
        for i in range(num):
            total += columns[2 * num + i]  # below 2**64: all lie in one tensor
        if total > most or self.pairs * total > most or living.get(cache_id) is not entry:
            return 0
        total *= self.pairs
        # From here on no Python code runs: no other thread, signal handler or finalizer.
        peer.check_open()
        if not peer.is_good(words):
            return 0
        if guard is not None:
            if not kvn_guard_try_enter(guard.guard, &announced):
                return 0
            # The guard has checked only the registrations since the announcement. An owner that
            # ended the lease before it has seen no announcement, and waits for no write.
            if peer.first_stale(words) >= 0:
                kvn_guard_leave(guard.guard, &announced)
                return 0
        for pair in range(self.pairs):
            src_base = <char *><uintptr_t>(<const uint64_t *>self.bases[0].buf)[pair]
            dst_base = <char *><uintptr_t>(<const uint64_t *>self.bases[1].buf)[pair]
            for i in range(num):
                memcpy(dst_base + columns[num + i], src_base + columns[i], columns[2 * num + i])
        if guard is not None:
            kvn_guard_leave(guard.guard, &announced)
        return total if peer.is_good(words) else 0

    cdef bint can_have(self, Py_ssize_t src_count, Py_ssize_t dst_count) noexcept:
        return src_count >= 1 and 1 <= dst_count <= <Py_ssize_t>self.rows.dst.count

    cdef lower_cut(self, kvn_rows_cut *cut):
        cdef kvn_run few[2 * FEW]
        cdef kvn_run *room = few
        cdef kvn_run *allocated = NULL
        cdef const uint64_t *columns
        cdef size_t num
        cdef kvn_recipe recipe
        if kvn_rows_room(cut) > 2 * FEW:
            room = allocated = <kvn_run *>malloc(kvn_rows_room(cut) * sizeof(kvn_run))
            if allocated is NULL:
                raise MemoryError
        try:
            if cut.num_runs > MANY:
                with nogil:
                    columns = kvn_rows_columns(&self.rows, cut, room, &num)
            else:
                columns = kvn_rows_columns(&self.rows, cut, room, &num)
            recipe.src_offsets, recipe.dst_offsets = columns, columns + num
            recipe.nbytes = columns + 2 * num
            recipe.num_segments, recipe.num_repeats = num, 0
            recipe.src_bases = <const uint64_t *>self.bases[0].buf
            recipe.dst_bases = <const uint64_t *>self.bases[1].buf
            recipe.num_pairs = self.pairs
            return lower_recipe(&recipe, NAMES, None)
        finally:
            free(allocated)


cdef Py_ssize_t table_length(object rows, bint is_lease=False) except -2:
    """Return the number of entries of a block table; -1 for an unusual type."""
    if type(rows) is tuple or (is_lease and isinstance(rows, tuple)):
        return PyTuple_Size(rows)
    if type(rows) is list:
        return PyList_Size(rows)
    if type(rows) is ndarray:  # not a subclass: a masked array has invalid entries
        return rows.shape[0] if rows.ndim == 1 else -1
    return -1


cdef bint read_table(object rows, int64_t *table, Py_ssize_t count) except -1:
    """Read a block table; False if an entry is not an int of 64 bits."""
    cdef bint is_tuple = isinstance(rows, tuple)
    cdef Py_ssize_t i
    cdef object entry
    if not is_tuple and type(rows) is not list:
        return read_array(rows, table, count)
    try:
        for i in range(count):
            entry = (<tuple>rows)[i] if is_tuple else (<list>rows)[i]
            if type(entry) is not int:
                return False
            table[i] = PyLong_AsLongLong(entry)
    except (OverflowError, IndexError):  # or another thread removes entries from a list
        return False
    return is_tuple or PyList_Size(rows) == count


cdef bint read_array(object rows, int64_t *table, Py_ssize_t count) except -1:
    cdef Py_buffer column
    cdef const char *letter
    try:
        PyObject_GetBuffer(rows, &column, PyBUF_FULL_RO)
    except (BufferError, ValueError):  # such as an array of dates or of strings
        return False
    try:
        letter = column.format
        if letter is NULL or column.ndim != 1 or column.shape[0] != count:
            return False
        if letter[0] in (c"@", c"="):
            letter += 1
        if letter[0] == 0 or letter[1] != 0 or not read_entries(letter[0], &column, table):
            return False
        return True
    finally:
        PyBuffer_Release(&column)


cdef bint read_entries(char letter, const Py_buffer *column, int64_t *table) noexcept:
    """Read the entries; False if they are not integers."""
    cdef bint is_signed = letter in (c"b", c"h", c"i", c"l", c"q")
    cdef const char *entry = <const char *>column.buf
    cdef Py_ssize_t i
    # memcpy, because an array need not be aligned.
    cdef int8_t int8
    cdef int16_t int16
    cdef int32_t int32
    if not is_signed and letter not in (c"B", c"H", c"I", c"L", c"Q"):
        return False
    # Unsigned entries that are too large become negative, and so out of range.
    if column.itemsize == 8 and column.strides[0] == 8:
        memcpy(table, entry, 8 * column.shape[0])
        return True
    for i in range(column.shape[0]):
        if column.itemsize == 8:
            memcpy(&table[i], entry, 8)
        elif column.itemsize == 4:
            memcpy(&int32, entry, 4)
            table[i] = int32 if is_signed else <uint32_t>int32
        elif column.itemsize == 2:
            memcpy(&int16, entry, 2)
            table[i] = int16 if is_signed else <uint16_t>int16
        elif column.itemsize == 1:
            memcpy(&int8, entry, 1)
            table[i] = int8 if is_signed else <uint8_t>int8
        else:
            return False
        entry += column.strides[0]
    return True
