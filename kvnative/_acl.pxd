# Declarations for Cython modules that work with the ACL library of Ascend devices.
from libc.stdint cimport int32_t

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
    int kvn_acl_library_init(const kvn_acl_library *library, int *first, kvn_failure *failure)
    int kvn_acl_library_finalize(const kvn_acl_library *library, kvn_failure *failure)
    const char *kvn_acl_library_soc(const kvn_acl_library *library)
    int kvn_acl_library_interface(const kvn_acl_library *library, int32_t *version)
    int kvn_acl_library_physical(
        const kvn_acl_library *library, int32_t logical, int32_t *physical
    )


cdef extern from "acl/ops.h" nogil:
    const kvn_device_ops kvn_acl_ops


cdef class AclLibrary(DeviceLibrary):
    cdef kvn_acl_library library
    cdef bint initialized
    cdef bint ours             # aclInit was called here

    @staticmethod
    cdef AclLibrary open_files(list files)
    cdef object interface_version(self)
