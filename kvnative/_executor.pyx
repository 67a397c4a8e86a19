"""The executor: moves descriptor arrays with a backend, without the GIL, and keeps what it uses."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.unistd cimport getpid

from kvnative._backend cimport Backend
from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport kvn_columns
from kvnative._native cimport *

import atexit

from kvnative import _backend
from kvnative._backend import NativeError

# The one module to import for execution: what it executes with comes along.
__all__ = [*_backend.__all__, "Executor", "Report", "Task"]
globals().update({name: getattr(_backend, name) for name in _backend.__all__})

# How long Ctrl-C may go unnoticed in a wait.
cdef int64_t SIGNALS_NS = 100_000_000
cdef double NS_PER_MS = 1e6


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
        cdef kvn_columns columns
        cdef Task self = Task.__new__(Task)
        cdef int status
        columns = descriptors.hold_columns()
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


cdef int drop_finished(int most) except -1:
    """Settle up to `most` of the oldest tasks if they are through; the others become the newest.

    Those of any executor: nobody else would look at the tasks of one that was dropped.
    """
    cdef Task task
    for task in [task for task, _ in zip(in_flight, range(most))]:
        if task.backend.pid == getpid() and task.done:
            continue
        in_flight.pop(task, None)
        # Another thread may have settled it since: `done` gives up the GIL.
        if task.outcome is None:
            in_flight[task] = None
    return 0


@cython.final
@cython.auto_pickle(False)
cdef class Executor:
    """Moves descriptors with one backend; any thread may submit.

    Tasks in flight, their descriptors and what they were told to keep stay alive until their
    outcome, also if every handle is dropped; what is through is let go at the next submit() of
    any executor, or at close(). As a context manager it closes itself. A forked child must make
    its own.
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
                Their addresses are taken as they are: a wrong one ends the process.
            keep: any object (a tuple, say), kept alive until the outcome: the memory's owner.

        Returns:
            The task. What the backend refuses is told by its report.

        Raises:
            ValueError: descriptors in another layout.
            NativeError: the executor is closed, or belongs to the process that this one was forked
                from.
        """
        self.check_usable()
        drop_finished(2)
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
        columns = descriptors.hold_columns()
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
