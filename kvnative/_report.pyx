"""Outcomes of transfers, and how long callers wait for them."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvnative._native cimport *

__all__ = ["Report"]

# A wait notices Ctrl-C after this time at the latest.
cdef int64_t SIGNALS_NS = 100_000_000
cdef double NS_PER_MS = 1e6


cdef int64_t deadline_of(object timeout_ms) except -1:
    """Return the CLOCK_MONOTONIC time in `timeout_ms`, in ns."""
    cdef double milliseconds
    if timeout_ms is None:
        return KVN_FOREVER
    milliseconds = timeout_ms
    if not milliseconds >= 0:
        raise ValueError(f"timeout_ms = {timeout_ms!r}: expected None or a number >= 0")
    if milliseconds * NS_PER_MS >= <double>KVN_FOREVER - <double>kvn_now_ns():
        return KVN_FOREVER
    return kvn_now_ns() + <int64_t>(milliseconds * NS_PER_MS)


cdef int64_t next_look(int64_t deadline_ns) noexcept nogil:
    """Return when a wait until `deadline_ns` next checks for signals."""
    cdef int64_t look = kvn_now_ns() + SIGNALS_NS
    return look if look < deadline_ns else deadline_ns


@cython.final
@cython.auto_pickle(False)
@cython.no_gc
cdef class Report:
    """The outcome of a task, or its progress.

    Attributes:
        status: KVN_OK, KVN_PENDING or a negative KVN_ constant.
        code: error number of the system or of a vendor's library, or 0.
        failed: index of the first descriptor known to have failed, or None.
        bytes_done: bytes that have moved, including those of unconfirmed descriptors.
        descriptors_done: number of confirmed descriptors; 0 while pending.
        unconfirmed: ascending half-open ranges (first, last) of descriptors that may be incomplete
            at the destination. All others are complete.
        message: error message, or "".
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a Report comes from an Executor or a task")

    def __repr__(self):
        return (f"Report(status={self.status}, code={self.code}, failed={self.failed},"
                f" bytes_done={self.bytes_done}, descriptors_done={self.descriptors_done},"
                f" unconfirmed={self.unconfirmed}, message={self.message!r})")


cdef Report progress_of(uint64_t bytes_done, uint64_t count):
    cdef Report self = Report.__new__(Report)
    self.status = KVN_PENDING
    self.bytes_done = bytes_done
    self.unconfirmed = ((0, count),)
    self.message = ""
    return self


cdef Report report_of(const kvn_report *native, uint64_t count):
    cdef uint32_t i
    if native.status == KVN_OK:
        return report_with(native, count, ())
    return report_with(native, count,
                       tuple([(native.unconfirmed[i].first, native.unconfirmed[i].last)
                              for i in range(native.num_unconfirmed)]))


cdef Report report_with(const kvn_report *native, uint64_t count, tuple unconfirmed):
    cdef Report self = Report.__new__(Report)
    self.status = native.status
    self.code = native.code
    self.failed = None if native.failed == KVN_NO_DESCRIPTOR else native.failed
    self.bytes_done = native.bytes_done
    self.message = "" if native.message[0] == 0 else native.message.decode(errors="replace")
    self.unconfirmed = unconfirmed
    self.descriptors_done = count
    for first, last in unconfirmed:
        self.descriptors_done -= last - first
    return self
