# Conversion of a Tuning to C, for ThreadPool.
from kvnative._native cimport kvn_tuning

# Fill in `tuning`; raise what check_tuning raises.
cdef int fill_tuning(object given, kvn_tuning *tuning) except -1
