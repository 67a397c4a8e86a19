"""The executor: moves descriptor arrays with a backend, on a pool of threads, without the GIL."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport ENOMEM, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.unistd cimport getpid

from kvnative cimport _native
from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport kvn_columns
from kvnative._native cimport *

import atexit
import math
import os
from typing import NamedTuple

__all__ = [
    "KVN_CANCELLED", "KVN_DENIED", "KVN_FAILED", "KVN_INVALID", "KVN_NO_MEMORY", "KVN_OK",
    "KVN_PEER_GONE", "KVN_PENDING", "KVN_TIMEOUT", "KVN_UNMAPPED", "KVN_UNSUPPORTED",
    "STRATEGIES", "Backend", "Capabilities", "Executor", "NativeError", "Report", "Task",
    "ThreadPool", "delay", "fail_at", "host_backend", "limit_bandwidth", "limit_batch", "trace",
]

# The same names for Python as in status.h.
globals().update(
    KVN_OK=_native.KVN_OK, KVN_PENDING=_native.KVN_PENDING, KVN_TIMEOUT=_native.KVN_TIMEOUT,
    KVN_CANCELLED=_native.KVN_CANCELLED, KVN_INVALID=_native.KVN_INVALID,
    KVN_NO_MEMORY=_native.KVN_NO_MEMORY, KVN_PEER_GONE=_native.KVN_PEER_GONE,
    KVN_DENIED=_native.KVN_DENIED, KVN_UNMAPPED=_native.KVN_UNMAPPED,
    KVN_UNSUPPORTED=_native.KVN_UNSUPPORTED, KVN_FAILED=_native.KVN_FAILED,
)

STRATEGIES = tuple(
    kvn_strategy_name(<kvn_strategy>i).decode() for i in range(<int>KVN_NUM_STRATEGIES)
)

# More threads than this do not copy faster on any machine measured; they only crowd it.
cdef enum:
    DEFAULT_MAX_THREADS = 16
# How long Ctrl-C may go unnoticed in a wait.
cdef int64_t SIGNALS_NS = 100_000_000
cdef double NS_PER_MS = 1e6


class NativeError(RuntimeError):
    """The native layer cannot do this now: closed, forked, or out of a resource."""


class Capabilities(NamedTuple):
    """What a backend takes.

    Attributes:
        max_batch: descriptors in one batch; the executor cuts longer tasks.
        max_nbytes: bytes of one descriptor; larger ones are refused.
        directions: names of the directions that it copies in.
        asynchronous: whether it moves on while nobody polls or waits.
    """

    max_batch: int
    max_nbytes: int
    directions: tuple[str, ...]
    asynchronous: bool


cdef tuple DIRECTIONS = (
    (KVN_HOST_TO_HOST, "host_to_host"),
    (KVN_HOST_TO_DEVICE, "host_to_device"),
    (KVN_DEVICE_TO_HOST, "device_to_host"),
    (KVN_DEVICE_TO_DEVICE, "device_to_device"),
    (KVN_PEER_GET, "peer_get"),
    (KVN_PEER_PUT, "peer_put"),
)


cdef int64_t deadline_of(object timeout_ms) except -1:
    """The CLOCK_MONOTONIC time, in ns, that is `timeout_ms` from now."""
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
    """When a wait for `deadline_ns` looks for signals."""
    cdef int64_t look = kvn_now_ns() + SIGNALS_NS
    return look if look < deadline_ns else deadline_ns


@cython.final
@cython.auto_pickle(False)
@cython.no_gc
cdef class ThreadPool:
    """A fixed number of threads that copy; shared by any number of backends.

    Idle threads sleep. A thread that waits for a task copies too, in the place of one of these.

    Args:
        threads: how many, 1 to 64; None for the number of cores that this process may use, at most
            16.

    Raises:
        ValueError: threads out of range.
        NativeError: the system refuses the threads.
    """

    def __cinit__(self, threads: int | None = None):
        if threads is None:
            threads = min(len(os.sched_getaffinity(0)), DEFAULT_MAX_THREADS)
        if not 1 <= threads <= KVN_MAX_THREADS:
            raise ValueError(f"threads = {threads!r}: expected 1 to {KVN_MAX_THREADS}")
        self.pool = kvn_pool_create(threads)
        if self.pool is NULL:
            raise NativeError(f"no pool of {threads} threads: {os.strerror(errno)}")

    def __dealloc__(self):
        with nogil:
            kvn_pool_destroy(self.pool)

    @property
    def threads(self) -> int:
        """Number of threads."""
        return kvn_pool_threads(self.pool)

    def __repr__(self):
        return f"<ThreadPool of {self.threads} threads>"


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Backend:
    """What moves bytes: `host_backend`, another module's backend, or a wrapper around one."""

    def __init__(self, *args, **kwargs):
        raise TypeError("a Backend comes from host_backend(), a wrapper or a link")

    @staticmethod
    cdef Backend adopt(kvn_backend *handle, object owners, str what):
        cdef int error = errno
        cdef Backend self
        if handle is NULL:
            raise MemoryError() if error == ENOMEM else NativeError(
                f"{what}: {os.strerror(error)} (errno {error})")
        self = Backend.__new__(Backend)
        self.owners = owners
        self.handle = handle
        self.pid = getpid()
        return self

    cdef const kvn_backend_vtable *calls(self) except NULL:
        if self.handle is NULL:
            raise TypeError("a Backend comes from host_backend(), a wrapper or a link")
        return self.handle.vtable

    cdef int check_process(self) except -1:
        if self.pid != getpid():
            raise NativeError(f"the backend {self.name} and its executors belong to process"
                              f" {self.pid}; process {getpid()} was forked from it and must make"
                              f" its own")
        return 0

    def __dealloc__(self):
        # A forked child has none of the threads and maybe a locked mutex: it only forgets.
        if self.handle is not NULL and self.pid == getpid():
            self.handle.vtable.destroy(self.handle)

    @property
    def name(self) -> str:
        """Of the backend, or of the outermost wrapper."""
        return self.calls().name.decode()

    @property
    def capabilities(self) -> Capabilities:
        """What it takes."""
        cdef kvn_capabilities limits
        self.calls().capabilities(self.handle, &limits)
        directions = tuple(name for bit, name in DIRECTIONS if limits.directions & <uint32_t>bit)
        return Capabilities(limits.max_batch, limits.max_nbytes, directions,
                            bool(limits.asynchronous))

    @property
    def last_error(self) -> str:
        """Message of the latest failure, of any task; "" when there was none."""
        self.check_process()
        return self.calls().last_error(self.handle).decode(errors="replace")

    def __repr__(self):
        return f"<Backend {self.name}>"


