"""Signals whose handlers may raise: when they run, and locks that they cannot leave taken.

Python runs a signal's handler in the main thread between two bytecodes, and an exception that it
raises (KeyboardInterrupt, say) ends the call there.
"""

import os
import sys
import threading

import _signal  # what `signal` has are functions of Python, in which a handler would run

cimport cython
from libc.string cimport memset
from posix.signal cimport SA_ONSTACK, SA_RESTART, kill, sigaction, sigaction_t, sigemptyset
from posix.unistd cimport getpid

__all__ = ["Condition", "GuardedLock", "Mutex", "signals_deferred"]

cdef extern from *:
    """
    #include <signal.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    #define KVN_SIGNALS 32 /* behind the standard ones */
    static int kvn_is_main_thread(void)
    {
        return syscall(SYS_gettid) == getpid();
    }

    static volatile sig_atomic_t kvn_arrived[KVN_SIGNALS];

    static void kvn_note(int number)
    {
        kvn_arrived[number] = 1;
    }

    /* Dropped with an exception set only if that came before the block that the lock is for. */
    static void kvn_end_hold(PyObject *hold)
    {
        PyObject *lock = (PyObject *)PyCapsule_GetContext(hold);

        if (PyErr_Occurred()) {
            PyObject *type, *value, *traceback, *done;

            PyErr_Fetch(&type, &value, &traceback);
            done = PyObject_CallMethod(lock, "release", NULL);
            if (done == NULL) {
                PyErr_WriteUnraisable(lock);
            }
            Py_XDECREF(done);
            PyErr_Restore(type, value, traceback);
        }
        Py_DECREF(lock);
    }

    static PyObject *kvn_hold(PyObject *lock)
    {
        PyObject *hold = PyCapsule_New(lock, NULL, NULL);

        if (hold != NULL) {
            Py_INCREF(lock);
            PyCapsule_SetContext(hold, lock);
            PyCapsule_SetDestructor(hold, kvn_end_hold);
        }
        return hold;
    }
    """
    enum:
        KVN_SIGNALS
    bint kvn_is_main_thread()
    int kvn_arrived[]
    void kvn_note(int number) noexcept nogil
    object kvn_hold(object lock)
    int PyErr_CheckSignals() except -1

cdef int depth = 0
cdef object interrupt = None  # what a handler raised before the block, due at its end
cdef sigaction_t replaced[KVN_SIGNALS]
cdef bint is_replaced[KVN_SIGNALS]
memset(is_replaced, 0, sizeof(is_replaced))
cdef object get_handler = _signal.getsignal
RLock = type(threading.RLock())


@cython.auto_pickle(False)
cdef class Deferral:
    """A `with` block in which no signal handler of Python runs; those that are due run at its end.

    For calls whose steps belong together. The block must not wait for long: an interrupt waits for
    its end. To enter it raises nothing; what a handler raised just before is raised at the end.
    Blocks may be nested. Only standard signals are deferred. In other threads than the main one no
    handler runs, and a block does nothing.
    """

    def __enter__(self):
        global depth, interrupt
        if not kvn_is_main_thread():
            return
        depth += 1
        if depth == 1:
            replace()
            try:
                PyErr_CheckSignals()  # those that had arrived before
            except BaseException as error:
                interrupt = error

    def __exit__(self, *exc):
        global depth, interrupt
        if not kvn_is_main_thread() or depth == 0:  # depth 0: the block began before a fork
            return
        depth -= 1
        if depth == 0:
            error, interrupt = interrupt, None
            restore()
            if error is not None:
                raise error


signals_deferred = Deferral()


cdef void replace():
    """Note signals that Python has a handler for, and have none run."""
    cdef sigaction_t ours
    cdef int number
    memset(&ours, 0, sizeof(ours))
    ours.sa_handler = kvn_note
    ours.sa_flags = SA_ONSTACK | SA_RESTART
    sigemptyset(&ours.sa_mask)
    for number in range(1, KVN_SIGNALS):
        kvn_arrived[number] = 0
        is_replaced[number] = (
            callable(get_handler(number)) and sigaction(number, &ours, &replaced[number]) == 0
        )


cdef void restore():
    """Have handlers run again, and send again the signals that have arrived."""
    cdef sigaction_t now
    cdef int number
    for number in range(1, KVN_SIGNALS):
        if not is_replaced[number]:
            continue
        is_replaced[number] = False
        # A handler that was set meanwhile stays.
        if sigaction(number, NULL, &now) == 0 and now.sa_handler == kvn_note:
            sigaction(number, &replaced[number], NULL)
        if kvn_arrived[number]:
            kill(getpid(), number)  # the handler may be one of a C library


def begin_child():
    """In a forked child: end the block that the parent's main thread is in.

    The child may have been forked by another thread, or run a program of its own inside the block.
    """
    global depth, interrupt
    cdef int number
    if depth == 0:
        return
    depth, interrupt = 0, None
    for number in range(1, KVN_SIGNALS):
        kvn_arrived[number] = 0  # sent to the parent
    restore()


os.register_at_fork(after_in_child=begin_child)


class GuardedLock(RLock):
    """An RLock that an interrupt between its acquisition and its `with` block does not leave taken.

    Python 3.14 runs signal handlers there. What `__enter__` returns is dropped before the block
    begins, and releases the lock if that is because of an exception.
    """

    def __enter__(self):
        self.acquire()
        return kvn_hold(self)


Mutex = GuardedLock if sys.version_info >= (3, 14) else RLock


class Condition(threading.Condition):
    """A condition over a re-entrant lock; no signal handler runs inside of taking and releasing it.

    `threading.Condition` does both in functions of Python, where one may come in between.
    """

    def __init__(self):
        super().__init__(Mutex())

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *exc):
        return self._lock.__exit__(*exc)
