"""The executor: moves descriptor arrays with a backend, without the GIL, and keeps what it uses."""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from posix.unistd cimport getpid

from kvnative._backend cimport Backend
from kvnative._lower cimport Descriptors
from kvnative._layered cimport LayeredTask
from kvnative._task cimport AnyTask, Gate, Report, Task, deadline_of, drop_finished

from kvnative import _backend, _layered, _task
from kvnative._backend import NativeError

# The one module to import for execution: what it executes with comes along.
__all__ = [*_backend.__all__, *_layered.__all__, *_task.__all__, "Executor"]
for _module in (_backend, _layered, _task):
    globals().update({name: getattr(_module, name) for name in _module.__all__})


@cython.final
@cython.auto_pickle(False)
cdef class Executor:
    """Moves descriptors with a backend; any thread may submit.

    Tasks in flight, their descriptors and what they are to keep stay alive until their
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

    cdef Backend usable(self, Backend backend):
        """The backend to use: `backend`, or without one this executor's."""
        if backend is None:
            backend = self._backend
        backend.check_process()
        if self.closed:
            raise NativeError("the executor is closed")
        return backend

    cdef int admit(self, AnyTask task) except -1:
        """Refuse a task that close() may not have found: it is in `tasks` before this looks."""
        if self.closed:
            task.cancel()
            raise NativeError("the executor is closed")
        return task.check_memory()

    cdef Task start(self, Backend backend, Descriptors descriptors, object keep, bint waits,
                    Gate after):
        cdef Task task = Task.prepare(self.usable(backend), descriptors, keep, waits, self.tasks,
                                      after)
        self.admit(task)
        task.begin()
        return task

    def submit(self, Descriptors descriptors not None, keep: object = (),
               Backend backend=None, Gate after=None) -> Task:
        """Begin a transfer and return at once; small ones are done on return.

        Args:
            descriptors: they cannot be lowered into again until the outcome. Their addresses are
                taken as they are: a wrong one ends the process.
            keep: any object, kept alive until the outcome: the memory's owner. Of what is
                Revocable in a tuple, tasks end when it is revoked.
            backend: what moves this transfer; None: the executor's.
            after: what it comes after: until then nothing of it moves; None: nothing.

        Returns:
            The task. What the backend refuses is in its report.
        """
        drop_finished(2)
        return self.start(backend, descriptors, keep, False, after)

    def layered(self, Descriptors descriptors not None, layer_size: int, keep: object = (),
                Backend backend=None) -> LayeredTask:
        """Prepare a transfer whose layers move when they are opened; nothing moves yet.

        Args:
            descriptors, keep, backend: as for submit().
            layer_size: descriptors of one layer, >= 1; the last layer may have fewer.

        Returns:
            The task, of ceil(count / layer_size) layers. What the backend refuses is in its
            report.
        """
        cdef uint64_t size
        cdef LayeredTask task
        backend = self.usable(backend)
        if layer_size < 1:
            raise ValueError(f"layer_size = {layer_size!r}: expected at least 1 descriptor")
        size = layer_size
        drop_finished(2)
        task = LayeredTask.prepare(backend, descriptors, size, keep, self.tasks)
        self.admit(task)
        return task

    def run(self, Descriptors descriptors not None, timeout_ms: float | None = None,
            keep: object = (), Backend backend=None) -> Report:
        """Transfer and wait, helping to copy: submit() and wait() in one call.

        Arguments, return value and errors are theirs. On KeyboardInterrupt the transfer is given
        up.
        """
        cdef int64_t deadline = deadline_of(timeout_ms)
        cdef Task task = self.start(backend, descriptors, keep, True, None)
        try:
            return task.wait_until(deadline, True)
        except BaseException:
            task.cancel()
            raise

    def close(self, cancel: bool = False) -> None:
        """Wait for the tasks in flight, or cancel them; then take no more. Idempotent.

        Those of run() too: when this returns, no byte is touched any more. A task with layers that
        nobody has opened would not end, and is cancelled in either case.
        """
        cdef AnyTask task
        self.closed = True
        if self._backend.pid != getpid():
            return
        # To be given up: what has not begun first, or it would begin when what is before it ends.
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
