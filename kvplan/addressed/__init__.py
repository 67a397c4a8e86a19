"""The common part of interfaces by address: `kvplan.hixl`, `kvplan.nixl`, `kvplan.mooncake`.

Memory is registered by address, peers have names, transfers are requests whose status the caller
polls, and peers send each other messages. Each interface defines its statuses and exceptions.
"""
