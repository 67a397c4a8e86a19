"""A bounded log of the calls of an observed program, and the tables in their indices."""

cimport cython
from cpython.buffer cimport PyBUF_FULL_RO, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from numpy import ndarray

__all__ = ["CallLog", "tables_of"]

cdef extern from *:
    ctypedef struct PyMethodDef:
        const char *ml_name
        void *ml_meth
        int ml_flags
        const char *ml_doc
    int METH_FASTCALL
    object PyCFunction_New(PyMethodDef *method, object self)
    unsigned long long PyLong_AsUnsignedLongLongMask(object number)

cdef enum:
    ANY, BY_HANDLE, MADE
    KEPT_NBYTES = 4 << 20  # larger memory of a batch is freed after its calls were taken

cdef struct Call:
    int kind
    PyObject *note
    PyObject *values[4]  # owned; NULL for indices that are in `copies`
    size_t owner
    size_t handle
    size_t lists[2]
    double begin
    double end
    Py_ssize_t num_indices[2]
    Py_ssize_t itemsize[2]

cdef struct Batch:
    Call *calls
    Py_ssize_t count
    Py_ssize_t size
    char *copies  # of indices, in the order of the calls
    Py_ssize_t nbytes
    Py_ssize_t copies_size
    Py_ssize_t lost


cdef inline double now() noexcept:
    """Return the time as `perf_counter` does."""
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return (at.tv_sec * <int64_t>1000000000 + at.tv_nsec) / 1e9


cdef inline size_t key_of(handle):
    """Return the key of a handle: the handle itself if it is a number, otherwise its id."""
    if type(handle) is int:
        return PyLong_AsUnsignedLongLongMask(handle)
    return <size_t><void *>handle


cdef inline PyObject *owned(value):
    Py_INCREF(value)
    return <PyObject *>value


cdef inline object moved(PyObject *value):
    """Return an object that was owned."""
    found = <object>value
    Py_DECREF(found)
    return found


cdef Py_ssize_t doubled(void **memory, Py_ssize_t size, Py_ssize_t needed, size_t each) noexcept:
    """Enlarge memory to at least `needed` items; return the new size, or the old one on failure."""
    cdef Py_ssize_t larger = max(2 * size, needed)
    cdef void *found = realloc(memory[0], larger * each)
    if found is NULL:
        return size
    memory[0] = found
    return larger


cdef struct Indices:
    PyObject *given  # owned; NULL: in `buffer`
    Py_buffer buffer
    Py_ssize_t count
    Py_ssize_t itemsize


cdef int hold(Indices *indices, given) except -1:
    """Hold the indices of a call, so that the program cannot change them; see `let_go`."""
    cdef const char *letter
    indices.given = NULL
    indices.itemsize = 8
    if type(given) is ndarray:
        PyObject_GetBuffer(given, &indices.buffer, PyBUF_FULL_RO)
        letter = indices.buffer.format
        if (
            indices.buffer.ndim == 1 and letter[0] in b"ilq" and letter[1] == 0
            and (indices.buffer.shape[0] < 2
                 or indices.buffer.strides[0] == indices.buffer.itemsize)
        ):
            indices.count = indices.buffer.shape[0]
            indices.itemsize = indices.buffer.itemsize
            return 0
        PyBuffer_Release(&indices.buffer)
        given = given.copy()
    else:
        given = given.copy() if type(given) is list else tuple(given)
    indices.count = len(given)
    indices.given = owned(given)
    return 0


cdef inline void let_go(Indices *indices) noexcept:
    if indices.given is NULL:
        PyBuffer_Release(&indices.buffer)
    else:
        Py_DECREF(<object>indices.given)


cdef bytes widened(const char *copies, Py_ssize_t count, Py_ssize_t itemsize):
    """Return indices as int64."""
    cdef Py_ssize_t i
    cdef int64_t *wide
    if itemsize == 8:
        return PyBytes_FromStringAndSize(copies, 8 * count)
    made = PyBytes_FromStringAndSize(NULL, 8 * count)
    wide = <int64_t *>PyBytes_AsString(made)
    for i in range(count):
        wide[i] = (<const int32_t *>copies)[i]
    return made


