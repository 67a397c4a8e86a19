# Conversions between Python and C: columns of numbers, checked and never copied; and failures.
from cpython.buffer cimport PyBUF_FULL_RO, PyBuffer_Release, PyObject_GetBuffer

from kvnative._native cimport KVN_INVALID, KVN_OK, KVN_PEER_GET, KVN_PEER_PUT, kvn_failure


cdef extern from "core/library.h" nogil:
    ctypedef struct kvn_symbol:
        const char *name
    ctypedef struct kvn_symbols:
        pass

    const kvn_symbol *kvn_library_missing(
        const void *calls, const kvn_symbols *symbols, const kvn_symbol *after
    )
    void kvn_library_path(const void *calls, const kvn_symbols *symbols, char *out, size_t room)


cdef inline str library_path(const void *calls, const kvn_symbols *symbols):
    """Return the file of a library; "" if the loader does not know it."""
    cdef char found[4096]
    kvn_library_path(calls, symbols, found, sizeof(found))
    return (<bytes>found).decode("utf-8", "surrogateescape")


cdef inline tuple missing_calls(const void *calls, const kvn_symbols *symbols):
    """Return the names of the optional calls that a library lacks."""
    cdef list names = []
    cdef const kvn_symbol *symbol = kvn_library_missing(calls, symbols, NULL)
    while symbol is not NULL:
        names.append(symbol.name.decode())
        symbol = kvn_library_missing(calls, symbols, symbol)
    return tuple(names)


cdef inline int raise_failure(object error, int status, const kvn_failure *failure) except -1:
    """Raise `error`, a CallError, or ValueError for an argument that was refused before a call."""
    message = failure.message.decode("utf-8", "replace")
    if status == KVN_INVALID and failure.code == 0:
        raise ValueError(message)
    raise error(message, failure.code, status)


cdef inline int peer_direction(object direction) except -1:
    """Return KVN_PEER_GET or KVN_PEER_PUT."""
    if direction == "get":
        return KVN_PEER_GET
    if direction == "put":
        return KVN_PEER_PUT
    raise ValueError(f"direction is {direction!r}; it must be 'get' or 'put'")


cdef inline bint is_native_uint64(const Py_buffer *column) noexcept:
    cdef const char *letter = column.format
    if letter is NULL or column.itemsize != 8:
        return False
    if letter[0] in (c"@", c"="):
        letter += 1
    return letter[0] in (c"L", c"Q") and letter[1] == 0


# Takes a third of the time of a typed memoryview, and its messages name the argument.
cdef inline int acquire_uint64(Py_buffer *column, object source, str name) except -1:
    """Take `source` as a column of uint64; on success the caller releases it."""
    try:
        PyObject_GetBuffer(source, column, PyBUF_FULL_RO)
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(f"{name}: expected a column of uint64, got {type(source).__name__}"
                        f" ({error})") from None
    try:
        if not is_native_uint64(column):
            item = "B" if column.format is NULL else column.format.decode()
            raise TypeError(f"{name}: expected uint64 in native byte order, got items of"
                            f" {column.itemsize} bytes and format {item!r}")
        if column.ndim != 1:
            raise ValueError(f"{name}: expected 1 dimension, got {column.ndim}")
        if column.shape[0] > 1 and column.strides[0] != 8:
            raise ValueError(f"{name}: expected contiguous items, 8 bytes apart,"
                             f" got items {column.strides[0]} bytes apart")
    except BaseException:
        PyBuffer_Release(column)
        raise
    return 0


cdef inline void release_columns(Py_buffer *columns, int count) noexcept:
    cdef int i
    for i in range(count):
        PyBuffer_Release(&columns[i])


cdef inline int check_length(const Py_buffer *columns, int first, int other, names) except -1:
    if columns[other].shape[0] != columns[first].shape[0]:
        raise ValueError(f"{names[other]}: expected {columns[first].shape[0]} items, as in"
                         f" {names[first]}, got {columns[other].shape[0]}")
    return 0


cdef inline int acquire_columns(
    Py_buffer *columns, tuple sources, tuple names, bint alike=True
) except -1:
    """Take columns of uint64, `alike` in length; on success the caller releases them."""
    cdef int held = 0
    try:
        for source in sources:
            acquire_uint64(&columns[held], source, names[held])
            held += 1
            if alike:
                check_length(columns, 0, held - 1, names)
    except BaseException:
        release_columns(columns, held)
        raise
    return 0
