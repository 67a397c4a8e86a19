"""Memory of peers reached by RDMA, and that of GPUs, through UCX."""
