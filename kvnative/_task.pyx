"""Tasks: transfers in flight, which keep everything that they use until their outcome."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from posix.unistd cimport getpid

from kvnative._backend cimport Backend
from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport KVN_CALLER_WAITS, kvn_columns, kvn_gate
from kvnative._native cimport *
from kvnative._report cimport Report, deadline_of, next_look, progress_of, report_of

import atexit
import sys
import threading

__all__ = ["Gate", "Revocable", "Task", "revoke"]

# All tasks in flight, kept here because native code points to their memory.
cdef dict in_flight = {}
# Without a GIL, held while a task moves to the end of `in_flight`.
cdef object moving_to_the_end = threading.RLock()
cdef bint HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Gate:
    """An event that a transfer waits for before its first byte moves."""

    def __init__(self, *args, **kwargs):
        raise TypeError(f"a {type(self).__name__} is taken of a device: Device.take_event()")


@cython.auto_pickle(False)
cdef class Revocable:
    """Memory of this process that its owner may take back while tasks use it.

    Args:
        parts: memory of other owners that this memory consists of; revoked if one part is.
    """

    def __init__(self, parts: tuple = ()):
        self.parts = parts

    @property
    def revoked(self) -> str | None:
        """Reason why the memory or a part of it was revoked, or None."""
        return self.revocation()

    cdef str revocation(self):
        cdef Revocable part
        cdef str why
        with cython.critical_section(self):
            why = self.why
        if why is None and self.parts:
            for part in self.parts:
                why = part.revocation()
                if why is not None:
                    break
        return why

    cdef bint contains(self, Revocable memory):
        cdef Revocable part
        if self is memory:
            return True
        for part in self.parts:
            if part.contains(memory):
                return True
        return False


def revoke(memory: Revocable, why: str) -> None:
    """Take memory back: after the return no task of any executor touches it.

    Tasks that keep the memory, in flight or submitted later, end with KVN_REVOKED. Idempotent: a
    second call waits for the same tasks, and the first reason stays.

    Args:
        memory: the `keep` of tasks, or a part of it.
        why: reason, as `Revocable.revoked` returns it.
    """
    cdef Revocable it = memory
    cdef AnyTask task
    with cython.critical_section(it):
        if it.why is None:
            it.why = why
    with moving_to_the_end:
        tasks = list(in_flight)
    # Newest first, because the end of a task may let the next one begin.
    executors = {id(task.siblings): task.siblings for task in tasks}
    for siblings in executors.values():
        for task in reversed(list(siblings)):
            if task.backend.pid == getpid() and task.uses(it):
                task.revoke()


@cython.auto_pickle(False)
@cython.no_gc_clear
@cython.nonecheck(True)
cdef class AnyTask:
    """Base of all tasks: holds its memory until the outcome, which never changes."""

    def __cinit__(self):
        kvn_ending_init(&self.ending, 1)

    def __init__(self, *args, **kwargs):
        raise TypeError(f"a {type(self).__name__} comes from an Executor")

    def __dealloc__(self):
        if self.queue is not None and self.backend.pid == getpid():
            kvn_ending_leave(&self.ending)

    cdef int poll_native(self) noexcept nogil:
        return KVN_FAILED

    cdef int wait_native(self, int64_t deadline_ns) noexcept nogil:
        return KVN_FAILED

    cdef int abort_native(self, int why) noexcept nogil:
        return KVN_FAILED

    cdef uint64_t bytes_done_native(self) noexcept nogil:
        return 0

    cdef Report make_outcome(self):
        raise NotImplementedError

    cdef bint will_end(self):
        return True

    cdef kvn_columns take(self, Backend backend, Descriptors descriptors, object keep,
                          dict siblings) except *:
        """Hold the task's descriptors, memory and backend."""
        cdef kvn_columns columns = descriptors.hold_columns()
        self.backend = backend
        self.descriptors = descriptors
        self.keep = keep
        self.siblings = siblings
        self.count = columns.count
        return columns

    cdef kvn_gate *behind(self, Gate gate) except? NULL:
        """Hold a gate as long as the task lives."""
        if gate is None:
            return NULL
        if gate.gate is NULL:
            raise TypeError("a Gate is taken of a device: Device.take_event()")
        with cython.critical_section(self):
            if self.gates is None:
                self.gates = []
            self.gates.append(gate)
        return gate.gate

    cdef int enlist(self) except -1:
        """Enter the task into `in_flight`, before a byte moves, so that `close` finds it."""
        try:
            self.siblings[self] = in_flight[self] = None
        except BaseException:
            self.cancel()
            raise
        return 0

    cdef Report settled(self):
        """Return the outcome, or None. Without a GIL another thread may be about to set it."""
        cdef Report outcome
        with cython.critical_section(self):
            outcome = self.outcome
        return outcome

    cdef Report settle(self):
        """Store the outcome of an ended task and release its memory."""
        cdef Report outcome = self.make_outcome()
        cdef bint is_first = False
        cdef object keep = None
        with cython.critical_section(self):
            if self.outcome is None:  # only the first of several waiting threads
                is_first = True
                self.descriptors.release()  # so that they are free when the outcome is visible
                self.outcome = outcome
                keep, self.keep = self.keep, None
        if is_first:
            self.descriptors = keep = None  # outside of the lock, as finalizers may run
            self.siblings.pop(self, None)
            in_flight.pop(self, None)
        return self.settled()

    cdef tuple kept(self):
        cdef object keep
        with cython.critical_section(self):
            keep = self.keep
        return <tuple>keep if type(keep) is tuple else ()

    cdef int check_memory(self) except -1:
        for it in self.kept():
            if isinstance(it, Revocable) and (<Revocable>it).revocation() is not None:
                self.revoke()
                break
        return 0

    cdef bint uses(self, Revocable memory) except -1:
        for it in self.kept():
            if isinstance(it, Revocable) and (<Revocable>it).contains(memory):
                return True
        return False

    cdef int revoke(self) except -1:
        if self.settled() is None:
            with nogil:
                self.abort_native(KVN_REVOKED)
            self.settle()
        return 0

    cdef bint over(self):
        """Return whether __dealloc__ may release the native task."""
        if self.outcome is not None:
            return True
        # No outcome: the task never began; or this is a forked child, and the task belongs to the
        # parent; or memory ran out.
        if self.descriptors is None or self.backend.pid != getpid():
            return False
        with nogil:
            self.abort_native(KVN_CANCELLED)
            self.descriptors.release()
        return True

    @property
    def done(self) -> bool:
        """True once the outcome is known. Never blocks."""
        cdef int status
        if self.settled() is not None:
            return True
        self.backend.check_process()
        with nogil:
            status = self.poll_native()
        if status == KVN_PENDING:
            return False
        self.settle()
        return True

    @property
    def ended(self) -> bool:
        """True once `wait` returns at once, perhaps before `done` is True. Never blocks.

        Always False for tasks of `Executor.run`.
        """
        return kvn_ending_is_over(&self.ending)

    @property
    def report(self) -> Report:
        """The outcome, or a report with status KVN_PENDING and the bytes that have moved."""
        cdef uint64_t bytes_done
        if self.done:
            return self.settled()
        with nogil:
            bytes_done = self.bytes_done_native()
        return progress_of(bytes_done, self.count)

    def wait(self, timeout_ms: float | None = None, give_up: bool = True) -> Report:
        """Wait for the outcome; this thread copies meanwhile.

        Args:
            timeout_ms: milliseconds from now, >= 0; None: no limit.
            give_up: cancel the transfer after the timeout and report KVN_TIMEOUT. If False, the
                transfer continues and the report has KVN_PENDING.

        Returns:
            The outcome. Failures are reported in it and not raised.
        """
        cdef int64_t deadline = deadline_of(timeout_ms)
        cdef Report outcome = self.settled()
        if outcome is not None:
            return outcome
        self.backend.check_process()
        return self.wait_until(deadline, give_up)

    cdef Report wait_until(self, int64_t deadline, bint stop):
        """Wait until a CLOCK_MONOTONIC time."""
        cdef bint passed
        cdef int status
        while self.settled() is None:
            with nogil:
                status = self.wait_native(next_look(deadline))
                passed = status == KVN_PENDING and kvn_now_ns() >= deadline
                if passed and stop:
                    status = self.abort_native(KVN_TIMEOUT)
            if status != KVN_PENDING:
                return self.settle()
            if passed:
                return self.report
            PyErr_CheckSignals()
        return self.settled()

    def cancel(self) -> Report:
        """Cancel the transfer; after the return it touches no byte.

        Returns:
            The outcome: KVN_CANCELLED, or an earlier one.
        """
        cdef Report outcome = self.settled()
        if outcome is not None:
            return outcome
        self.backend.check_process()
        with nogil:
            self.abort_native(KVN_CANCELLED)
        return self.settle()

    def __repr__(self):
        outcome = self.settled()
        state = "in flight" if outcome is None else repr(outcome)
        return f"<{type(self).__name__} on {self.backend.name}: {state}>"


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear
@cython.nonecheck(True)
cdef class Task(AnyTask):
    """A submitted transfer, which continues if the caller drops the object.

    All methods are thread-safe.
    """

    @staticmethod
    cdef Task prepare(Backend backend, Descriptors descriptors, object keep, bint waits,
                      dict siblings, Gate after):
        """Make a task that moves nothing before `begin`; `waits` if the same thread then waits."""
        cdef Task self = Task.__new__(Task)
        cdef kvn_gate *gate = self.behind(after)
        cdef kvn_columns columns = self.take(backend, descriptors, keep, siblings)
        columns.after = gate
        if waits:
            columns.caller = KVN_CALLER_WAITS
        # A thread waits for it, so no queue watches it.
        kvn_task_init(&self.task, backend.handle, &columns, NULL if waits else &self.ending)
        self.enlist()
        return self

    @property
    def held(self) -> bool:
        """True while the task waits for its gate and is not submitted."""
        if self.settled() is not None:
            return False
        self.backend.check_process()
        return kvn_task_is_held(&self.task)

    def block_stream(self, uint64_t stream) -> Report | None:
        """Make later work of a stream wait for this transfer.

        The call waits until all copies are issued to the device, not until they are done.

        Args:
            stream: handle of a stream of the device that moves the bytes.

        Returns:
            None, also if the transfer has ended; or a report with the reason of a failure.
        """
        cdef void *handle = <void *><uintptr_t>stream
        cdef int status = KVN_PENDING
        cdef kvn_failure why
        cdef Report refusal
        self.backend.check_process()
        while status == KVN_PENDING:
            with nogil:
                status = kvn_task_block_stream(&self.task, handle, next_look(KVN_FOREVER), &why)
            if status == KVN_PENDING:
                PyErr_CheckSignals()
        if status == KVN_OK:
            return None
        refusal = progress_of(0, self.count)
        refusal.status = why.status
        refusal.code = why.code
        refusal.message = why.message.decode(errors="replace")
        return refusal

    cdef int begin(self) except -1:
        """Submit the transfer; a small one is done on return."""
        cdef int status
        with nogil:
            status = kvn_task_begin(&self.task)
        if status != KVN_PENDING:
            self.settle()
        return 0

    def __dealloc__(self):
        if self.over():
            kvn_task_release(&self.task)

    cdef int poll_native(self) noexcept nogil:
        return kvn_task_poll(&self.task)

    cdef int wait_native(self, int64_t deadline_ns) noexcept nogil:
        return kvn_task_wait(&self.task, deadline_ns)

    cdef int abort_native(self, int why) noexcept nogil:
        return kvn_task_abort(&self.task, why)

    cdef uint64_t bytes_done_native(self) noexcept nogil:
        return kvn_task_bytes_done(&self.task)

    cdef Report make_outcome(self):
        return report_of(kvn_task_outcome(&self.task), self.count)


cdef int drop_finished(int most) except -1:
    """Settle the ended ones of the `most` oldest tasks; the others become the newest.

    The tasks of all executors count, because a dropped executor does not settle its own.
    """
    cdef AnyTask task
    try:
        oldest = [task for task, _ in zip(in_flight, range(most))]
    except RuntimeError:  # without a GIL another thread changes the dict, and settles tasks too
        return 0
    for task in oldest:
        if task.backend.pid == getpid() and task.done:
            continue
        if HAS_GIL:
            in_flight.pop(task, None)
            in_flight[task] = None
        else:
            with moving_to_the_end:
                in_flight.pop(task, None)
                in_flight[task] = None
        # Another thread may have settled the task while it was out of the dict.
        if task.settled() is not None:
            in_flight.pop(task, None)
    return 0


def _abandon_all():
    # At exit Python frees memory, which tasks in flight would write to.
    cdef AnyTask task
    for task in list(in_flight):
        if task.backend.pid == getpid():
            task.cancel()


atexit.register(_abandon_all)
