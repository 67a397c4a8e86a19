"""Tensors of any library: their shape, type and memory, and cache descriptions of them.

No library of tensors is imported here except NumPy, and no byte of a tensor is read. Registering
memory and copying belong to `kvplan.execution` and `kvplan.device`.
"""
