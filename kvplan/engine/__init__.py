"""LlmDataDist: one engine with its options, caches, keys, leases, notifications and transfers.

Official names (`llm_datadist`, `hixl`) and requests of serving engines do not belong here: their
rooms call the public methods. Copies and sockets are in `execution`, `transport`, `control` and
`links`.
"""
