"""Many engines, each in a process of its own: forks, so that all start fast."""

import atexit
import json
import os
import select
from typing import Any

from kvplan import LlmDataDist, LlmRole, Options
from tests.faults.contents import make_cache
from tests.support.places import CLUSTER_KEY, PEER_LISTEN


def names(number: str) -> dict[str, Any]:
    """Return `engines`: the listening address and the pid of each cluster."""
    reader, writer = os.pipe()
    for cluster_id in range(1, int(number) + 1):
        if not (child := os.fork()):
            serve(cluster_id, writer)
            os._exit(0)
        atexit.register(os.waitpid, child, 0)
    with os.fdopen(reader) as lines:
        engines = [json.loads(lines.readline()) for _ in range(int(number))]
    os.close(writer)
    return {"engines": {cluster_id: (address, pid) for cluster_id, address, pid in engines}}


def serve(cluster_id: int, writer: int) -> None:
    """Run an engine until the test closes its connection, which is stdin."""
    with LlmDataDist(cluster_id, LlmRole.PROMPT) as datadist:
        datadist.initialize(
            Options(listen_ip_info=PEER_LISTEN, cluster_key_file=CLUSTER_KEY or None)
        )
        make_cache(datadist, "allocated" if cluster_id % 2 else "registered", cluster_id)
        line = json.dumps([cluster_id, datadist.listen_address, os.getpid()]) + "\n"
        os.write(writer, line.encode())
        closed = select.poll()
        closed.register(0, 0)
        closed.poll()
