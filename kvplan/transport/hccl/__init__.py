"""Memory of Ascend devices of this and other hosts, reached by HCCL's one-sided operations."""
