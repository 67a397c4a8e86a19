"""Several peers: one decode engine pulls from three prefill engines at the same time.

All are linked by one call. Each pull is submitted, which returns a task at once; then all tasks are
waited for. A hook sees every plan before it is executed; links() says what went over each link.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Options,
    PlanEvent,
    Rows,
    Transfer,
)

DECODE, PREFILLS = 10, (1, 2, 3)
DECODE_DEVICE = 0  # and prefill has those that are numbered like its clusters
PAGED = CacheDesc(num_tensors=4, shape=(16, 8, 2, 16), data_type=DataType.DT_FLOAT16)


def prefill(pipe: Connection, cluster_id: int) -> None:
    """Have a paged cache, and listen."""
    with LlmDataDist(cluster_id, LlmRole.PROMPT) as datadist:
        datadist.initialize(Options(listen_ip_info="127.0.0.1:0", device_id=cluster_id))
        cache = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(cluster_id))
        datadist.write_cache(cache, content(cluster_id))
        pipe.send(datadist.listen_address)
        pipe.recv()  # decode has everything


def decode(pipes: list[Connection]) -> None:
    """Pull three blocks from each, all at the same time."""
    with LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize(Options(device_id=DECODE_DEVICE))
        addresses = [pipe.recv() for pipe in pipes]
        clusters = [ClusterInfo(*pair) for pair in zip(PREFILLS, addresses, strict=True)]
        datadist.link_clusters(clusters).raise_for_status()

        cache = datadist.allocate_blocks_cache(PAGED)
        datadist.on_plan(show)
        expected = np.zeros_like(content(0))
        tasks = []
        for cluster_id in PREFILLS:
            theirs = [cluster_id, 5, 6]
            mine = [4 * cluster_id, 4 * cluster_id + 1, 4 * cluster_id + 2]
            key = BlocksCacheKey(cluster_id)
            tasks.append(datadist.submit(Transfer(Rows(key, theirs), Rows(cache, mine))))
            expected[:, mine] = content(cluster_id)[:, theirs]
        for task in tasks:
            task.wait(timeout_ms=1000)
        check("three blocks of each", datadist.arrays(cache, copy=True), expected)
        for link in datadist.links():
            print(f"{link.state.name} with cluster {link.cluster_id}: {link.bytes_pulled} bytes")
        for pipe in pipes:
            pipe.send("done")


def show(event: PlanEvent) -> None:
    """Print a plan in one line."""
    print(f"from cluster {event.cluster_id}: {event.plan!r}")


def content(cluster_id: int) -> NDArray[np.float16]:
    """Return a cache's content: each row holds 400 * cluster_id + 100 * tensor + row."""
    first = 400 * cluster_id
    rows = first + 100 * np.arange(PAGED.num_tensors)[:, None] + np.arange(PAGED.batch_size)
    return np.full((PAGED.num_tensors, *PAGED.shape), rows[:, :, None, None, None], np.float16)


def check(what: str, arrived: Sequence[NDArray[np.float16]], sent: NDArray[np.float16]) -> None:
    """Print the rows of each tensor, or end the program: they are not what was sent."""
    print(f"{what}:")
    for tensor, rows in enumerate(arrived):
        print(f"  tensor {tensor}:", *rows[:, 0, 0, 0].astype(int))
        if not np.array_equal(rows, sent[tensor]):
            sys.exit(f"FAILED: tensor {tensor} should hold {sent[tensor, :, 0, 0, 0]}")


def main() -> None:
    """Run each prefill engine in a new process, decode in this one."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for cluster_id in PREFILLS:
        ours, theirs = context.Pipe()
        process = context.Process(target=prefill, args=(theirs, cluster_id), daemon=True)
        process.start()
        theirs.close()  # if that process ends early, we read the end of file
        pipes.append(ours)
        processes.append(process)
    decode(pipes)
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
