"""LlmDataDist: one engine with its options, caches, keys, leases, notifications and transfers.

The official interfaces (`llm_datadist`, `hixl`) and serving engines have packages of their own,
which call the public methods here. Copies and sockets are in `execution`, `transport`, `control`
and `links`.
"""
