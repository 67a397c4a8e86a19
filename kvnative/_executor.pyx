"""The executor: moves descriptor arrays by a backend without the GIL, and keeps them alive."""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from posix.unistd cimport getpid

from kvnative._backend cimport Backend
from kvnative._lower cimport Descriptors
from kvnative._layered cimport LayeredTask
from kvnative._report cimport Report, deadline_of
from kvnative._task cimport AnyTask, Gate, Task, drop_finished

from kvnative._backend import NativeError

__all__ = ["Executor"]


@cython.final
@cython.auto_pickle(False)
cdef class Executor:
    """Moves descriptors by a backend; any thread may submit.

    A task in flight, its descriptors and its `keep` stay alive until the outcome, even if the
    caller drops the task. Memory of finished tasks is released at the next submit() of any
    executor, or at close(). The context manager closes the executor. A forked child must make its
    own.
    """

    def __cinit__(self, Backend backend not None):
        backend.check_process()
        self._backend = backend
        self.tasks = {}
        self.closed = False

    @property
    def backend(self) -> Backend:
        """The default backend."""
        return self._backend

    cdef Backend usable(self, Backend backend):
        """Return `backend`, or the executor's if it is None."""
        if backend is None:
            backend = self._backend
        backend.check_process()
        if self.closed:
            raise NativeError("the executor is closed")
        return backend

    cdef int admit(self, AnyTask task) except -1:
        """Raise if the executor is closed. The task is in `tasks` already, so close() finds it."""
        if self.closed:
            task.cancel()
            raise NativeError("the executor is closed")
        return task.check_memory()

    cdef Task start(self, Backend backend, Descriptors descriptors, object keep, bint waits,
                    Gate after, list into):
        cdef Task task = Task.prepare(self.usable(backend), descriptors, keep, waits, self.tasks,
                                      after)
        if into is not None:
            into.append(task)
        self.admit(task)
        task.begin()
        return task

    def submit(self, Descriptors descriptors not None, keep: object = (),
               Backend backend=None, Gate after=None, list into=None) -> Task:
        """Begin a transfer and return at once; a small one is done on return.

        Args:
            descriptors: held until the outcome. Addresses are not checked: a wrong one ends the
                process.
            keep: owner of the memory, kept alive until the outcome. The task ends if a Revocable
                in this tuple is revoked.
            backend: replaces the executor's backend for this transfer.
            after: event before which no byte moves.
            into: gets the task before a byte moves, so a caller that an interrupt ends has it.

        Returns:
            The task. Its report has the error if the backend refuses the transfer.
        """
        drop_finished(2)
        return self.start(backend, descriptors, keep, False, after, into)

    def layered(self, Descriptors descriptors not None, layer_size: int, keep: object = (),
                Backend backend=None, list into=None) -> LayeredTask:
        """Prepare a transfer whose layers move once they are opened.

        Args:
            descriptors, keep, backend, into: as for submit().
            layer_size: descriptors of one layer, >= 1; the last layer may have fewer.

        Returns:
            The task, with ceil(count / layer_size) layers.
        """
        cdef uint64_t size
        cdef LayeredTask task
        backend = self.usable(backend)
        if layer_size < 1:
            raise ValueError(f"layer_size = {layer_size!r}: expected at least 1 descriptor")
        size = layer_size
        drop_finished(2)
        task = LayeredTask.prepare(backend, descriptors, size, keep, self.tasks)
        if into is not None:
            into.append(task)
        self.admit(task)
        return task

    def run(self, Descriptors descriptors not None, timeout_ms: float | None = None,
            keep: object = (), Backend backend=None) -> Report:
        """Transfer and wait: submit() and wait() in one call.

        This thread copies too. A KeyboardInterrupt aborts the transfer.
        """
        cdef int64_t deadline = deadline_of(timeout_ms)
        cdef Task task = self.start(backend, descriptors, keep, True, None, None)
        try:
            return task.wait_until(deadline, True)
        except BaseException:
            task.cancel()
            raise

    def close(self, cancel: bool = False) -> None:
        """Wait for all tasks in flight, or cancel them; refuse new ones. Idempotent.

        No byte moves after the return, including those of run() in other threads. Tasks with layers
        that are not open are always cancelled, because they would never end.
        """
        cdef AnyTask task
        self.closed = True
        if self._backend.pid != getpid():
            return
        # Newest first, because the end of a task may let the next one begin.
        for task in reversed(list(self.tasks)) if cancel else list(self.tasks):
            if cancel or not task.will_end():
                task.cancel()
            else:
                task.wait()

    def __enter__(self):
        self.usable(None)
        return self

    def __exit__(self, kind, error, traceback):
        self.close()

    def __repr__(self):
        state = "closed" if self.closed else f"{len(self.tasks)} tasks in flight"
        return f"<Executor on {self._backend.name}: {state}>"
