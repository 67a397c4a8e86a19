# The ACL library, as other Cython modules may see it.
from libc.stdint cimport int32_t, int64_t, uint32_t
from posix.types cimport pid_t

from kvnative._host cimport kvn_failure


cdef extern from "kvnative/acl.h" nogil:
    ctypedef struct kvn_acl:
        pass


cdef extern from "acl/library.h" nogil:
    ctypedef struct kvn_acl_library:
        kvn_acl calls
        pid_t pid

    int kvn_acl_library_open(
        const char *const *paths, size_t num_paths, kvn_acl_library *out, kvn_failure *failure
    )
    void kvn_acl_library_path(const kvn_acl_library *library, char *out, size_t room)
    const char *kvn_acl_missing(const kvn_acl *acl, size_t n)
    int kvn_acl_library_init(const kvn_acl_library *library, int *first, kvn_failure *failure)
    int kvn_acl_library_finalize(const kvn_acl_library *library, kvn_failure *failure)
    int kvn_acl_library_devices(
        const kvn_acl_library *library, uint32_t *count, kvn_failure *failure
    )
    const char *kvn_acl_library_soc(const kvn_acl_library *library)
    int kvn_acl_library_interface(const kvn_acl_library *library, int32_t *version)
    int kvn_acl_library_physical(
        const kvn_acl_library *library, int32_t logical, int32_t *physical
    )
    int kvn_acl_library_attribute(
        const kvn_acl_library *library, int32_t device, int attribute, int64_t *value,
        kvn_failure *failure
    )


# Raises what `failure` says of a call of ACL: AclError, or ValueError for an argument that was
# refused before any call.
cdef int check_acl(int status, const kvn_failure *failure) except -1


cdef class AclLibrary:
    cdef kvn_acl_library library
    cdef object lock
    cdef object devices        # id -> Device, weak
    cdef bint initialized
    cdef bint ours             # this process was not initialized by anybody else
    cdef readonly str path
    cdef readonly object version
    cdef readonly tuple missing
    cdef object __weakref__

    @staticmethod
    cdef AclLibrary open_files(list files)
    cdef list list_missing(self)
    cdef object interface_version(self)
    # NativeError in a forked child.
    cdef int check_process(self) except -1
    # aclInit, once.
    cdef int begin(self) except -1
    # On the server: as the runtime says, else as the list of visible devices does.
    cdef int physical_number(self, int32_t device) except? -1
    # None where this version does not know it.
    cdef object attribute_of(self, int32_t device, int number)
