# Declarations for Cython modules that use layered tasks.
from libc.stdint cimport uint64_t

from kvnative._backend cimport Backend
from kvnative._lower cimport Descriptors
from kvnative._native cimport kvn_layered
from kvnative._task cimport AnyTask


cdef class LayeredTask(AnyTask):
    cdef kvn_layered layered

    @staticmethod
    cdef LayeredTask prepare(Backend backend, Descriptors descriptors, uint64_t layer_size,
                             object keep, dict siblings)
    cdef tuple unconfirmed(self)
