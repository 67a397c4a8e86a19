"""Memory of processes on any host over TCP connections, served by native threads.

This transport must not open ports or make handshakes. Connections come as `Streams`.
"""
