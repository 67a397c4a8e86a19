"""Plan the transfer of a KV cache, look at the plan, then execute it."""

__version__ = "0.1.0"
