"""Many engines, each in a process of its own: forked, so that they are there at once.

The argument is their number. One line says where each listens; they live until stdin ends.
"""

import json
import os
import sys

from kvplan import LlmDataDist, LlmRole, Options
from tests.faults.contents import make_cache
from tests.support.places import CLUSTER_KEY, PEER_LISTEN


def serve(cluster_id: int, output: int) -> None:
    with LlmDataDist(cluster_id, LlmRole.PROMPT) as datadist:
        datadist.initialize(
            Options(listen_ip_info=PEER_LISTEN, cluster_key_file=CLUSTER_KEY or None)
        )
        make_cache(datadist, "allocated" if cluster_id % 2 else "registered", cluster_id)
        line = json.dumps([cluster_id, datadist.listen_address, os.getpid()]) + "\n"
        os.write(output, line.encode())
        sys.stdin.buffer.raw.read()  # returns when the pipe's last writer has gone


def main() -> None:
    children = []
    for cluster_id in range(1, int(sys.argv[1]) + 1):
        if not (child := os.fork()):
            serve(cluster_id, sys.stdout.fileno())
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
