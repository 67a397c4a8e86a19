"""LlmDataDist: one engine with its options, caches, keys, leases, notifications and transfers.

Names of serving engines and of official packages do not belong here.
"""
