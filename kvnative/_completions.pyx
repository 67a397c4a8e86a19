"""Queues of tasks that have ended."""

cimport cython
from libc.stdint cimport uint64_t
from posix.unistd cimport getpid

from kvnative._native cimport *
from kvnative._task cimport AnyTask

import os

from kvnative._backend import NativeError

__all__ = ["CompletionQueue"]

cdef enum:
    TAKEN_AT_ONCE = 256  # tokens of a queue, on the stack


@cython.final
@cython.auto_pickle(False)
cdef class CompletionQueue:
    """A queue of watched tasks that have ended; one thread at a time takes them."""

    cdef kvn_completions native
    cdef dict items            # token of a watched task -> its item
    cdef uint64_t last_token
    cdef bint is_open
    cdef int pid

    def __cinit__(self):
        cdef int error = kvn_completions_init(&self.native)
        if error:
            raise NativeError(f"no eventfd for a queue of completions: {os.strerror(error)}", error)
        self.is_open = True
        self.pid = getpid()
        self.items = {}

    def __dealloc__(self):
        # A forked child may find the mutex locked by a thread that it does not have.
        if self.is_open and self.pid == getpid():
            kvn_completions_fini(&self.native)

    cdef int check_process(self) except -1:
        if self.pid != getpid():
            raise NativeError(f"the queue of completions belongs to process {self.pid}; process"
                              f" {getpid()} was forked from it and must make its own")
        return 0

    def fileno(self) -> int:
        """Return an eventfd that polls readable while the queue has items, and rarely without."""
        return self.native.fd

    def watch(self, AnyTask task not None, item: object) -> None:
        """Make `take` return `item` when the task has ended, and each time that a layer fails.

        A second call for the same task replaces the item. The queue keeps it until `forget`.
        """
        self.check_process()
        task.backend.check_process()
        with cython.critical_section(self, task):
            if task.queue is None:
                self.last_token += 1
                task.token = self.last_token
                task.queue = self
            elif task.queue is not self:
                raise ValueError("the task is watched by another queue")
            self.items[task.token] = item
            kvn_ending_watch(&task.ending, &self.native, task.token)

    def take(self) -> list:
        """Return the items of the tasks that have ended since the last call. Never blocks."""
        cdef uint64_t tokens[TAKEN_AT_ONCE]
        cdef size_t i, count = TAKEN_AT_ONCE
        cdef list taken = []
        self.check_process()
        while count == TAKEN_AT_ONCE:
            count = kvn_completions_take(&self.native, tokens, TAKEN_AT_ONCE)
            with cython.critical_section(self):
                for i in range(count):
                    if tokens[i] in self.items:
                        taken.append(self.items[tokens[i]])
        return taken

    def forget(self, AnyTask task not None, item: object) -> bool:
        """Drop the item of a task; return False if the task has another item."""
        cdef bint is_there
        with cython.critical_section(self, task):
            is_there = task.queue is self and self.items.get(task.token) is item
            if is_there:
                del self.items[task.token]
        return is_there
