# Declarations for Cython modules that lower plans or use descriptors.
from libc.stdint cimport int64_t, uint64_t
from libc.stddef cimport size_t

from kvnative._lower_c cimport kvn_columns, kvn_recipe


# Lower a recipe into `out`, or into new descriptors. Errors are those of lower(), with `names`.
cdef Descriptors lower_recipe(kvn_recipe *recipe, tuple names, Descriptors out)


cdef class Descriptors:
    """A descriptor array. A consumer wraps its use in hold() and release(): between the two the
    array cannot be lowered into again, so it does not change while a task reads it."""
    # This object allocates and frees the buffer; every address handed out points into it.
    cdef void *buffer
    cdef size_t capacity             # bytes of buffer
    cdef size_t num_descriptors
    cdef uint64_t num_bytes          # sum of nbytes
    cdef int64_t leases              # readers, or KVN_BEING_WRITTEN; see lower.h

    # Return the users of the array, for messages.
    cdef str users(self)
    # Make room for nbytes; the caller becomes the writer.
    cdef int reserve(self, size_t nbytes) except -1
    # Raise BufferError while the array is being written.
    cdef int hold(self) except -1
    # End one hold(), in any thread, without the GIL.
    cdef void release(self) noexcept nogil
    # Hold the array, and return its columns.
    cdef kvn_columns hold_columns(self) except *
    # Return the columns, which are valid while the array is held.
    cdef kvn_columns columns(self) noexcept
