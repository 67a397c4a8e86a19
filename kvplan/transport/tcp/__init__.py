"""Memory of processes on any host over TCP connections, served by native threads.

The opening of ports and the handshake may not enter: connections come as `Streams`.
"""
