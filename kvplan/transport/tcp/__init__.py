"""Memory of processes on other hosts over TCP: plain sockets, served by native threads."""
