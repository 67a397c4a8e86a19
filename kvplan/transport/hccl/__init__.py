"""Memory of Ascend devices of this host and others, by one-sided operations of HCCL.

This transport must not use devices of other vendors.
"""
