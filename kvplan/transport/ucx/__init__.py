"""Memory of processes on other hosts, reached through UCX: RDMA, TCP, whatever it knows."""
