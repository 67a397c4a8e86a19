"""The common part of interfaces of addresses: `kvplan.hixl`, `kvplan.nixl`, `kvplan.mooncake`.

Memory is registered by address, peers have names, transfers are requests that are asked for, and
peers send each other messages. Which statuses and exceptions a caller sees is the interface's.
"""
