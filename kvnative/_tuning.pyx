"""Thresholds for copies of host memory, and measurements to choose them."""

from libc.errno cimport ENOMEM, errno
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport kvn_columns
from kvnative._native cimport (
    KVN_BYPASS_NBYTES, KVN_MAX_THREADS, KVN_PIECE_MIN, KVN_PIECE_NBYTES, kvn_candidate,
    kvn_copy_past_caches, kvn_measure, kvn_tuning
)

import os
from typing import NamedTuple

from kvnative.cores import usable_cores

__all__ = ["MAX_PIECE_NBYTES", "NEVER", "Tuning", "builtin_tuning", "check_tuning",
           "measure_copies"]

MAX_PIECE_NBYTES = 16 << 20
NEVER = 1 << 62  # a `bypass_nbytes` that no batch reaches

# No measured machine copies faster with more threads.
cdef enum:
    DEFAULT_MAX_THREADS = 16


class Tuning(NamedTuple):
    """Parameters of copies of host memory on a machine.

    Attributes:
        threads: number of copying threads.
        bypass_nbytes: size from which batches are written past the caches; NEVER on a processor
            without such stores.
        piece_nbytes: maximum number of bytes that a thread claims at once.
    """

    threads: int
    bypass_nbytes: int
    piece_nbytes: int


def builtin_tuning():
    """Return the built-in tuning, measured on other machines, for the cores of this process."""
    bypass_nbytes = NEVER if kvn_copy_past_caches() is NULL else KVN_BYPASS_NBYTES
    return Tuning(min(usable_cores(), DEFAULT_MAX_THREADS), bypass_nbytes, KVN_PIECE_NBYTES)


def check_tuning(given):
    """Raise ValueError or TypeError unless every field of a tuning is in range."""
    for name, low, high in (("threads", 1, KVN_MAX_THREADS), ("bypass_nbytes", 0, 2**63 - 1),
                            ("piece_nbytes", KVN_PIECE_MIN, MAX_PIECE_NBYTES)):
        value = getattr(given, name)
        if type(value) is not int:
            raise TypeError(f"{name} = {value!r} must be an int")
        if not low <= value <= high:
            raise ValueError(f"{name} = {value}: expected {low} to {high}")


cdef int fill_tuning(object given, kvn_tuning *tuning) except -1:
    check_tuning(given)
    tuning.bypass_nbytes = given.bypass_nbytes
    tuning.piece_nbytes = given.piece_nbytes
    return 0


def measure_copies(candidates, Descriptors descriptors not None, *, size_t at_once, int rounds,
                   int64_t deadline_ns):
    """Time transfers with each tuning in turn, each with its own threads.

    Args:
        candidates: tunings.
        at_once: number of descriptors of a copy; each copy takes the next ones.
        rounds: number of turns of each tuning, with three copies each, of which the fastest counts.
        deadline_ns: CLOCK_MONOTONIC time after which no copy begins.

    Returns:
        For each complete round the nanoseconds of each candidate; and the share of the requested
        CPU time that the threads got, which is far below 1 on a busy machine.
    """
    if not 1 <= len(candidates) <= 64 or not 1 <= rounds <= 1000:
        raise ValueError(f"{len(candidates)} candidates, rounds = {rounds}: expected 1 to 64, 1 to"
                         " 1000")
    if not 1 <= at_once <= len(descriptors):
        raise ValueError(f"at_once = {at_once}: expected 1 to {len(descriptors)}")
    cdef unsigned count = len(candidates)
    cdef kvn_candidate *native = <kvn_candidate *>calloc(count, sizeof(kvn_candidate))
    cdef int64_t *ns = <int64_t *>calloc(count * rounds, sizeof(int64_t))
    cdef kvn_columns columns
    cdef int done, error
    cdef double share
    try:
        if native is NULL or ns is NULL:
            raise MemoryError()
        for i, tuning in enumerate(candidates):
            fill_tuning(tuning, &native[<unsigned>i].tuning)
            native[<unsigned>i].threads = tuning.threads
        columns = descriptors.hold_columns()
        with nogil:
            done = kvn_measure(native, count, &columns, at_once, rounds, deadline_ns, ns,
                               &share)
            error = errno
            descriptors.release()
        if done < 0:
            raise MemoryError() if error == ENOMEM else OSError(error, os.strerror(error))
        return [[ns[<unsigned>(it * count + i)] for i in range(count)] for it in range(done)], share
    finally:
        free(native)
        free(ns)
