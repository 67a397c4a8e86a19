"""Lists of address ranges: read from objects of the caller, sorted, merged and compared."""

cimport cython
from cpython.buffer cimport PyBUF_FULL_RO, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove, strchr, strlen

from kvnative._crossing cimport (acquire_columns, check_length, is_native_uint64,
                                 release_columns)
from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport kvn_column_stride

import operator

import numpy

cdef object UINT64 = numpy.dtype(numpy.uint64)

__all__ = ["Pieces", "TransferOpDesc", "address_columns", "choose", "first_bad", "first_overlap",
           "locate", "place"]

cdef extern from "stdbool.h":
    ctypedef bint c_bool "bool"

cdef extern from "core/ranges.h" nogil:
    const size_t KVN_NO_OVERLAP
    ctypedef struct kvn_ranges:
        uint64_t *groups
        uint64_t *src
        uint64_t *dst
        uint64_t *nbytes
    size_t kvn_ranges_scratch(size_t count)
    size_t kvn_ranges_arrange(const kvn_ranges *from_, size_t count, kvn_ranges *to,
                              uint64_t *scratch)
    size_t kvn_ranges_overlap(const uint64_t *starts, const uint64_t *nbytes, size_t count,
                              uint64_t *scratch, size_t *other)
    size_t kvn_ranges_locate(const uint64_t *firsts, const uint64_t *lasts, size_t num_pieces,
                             const uint64_t *starts, const uint64_t *nbytes, size_t count,
                             uint64_t *found, int *passes)
    ctypedef struct kvn_pieces:
        const uint64_t *firsts
        const uint64_t *lasts
        const uint64_t *owners
        size_t count
    bint kvn_ranges_pair(const kvn_pieces *own, const kvn_pieces *peer, uint64_t num_peer_extents,
                         const uint64_t *local, const uint64_t *remote, const uint64_t *nbytes,
                         size_t count, uint64_t *pairs, c_bool *alike)
    size_t kvn_ranges_first_bad(const uint64_t *local, const uint64_t *remote,
                                const uint64_t *nbytes, size_t count)
    size_t kvn_rows_choose(const uint64_t *local, size_t num_local, const uint64_t *local_at,
                           const uint64_t *remote, size_t num_remote, const uint64_t *remote_at,
                           size_t count, uint64_t *here, uint64_t *there, uint64_t *nbytes,
                           uint64_t *total)


cdef tuple NAMES_OF_RANGES = ("local", "remote", "nbytes")


cdef tuple empty_columns(size_t count):
    """Return uninitialized columns of local addresses, remote addresses and sizes."""
    return numpy.empty(count, UINT64), numpy.empty(count, UINT64), numpy.empty(count, UINT64)


cdef uint64_t as_uint64(str name, value) except? 0:
    cdef object number
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__}; it must be int") from None
    if not 0 <= number < 1 << 64:
        raise TypeError(f"{name}={number:#x} is out of range [0, 2**64)")  # any int has hex
    return number


cdef class TransferOpDesc:
    """A copy between memory of this process and of a peer, by addresses.

    Args:
        local_addr: address of the first byte in this process.
        remote_addr: address of the first byte in the peer.
        len: size in bytes.
    """
    # Native because a transfer has thousands of them, and reading three attributes of a Python
    # object takes as long as copying 2 KiB.
    cdef uint64_t local_, remote_, nbytes_

    def __init__(self, local_addr, remote_addr, len):
        self.local_ = as_uint64("local_addr", local_addr)
        self.remote_ = as_uint64("remote_addr", remote_addr)
        self.nbytes_ = as_uint64("len", len)

    @property
    def local_addr(self):
        """Address of the first byte in this process."""
        return self.local_

    @local_addr.setter
    def local_addr(self, value):
        self.local_ = as_uint64("local_addr", value)

    @property
    def remote_addr(self):
        """Address of the first byte in the peer."""
        return self.remote_

    @remote_addr.setter
    def remote_addr(self, value):
        self.remote_ = as_uint64("remote_addr", value)

    @property
    def len(self):
        """Size in bytes."""
        return self.nbytes_

    @len.setter
    def len(self, value):
        self.nbytes_ = as_uint64("len", value)

    def __reduce__(self):
        return TransferOpDesc, (self.local_, self.remote_, self.nbytes_)

    def __repr__(self):
        return (f"TransferOpDesc(local_addr={self.local_:#x}, remote_addr={self.remote_:#x},"
                f" len={self.nbytes_})")


