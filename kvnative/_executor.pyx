"""The executor: moves descriptor arrays with a backend, without the GIL, and keeps what it uses."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint64_t
from posix.unistd cimport getpid

from kvnative._backend cimport Backend
from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport kvn_columns
from kvnative._native cimport *
from kvnative._staged cimport StagedTask
from kvnative._task cimport (
    AnyTask, Report, Task, deadline_of, drop_finished, next_look, report_of
)

from kvnative import _backend, _staged, _task
from kvnative._backend import NativeError

# The one module to import for execution: what it executes with comes along.
__all__ = [*_backend.__all__, *_staged.__all__, *_task.__all__, "Executor"]
for _module in (_backend, _staged, _task):
    globals().update({name: getattr(_module, name) for name in _module.__all__})


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

    def stage(self, Descriptors descriptors not None, stage_size: int, keep: object = ()
              ) -> StagedTask:
        """Prepare a transfer whose stages move when they are opened; nothing moves yet.

        Args:
            descriptors, keep: as for submit().
            stage_size: descriptors of one stage, >= 1; the last stage may have fewer.

        Returns:
            The task, of ceil(count / stage_size) stages. What the backend refuses is told by its
            report.

        Raises:
            ValueError: as submit(), and stage_size < 1.
            NativeError: as submit().
        """
        cdef uint64_t size
        self.check_usable()
        if stage_size < 1:
            raise ValueError(f"stage_size = {stage_size!r}: expected at least 1 descriptor")
        size = stage_size
        drop_finished(2)
        return StagedTask.prepare(self._backend, descriptors, size, keep, self.tasks)

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
        """Wait for the tasks in flight, or cancel them; then take no more. Idempotent.

        A task with stages that nobody has opened would not end, and is cancelled in either case.
        """
        cdef AnyTask task
        self.closed = True
        if self._backend.pid != getpid():
            return
        for task in list(self.tasks):
            if cancel or not task.will_end():
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
