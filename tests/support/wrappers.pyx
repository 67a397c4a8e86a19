"""Backends that wrap a backend and make it fail, on any machine. Built in place, only for tests."""

from libc.stdint cimport int64_t, uint64_t

from kvnative._backend cimport Backend
from kvnative._native cimport (
    KVN_FAILED,
    KVN_NO_DEVICE_MEMORY,
    KVN_OK,
    KVN_PENDING,
    kvn_backend,
)

import math

__all__ = [
    "delay", "early_ends", "ends_seen", "fail_at", "hold", "let_go", "limit_bandwidth",
    "limit_batch", "streams", "swap_at", "trace",
]

cdef double NS_PER_MS = 1e6

cdef extern from "wrappers.h" nogil:
    kvn_backend *kvn_fail_at_create(kvn_backend *inner, uint64_t descriptor, int status, int code,
                                    bint at_submit)
    kvn_backend *kvn_delay_create(kvn_backend *inner, int64_t nanoseconds)
    kvn_backend *kvn_hold_create(kvn_backend *inner)
    void kvn_hold_let_go(kvn_backend *self)
    kvn_backend *kvn_limit_bandwidth_create(kvn_backend *inner, double bytes_per_second)
    kvn_backend *kvn_limit_batch_create(kvn_backend *inner, uint64_t max_batch)
    kvn_backend *kvn_swap_at_create(kvn_backend *inner, uint64_t descriptor)
    kvn_backend *kvn_streams_create(kvn_backend *inner, int pending, int status)
    kvn_backend *kvn_early_ends_create(kvn_backend *inner)
    unsigned kvn_early_ends_seen(kvn_backend *self, unsigned *early)
    kvn_backend *kvn_trace_create(kvn_backend *inner, int fd)


def fail_at(Backend backend not None, uint64_t descriptor, int status=KVN_FAILED,
            int code=0, *, bint at_submit=False) -> Backend:
    """Make descriptor number `descriptor` of every task fail.

    Earlier descriptors are moved. This one and later ones are not.

    Args:
        status: status of the report, one of the negative KVN_ constants.
        code: the system's error code in the report.
        at_submit: refuse the whole batch with the descriptor, instead of moving a part. With
            KVN_PENDING as the status, do not take it.
    """
    if not (KVN_NO_DEVICE_MEMORY <= status < KVN_OK or (at_submit and status == KVN_PENDING)):
        raise ValueError(f"status = {status}: expected {KVN_NO_DEVICE_MEMORY} to {KVN_OK - 1}")
    backend.check_process()
    return Backend.adopt(
        kvn_fail_at_create(backend.handle, descriptor, status, code, at_submit), backend, "fail_at")


def swap_at(Backend backend not None, uint64_t descriptor) -> Backend:
    """Swap the destinations of descriptor number `descriptor` and the next one, once.

    Both must have the same size. No report tells.
    """
    backend.check_process()
    return Backend.adopt(kvn_swap_at_create(backend.handle, descriptor), backend, "swap_at")


def delay(Backend backend not None, double ms) -> Backend:
    """Hold back the outcome of every batch until `ms` milliseconds after its submission.

    A batch that is aborted earlier is reported as unconfirmed, even if it was moved.
    """
    if not 0 <= ms <= 1e9:
        raise ValueError(f"ms = {ms!r}: expected 0 to 1e9 milliseconds")
    backend.check_process()
    return Backend.adopt(kvn_delay_create(backend.handle, <int64_t>(ms * NS_PER_MS)), backend,
                         "delay")


def hold(Backend backend not None) -> Backend:
    """Hold back the outcome of every batch until `let_go`, or until the batch is aborted."""
    backend.check_process()
    return Backend.adopt(kvn_hold_create(backend.handle), backend, "hold")


def let_go(Backend held not None) -> None:
    """Release the outcomes that a backend holds back, and hold none from now on.

    Args:
        held: the backend that `hold` has returned, not a wrapper around it.
    """
    if held.name != "hold":
        raise ValueError(f"held = {held!r}: expected a backend that hold() has returned")
    held.check_process()
    with nogil:
        kvn_hold_let_go(held.handle)


def limit_bandwidth(Backend backend not None, double bytes_per_second) -> Backend:
    """Move at most that many bytes a second, over all tasks of the backend together."""
    if not 0 < bytes_per_second < math.inf:
        raise ValueError(f"bytes_per_second = {bytes_per_second!r}: expected a number > 0")
    backend.check_process()
    return Backend.adopt(kvn_limit_bandwidth_create(backend.handle, bytes_per_second), backend,
                         "limit_bandwidth")


def limit_batch(Backend backend not None, uint64_t max_batch) -> Backend:
    """Pass on at most `max_batch` descriptors at a time, and the next ones when those are moved."""
    if max_batch < 1:
        raise ValueError(f"max_batch = {max_batch}: expected at least 1 descriptor")
    backend.check_process()
    return Backend.adopt(kvn_limit_batch_create(backend.handle, max_batch), backend, "limit_batch")


def streams(Backend backend not None, int pending=0, int status=KVN_OK) -> Backend:
    """Pretend that streams can wait for every batch.

    Args:
        pending: number of calls that first return KVN_PENDING; -1: all until the batch is over.
        status: the status after them; a failure has code 7 and a message that names the stream.
    """
    backend.check_process()
    return Backend.adopt(kvn_streams_create(backend.handle, pending, status), backend, "streams")


def early_ends(Backend backend not None) -> Backend:
    """Poll each batch inside of its end, when the outcome may not be known yet."""
    backend.check_process()
    return Backend.adopt(kvn_early_ends_create(backend.handle), backend, "early_ends")


def ends_seen(Backend watched not None) -> tuple[int, int]:
    """Return how many batches `early_ends` has polled, and how many of them were over.

    A batch that ends before its submission has returned is not polled.
    """
    cdef unsigned seen, early = 0
    if watched.name != "early_ends":
        raise ValueError(f"watched = {watched!r}: expected what early_ends() has returned")
    watched.check_process()
    seen = kvn_early_ends_seen(watched.handle, &early)
    return seen, early


def trace(Backend backend not None, int fd) -> Backend:
    """Write a line of JSON to `fd` when a call of the backend's vtable returns.

    Fields: call, backend, request (the number of the batch), first (the batch's first descriptor
    in its task), count, nbytes, status (KVN_), us (CLOCK_MONOTONIC, in microseconds). The caller
    keeps the file descriptor open; a line that cannot be written is lost.
    """
    if fd < 0:
        raise ValueError(f"fd = {fd}: expected an open file descriptor")
    backend.check_process()
    return Backend.adopt(kvn_trace_create(backend.handle, fd), backend, "trace")