def address_columns(op_descs):
    """Return the attributes of a list or tuple of TransferOpDesc as three new uint64 columns.

    Returns:
        Local addresses, remote addresses, sizes.
    """
    cdef Py_ssize_t i = 0
    cdef Py_ssize_t count
    cdef TransferOpDesc it
    cdef Py_buffer out[3]
    if not isinstance(op_descs, (list, tuple)):
        raise TypeError(f"op_descs is a {type(op_descs).__name__}; it must be a list of"
                        " TransferOpDesc")
    # A copy, because another thread may change the list meanwhile.
    cdef tuple given = tuple(op_descs)
    count = len(given)
    columns = empty_columns(count)
    acquire_columns(out, columns, NAMES_OF_RANGES)
    try:
        for one in given:
            if not isinstance(one, TransferOpDesc):
                raise TypeError(f"op_descs[{i}] is a {type(one).__name__}; it must be a"
                                " TransferOpDesc")
            it = <TransferOpDesc>one
            (<uint64_t *>out[0].buf)[i] = it.local_
            (<uint64_t *>out[1].buf)[i] = it.remote_
            (<uint64_t *>out[2].buf)[i] = it.nbytes_
            i += 1
    finally:
        release_columns(out, 3)
    return columns


cdef uint64_t *scratch_for(size_t count) except NULL:
    cdef uint64_t *scratch = <uint64_t *>malloc((kvn_ranges_scratch(count) + 1) * sizeof(uint64_t))
    if scratch is NULL:
        raise MemoryError(f"no memory to sort {count} ranges in")
    return scratch


def first_overlap(starts, nbytes):
    """Return the indices of two ranges that share a byte, or None.

    Args:
        starts, nbytes: contiguous uint64 columns of ranges of at least 1 byte that end by 2**64.
    """
    cdef Py_buffer columns[2]
    cdef size_t first, second = 0
    cdef uint64_t *scratch
    acquire_columns(columns, (starts, nbytes), ("starts", "nbytes"))
    try:
        scratch = scratch_for(columns[0].shape[0])
        with nogil:
            first = kvn_ranges_overlap(<const uint64_t *>columns[0].buf,
                                       <const uint64_t *>columns[1].buf, columns[0].shape[0],
                                       scratch, &second)
        free(scratch)
    finally:
        release_columns(columns, 2)
    return None if first == KVN_NO_OVERLAP else (first, second)


def locate(firsts, lasts, starts, nbytes):
    """Find the piece of memory in which each range begins.

    Args:
        firsts, lasts: contiguous uint64 columns: first and last byte of pieces, ascending and
            disjoint.
        starts, nbytes: contiguous uint64 columns of ranges of at least 1 byte.

    Returns:
        A new column with the index of the piece of each range; the first range that begins in no
        piece, or -1; whether a range before it extends beyond its piece.
    """
    cdef Py_buffer columns[5]
    cdef int passes = 0
    cdef size_t done, count
    names = ("firsts", "lasts", "starts", "nbytes", "out")
    out = numpy.empty(len(starts), numpy.uint64)
    acquire_columns(columns, (firsts, lasts, starts, nbytes, out), names, False)
    try:
        check_length(columns, 0, 1, names)
        check_length(columns, 2, 3, names)
        count = columns[2].shape[0]
        with nogil:
            done = kvn_ranges_locate(<const uint64_t *>columns[0].buf,
                                     <const uint64_t *>columns[1].buf, columns[0].shape[0],
                                     <const uint64_t *>columns[2].buf,
                                     <const uint64_t *>columns[3].buf, count,
                                     <uint64_t *>columns[4].buf, &passes)
    finally:
        release_columns(columns, 5)
    return out, (-1 if done == count else done), bool(passes)


@cython.final
cdef class Pieces:
    """Memory in which ranges are found: ascending, disjoint pieces, each of one extent.

    Args:
        firsts, lasts: contiguous uint64 columns: first and last byte of each piece.
        owners: contiguous uint64 column: the extent of each piece; None: its own number.
        num_extents: number of extents.
    """
    cdef Py_buffer columns[3]
    cdef int held
    cdef kvn_pieces pieces
    cdef uint64_t num_extents

    def __init__(self, firsts, lasts, owners, uint64_t num_extents):
        if self.held:
            raise TypeError("pieces are made once")
        given = (firsts, lasts) if owners is None else (firsts, lasts, owners)
        acquire_columns(self.columns, given, ("firsts", "lasts", "owners"))
        self.held = len(given)
        self.num_extents = num_extents
        self.pieces.firsts = <const uint64_t *>self.columns[0].buf
        self.pieces.lasts = <const uint64_t *>self.columns[1].buf
        self.pieces.owners = NULL if owners is None else <const uint64_t *>self.columns[2].buf
        self.pieces.count = self.columns[0].shape[0]

    def __dealloc__(self):
        release_columns(self.columns, self.held)


