"""LlmDataDist: one engine with its options, caches, keys, leases, notifications and transfers."""
