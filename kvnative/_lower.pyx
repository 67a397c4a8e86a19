"""Lowering of segments and base addresses to the descriptor array of a backend."""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_WRITABLE
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from kvnative._crossing cimport acquire_columns, acquire_uint64, check_length, release_columns
from kvnative._lower_c cimport *

import numpy

__all__ = ["Descriptors", "lower"]

# Argument names of lower() and of from_columns(), for messages.
cdef enum:
    NBYTES = KVN_ARG_NBYTES
    SRC_OFFSETS = KVN_ARG_SRC_OFFSETS
    DST_OFFSETS = KVN_ARG_DST_OFFSETS
    SRC_BASES = KVN_ARG_SRC_BASES
    DST_BASES = KVN_ARG_DST_BASES
    NUM_ARGUMENTS = KVN_NUM_ARGUMENTS

    MAX_REPEATS = KVN_MAX_REPEATS
    COUNTS = KVN_ARG_COUNTS

cdef tuple LOWER_NAMES = ("nbytes", "src_offsets", "dst_offsets", "src_bases", "dst_bases")
cdef tuple COLUMN_NAMES = ("nbytes", "src", "dst", "src_bases", "dst_bases")


cdef int refuse(const kvn_refusal *refusal, tuple names) except -1:
    cdef str item
    if <int>refusal.argument >= COUNTS:
        level = <int>refusal.argument - COUNTS
        item = f"repeats[{level}].counts[{refusal.index}] = {refusal.value}"
        if refusal.value == 0:
            raise ValueError(f"{item}: expected at least 1")
        raise OverflowError(f"{item}: the runs, or the end of them, pass 2**64 - 1")
    item = f"{names[<int>refusal.argument]}[{refusal.index}] = {refusal.value}"
    if refusal.argument == KVN_ARG_NBYTES and refusal.value == 0:
        raise ValueError(f"{item}: expected at least 1 byte")
    what = "the total of bytes" if refusal.argument == KVN_ARG_NBYTES else "the end of a range"
    raise OverflowError(f"{item}: expected at most {refusal.most}, or {what} passes 2**64 - 1")


cdef Descriptors lower_sources(tuple sources, tuple names, Descriptors out, repeats=()):
    """Lower columns that are in the order of kvn_argument."""
    cdef Py_buffer columns[NUM_ARGUMENTS + MAX_REPEATS]
    cdef kvn_recipe recipe
    cdef int held = 0
    cdef int level
    if len(repeats) > MAX_REPEATS:
        raise ValueError(f"repeats: expected at most {MAX_REPEATS} levels, got {len(repeats)}")
    acquire_columns(columns, sources, names, False)
    held = NUM_ARGUMENTS
    try:
        check_length(columns, NBYTES, SRC_OFFSETS, names)
        check_length(columns, NBYTES, DST_OFFSETS, names)
        check_length(columns, SRC_BASES, DST_BASES, names)
        for level in range(len(repeats)):
            counts, src_stride, dst_stride = repeats[level]
            acquire_uint64(&columns[held], counts, f"repeats[{level}].counts")
            held += 1
            if columns[held - 1].shape[0] != columns[NBYTES].shape[0]:
                raise ValueError(
                    f"repeats[{level}].counts: expected {columns[NBYTES].shape[0]} items, as in"
                    f" {names[NBYTES]}, got {columns[held - 1].shape[0]}"
                )
            recipe.repeats[level].counts = <const uint64_t *>columns[held - 1].buf
            recipe.repeats[level].src_stride = src_stride
            recipe.repeats[level].dst_stride = dst_stride
        recipe.num_repeats = len(repeats)
        recipe.nbytes = <const uint64_t *>columns[NBYTES].buf
        recipe.src_offsets = <const uint64_t *>columns[SRC_OFFSETS].buf
        recipe.dst_offsets = <const uint64_t *>columns[DST_OFFSETS].buf
        recipe.num_segments = columns[NBYTES].shape[0]
        recipe.src_bases = <const uint64_t *>columns[SRC_BASES].buf
        recipe.dst_bases = <const uint64_t *>columns[DST_BASES].buf
        recipe.num_pairs = columns[SRC_BASES].shape[0]
        return lower_recipe(&recipe, names, out)
    finally:
        release_columns(columns, held)