def host_backend(ThreadPool pool not None, strategy: str = "auto") -> Backend:
    """Copies memory that this process can address.

    Args:
        pool: the threads that copy. Small batches are copied by the submitting thread.
        strategy: one of ``STRATEGIES``. "auto" streams past the caches what is larger than them.

    Raises:
        ValueError: an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy = {strategy!r}: expected one of"
                         f" {', '.join(map(repr, STRATEGIES))}")
    index = STRATEGIES.index(strategy)
    return Backend.adopt(kvn_host_create(pool.pool, <kvn_strategy><int>index), pool, "host_backend")


def fail_at(Backend backend not None, uint64_t descriptor, int status=_native.KVN_FAILED,
            int code=0) -> Backend:
    """Make descriptor number `descriptor` of every task fail.

    The descriptors before it are moved, it and those after it are not.

    Args:
        status: what the report says, one of the negative KVN_ constants.
        code: the system's error code in the report.
    """
    if not KVN_FAILED <= status < KVN_OK:
        raise ValueError(f"status = {status}: expected {KVN_FAILED} to {KVN_OK - 1}")
    backend.check_process()
    return Backend.adopt(kvn_fail_at_create(backend.handle, descriptor, status, code), backend,
                         "fail_at")


def delay(Backend backend not None, double ms) -> Backend:
    """Hold back every batch's outcome until `ms` milliseconds after its submission.

    A batch that is aborted earlier is reported as not confirmed, whatever was moved.
    """
    if not 0 <= ms <= 1e9:
        raise ValueError(f"ms = {ms!r}: expected 0 to 1e9 milliseconds")
    backend.check_process()
    return Backend.adopt(kvn_delay_create(backend.handle, <int64_t>(ms * NS_PER_MS)), backend,
                         "delay")


def limit_bandwidth(Backend backend not None, double bytes_per_second) -> Backend:
    """Move at most that many bytes a second, over all tasks of the backend together.

    Advances only while somebody polls or waits.
    """
    if not 0 < bytes_per_second < math.inf:
        raise ValueError(f"bytes_per_second = {bytes_per_second!r}: expected a number > 0")
    backend.check_process()
    return Backend.adopt(kvn_limit_bandwidth_create(backend.handle, bytes_per_second), backend,
                         "limit_bandwidth")


def limit_batch(Backend backend not None, uint64_t max_batch, max_nbytes: int | None = None
                ) -> Backend:
    """Take at most `max_batch` descriptors in a batch, of at most `max_nbytes` bytes each."""
    cdef uint64_t nbytes = <uint64_t>-1 if max_nbytes is None else max_nbytes
    if max_batch < 1:
        raise ValueError(f"max_batch = {max_batch}: expected at least 1 descriptor")
    if nbytes < 1:
        raise ValueError(f"max_nbytes = {max_nbytes}: expected None or at least 1 byte")
    backend.check_process()
    return Backend.adopt(kvn_limit_batch_create(backend.handle, max_batch, nbytes), backend,
                         "limit_batch")


def trace(Backend backend not None, int fd) -> Backend:
    """Write a line of JSON to `fd` for every call of the backend's vtable, when it returns.

    Its fields: call, backend, request (a number of its own for each batch), first (the batch's
    first descriptor in its task), count, nbytes, status (KVN_), us (CLOCK_MONOTONIC,
    microseconds). The caller keeps the file descriptor open; ``last_error`` says when lines were
    lost.
    """
    if fd < 0:
        raise ValueError(f"fd = {fd}: expected an open file descriptor")
    backend.check_process()
    return Backend.adopt(kvn_trace_create(backend.handle, fd), backend, "trace")


@cython.final
@cython.auto_pickle(False)
@cython.no_gc
cdef class Report:
    """How a task ended, or how far it is.

    Attributes:
        status: KVN_OK, KVN_PENDING or a negative KVN_ constant.
        code: errno, aclError, HcclResult: as the system gave it; 0 when there is none.
        failed: index of the first descriptor known to have failed, or None.
        bytes_done: bytes moved, those of descriptors that are not confirmed included.
        descriptors_done: number of confirmed descriptors; 0 while pending.
        unconfirmed: half-open ranges (first, last) of descriptors that may not have arrived whole;
            ascending. Every other descriptor has.
        message: what went wrong, "" if nothing did.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a Report comes from an Executor or a Task")

    def __repr__(self):
        return (f"Report(status={self.status}, code={self.code}, failed={self.failed},"
                f" bytes_done={self.bytes_done}, descriptors_done={self.descriptors_done},"
                f" unconfirmed={self.unconfirmed}, message={self.message!r})")