def place(Pieces own not None, Pieces peer not None, local, remote, nbytes, bint pulls):
    """Find copies in registered memory; lower them in the order of extents and source, merged.

    Args:
        own, peer: memory of both sides.
        local, remote, nbytes: contiguous uint64 columns of ranges that `first_bad` has passed.
        pulls: the remote ranges are the sources.

    Raises:
        ValueError: no range, or another thread has written an impossible one into a column.

    Returns:
        None if a range lies in no piece, or continues in the next one. Otherwise the descriptors;
        for each pair of extents (own, peer, its first descriptor); the pair of each given range as
        own * peer.num_extents + peer, or None if there is one pair; and the indices of two
        descriptors whose destinations share a byte, or None.
    """
    cdef Py_buffer columns[3]
    cdef kvn_ranges from_, to
    cdef size_t count, stride, left = 0, i, first = KVN_NO_OVERLAP, second = 0
    cdef uint64_t *scratch = NULL
    cdef uint64_t *pairs
    cdef uint64_t *groups
    cdef uint64_t *own_columns[3]
    cdef bint found
    cdef c_bool alike = True
    cdef list parts = []
    cdef Descriptors placed = Descriptors.__new__(Descriptors)
    column = None
    acquire_columns(columns, (local, remote, nbytes), NAMES_OF_RANGES)
    try:
        count = columns[0].shape[0]
        if count == 0:
            raise ValueError("nbytes: expected at least 1 range")
        scratch = <uint64_t *>malloc((kvn_ranges_scratch(count) + 5 * count) * sizeof(uint64_t))
        if scratch is NULL:
            raise MemoryError(f"no memory to sort {count} ranges in")
        pairs = scratch + kvn_ranges_scratch(count)
        groups = pairs + count
        # Copies, because another thread may write to the caller's columns meanwhile.
        for i in range(3):
            own_columns[i] = groups + (i + 1) * count
            memcpy(own_columns[i], columns[i].buf, count * sizeof(uint64_t))
        first = kvn_ranges_first_bad(own_columns[0], own_columns[1], own_columns[2], count)
        if first != count:
            raise ValueError(f"range {first} was written to since it was checked")
        first = KVN_NO_OVERLAP
        stride = kvn_column_stride(count)
        placed.reserve(3 * stride)
        to.dst = <uint64_t *>placed.buffer
        to.src = <uint64_t *>(<char *>placed.buffer + stride)
        to.nbytes = <uint64_t *>(<char *>placed.buffer + 2 * stride)
        from_.src = own_columns[1 if pulls else 0]
        from_.dst = own_columns[0 if pulls else 1]
        from_.nbytes = own_columns[2]
        with nogil:
            found = kvn_ranges_pair(&own.pieces, &peer.pieces, peer.num_extents, own_columns[0],
                                    own_columns[1], own_columns[2], count, pairs, &alike)
            if found:
                from_.groups = NULL if alike else pairs
                to.groups = NULL if alike else groups
                left = kvn_ranges_arrange(&from_, count, &to, scratch)
                first = kvn_ranges_overlap(to.dst, to.nbytes, left, scratch, &second)
        if not found:
            return None
        for i in range(1 if alike else left):
            if i == 0 or groups[i] != groups[i - 1]:
                parts.append(divmod(pairs[0] if alike else groups[i], peer.num_extents) + (i,))
        if not alike:
            column = numpy.frombuffer(PyBytes_FromStringAndSize(<char *>pairs, 8 * count),
                                      numpy.uint64)
        placed.num_descriptors = left
        for i in range(left):
            placed.num_bytes += to.nbytes[i]
        stride = kvn_column_stride(left)  # merged ones leave less than was reserved
        memmove(<char *>placed.buffer + stride, to.src, left * sizeof(uint64_t))
        memmove(<char *>placed.buffer + 2 * stride, to.nbytes, left * sizeof(uint64_t))
    finally:
        free(scratch)
        release_columns(columns, 3)
    return placed, parts, column, None if first == KVN_NO_OVERLAP else (first, second)


def first_bad(local, remote, nbytes):
    """Return the index of the first impossible range, or -1.

    A range is impossible if it is empty, begins at 0 or passes 2**64, at either side.

    Args:
        local, remote, nbytes: contiguous uint64 columns of the same length.
    """
    cdef Py_buffer columns[3]
    cdef size_t count, found
    acquire_columns(columns, (local, remote, nbytes), NAMES_OF_RANGES)
    count = columns[0].shape[0]
    found = kvn_ranges_first_bad(<const uint64_t *>columns[0].buf,
                                 <const uint64_t *>columns[1].buf,
                                 <const uint64_t *>columns[2].buf, count)
    release_columns(columns, 3)
    return -1 if found == count else found