@cython.final
@cython.auto_pickle(False)
cdef class CallLog:
    """A log of calls, which any thread appends to, and one thread at a time takes from.

    A call without room is lost, and so are later calls of transfers, until all calls were taken. A
    single call always has room.

    Args:
        wake: called after each call that is appended while `awake` is False.
        max_calls: maximum number of calls; calls of `add` have twice the room.
        max_nbytes: maximum number of bytes of indices.

    Attributes:
        active: False: append no calls.
        awake: True if `wake` need not be called.
        add_handle: appends a call of a method that takes a handle: (note, owner, handle, result,
            begin, further arguments, error). The log keeps the handle if it is an int, otherwise
            its id.
        add_made: appends a call of a method that makes a transfer of rows of two lists: (note,
            owner, handle, operation, local list, indices, remote list, indices, message). The log
            keeps handles in the same way, and a copy of the indices.
    """
    # Functions of positional arguments in C, because those of Cython take 0.1 us more in the stable
    # ABI of Python 3.11.
    cdef readonly object add_handle
    cdef readonly object add_made
    cdef public bint active
    cdef public bint awake
    cdef object wake
    cdef Py_ssize_t max_calls
    cdef Py_ssize_t max_nbytes
    cdef Batch coming
    cdef Batch taken
    cdef Py_ssize_t num_taken  # calls of `taken`
    cdef Py_ssize_t nbytes_taken

    def __init__(self, wake, Py_ssize_t max_calls, Py_ssize_t max_nbytes):
        self.wake = wake
        self.max_calls = max_calls
        self.max_nbytes = max_nbytes
        self.active = True
        self.add_handle = PyCFunction_New(&add_handle_method, self)
        self.add_made = PyCFunction_New(&add_made_method, self)

    def __dealloc__(self):
        drop(&self.taken, self.num_taken)
        drop(&self.coming, 0)
        free(self.taken.calls)
        free(self.taken.copies)
        free(self.coming.calls)
        free(self.coming.copies)

    def __len__(self):
        return self.coming.count + self.taken.count - self.num_taken

    cdef Call *room(self, Py_ssize_t nbytes, Py_ssize_t max_calls) noexcept:
        """Return the place of a new call with this many bytes of indices; NULL: it is lost."""
        cdef Batch *coming = &self.coming
        cdef Call *call
        if coming.count > 0 and (
            coming.count >= max_calls or coming.nbytes + nbytes > self.max_nbytes
            or coming.lost > 0 and max_calls == self.max_calls  # the lost ones are the last
        ):
            coming.lost += 1
            return NULL
        if coming.count == coming.size:
            coming.size = doubled(<void **>&coming.calls, coming.size, 64, sizeof(Call))
        if coming.nbytes + nbytes > coming.copies_size:
            coming.copies_size = doubled(
                <void **>&coming.copies, coming.copies_size, coming.nbytes + nbytes + 4096, 1)
        if coming.count == coming.size or coming.nbytes + nbytes > coming.copies_size:
            coming.lost += 1  # no memory
            return NULL
        call = &coming.calls[coming.count]
        call.values[0] = call.values[1] = call.values[2] = call.values[3] = NULL
        call.num_indices[0] = call.num_indices[1] = 0
        coming.count += 1
        return call

    def add(self, note, owner, double begin, str error not None, tuple picked not None):
        """Append a call of any method.

        Args:
            note: first value that `take` returns for the call.
            owner: the object whose method was called; the log keeps its id.
            begin: when the call began; it has ended now.
            error: text of the exception; "" if there was none.
            picked: further values, which must not change.
        """
        cdef Call *call
        if not self.active:
            return
        with cython.critical_section(self):
            call = self.room(0, 2 * self.max_calls)
            if call is NULL:
                return
            call.kind, call.begin, call.end = ANY, begin, now()
            call.owner = <size_t><void *>owner
            call.note = owned(note)
            call.values[0] = owned(error)
            call.values[1] = owned(picked)
        if not self.awake:
            self.wake()

    cdef int append_handle(
        self, note, owner, handle, result, double begin, rest, str error
    ) except -1:
        cdef Call *call
        if not self.active:
            return 0
        with cython.critical_section(self):
            call = self.room(0, self.max_calls)
            if call is NULL:
                return 0
            call.kind, call.begin, call.end = BY_HANDLE, begin, now()
            call.owner = <size_t><void *>owner
            call.handle = key_of(handle)
            call.note = owned(note)
            call.values[0] = owned(error)
            call.values[1] = owned(result)
            call.values[2] = owned(rest)
        if not self.awake:
            self.wake()
        return 0

    cdef int append_made(
        self, note, owner, handle, operation, local, here, remote, there, message
    ) except -1:
        cdef Call *call
        cdef Indices indices[2]
        cdef Py_ssize_t nbytes
        cdef char *copies
        cdef int i
        if not self.active:
            return 0
        hold(&indices[0], here)
        try:
            hold(&indices[1], there)
        except BaseException:
            let_go(&indices[0])
            raise
        with cython.critical_section(self):
            nbytes = 0
            for i in range(2):
                nbytes += indices[i].count * indices[i].itemsize + 7 & ~7
            call = self.room(nbytes, self.max_calls)
            if call is not NULL:
                call.kind = MADE
                call.owner = <size_t><void *>owner
                call.handle, call.lists[0], call.lists[1] = (
                    key_of(handle), key_of(local), key_of(remote))
                call.note = owned(note)
                call.values[0] = owned(operation)
                call.values[1] = owned(message)
                copies = self.coming.copies + self.coming.nbytes
                self.coming.nbytes += nbytes
                for i in range(2):
                    call.num_indices[i] = indices[i].count
                    call.itemsize[i] = indices[i].itemsize
                    if indices[i].given is NULL:
                        memcpy(copies, indices[i].buffer.buf, indices[i].buffer.len)
                    else:
                        call.values[2 + i] = owned(<object>indices[i].given)
                    copies += indices[i].count * indices[i].itemsize + 7 & ~7
        let_go(&indices[0])
        let_go(&indices[1])
        if call is not NULL and not self.awake:
            self.wake()
        return 0

    @cython.critical_section
    def take(self, Py_ssize_t count):
        """Remove and return at most `count` calls, oldest first, and how many were lost next.

        Each is (note, id of the owner, begin, end, error) and then, for `add`: `picked`; for
        `add_handle`: key of the handle, result, rest; for `add_made`: key of the handle, operation,
        key and indices of the local list, the same of the remote list, message. Copies of indices
        that were arrays of int32 or int64 are bytes of int64; others are a list, tuple or array.
        """
        cdef Batch empty
        cdef Py_ssize_t lost = 0
        cdef list found = []
        if self.num_taken == self.taken.count:
            empty = self.taken
            self.taken, self.coming = self.coming, empty
            self.num_taken = self.nbytes_taken = 0
        while self.num_taken < self.taken.count and len(found) < count:
            found.append(self.next_call())
        if self.num_taken == self.taken.count:
            lost = self.taken.lost
            drop(&self.taken, self.num_taken)
            self.num_taken = 0
        return found, lost

    cdef tuple next_call(self):
        cdef Call *call = &self.taken.calls[self.num_taken]
        cdef list indices
        cdef int i
        self.num_taken += 1
        if call.kind == ANY:
            error = moved(call.values[0])
            return moved(call.note), call.owner, call.begin, call.end, error, *moved(call.values[1])
        if call.kind == BY_HANDLE:
            error, result = moved(call.values[0]), moved(call.values[1])
            return (moved(call.note), call.owner, call.begin, call.end, error, call.handle, result,
                    moved(call.values[2]))
        indices = []
        for i in range(2):
            if call.values[2 + i] is NULL:
                indices.append(widened(
                    self.taken.copies + self.nbytes_taken, call.num_indices[i], call.itemsize[i]))
            else:
                indices.append(moved(call.values[2 + i]))
            self.nbytes_taken += call.num_indices[i] * call.itemsize[i] + 7 & ~7
        operation = moved(call.values[0])
        return (moved(call.note), call.owner, 0.0, 0.0, "", call.handle, operation, call.lists[0],
                indices[0], call.lists[1], indices[1], moved(call.values[1]))

    @cython.critical_section
    def clear(self):
        """Remove all calls."""
        drop(&self.taken, self.num_taken)
        drop(&self.coming, 0)
        self.num_taken = 0


