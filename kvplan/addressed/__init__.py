"""The common part of interfaces by address: `kvplan.hixl`, `kvplan.nixl`, `kvplan.mooncake`.

Memory is registered by address, and peers have names. Each interface defines its statuses and
exceptions.
"""