cdef int acquire_rows(Py_buffer *rows, object source, str name) except -1:
    """Take an array of rows of address, size and device; on success the caller releases it."""
    PyObject_GetBuffer(source, rows, PyBUF_FULL_RO)
    if not (is_native_uint64(rows) and rows.ndim == 2 and rows.shape[1] == 3
            and rows.strides[1] == 8 and (rows.shape[0] < 2 or rows.strides[0] == 24)):
        PyBuffer_Release(rows)
        raise TypeError(f"{name}: expected a contiguous array of uint64 with 3 columns")
    return 0


cdef char acquire_indices(Py_buffer *indices, object source, str name) except 0:
    """Take a column of integers of any width; on success the caller releases it.

    Returns the letter of its format.
    """
    cdef const char *letter
    PyObject_GetBuffer(source, indices, PyBUF_FULL_RO)
    letter = indices.format
    if letter is not NULL and letter[0] in (c"@", c"="):
        letter += 1
    if indices.ndim != 1:
        num_dimensions = indices.ndim
        PyBuffer_Release(indices)
        raise ValueError(f"{name} has {num_dimensions} dimensions; it must have 1")
    if letter is NULL or strlen(letter) != 1 or strchr(b"bBhHiIlLqQ", letter[0]) is NULL:
        item = "B" if letter is NULL else letter.decode()
        PyBuffer_Release(indices)
        raise TypeError(f"{name} has items of format {item!r}; expected integers")
    return letter[0]


cdef void widen(const Py_buffer *indices, char letter, uint64_t *out) noexcept nogil:
    """Write integers of any width as uint64; a negative one becomes a large one."""
    cdef bint is_signed = letter >= c"a"
    cdef int unused = 8 * (8 - <int>indices.itemsize)
    cdef uint64_t item
    cdef Py_ssize_t i
    for i in range(indices.shape[0]):
        item = 0
        memcpy(&item, <const char *>indices.buf + i * indices.strides[0], indices.itemsize)
        item <<= unused  # assumes a little-endian machine
        out[i] = <uint64_t>(<int64_t>item >> unused) if is_signed else item >> unused


def choose(local, remote, local_indices=None, remote_indices=None):
    """Choose rows of two lists of descriptors, which have address, size and device.

    Args:
        local, remote: contiguous uint64 arrays of shape (n, 3).
        local_indices, remote_indices: columns of integers, equal in length; None: all rows.

    Returns:
        New columns of local addresses, remote addresses and sizes, and the sum of the sizes; and
        the position of the first choice whose row does not exist, or whose sizes differ, or -1.
    """
    cdef Py_buffer rows[2]
    cdef Py_buffer indices[2]
    cdef Py_buffer out[3]
    cdef char letters[2]
    cdef uint64_t *at[2]
    cdef int num_rows = 0, num_indices = 0, num_out = 0
    cdef size_t count, done
    cdef uint64_t total = 0
    if (local_indices is None) != (remote_indices is None):
        raise TypeError("local_indices, remote_indices: expected two columns, or None twice")
    at[0] = at[1] = NULL
    try:
        acquire_rows(&rows[0], local, "local")
        num_rows = 1
        acquire_rows(&rows[1], remote, "remote")
        num_rows = 2
        if local_indices is not None:
            letters[0] = acquire_indices(&indices[0], local_indices, "local_indices")
            num_indices = 1
            letters[1] = acquire_indices(&indices[1], remote_indices, "remote_indices")
            num_indices = 2
        count = indices[0].shape[0] if num_indices else rows[0].shape[0]
        if count != <size_t>(indices[1].shape[0] if num_indices else rows[1].shape[0]):
            raise ValueError(f"remote: expected {count} rows or indices, as many as local has")
        columns = empty_columns(count)
        acquire_columns(out, columns, NAMES_OF_RANGES)
        num_out = 3
        if num_indices:
            at[0] = <uint64_t *>malloc((2 * count + 1) * sizeof(uint64_t))
            if at[0] is NULL:
                raise MemoryError(f"no memory for {count} indices")
            at[1] = at[0] + count
            widen(&indices[0], letters[0], at[0])
            widen(&indices[1], letters[1], at[1])
        done = kvn_rows_choose(
            <const uint64_t *>rows[0].buf, rows[0].shape[0], at[0],
            <const uint64_t *>rows[1].buf, rows[1].shape[0], at[1], count,
            <uint64_t *>out[0].buf, <uint64_t *>out[1].buf, <uint64_t *>out[2].buf, &total)
    finally:
        free(at[0])
        release_columns(rows, num_rows)
        release_columns(indices, num_indices)
        release_columns(out, num_out)
    return columns + (total, -1 if done == count else done)
