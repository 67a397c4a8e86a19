"""Role switch: two engines pull from each other in turn; who decoded, prefills, and listens.

A role labels an engine, and no transfer depends on it. What changes is who listens: set_role with
an address listens there, without one it listens no longer. It is refused while links live, so both
ends are unlinked first, by one call at either end.
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
    LLMException,
    LlmRole,
    LLMStatusCode,
)

FIRST, SECOND = 1, 2
PAGED = CacheDesc(num_tensors=4, shape=(4, 8, 2, 16), data_type=DataType.DT_FLOAT16)
LISTEN = {"llm.ListenIpInfo": "127.0.0.1:0"}
ALL = [0, 1, 2, 3]


def first(pipe: Connection) -> None:
    """Prefill first. Then decode: pull what the second engine has."""
    with LlmDataDist(FIRST, LlmRole.PROMPT) as datadist:
        datadist.initialize({**LISTEN, "llm.DeviceId": "0"})
        cache = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(FIRST))
        datadist.write_cache(cache, numbered(PAGED))
        pipe.send(datadist.listen_address)
        pipe.recv()  # the second one has pulled
        try:
            datadist.set_role(LlmRole.DECODER)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_EXIST_LINK:
                raise
            print(f"not yet: {error}")
        else:
            sys.exit("FAILED: the role has changed under a link")

        pipe.send("unlink")
        address = pipe.recv()
        datadist.set_role(LlmRole.DECODER)
        print(f"{datadist!r}, listening at {datadist.listen_address}")
        datadist.link_clusters([ClusterInfo(SECOND, address)]).raise_for_status()
        datadist.pull_blocks(BlocksCacheKey(SECOND), cache, ALL, ALL)
        check(
            "pulled by the first engine",
            datadist.arrays(cache, copy=True),
            numbered(PAGED, start=1000),
        )
        pipe.send("done")


def second(pipe: Connection) -> None:
    """Decode first: pull what the first engine has. Then prefill: have something else."""
    with LlmDataDist(SECOND, LlmRole.DECODER) as datadist:
        datadist.initialize({"llm.DeviceId": "1"})
        datadist.link_clusters([ClusterInfo(FIRST, pipe.recv())]).raise_for_status()
        cache = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(SECOND))
        datadist.pull_blocks(BlocksCacheKey(FIRST), cache, ALL, ALL)
        check("pulled by the second engine", datadist.arrays(cache, copy=True), numbered(PAGED))
        pipe.send("pulled")

        pipe.recv()
        datadist.unlink_clusters([FIRST]).raise_for_status()
        datadist.set_role(LlmRole.PROMPT, LISTEN)
        datadist.write_cache(cache, numbered(PAGED, start=1000))
        pipe.send(datadist.listen_address)
        pipe.recv()  # the first one has pulled


def numbered(desc: CacheDesc, start: int = 0) -> NDArray[np.float16]:
    """Return all tensors of a cache; each row holds its number, start + 100 * tensor + row."""
    rows = start + 100 * np.arange(desc.num_tensors)[:, None] + np.arange(desc.batch_size)
    return np.full((desc.num_tensors, *desc.shape), rows[:, :, None, None, None], np.float16)


def check(what: str, arrived: Sequence[NDArray[np.float16]], sent: NDArray[np.float16]) -> None:
    """Print the rows of each tensor, or end the program: they are not what was sent."""
    print(f"{what}:")
    for tensor, rows in enumerate(arrived):
        print(f"  tensor {tensor}:", *rows[:, 0, 0, 0].astype(int), flush=True)
        if not np.array_equal(rows, sent[tensor]):
            sys.exit(f"FAILED: tensor {tensor} should hold {sent[tensor, :, 0, 0, 0]}")


def main() -> None:
    """Run the second engine in a new process, the first in this one."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=second, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # if that process ends early, we read the end of file
    first(ours)
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
