# How arrays cross from Python: checked by name, dtype, byte order and strides, never copied.
from cpython.buffer cimport PyBUF_FULL_RO, PyBuffer_Release, PyObject_GetBuffer


cdef inline bint is_native_uint64(const Py_buffer *column) noexcept:
    cdef const char *letter = column.format
    if letter is NULL or column.itemsize != 8:
        return False
    if letter[0] in (c"@", c"="):
        letter += 1
    return letter[0] in (c"L", c"Q") and letter[1] == 0


# By hand and not as a typed memoryview: messages name the argument, and it costs a third.
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