cdef Report report_of(const kvn_report *native, uint64_t count):
    cdef Report self = Report.__new__(Report)
    cdef uint32_t i
    self.status = native.status
    self.code = native.code
    self.failed = None if native.failed == KVN_NO_DESCRIPTOR else native.failed
    self.bytes_done = native.bytes_done
    self.message = "" if native.message[0] == 0 else native.message.decode(errors="replace")
    if native.status == KVN_OK:
        self.unconfirmed = ()
        self.descriptors_done = count
    elif native.status == KVN_PENDING:
        self.unconfirmed = ((0, count),)
        self.descriptors_done = 0
    else:
        self.unconfirmed = tuple([(native.unconfirmed[i].first, native.unconfirmed[i].last)
                                  for i in range(native.num_unconfirmed)])
        self.descriptors_done = count - kvn_report_unconfirmed(native)
    return self


# Tasks in flight, of all executors: whatever else is let go, what they point to stays.
cdef dict in_flight = {}


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
@cython.nonecheck(True)
cdef class Task:
    """A submitted transfer. Dropping it stops nothing: the executor keeps it until it is done.

    All methods may be called from several threads at once.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("a Task comes from Executor.submit()")

    @staticmethod
    cdef Task begin(Backend backend, Descriptors descriptors, object keep, dict siblings):
        cdef kvn_columns columns = descriptors.columns()
        cdef Task self = Task.__new__(Task)
        cdef int status
        descriptors.hold()
        self.backend = backend
        self.descriptors = descriptors
        self.keep = keep
        self.siblings = siblings
        self.count = columns.count
        with nogil:
            status = kvn_task_submit(&self.task, backend.handle, &columns)
        if status != KVN_PENDING:
            self.settle()
            return self
        try:
            siblings[self] = in_flight[self] = None
        except BaseException:
            self.cancel()
            raise
        return self

    def __dealloc__(self):
        # Without an outcome only in a forked child, which must leave the task to its parent.
        if self.outcome is not None:
            kvn_task_release(&self.task)

    cdef Report settle(self):
        """Keep the outcome and let go of the memory. Only when there is one."""
        cdef kvn_report native
        cdef Report outcome
        kvn_task_report(&self.task, &native)
        outcome = report_of(&native, self.count)
        if self.outcome is None:  # of several threads that waited, the first comes here
            self.outcome = outcome
            self.descriptors.release()
            self.descriptors = self.keep = None
            self.siblings.pop(self, None)
            in_flight.pop(self, None)
        return self.outcome

    @property
    def done(self) -> bool:
        """Whether the outcome is there. Never blocks."""
        cdef int status
        if self.outcome is not None:
            return True
        self.backend.check_process()
        with nogil:
            status = kvn_task_poll(&self.task)
        if status == KVN_PENDING:
            return False
        self.settle()
        return True

    @property
    def report(self) -> Report:
        """The outcome, or a report with status KVN_PENDING and the bytes moved so far."""
        cdef kvn_report native
        if self.done:
            return self.outcome
        if kvn_task_report(&self.task, &native) != KVN_PENDING:
            return self.settle()
        return report_of(&native, self.count)

    def wait(self, timeout_ms: float | None = None) -> Report:
        """Wait for the outcome, helping to copy.

        Args:
            timeout_ms: milliseconds from now, >= 0; None waits for as long as it takes. When they
                have passed the transfer is given up, and the report says KVN_TIMEOUT.

        Returns:
            The outcome; failures too are told there, not raised.

        Raises:
            ValueError: timeout_ms is negative or not a number.
            NativeError: this process was forked from the one that submitted the task.
        """
        cdef int64_t deadline = deadline_of(timeout_ms)
        cdef int status
        if self.outcome is not None:
            return self.outcome
        self.backend.check_process()
        while True:
            with nogil:
                status = kvn_task_wait(&self.task, next_look(deadline))
                if status == KVN_PENDING and kvn_now_ns() >= deadline:
                    status = kvn_task_abort(&self.task, KVN_TIMEOUT)
            if status != KVN_PENDING:
                return self.settle()
            PyErr_CheckSignals()

    def cancel(self) -> Report:
        """Give the transfer up; afterwards no byte is touched any more.

        Returns:
            The outcome: KVN_CANCELLED, or another one if that came first.
        """
        if self.outcome is not None:
            return self.outcome
        self.backend.check_process()
        with nogil:
            kvn_task_abort(&self.task, KVN_CANCELLED)
        return self.settle()

    def __repr__(self):
        state = "in flight" if self.outcome is None else repr(self.outcome)
        return f"<Task on {self.backend.name}: {state}>"


cdef int drop_finished(dict tasks, int most) except -1:
    """Settle up to `most` of the oldest tasks if they are through; the others become the newest."""
    cdef Task task
    for task in [task for task, _ in zip(tasks, range(most))]:
        if not task.done:
            tasks.pop(task, None)
            tasks[task] = None
    return 0


@cython.final
@cython.auto_pickle(False)
cdef class Executor:
    """Moves descriptors with one backend; any thread may submit.

    Tasks in flight, their descriptors and what they were told to keep stay alive until their
    outcome, also if every handle is dropped; what is through is let go at the next submit() or
    close(). As a context manager it closes itself. A forked child must make its own.
    """

    def __cinit__(self, Backend backend not None):
        backend.check_process()
        self._backend = backend
        self.tasks = {}
        self.closed = False

    @property
    def backend(self) -> Backend:
        """The backend, as given."""
        return self._backend

    cdef int check_usable(self) except -1:
        self._backend.check_process()
        if self.closed:
            raise NativeError("the executor is closed")
        return 0

    def submit(self, Descriptors descriptors not None, keep: object = ()) -> Task:
        """Begin a transfer and return at once; small ones are done on return.

        Args:
            descriptors: in layout "columns". They cannot be lowered into again until the outcome.
            keep: any object (a tuple, say), kept alive until the outcome: the memory's owner.

        Returns:
            The task. What the backend refuses is told by its report.

        Raises:
            ValueError: descriptors in another layout.
            NativeError: the executor is closed, or belongs to the process that this one was forked
                from.
        """
        self.check_usable()
        drop_finished(self.tasks, 2)
        return Task.begin(self._backend, descriptors, keep, self.tasks)

    def run(self, Descriptors descriptors not None, timeout_ms: float | None = None,
            keep: object = ()) -> Report:
        """Transfer and wait, helping to copy: submit() and wait() in one call.

        Arguments, return value and errors are theirs. On KeyboardInterrupt the transfer is given
        up.
        """
        cdef int64_t deadline = deadline_of(timeout_ms)
        cdef kvn_task task
        cdef kvn_report native
        cdef kvn_columns columns
        cdef int status
        self.check_usable()
        columns = descriptors.columns()
        descriptors.hold()
        with nogil:
            status = kvn_task_submit(&task, self._backend.handle, &columns)
            if status == KVN_PENDING:
                status = kvn_task_wait(&task, next_look(deadline))
        try:
            while status == KVN_PENDING and kvn_now_ns() < deadline:
                PyErr_CheckSignals()
                with nogil:
                    status = kvn_task_wait(&task, next_look(deadline))
        finally:
            with nogil:
                if status == KVN_PENDING:
                    kvn_task_abort(&task, KVN_TIMEOUT)
                kvn_task_report(&task, &native)
                kvn_task_release(&task)
                descriptors.release()
        return report_of(&native, columns.count)

    def close(self, cancel: bool = False) -> None:
        """Wait for the tasks in flight, or cancel them; then take no more. Idempotent."""
        cdef Task task
        self.closed = True
        if self._backend.pid != getpid():
            return
        for task in list(self.tasks):
            if cancel:
                task.cancel()
            else:
                task.wait()

    def __enter__(self):
        self.check_usable()
        return self

    def __exit__(self, kind, error, traceback):
        self.close()

    def __repr__(self):
        state = "closed" if self.closed else f"{len(self.tasks)} tasks in flight"
        return f"<Executor on {self._backend.name}: {state}>"


def _abandon_all():
    # At exit: Python is about to free the memory that tasks in flight are writing to.
    cdef Task task
    for task in list(in_flight):
        if task.backend.pid == getpid():
            task.cancel()


atexit.register(_abandon_all)
