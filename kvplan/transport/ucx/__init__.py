"""Memory of processes on other hosts over RDMA, and of GPUs, through UCX.

This transport must not use plain sockets, which belong to `tcp`.
"""
