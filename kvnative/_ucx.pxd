# Declarations of the sources behind _ucx, and its classes.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kvnative._host cimport kvn_failure


cdef extern from "clock.h" nogil:
    int64_t kvn_now_ns()


cdef extern from "ucx_library.h" nogil:
    ctypedef struct kvn_ucx_library:
        unsigned version[3]
        const char *path

    int kvn_ucx_library_open(const char *path, kvn_ucx_library *out, kvn_failure *failure)


cdef extern from "ucx_end.h" nogil:
    ctypedef enum kvn_ucx_mode:
        KVN_UCX_GATHERED
        KVN_UCX_ONE_SIDED
    enum:
        KVN_UCX_TOKEN_NBYTES
    ctypedef struct kvn_ucx_end:
        pass
    ctypedef struct kvn_ucx_link:
        pass
    ctypedef struct kvn_ucx_setting:
        const char *name
        const char *value
    ctypedef struct kvn_ucx_counters:
        uint64_t messages
        uint64_t unknown_tokens
        uint64_t malformed
        uint64_t wakeups
        uint64_t rounds
        uint64_t links_failed

    int kvn_ucx_end_create(
        const kvn_ucx_library *library, kvn_ucx_mode mode, const kvn_ucx_setting *settings,
        size_t num_settings, const char *name, kvn_ucx_end **out, kvn_failure *failure
    )
    void kvn_ucx_end_close(kvn_ucx_end *end)
    void kvn_ucx_end_release(kvn_ucx_end *end)
    const void *kvn_ucx_end_address(const kvn_ucx_end *end, size_t *nbytes)
    void kvn_ucx_end_transports(const kvn_ucx_end *end, char *out, size_t room)
    bint kvn_ucx_end_is_forked(const kvn_ucx_end *end)
    void kvn_ucx_end_count(const kvn_ucx_end *end, kvn_ucx_counters *out)


cdef extern from "ucx_link.h" nogil:
    int kvn_ucx_link_create(
        kvn_ucx_end *end, const uint8_t *token, const void *address, size_t address_nbytes,
        kvn_ucx_link **out, kvn_failure *failure
    )
    int kvn_ucx_link_connect(kvn_ucx_link *link, int64_t deadline_ns, kvn_failure *failure)
    void kvn_ucx_link_close(kvn_ucx_link *link, const char *reason)
    void kvn_ucx_link_hold(kvn_ucx_link *link)
    void kvn_ucx_link_release(kvn_ucx_link *link)
    bint kvn_ucx_link_is_connected(const kvn_ucx_link *link)
    bint kvn_ucx_link_has_failed(const kvn_ucx_link *link, kvn_failure *why)
    int kvn_ucx_link_death_fd(const kvn_ucx_link *link)
    void kvn_ucx_link_way(kvn_ucx_link *link, char *out, size_t room)


cdef extern from "ucx_serve.h" nogil:
    ctypedef struct kvn_ucx_serve:
        pass
    ctypedef struct kvn_ucx_served:
        uint64_t pulled_nbytes
        uint64_t pushed_nbytes
        uint64_t parts
        uint64_t refused
        uint64_t broken
        uint64_t stalled

    kvn_ucx_serve *kvn_ucx_serve_create(
        kvn_ucx_end *end, uint32_t max_ranges, kvn_failure *failure
    )
    int kvn_ucx_serve_add_range(
        kvn_ucx_serve *self, uint64_t slot, uint64_t address, uint64_t nbytes, bint writable,
        uint64_t generation, kvn_failure *failure
    )
    enum:
        KVN_UCX_MAX_LANES
    int kvn_ucx_serve_remove_range(
        kvn_ucx_serve **all, size_t count, uint64_t slot, kvn_failure *failure
    )
    void kvn_ucx_serve_count(const kvn_ucx_serve *self, kvn_ucx_served *out)


# Raises what `failure` says: UcxError, or ValueError for an argument that UCX never saw.
cdef int check_ucx(int status, const kvn_failure *failure) except -1


cdef class UcxLibrary:
    cdef kvn_ucx_library library
    cdef readonly str path
    cdef readonly tuple version


cdef class UcxEnd:
    cdef UcxLibrary library
    cdef kvn_ucx_end *end
    cdef kvn_ucx_serve *serve     # the end's; NULL for a one-sided one
    cdef readonly str mode
    cdef readonly bytes address
    cdef readonly str transports
    cdef object __weakref__

    # TypeError before it was made, NativeError in a forked child.
    cdef int check_made(self) except -1
    # ValueError for a one-sided end.
    cdef int check_serves(self) except -1


cdef class UcxNativeLink:
    cdef readonly UcxEnd end
    cdef kvn_ucx_link *link

    @staticmethod
    cdef UcxNativeLink of(UcxEnd end, bytes token, bytes peer_address)
    cdef int check_made(self) except -1
