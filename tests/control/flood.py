"""A client that connects as fast as it can: `python flood.py HOST PORT SOURCE RATE HEX`.

Says HEX on each connection, holds the last 256, until a line or the end comes on stdin; then writes
how many it has made in how many seconds.
"""

import contextlib
import json
import select
import socket
import struct
import sys
import time
from collections import deque

HELD = 256
AT_ONCE = 50


def main() -> None:
    host, port, source, rate, said = sys.argv[1:]
    held: deque[socket.socket] = deque()
    count, begun = 0, time.monotonic()
    reset = struct.pack("2i", 1, 0)  # nothing waits for packets of it, and its port is free again
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    while True:
        # What it is late by is made up for.
        wait_s = begun + count / float(rate) - time.monotonic()
        if select.select([sys.stdin], [], [], max(0.0, wait_s))[0]:
            break
        for _ in range(AT_ONCE):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
            connection.bind((source, 0))
            connection.setblocking(False)
            connection.connect_ex((host, int(port)))
            if said:
                with contextlib.suppress(OSError):
                    connection.send(bytes.fromhex(said))
            held.append(connection)
            count += 1
        while len(held) > HELD:
            held.popleft().close()
    sys.stdout.write(json.dumps([count, time.monotonic() - begun]) + "\n")


if __name__ == "__main__":
    main()
