# Declarations for Cython modules that work with devices, or add a kind of device.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from posix.types cimport pid_t

from kvnative._crossing cimport kvn_symbols
from kvnative._host cimport kvn_failure
from kvnative._lower_c cimport kvn_gate
from kvnative._native cimport kvn_backend
from kvnative._task cimport Gate


cdef extern from "device/ops.h" nogil:
    enum:
        KVN_MEMORY_PAGEABLE
        KVN_MEMORY_PINNED
        KVN_MEMORY_DEVICE
        KVN_MEMORY_MANAGED
        KVN_MEMORY_FOREIGN
    ctypedef struct kvn_memory_place:
        int kind
        uint32_t device
        uint32_t page_nbytes
    ctypedef struct kvn_device_ops:
        const char *runtime
        const kvn_symbols *symbols
        int (*count_devices)(const void *runtime, uint32_t *count, kvn_failure *failure) nogil
        int (*attribute)(const void *runtime, int32_t device, int attribute, int64_t *value,
                         kvn_failure *failure) nogil


cdef extern from "device/device.h" nogil:
    ctypedef struct kvn_device:
        int32_t id

    int kvn_device_open(
        const kvn_device_ops *ops, const void *runtime, int32_t id, kvn_device *out,
        kvn_failure *failure
    )
    void kvn_device_close(kvn_device *device)
    int kvn_device_allocate(
        const kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure
    )
    int kvn_device_free(const kvn_device *device, void *address, kvn_failure *failure)
    ctypedef struct kvn_pinned:
        uint64_t first
        uint64_t last
        bint is_allocated

    int kvn_device_allocate_pinned(
        kvn_device *device, uint64_t nbytes, void **out, kvn_failure *failure
    )
    int kvn_device_free_pinned(kvn_device *device, void *address, kvn_failure *failure)
    bint kvn_device_pinned_at(kvn_device *device, uint64_t address, kvn_pinned *out)
    int kvn_device_pin(
        kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure
    )
    int kvn_device_unpin(kvn_device *device, uint64_t address, kvn_failure *failure)
    int kvn_device_locate(
        const kvn_device *device, uint64_t address, kvn_memory_place *out, kvn_failure *failure
    )
    int kvn_device_copy(
        const kvn_device *device, int direction, uint64_t dst, uint64_t src, uint64_t nbytes,
        kvn_failure *failure
    )
    int kvn_device_clear(
        const kvn_device *device, uint64_t address, uint64_t nbytes, kvn_failure *failure
    )
    int kvn_device_memory(
        const kvn_device *device, size_t *free_nbytes, size_t *total_nbytes, kvn_failure *failure
    )
    void kvn_device_fallback(kvn_device *device, char *out, size_t room)


cdef extern from "device/events.h" nogil:
    ctypedef struct kvn_events:
        pass
    ctypedef struct kvn_event:
        kvn_gate gate

    kvn_events *kvn_events_create(kvn_device *device)
    void kvn_events_close(kvn_events *events)
    void kvn_events_destroy(kvn_events *events)
    int kvn_event_take_stream(
        kvn_events *events, void *stream, kvn_event *out, kvn_failure *failure
    )
    int kvn_event_take(kvn_events *events, void *event, kvn_event *out, kvn_failure *failure)
    void kvn_event_give_back(kvn_event *event)


cdef extern from "device/channel.h" nogil:
    ctypedef struct kvn_channel:
        pass

    int kvn_channel_create(kvn_device *device, kvn_channel **out, kvn_failure *failure)
    void kvn_channel_destroy(kvn_channel *channel)


cdef extern from "device/stream_backend.h" nogil:
    enum:
        KVN_MAX_CHANNELS


cdef extern from "device/copy.h" nogil:
    kvn_backend *kvn_device_copy_create(
        kvn_device *device, kvn_channel **channels, unsigned num_channels, int direction
    )


# The opened runtime of one kind of accelerator, one object per process. Each kind is a subclass,
# which fills in the fields when it is made.
cdef class DeviceLibrary:
    cdef const kvn_device_ops *ops
    cdef const void *runtime   # argument of the ops
    cdef pid_t pid             # of the process that opened it: no other may use it
    cdef object error          # class of the errors that calls raise, a DeviceError
    cdef readonly str path     # of the library's file
    cdef readonly object version
    cdef readonly tuple missing  # names of calls that only later versions have
    cdef object lock
    cdef object devices        # id -> Device, weak
    cdef object __weakref__

    # Raise NativeError in a forked child.
    cdef int check_process(self) except -1
    # Raise `failure` as self.error, or as ValueError for an argument that was refused before any
    # call.
    cdef int check(self, int status, const kvn_failure *failure) except -1 nogil
    # Set `path` and `missing` of the opened library.
    cdef int opened(self) except -1
    # Prepare the runtime before its first device is opened.
    cdef int begin(self) except -1
    # Return a device's physical number on its server.
    cdef int physical_number(self, int32_t device) except? -1
    # Return the name of a device's chip.
    cdef str name_of(self, int32_t device)


# Return the kvn_direction of a name in COPY_DIRECTIONS; ValueError for another name.
cdef int direction_of(str name) except -1


cdef class Device:
    cdef readonly DeviceLibrary library
    cdef kvn_device device     # stays in place: channels and backends point to it
    cdef bint opened
    cdef bint closed
    cdef kvn_events *events    # NULL before the first was taken
    cdef object lock
    cdef object channels       # direction -> Channels, weak
    cdef object __weakref__

    @staticmethod
    cdef Device open_number(DeviceLibrary library, int32_t number)
    cdef DeviceEvent take(self, object handle, bint is_stream)
    # Raise NativeError in a forked child, or if the device is closed.
    cdef int check_usable(self) except -1
    cdef kvn_memory_place look_up(self, object address) except *
    cdef int copy(self, object address, object buffer, bint to_device) except -1


cdef class DeviceBuffer:
    cdef readonly Device device
    cdef void *start
    cdef readonly uint64_t nbytes


cdef class DeviceEvent(Gate):
    cdef readonly Device device
    cdef kvn_event event
    cdef bint taken
