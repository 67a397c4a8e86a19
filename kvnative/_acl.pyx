"""Ascend devices by ACL, whose library is opened at run time."""

cimport cython
from libc.stdint cimport int32_t

from kvnative._device cimport DeviceLibrary
from kvnative._host cimport kvn_failure

import os
import threading

from kvnative._backend import NativeError
from kvnative._device import DeviceError
from kvnative.ascend_files import ACL_NAMES, candidates, toolkit_version

__all__ = ["AclError", "AclLibrary"]


cdef dict LIBRARIES = {}  # path -> AclLibrary: a library is never closed
LIBRARIES_LOCK = threading.Lock()


class AclError(DeviceError):
    """A failed call of ACL; the message has the call, its code in words and the vendor's text.

    Attributes:
        code: aclError, or 0 if the failure is not ACL's.
        status: one of the KVN_ constants.
    """


@cython.final
@cython.auto_pickle(False)
cdef class AclLibrary(DeviceLibrary):
    """The ACL library of this process.

    Attributes:
        path: file of the library.
        version: version of the toolkit, such as "8.5.0", or of its ACL interface, "acl 1.16.0";
            None if unknown.
        missing: names of calls of later versions that this one lacks.
    """

    def __init__(self, *args, **kwargs):
        raise TypeError("an AclLibrary comes from AclLibrary.load()")

    @staticmethod
    def load(path: str | None = None) -> AclLibrary:
        """Open the library, or return the one that is open.

        Args:
            path: file of the library, folder of a toolkit, or a name that the loader searches; None
                searches the places of the environment and of the toolkit's installer, then asks the
                loader.
        """
        tried = []
        for files in candidates(ACL_NAMES, path):
            try:
                return AclLibrary.open_files(files)
            except AclError as error:
                tried.append(str(error))
        reasons = "; ".join(tried) or f"{path} has neither {' nor '.join(ACL_NAMES)}"
        raise NativeError(f"no ACL library: {reasons}")

    @staticmethod
    cdef AclLibrary open_files(list files):
        cdef kvn_failure failure
        cdef const char *paths[2]
        cdef AclLibrary self = AclLibrary.__new__(AclLibrary)
        cdef size_t count = min(len(files), 2)
        encoded = [os.fsencode(it) for it in files]
        for i in range(count):
            paths[i] = <const char *>encoded[i]
        self.ops = &kvn_acl_ops
        self.runtime = &self.library
        self.error = AclError
        with nogil:
            self.check(kvn_acl_library_open(paths, count, &self.library, &failure), &failure)
        self.opened()
        self.version = toolkit_version(self.path) or self.interface_version()
        with LIBRARIES_LOCK:
            return LIBRARIES.setdefault(os.path.realpath(self.path), self)

    cdef object interface_version(self):
        cdef int32_t numbers[3]
        if not kvn_acl_library_interface(&self.library, numbers):
            return None
        return f"acl {numbers[0]}.{numbers[1]}.{numbers[2]}"

    cdef int begin(self) except -1:
        cdef kvn_failure failure
        cdef int first = 0
        self.check_process()
        if self.initialized:
            return 0
        with self.lock:
            if not self.initialized:
                with nogil:
                    self.check(kvn_acl_library_init(&self.library, &first, &failure), &failure)
                self.ours = first != 0
                self.initialized = True
        return 0

    @property
    def has_batch(self) -> bool:
        """True if the library has batch copies, which a device may still not support."""
        return "aclrtMemcpyBatch" not in self.missing

    def soc_name(self) -> str:
        """Return the name of the devices' chip, such as "Ascend910B1"."""
        self.begin()
        return kvn_acl_library_soc(&self.library).decode(errors="replace")

    def finalize(self) -> None:
        """Call aclFinalize if this library called aclInit.

        Use it only if no other part of the process uses ACL.
        """
        cdef kvn_failure failure
        self.check_process()
        with self.lock:
            if not self.initialized or not self.ours:
                return
            if len(self.devices):
                raise NativeError(f"devices {sorted(self.devices)} are still in use")
            with nogil:
                self.check(kvn_acl_library_finalize(&self.library, &failure), &failure)
            self.initialized = False

    cdef int physical_number(self, int32_t device) except? -1:
        cdef int32_t physical = -1
        if kvn_acl_library_physical(&self.library, device, &physical):
            return physical
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
        if device < len(visible) and visible[device].strip().isdigit():
            return int(visible[device])
        return device

    cdef str name_of(self, int32_t device):
        return self.soc_name()

    def __repr__(self):
        return f"<AclLibrary {self.path}>"
