"""Memory of processes on this host: arenas that both ends map, and any memory by its address.

This transport must not use other transports or any network.
"""

from kvplan.transport.local.transport import LocalTransport

__all__ = ["LocalTransport"]
