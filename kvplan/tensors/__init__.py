"""Tensors of any library: what they say of themselves, compared with cache descriptions.

No library of tensors is imported here except NumPy, and no byte of a tensor is read. Registering
memory and copying belong to `kvplan.execution` and `kvplan.device`.
"""
