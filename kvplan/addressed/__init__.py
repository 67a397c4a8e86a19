"""The common part of interfaces by address: `kvplan.hixl`, `kvplan.nixl`, `kvplan.mooncake`.

Memory is registered by address, and peers have names. Statuses and exceptions of an interface do
not belong here.
"""
