"""Memory of Ascend devices of this host and others, by one-sided operations of HCCL.

Devices of other makers may not enter.
"""
