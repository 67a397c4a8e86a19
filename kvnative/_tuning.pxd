# What ThreadPool needs of a Tuning.
from kvnative._native cimport kvn_tuning

# ValueError: what is wrong with it.
cdef int fill_tuning(object given, kvn_tuning *tuning) except -1