cdef Descriptors lower_recipe(kvn_recipe *recipe, tuple names, Descriptors out):
    cdef kvn_refusal refusal
    cdef uint64_t total_nbytes = 0
    cdef size_t array_nbytes = 0
    cdef int refused
    with nogil:
        refused = kvn_lower_count(recipe, &array_nbytes, &refusal)
    if refused:
        if refusal.argument == KVN_ARG_NBYTES:
            raise OverflowError(f"{recipe.num_pairs} tensor pairs x {recipe.num_runs} segments:"
                                f" their array passes 2**63 - 1 bytes")
        refuse(&refusal, names)
    with nogil:
        refused = kvn_lower_check(recipe, &total_nbytes, &refusal)
    if refused:
        refuse(&refusal, names)
    if out is None:
        out = Descriptors.__new__(Descriptors)
    if kvn_lease_write(&out.leases) != 0:
        raise BufferError(f"out: {out!r} is in use by {out.users()}")
    try:
        out.reserve(array_nbytes)
        out.num_descriptors = recipe.num_pairs * recipe.num_runs
        out.num_bytes = total_nbytes
        with nogil:
            kvn_lower(recipe, <uint64_t *>out.buffer)
    finally:
        kvn_lease_written(&out.leases)
    return out


def lower(src_offsets, dst_offsets, nbytes, src_bases, dst_bases, Descriptors out=None, repeats=()):
    """Write the descriptors of every segment of every tensor pair, pair by pair.

    Descriptor ``pair * n + segment`` moves ``nbytes[segment]`` bytes from ``src_bases[pair] +
    src_offsets[segment]`` to ``dst_bases[pair] + dst_offsets[segment]``. A segment that repeats has
    a descriptor for each repetition.

    Args:
        src_offsets, dst_offsets, nbytes: contiguous uint64 columns of n segments, in bytes;
            every nbytes is at least 1.
        src_bases, dst_bases: contiguous uint64 columns of P addresses, one per tensor pair.
        out: descriptors to write into; their buffer is reused, and grows at least twofold.
        repeats: at most two levels, outermost first: (counts, src_stride, dst_stride), a contiguous
            uint64 column of n counts, each at least 1, and the distances in bytes.

    Returns:
        ``out``, or new descriptors: P * n of them, repeats counted.
    """
    return lower_sources((nbytes, src_offsets, dst_offsets, src_bases, dst_bases), LOWER_NAMES, out,
                         repeats)


@cython.final
@cython.no_gc  # its owner refers to no Python object, so no cycle can pass through the pair
cdef class _View:
    """A read-only column of a descriptor array, as NumPy sees it without a copy.

    The view holds the array, which is neither freed nor rewritten meanwhile.
    """
    # The owner of the memory at `start`, held until __dealloc__.
    cdef Descriptors owner
    cdef const uint64_t *start
    cdef Py_ssize_t count
    cdef Py_ssize_t item_nbytes

    @staticmethod
    cdef object array(Descriptors owner, kvn_argument which):
        """Return a NumPy array over one column."""
        cdef _View view = _View.__new__(_View)
        cdef kvn_columns columns = owner.hold_columns()
        view.owner = owner
        if which == KVN_ARG_NBYTES:
            view.start = columns.nbytes
        else:
            view.start = columns.src if which == KVN_ARG_SRC_OFFSETS else columns.dst
        view.count = columns.count
        view.item_nbytes = sizeof(uint64_t)
        return numpy.asarray(view)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if flags & PyBUF_WRITABLE or self.owner is None:
            raise BufferError("descriptors are read-only, and only their owner makes views")
        buffer.buf = <void *>self.start
        buffer.obj = self
        buffer.len = self.count * self.item_nbytes
        buffer.itemsize = self.item_nbytes
        buffer.readonly = 1
        buffer.ndim = 1
        buffer.format = <char *>b"Q" if flags & PyBUF_FORMAT else NULL
        buffer.shape = &self.count
        buffer.strides = &self.item_nbytes
        buffer.suboffsets = NULL
        buffer.internal = NULL

    def __dealloc__(self):
        if self.owner is not None:
            self.owner.release()


