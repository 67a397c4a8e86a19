"""Tensors of any library: their shape, type and memory, and cache descriptions of them.

This room imports no tensor library except NumPy, and reads no byte of a tensor.
"""
