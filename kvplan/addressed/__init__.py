"""What the interfaces of addresses share: `kvplan.hixl`, `kvplan.nixl` and `kvplan.mooncake`.

Memory is registered by address, peers have names, transfers are requests that are asked for, and
peers send each other messages. Which statuses and exceptions a caller sees is the interface's.
"""
