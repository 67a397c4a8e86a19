# Declarations for Cython modules that use or add tasks.
from libc.stdint cimport int64_t, uint64_t

from kvnative._backend cimport Backend
from kvnative._lower cimport Descriptors
from kvnative._lower_c cimport kvn_columns, kvn_gate
from kvnative._native cimport kvn_ending, kvn_task
from kvnative._report cimport Report


# An event that transfers wait for, such as work on a device. Subclasses set `gate`.
cdef class Gate:
    cdef kvn_gate *gate        # valid as long as this object


# Memory that its owner may revoke; each kind is a subclass.
cdef class Revocable:
    cdef str why               # reason, once it was revoked
    cdef tuple parts           # Revocables that it is made of

    # Return the reason why the memory or a part of it was revoked, or None.
    cdef str revocation(self)
    # Return True if `memory` is this one, a part of it, or a part of a part.
    cdef bint contains(self, Revocable memory)


cdef class AnyTask:
    # Declared before the native task, which uses `descriptors` and `keep` until the outcome, and
    # `backend` as long as this object lives.
    cdef Backend backend
    cdef Descriptors descriptors  # held; None after the outcome
    cdef object keep              # a tuple with what may be revoked, or any object
    cdef dict siblings            # the executor's tasks in flight, this one among them
    cdef uint64_t count
    cdef Report outcome           # None while in flight
    cdef kvn_ending ending
    cdef object queue             # the CompletionQueue that watches the task, or None
    cdef uint64_t token           # of the task in the queue
    cdef list gates               # Gates of the task, or None

    # Implemented by each kind of task.
    cdef int poll_native(self) noexcept nogil
    cdef int wait_native(self, int64_t deadline_ns) noexcept nogil
    cdef int abort_native(self, int why) noexcept nogil
    cdef uint64_t bytes_done_native(self) noexcept nogil
    # Convert the native outcome, after it has come.
    cdef Report make_outcome(self)
    # Return True if the task ends without another call.
    cdef bint will_end(self)

    cdef kvn_columns take(self, Backend backend, Descriptors descriptors, object keep,
                          dict siblings) except *
    cdef int enlist(self) except -1
    cdef kvn_gate *behind(self, Gate gate) except? NULL
    cdef Report wait_until(self, int64_t deadline, bint stop)
    cdef Report settled(self)
    cdef Report settle(self)
    cdef tuple kept(self)
    # Cancel the task if its memory was revoked. The task is in flight before this check, so
    # that either the check or `revoke` cancels it.
    cdef int check_memory(self) except -1
    cdef bint uses(self, Revocable memory) except -1
    cdef int revoke(self) except -1
    cdef bint over(self)


cdef class Task(AnyTask):
    cdef kvn_task task

    @staticmethod
    cdef Task prepare(Backend backend, Descriptors descriptors, object keep, bint waits,
                      dict siblings, Gate after)
    cdef int begin(self) except -1


# Settle up to `most` of the oldest tasks of all executors, if they have ended.
cdef int drop_finished(int most) except -1
