# What other Cython modules may see of lowering: cimport this, nothing else of _lower.
from libc.stdint cimport int64_t, uint64_t
from libc.stddef cimport size_t

from kvnative._lower_c cimport kvn_columns, kvn_recipe


# New descriptors, or `out`, of a recipe; errors as of lower(), under the names of its arguments.
cdef Descriptors lower_recipe(kvn_recipe *recipe, tuple names, Descriptors out)


cdef class Descriptors:
    """A descriptor array. A consumer wraps its use in hold() and release(): between the two the
    array cannot be lowered into again, so what a task reads never changes under it."""
    # This object allocates and frees the buffer; every address handed out points into it.
    cdef void *buffer
    cdef size_t capacity             # bytes of buffer
    cdef size_t num_descriptors
    cdef uint64_t num_bytes          # sum of nbytes
    cdef int64_t leases              # readers, or KVN_BEING_WRITTEN; see lower.h

    # For messages: who uses the array.
    cdef str users(self)
    # Room for nbytes; the caller is the writer.
    cdef int reserve(self, size_t nbytes) except -1
    # BufferError while the array is being written.
    cdef int hold(self) except -1
    # Ends one hold(); any thread, no GIL needed.
    cdef void release(self) noexcept nogil
    # hold() and then the columns, so that they cannot change between the two.
    cdef kvn_columns hold_columns(self) except *
    # The columns, valid while held.
    cdef kvn_columns columns(self) noexcept
