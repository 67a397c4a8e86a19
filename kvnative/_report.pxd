# Declarations for Cython modules that use reports.
from libc.stdint cimport int64_t, uint64_t

from kvnative._native cimport kvn_report

# Return the CLOCK_MONOTONIC time, in ns, that is `timeout_ms` from now.
cdef int64_t deadline_of(object timeout_ms) except -1
# Return the time at which a wait until `deadline_ns` next checks for signals.
cdef int64_t next_look(int64_t deadline_ns) noexcept nogil


cdef class Report:
    cdef readonly int status
    cdef readonly int code
    cdef readonly object failed
    cdef readonly unsigned long long bytes_done
    cdef readonly unsigned long long descriptors_done
    cdef readonly tuple unconfirmed
    cdef readonly str message


# Return the Report of `count` descriptors in flight, with status KVN_PENDING.
cdef Report progress_of(uint64_t bytes_done, uint64_t count)
# Convert `native`, the outcome of `count` descriptors.
cdef Report report_of(const kvn_report *native, uint64_t count)
# Likewise, with `unconfirmed` instead of the spans in `native`.
cdef Report report_with(const kvn_report *native, uint64_t count, tuple unconfirmed)
