# Ascend devices, as other Cython modules may see them: cimport this to work with ACL's library.
from libc.stdint cimport int32_t, int64_t, uint32_t

from kvnative._device cimport DeviceLibrary, kvn_device_ops
from kvnative._host cimport kvn_failure


cdef extern from "kvnative/acl.h" nogil:
    ctypedef struct kvn_acl:
        pass


cdef extern from "acl/library.h" nogil:
    ctypedef struct kvn_acl_library:
        kvn_acl calls

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


cdef extern from "acl/ops.h" nogil:
    const kvn_device_ops kvn_acl_ops


cdef class AclLibrary(DeviceLibrary):
    cdef kvn_acl_library library
    cdef bint initialized
    cdef bint ours             # aclInit was called here
    cdef readonly tuple missing

    @staticmethod
    cdef AclLibrary open_files(list files)
    cdef list list_missing(self)
    cdef object interface_version(self)
