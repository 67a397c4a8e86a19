"""Memory of other processes on this host: arenas that both map, and any memory by address."""

from kvplan.transport.local.transport import LocalTransport

__all__ = ["LocalTransport"]
