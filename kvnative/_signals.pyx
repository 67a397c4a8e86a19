"""Deferral of signal handlers, and locks that stay consistent if a handler raises.

Python runs a signal's handler in the main thread between two bytecodes. An exception that the
handler raises, such as KeyboardInterrupt, ends the call there.
"""

import os
import sys
import threading

import _signal  # the functions of `signal` are Python, in which a handler could run

cimport cython
from libc.signal cimport raise_
from libc.string cimport memset
from posix.signal cimport SA_ONSTACK, SA_RESTART, sigaction, sigaction_t, sigemptyset

__all__ = ["Condition", "GuardedLock", "Mutex", "signals_deferred"]

cdef extern from *:
    """
    #include <signal.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    #define KVN_SIGNALS 32 /* behind the standard ones */
    static _Thread_local int kvn_role; /* of a thread; 0: not known, 1: main, 2: another */

    static int kvn_is_main_thread(void)
    {
        if (kvn_role == 0) {
            kvn_role = syscall(SYS_gettid) == getpid() ? 1 : 2;
        }
        return kvn_role == 1;
    }

    static void kvn_forget_role(void)
    {
        kvn_role = 0;
    }

    static PyObject *kvn_getsignal; /* `_signal.getsignal` */
    static PyCFunction kvn_getsignal_direct; /* in a fifth of the time; NULL: of another kind */

    static void kvn_set_getsignal(PyObject *function)
    {
        kvn_getsignal = Py_NewRef(function);
        if (PyCFunction_Check(function) && PyCFunction_GetFlags(function) == METH_O) {
            kvn_getsignal_direct = PyCFunction_GetFunction(function);
        }
    }

    static int kvn_has_python_handler(PyObject *number)
    {
        PyObject *handler = kvn_getsignal_direct != NULL
            ? kvn_getsignal_direct(PyCFunction_GetSelf(kvn_getsignal), number)
            : PyObject_CallFunctionObjArgs(kvn_getsignal, number, NULL);
        int found = handler != NULL && PyCallable_Check(handler);

        if (handler == NULL) {
            PyErr_Clear();
        }
        Py_XDECREF(handler);
        return found;
    }

    static volatile sig_atomic_t kvn_arrived[KVN_SIGNALS];

    static void kvn_note(int number)
    {
        kvn_arrived[number] = 1;
    }

    /* An exception is set here only if it came before the block of the lock. */
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
    void kvn_forget_role()
    void kvn_set_getsignal(object function)
    bint kvn_has_python_handler(object number)
    int kvn_arrived[]
    void kvn_note(int number) noexcept nogil
    object kvn_hold(object lock)
    int PyErr_CheckSignals() except -1

cdef int depth = 0
cdef object interrupt = None  # raised by a handler just before the block; raised again at its end
cdef sigaction_t replaced[KVN_SIGNALS]
cdef bint is_replaced[KVN_SIGNALS]
memset(is_replaced, 0, sizeof(is_replaced))
kvn_set_getsignal(_signal.getsignal)
RLock = type(threading.RLock())


@cython.auto_pickle(False)
cdef class Deferral:
    """A `with` block that defers the signal handlers of Python to its end.

    Use it for steps that must all happen, and not for long waits: Ctrl-C has no effect before the
    end. Entering raises nothing; an exception that a handler raised just before is raised at the
    end. Blocks may be nested. Only standard signals are deferred. Outside of the main thread, where
    Python runs no handlers, a block does nothing.
    """

    def __enter__(self):
        global depth, interrupt
        if not kvn_is_main_thread():
            return
        depth += 1
        if depth == 1:
            replace()
            try:
                PyErr_CheckSignals()  # for signals that arrived before the block
            except BaseException as error:
                interrupt = error

    def __exit__(self, kind, value, traceback):
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
    """Replace each handler of Python by one that only notes the signal."""
    cdef sigaction_t ours
    cdef int number
    memset(&ours, 0, sizeof(ours))
    ours.sa_handler = kvn_note
    ours.sa_flags = SA_ONSTACK | SA_RESTART
    sigemptyset(&ours.sa_mask)
    for number in range(1, KVN_SIGNALS):
        kvn_arrived[number] = 0
        is_replaced[number] = (
            kvn_has_python_handler(number) and sigaction(number, &ours, &replaced[number]) == 0
        )


cdef void restore():
    """Restore the handlers, and resend the signals that have arrived."""
    cdef sigaction_t now
    cdef int number
    for number in range(1, KVN_SIGNALS):
        if not is_replaced[number]:
            continue
        is_replaced[number] = False
        # Keep a handler that the block has set.
        if sigaction(number, NULL, &now) == 0 and now.sa_handler == kvn_note:
            sigaction(number, &replaced[number], NULL)
        if kvn_arrived[number]:
            # The handler may be one of a C library. Unlike with kill(), no other thread handles the
            # signal, perhaps after the call that the signal interrupts.
            raise_(number)


def begin_child():
    """End the block of the parent's main thread. Call it in a forked child.

    Another thread may have forked the child, or the child may run a program inside the block.
    """
    global depth, interrupt
    cdef int number
    kvn_forget_role()
    if depth == 0:
        return
    depth, interrupt = 0, None
    for number in range(1, KVN_SIGNALS):
        kvn_arrived[number] = 0  # it was sent to the parent
    restore()


os.register_at_fork(after_in_child=begin_child)


class GuardedLock(RLock):
    """An RLock that is released if a signal handler raises before its `with` block begins.

    Python 3.14 runs signal handlers there. The object that `__enter__` returns is dropped before
    the block begins, and releases the lock if an exception is the reason.
    """

    def __enter__(self):
        self.acquire()
        return kvn_hold(self)


Mutex = GuardedLock if sys.version_info >= (3, 14) else RLock


class Condition(threading.Condition):
    """A condition over `mutex`, which it takes and releases without signal handlers in between.

    `threading.Condition` does both in Python functions, where handlers run.

    Args:
        mutex: A `Mutex`. None: a new one.
    """

    def __init__(self, mutex=None):
        super().__init__(mutex or Mutex())

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, kind, value, traceback):
        return self._lock.__exit__(kind, value, traceback)
