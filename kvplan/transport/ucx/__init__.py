"""Memory of processes on other hosts over RDMA, and of GPUs, through UCX.

Plain sockets may not enter: that is `tcp`.
"""