cdef object add_handle(CallLog log, PyObject *const *args, Py_ssize_t count):
    if count != 7:
        raise TypeError(f"add_handle takes 7 arguments, got {count}")
    log.append_handle(<object>args[0], <object>args[1], <object>args[2], <object>args[3],
                      <object>args[4], <object>args[5], <object>args[6])


cdef object add_made(CallLog log, PyObject *const *args, Py_ssize_t count):
    if count != 9:
        raise TypeError(f"add_made takes 9 arguments, got {count}")
    log.append_made(<object>args[0], <object>args[1], <object>args[2], <object>args[3],
                    <object>args[4], <object>args[5], <object>args[6], <object>args[7],
                    <object>args[8])


cdef PyMethodDef add_handle_method, add_made_method
add_handle_method.ml_name, add_handle_method.ml_meth = "add_handle", <void *>add_handle
add_made_method.ml_name, add_made_method.ml_meth = "add_made", <void *>add_made
add_handle_method.ml_flags = add_made_method.ml_flags = METH_FASTCALL
add_handle_method.ml_doc = add_made_method.ml_doc = NULL


cdef void drop(Batch *batch, Py_ssize_t first) noexcept:
    """Remove the calls of a batch; those before `first` own nothing."""
    cdef Batch gone = batch[0]
    cdef Py_ssize_t i
    cdef int value
    cdef bint is_kept = (
        first == gone.count
        and gone.size * <Py_ssize_t>sizeof(Call) + gone.copies_size <= KEPT_NBYTES
    )
    batch.count = batch.nbytes = batch.lost = 0
    # The release of an object may run code of the program that appends to this batch.
    if not is_kept:
        batch.calls, batch.copies, batch.size, batch.copies_size = NULL, NULL, 0, 0
    for i in range(first, gone.count):
        Py_DECREF(<object>gone.calls[i].note)
        for value in range(4):
            if gone.calls[i].values[value] is not NULL:
                Py_DECREF(<object>gone.calls[i].values[value])
    if not is_kept:
        free(gone.calls)
        free(gone.copies)


