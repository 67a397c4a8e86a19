"""Which way of copying suits which size: the ways there are, and how a choice is measured."""

from libc.errno cimport ENOMEM, errno
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport kvn_columns
from kvnative._native cimport (
    KVN_MAX_THREADS, KVN_NUM_STRATEGIES, KVN_PIECE_MIN, kvn_candidate, kvn_copy_function,
    kvn_measure, kvn_strategy_name, kvn_strategy_needs, kvn_tuning, kvn_tuning_builtin
)

import os
from typing import NamedTuple

from kvnative.cores import usable_cores

__all__ = ["MAX_PIECE_NBYTES", "STRATEGIES", "Tuning", "builtin_tuning", "check_strategy",
           "check_tuning", "measure_copies", "usable_strategies"]

STRATEGIES = tuple(kvn_strategy_name(i).decode() for i in range(<int>KVN_NUM_STRATEGIES))

MAX_PIECE_NBYTES = 16 << 20

# More threads than this do not copy faster on any machine measured; they only crowd it.
cdef enum:
    DEFAULT_MAX_THREADS = 16


class Tuning(NamedTuple):
    """What suits a machine.

    Attributes:
        threads: that copy.
        cached: strategy of batches that the caches hold, one of `usable_strategies()`.
        bypassing: of those from `bypass_nbytes` on.
        bypass_nbytes: from which batches are written past the caches.
        piece_nbytes: the most that a thread takes at once.
    """

    threads: int
    cached: str
    bypassing: str
    bypass_nbytes: int
    piece_nbytes: int


def usable_strategies():
    """Names of the strategies that this processor can execute."""
    return tuple(name for i, name in enumerate(STRATEGIES) if kvn_copy_function(i) is not NULL)


def check_strategy(name):
    """ValueError unless `name` is a strategy that this processor can execute."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy = {name!r}: expected one of {', '.join(map(repr, STRATEGIES))}")
    cdef unsigned number = STRATEGIES.index(name)
    if kvn_copy_function(number) is NULL:
        raise ValueError(
            f"strategy = {name!r} needs {kvn_strategy_needs(number).decode()}; here there are"
            f" {', '.join(map(repr, usable_strategies()))}"
        )


def builtin_tuning():
    """What was measured on other machines, for as many threads as this process has cores."""
    cdef kvn_tuning tuning
    kvn_tuning_builtin(&tuning)
    return Tuning(
        min(usable_cores(), DEFAULT_MAX_THREADS), STRATEGIES[tuning.cached],
        STRATEGIES[tuning.bypassing], tuning.bypass_nbytes, tuning.piece_nbytes
    )


def check_tuning(given):
    """ValueError or TypeError: what is wrong with a tuning, or what this processor lacks for it."""
    for name, low, high in (("threads", 1, KVN_MAX_THREADS), ("bypass_nbytes", 0, 2**63 - 1),
                            ("piece_nbytes", KVN_PIECE_MIN, MAX_PIECE_NBYTES)):
        value = getattr(given, name)
        if type(value) is not int:
            raise TypeError(f"{name} = {value!r} must be an int")
        if not low <= value <= high:
            raise ValueError(f"{name} = {value}: expected {low} to {high}")
    check_strategy(given.cached)
    check_strategy(given.bypassing)


cdef int fill_tuning(object given, kvn_tuning *tuning) except -1:
    check_tuning(given)
    tuning.cached = STRATEGIES.index(given.cached)
    tuning.bypassing = STRATEGIES.index(given.bypassing)
    tuning.bypass_nbytes = given.bypass_nbytes
    tuning.piece_nbytes = given.piece_nbytes
    return 0


def measure_copies(candidates, Descriptors descriptors not None, *, int rounds,
                   int64_t deadline_ns):
    """Time transfers of the descriptors with each tuning in turn, on threads of their own.

    Args:
        candidates: tunings.
        rounds: how many turns each has: of three copies in a row, of which the fastest counts.
        deadline_ns: of CLOCK_MONOTONIC, after which no copy begins.

    Returns:
        A list for each round that is whole: nanoseconds by candidate; and how much of the cores
        that it wanted it was given: far below 1, others have them.

    Raises:
        OSError, MemoryError: the system has no threads, or no memory.
    """
    if not 1 <= len(candidates) <= 64 or not 1 <= rounds <= 1000:
        raise ValueError(f"{len(candidates)} candidates, rounds = {rounds}: expected 1 to 64, 1 to"
                         " 1000")
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
            done = kvn_measure(native, count, &columns, rounds, deadline_ns, ns, &share)
            error = errno
            descriptors.release()
        if done < 0:
            raise MemoryError() if error == ENOMEM else OSError(error, os.strerror(error))
        return [[ns[<unsigned>(it * count + i)] for i in range(count)] for it in range(done)], share
    finally:
        free(native)
        free(ns)
