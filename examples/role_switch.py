"""Role switch: two engines pull from each other in turn; who decoded, prefills, and listens.

A role labels an engine, and no transfer depends on it. What changes is who listens: set_role with
an address listens there, without one it listens no longer. It is refused while links live, so both
ends are unlinked first, by one call at either end.
"""

import sys
from multiprocessing.connection import Connection

from examples.harness import check, explain_yourself, numbered, peer, until_closed
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


def second(pipe: Connection, address: str) -> None:
    """Decode first: pull what the first engine has. Then prefill: have something else."""
    with LlmDataDist(SECOND, LlmRole.DECODER) as datadist:
        datadist.initialize({"llm.DeviceId": "1"})
        datadist.link_clusters([ClusterInfo(FIRST, address)]).raise_for_status()
        cache = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(SECOND))
        datadist.pull_blocks(BlocksCacheKey(FIRST), cache, ALL, ALL)
        check("pulled by the second engine", datadist.read_cache(cache), numbered(PAGED))
        pipe.send("pulled")

        pipe.recv()
        datadist.unlink_clusters([FIRST]).raise_for_status()
        datadist.set_role(LlmRole.PROMPT, LISTEN)
        datadist.write_cache(cache, numbered(PAGED, first=1000))
        pipe.send(datadist.listen_address)
        until_closed(pipe)


def main() -> None:
    """Prefill first, then decode."""
    explain_yourself(__doc__)
    with LlmDataDist(FIRST, LlmRole.PROMPT) as datadist:
        datadist.initialize({**LISTEN, "llm.DeviceId": "0"})
        cache = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(FIRST))
        datadist.write_cache(cache, numbered(PAGED))
        with peer(second, datadist.listen_address) as pipe:
            pipe.recv()
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
            there = numbered(PAGED, first=1000)
            check("pulled by the first engine", datadist.read_cache(cache), there)


if __name__ == "__main__":
    main()
