"""LlmDataDist and what it is made of: options, caches and their keys, pools, links, operations."""
