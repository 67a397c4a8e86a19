"""Counters for any thread, each updated by one native call that no signal handler interrupts."""

cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

__all__ = ["Histogram", "Traffic"]


@cython.final
@cython.auto_pickle(False)
cdef class Histogram:
    """A histogram of durations, with the sum of the bytes that were moved.

    Args:
        bounds: ascending upper bounds of the buckets in seconds; one more bucket has the rest.
    """
    cdef uint64_t *counts
    cdef double *bounds
    cdef Py_ssize_t num_bounds
    cdef uint64_t nbytes
    cdef double seconds

    def __cinit__(self, tuple bounds not None):
        cdef Py_ssize_t i
        self.num_bounds = len(bounds)
        self.bounds = <double *>malloc((self.num_bounds + 1) * sizeof(double))
        self.counts = <uint64_t *>malloc((self.num_bounds + 1) * sizeof(uint64_t))
        if self.bounds is NULL or self.counts is NULL:
            raise MemoryError
        memset(self.counts, 0, (self.num_bounds + 1) * sizeof(uint64_t))
        for i in range(self.num_bounds):
            self.bounds[i] = bounds[i]

    def __dealloc__(self):
        free(self.bounds)
        free(self.counts)

    @cython.critical_section
    def add(self, double seconds, uint64_t nbytes):
        """Count a call of `seconds` that moved `nbytes`."""
        cdef Py_ssize_t bucket = 0
        while bucket < self.num_bounds and self.bounds[bucket] < seconds:
            bucket += 1
        self.counts[bucket] += 1
        self.seconds += seconds
        self.nbytes += nbytes

    @cython.critical_section
    def snapshot(self):
        """Return bytes, seconds and the counts of the buckets, all at one moment."""
        return self.nbytes, self.seconds, [self.counts[i] for i in range(self.num_bounds + 1)]


@cython.final
@cython.auto_pickle(False)
cdef class Traffic:
    """Traffic of a link: operations, and bytes that were pulled and pushed."""
    cdef readonly uint64_t operations
    cdef readonly uint64_t pulled
    cdef readonly uint64_t pushed

    @cython.critical_section
    def add(self, uint64_t operations, uint64_t pulled=0, uint64_t pushed=0):
        """Add to the counters."""
        self.operations += operations
        self.pulled += pulled
        self.pushed += pushed