def tables_of(bytes here not None, bytes there not None, Py_ssize_t num_here,
              Py_ssize_t count_here, Py_ssize_t num_there, Py_ssize_t count_there):
    """Return the indices of a transfer as a table, with the same number of rows in each tensor.

    Args:
        here, there: indices, as int64, of two lists of equal tensors.
        num_here, num_there: tensors of each list.
        count_here, count_there: rows of each tensor of a list.

    Returns:
        Number of tensors, and for each list its first tensor, the rows as int64, and whether the
        rows are different; None if the indices are not a table.
    """
    cdef Py_ssize_t count = len(here) // 8, num = 1, i
    cdef const int64_t *ours = <const int64_t *>PyBytes_AsString(here)
    if count == 0 or len(there) != len(here):
        return None
    for i in range(1, count):
        if ours[i] == ours[0] + count_here:
            num = count // i
            break
    if count % num:
        return None
    first = table_of(ours, count // num, num, num_here, count_here)
    if first is None:
        return None
    second = table_of(
        <const int64_t *>PyBytes_AsString(there), count // num, num, num_there, count_there)
    return None if second is None else (num, *first, *second)


cdef tuple table_of(const int64_t *indices, Py_ssize_t count, Py_ssize_t num,
                    Py_ssize_t num_tensors, Py_ssize_t rows_of_tensor):
    """Return the first of `num` tensors, `count` rows, and whether the rows are different."""
    cdef Py_ssize_t first = indices[0] // rows_of_tensor, i
    cdef int64_t *rows
    cdef bint ascends = True
    if indices[0] < 0 or first + num > num_tensors:
        return None
    for i in range(count, count * num):
        if indices[i] != indices[i - count] + rows_of_tensor:
            return None
    made = PyBytes_FromStringAndSize(NULL, 8 * count)
    rows = <int64_t *>PyBytes_AsString(made)
    for i in range(count):
        rows[i] = indices[i] - first * rows_of_tensor
        if not 0 <= rows[i] < rows_of_tensor:
            return None
        ascends = ascends and (i == 0 or rows[i] > rows[i - 1])
    return first, made, ascends or are_different(rows, count, rows_of_tensor)


cdef bint are_different(const int64_t *rows, Py_ssize_t count, Py_ssize_t limit) noexcept:
    """Return whether no two rows are equal; False if memory is short."""
    cdef char *seen = <char *>calloc(limit, 1)
    cdef Py_ssize_t i
    cdef bint different = seen is not NULL
    for i in range(count):
        if not different:
            break
        different = not seen[rows[i]]
        seen[rows[i]] = 1
    free(seen)
    return different
