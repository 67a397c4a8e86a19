# The C form of a Tuning, for ThreadPool.
from kvnative._native cimport kvn_tuning

# Raises what check_tuning raises.
cdef int fill_tuning(object given, kvn_tuning *tuning) except -1