@cython.final
cdef class Descriptors:
    """A descriptor array for a backend, empty until lower() or from_columns() fills it.

    ``len()`` is its number of descriptors. Views are read-only NumPy arrays over its memory. The
    array cannot be the ``out`` of lower() while a view lives or a task reads it.
    """

    def __dealloc__(self):
        kvn_descriptors_free(self.buffer)

    @staticmethod
    def from_columns(dst, src, nbytes):
        """Copy the caller's own descriptors, without the checks of `kvplan.submit`.

        A wrong address ends the process once an executor moves it.

        Args:
            dst, src: contiguous uint64 columns of addresses.
            nbytes: contiguous uint64 column of sizes in bytes, each at least 1.
        """
        # A tensor pair at address 0, so that offsets are addresses.
        base = numpy.zeros(1, dtype=numpy.uint64)
        return lower_sources((nbytes, src, dst, base, base), COLUMN_NAMES, None)

    @staticmethod
    def joined(parts):
        """Copy the descriptors of several arrays into one, one array after another.

        Args:
            parts: a sequence of Descriptors.
        """
        cdef Descriptors out = Descriptors.__new__(Descriptors)
        cdef Descriptors part
        cdef tuple held = ()
        cdef kvn_columns from_
        cdef kvn_columns to
        cdef size_t done = 0
        try:
            for part in parts:
                if part is None:
                    raise TypeError("parts: expected Descriptors, got None")
                part.hold()
                held += (part,)
                if part.num_bytes > <uint64_t>0xFFFFFFFFFFFFFFFF - out.num_bytes:
                    raise OverflowError("parts: the total of bytes passes 2**64 - 1")
                out.num_bytes += part.num_bytes
                out.num_descriptors += part.num_descriptors
            out.reserve(3 * kvn_column_stride(out.num_descriptors))
            to = out.columns()
            for part in held:
                from_ = part.columns()
                memcpy(<uint64_t *>to.dst + done, from_.dst, from_.count * sizeof(uint64_t))
                memcpy(<uint64_t *>to.src + done, from_.src, from_.count * sizeof(uint64_t))
                memcpy(<uint64_t *>to.nbytes + done, from_.nbytes, from_.count * sizeof(uint64_t))
                done += from_.count
        finally:
            for part in held:
                part.release()
        return out

    @property
    def count(self):
        """Number of descriptors."""
        return self.num_descriptors

    @property
    def total_nbytes(self):
        """Sum of `nbytes`."""
        return self.num_bytes

    @property
    def dst(self):
        """Destination addresses: (count,) read-only uint64."""
        return _View.array(self, KVN_ARG_DST_OFFSETS)

    @property
    def src(self):
        """Source addresses: (count,) read-only uint64."""
        return _View.array(self, KVN_ARG_SRC_OFFSETS)

    @property
    def nbytes(self):
        """Sizes in bytes: (count,) read-only uint64."""
        return _View.array(self, KVN_ARG_NBYTES)

    def __len__(self):
        return self.num_descriptors

    def __repr__(self):
        return f"<Descriptors: {self.num_descriptors} descriptors, {self.num_bytes} bytes>"

    cdef str users(self):
        cdef int64_t leases = kvn_lease_count(&self.leases)
        return "lower() itself" if leases < 0 else f"{leases} views or tasks in flight"

    cdef int reserve(self, size_t nbytes) except -1:
        cdef size_t capacity = self.capacity
        cdef void *buffer
        if self.buffer is not NULL and nbytes <= capacity:
            return 0
        # Twice the old size, so that a growing series of plans allocates rarely.
        capacity = max(nbytes, 2 * capacity)
        buffer = kvn_descriptors_alloc(capacity)
        if buffer is NULL:
            raise MemoryError(f"no memory for {capacity} bytes of descriptors")
        kvn_descriptors_free(self.buffer)
        self.buffer = buffer
        self.capacity = capacity
        return 0

    cdef int hold(self) except -1:
        if kvn_lease_read(&self.leases) != 0:
            raise BufferError(f"{self!r} is being written by lower()")
        return 0

    cdef void release(self) noexcept nogil:
        kvn_lease_done(&self.leases)

    cdef kvn_columns hold_columns(self) except *:
        self.hold()
        return self.columns()

    cdef kvn_columns columns(self) noexcept:
        cdef kvn_columns columns
        cdef size_t stride = kvn_column_stride(self.num_descriptors)
        columns.dst = <const uint64_t *>self.buffer
        columns.src = <const uint64_t *>(<char *>self.buffer + stride)
        columns.nbytes = <const uint64_t *>(<char *>self.buffer + 2 * stride)
        columns.count = self.num_descriptors
        columns.first = 0
        columns.caller = KVN_CALLER_RETURNS
        columns.after = NULL
        columns.end = NULL
        return columns
