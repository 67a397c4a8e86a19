"""Several peers: one decode engine pulls from three prefill engines at the same time.

All are linked by one call. Each pull is submitted, which returns a task at once; then all tasks are
waited for. A hook sees every plan before it is executed; links() says what went over each link.
"""

from contextlib import ExitStack
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from examples.harness import check, explain_yourself, numbered, peer, until_closed
from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Options,
    PlanEvent,
)

DECODE, PREFILLS = 10, (1, 2, 3)
DECODE_DEVICE = 0  # and prefill has those that are numbered like its clusters
PAGED = CacheDesc(num_tensors=4, shape=(16, 8, 2, 16), data_type=DataType.DT_FLOAT16)


def content(cluster_id: int) -> NDArray[np.float16]:
    """What the paged cache of a prefill engine holds: numbers that no other one has."""
    return numbered(PAGED, first=400 * cluster_id)


def prefill(pipe: Connection, cluster_id: int) -> None:
    """Have a paged cache, and listen."""
    with LlmDataDist(cluster_id, LlmRole.PROMPT) as datadist:
        datadist.initialize(Options(listen_ip_info="127.0.0.1:0", device_id=cluster_id))
        cache = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(cluster_id))
        datadist.write_cache(cache, content(cluster_id))
        pipe.send(datadist.listen_address)
        until_closed(pipe)


def show(event: PlanEvent) -> None:
    """Print a plan in one line."""
    print(f"from cluster {event.cluster_id}: {event.plan!r}")


def main() -> None:
    """Decode."""
    explain_yourself(__doc__)
    with ExitStack() as stack:
        pipes = [stack.enter_context(peer(prefill, cluster_id)) for cluster_id in PREFILLS]
        datadist = stack.enter_context(LlmDataDist(DECODE, LlmRole.DECODER))
        datadist.initialize(Options(device_id=DECODE_DEVICE))
        addresses = [pipe.recv() for pipe in pipes]
        clusters = [ClusterInfo(*it) for it in zip(PREFILLS, addresses, strict=True)]
        datadist.link_clusters(clusters).raise_for_status()

        cache = datadist.allocate_blocks_cache(PAGED)
        datadist.on_plan(show)
        expected = np.zeros_like(numbered(PAGED))
        tasks = []
        for cluster_id in PREFILLS:
            theirs = [cluster_id, 5, 6]
            mine = [4 * cluster_id, 4 * cluster_id + 1, 4 * cluster_id + 2]
            key = BlocksCacheKey(cluster_id)
            tasks.append(datadist.submit_pull_blocks(key, cache, theirs, mine))
            expected[:, mine] = content(cluster_id)[:, theirs]
        for task in tasks:
            task.wait(timeout_ms=1000)
        check("three blocks of each", datadist.read_cache(cache), expected)
        for link in datadist.links():
            print(f"{link.state.name} with cluster {link.cluster_id}: {link.bytes_pulled} bytes")


if __name__ == "__main__":
    main()
