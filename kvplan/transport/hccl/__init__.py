"""Memory of Ascend devices and of their hosts, by one-sided operations of HCCL.

This transport must not use devices of other vendors.
"""
