"""A service on asyncio that fetches blocks from four peers, many requests at the same time.

Clients send a line of JSON, `{"peer": 3, "blocks": [4, 5, 9]}`. The service takes free blocks of
its own cache, pulls into them, answers with what has arrived, and frees them. A transfer is a task
that is awaited: the event loop goes on meanwhile, and a deadline cancels the transfer with the
await. After that no byte moves any more, so that the next request can have the blocks.

Four processes stand for prefill engines. Clients in this program ask, and compare every answer; one
asks for what cannot be had, and gets an error each time while all others go on.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Annotated, Any

import msgspec  # which kvplan brings
import numpy as np

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    LlmRole,
    Options,
    Placement,
    Rows,
    Transfer,
)

DECODE, PEERS = 10, (1, 2, 3, 4)
# 8 tensors of 64 blocks of 16 KiB, in host memory also where there is an accelerator.
PAGED = CacheDesc(8, (64, 4096), DataType.DT_UINT32, placement=Placement.HOST)
CLIENTS, REQUESTS = 8, 10  # of each client
DEADLINE_S = 5.0


def content(peer: int, tensor: int, block: int) -> int:
    """Return the number that fills a block of a peer."""
    return 1_000_000 * peer + 1_000 * tensor + block


def prefill(pipe: Connection, peer: int) -> None:
    """Have a paged cache, and listen."""
    with LlmDataDist(peer, LlmRole.PROMPT) as datadist:
        datadist.initialize(Options(listen_ip_info="127.0.0.1:0"))
        cache = datadist.allocate_blocks_cache(PAGED, BlocksCacheKey(peer))
        for tensor, array in enumerate(datadist.arrays(cache)):
            array[:] = content(peer, tensor, 0) + np.arange(PAGED.batch_size)[:, None]
        pipe.send(datadist.listen_address)
        pipe.recv()  # the service has ended


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A request of a client."""

    peer: int
    blocks: Annotated[list[int], msgspec.Meta(min_length=1, max_length=PAGED.batch_size)]


class Service:
    """Answers clients; owns the blocks of one cache."""

    def __init__(self, datadist: LlmDataDist) -> None:
        self._datadist = datadist
        self._cache = datadist.allocate_blocks_cache(PAGED)
        self._tensors = datadist.arrays(self._cache)
        self._free = list(range(PAGED.batch_size))
        self._changed = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the lines of one client, until it closes its connection."""
        try:
            async for line in reader:
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            print("a client has gone before it had its answer")
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        """Whatever is wrong is said to this client; the service goes on."""
        try:
            request = msgspec.json.decode(line, type=Request)
            async with asyncio.timeout(DEADLINE_S):
                return {"tensors": await self._fetch(request)}
        except TimeoutError:
            return {"error": f"not fetched within {DEADLINE_S} s"}
        except (msgspec.MsgspecError, LLMException) as error:
            return {"error": str(error)}

    async def _fetch(self, request: Request) -> list[list[list[int]]]:
        """Pull blocks of a peer; returns, of each tensor, the numbers that each block holds."""
        async with self._blocks(len(request.blocks)) as mine:
            key = BlocksCacheKey(request.peer)
            await self._datadist.submit(
                Transfer(Rows(key, request.blocks), Rows(self._cache, mine))
            )
            return [[np.unique(tensor[b]).tolist() for b in mine] for tensor in self._tensors]

    @asynccontextmanager
    async def _blocks(self, count: int) -> AsyncIterator[list[int]]:
        """So many free blocks, which are free again afterwards."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._free) >= count)
            mine = [self._free.pop() for _ in range(count)]
        try:
            yield mine
        finally:
            async with self._changed:
                self._free += mine
                self._changed.notify_all()


async def client(number: int, port: int) -> int:
    """Ask for blocks of any peer, several times; returns how many answers were right."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    chance = random.Random(number)
    for _ in range(REQUESTS):
        peer = chance.choice(PEERS)
        blocks = chance.sample(range(PAGED.batch_size), k=chance.randint(1, 24))
        writer.write(json.dumps({"peer": peer, "blocks": blocks}).encode() + b"\n")
        answer = json.loads(await reader.readline())
        expected = [
            [[content(peer, index, b)] for b in blocks] for index in range(PAGED.num_tensors)
        ]
        if answer != {"tensors": expected}:
            sys.exit(f"FAILED: client {number} asked peer {peer} for {blocks} and got {answer}")
    writer.close()
    return REQUESTS


async def impossible(port: int) -> None:
    """Ask for a block that no peer has, for a peer that there is not, and for nothing known."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for request in (b'{"peer": 1, "blocks": [64]}', b'{"peer": 5, "blocks": [0]}', b"blocks!"):
        writer.write(request + b"\n")
        print(f"{request.decode()}: {json.loads(await reader.readline())['error']}")
    writer.close()


async def run(addresses: list[str]) -> None:
    """Serve the clients, and say what was moved."""
    with LlmDataDist(DECODE, LlmRole.DECODER) as datadist:
        datadist.initialize()
        clusters = [ClusterInfo(*pair) for pair in zip(PEERS, addresses, strict=True)]
        (await datadist.link_clusters_async(clusters)).raise_for_status()
        server = await asyncio.start_server(Service(datadist).serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            clients = asyncio.gather(*(client(number, port) for number in range(CLIENTS)))
            right, _ = await asyncio.gather(clients, impossible(port))
        print(f"{CLIENTS} clients at once: {sum(right)} answers, every number as it should be")
        for link in datadist.links():
            print(f"peer {link.cluster_id}: {link.bytes_pulled >> 10} KiB over {link.transport}")


def main() -> None:
    """Run each peer in a new process, the service and its clients in this one."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for peer in PEERS:
        ours, theirs = context.Pipe()
        process = context.Process(target=prefill, args=(theirs, peer), daemon=True)
        process.start()
        theirs.close()  # if that process ends early, we read the end of file
        pipes.append(ours)
        processes.append(process)
    asyncio.run(run([pipe.recv() for pipe in pipes]))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("done")
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
