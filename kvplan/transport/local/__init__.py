"""Memory of processes on this host: arenas that both ends map, and any memory by its address.

Other transports, and any network, may not enter.
"""

from kvplan.transport.local.transport import LocalTransport

__all__ = ["LocalTransport"]
