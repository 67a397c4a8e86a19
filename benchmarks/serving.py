"""Requests of `kvplan.serving`: their time in addition to the bare transfer."""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.table import Row, Run, Topic
from kvplan import (
    BlockLease,
    Cache,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    Placement,
    Rows,
    Shard,
    Transfer,
)
from kvplan.serving import Compatibility, Exchange, Handle, Reference, Source, Target

TOPIC = Topic()
ROUNDS: Final = 400
INSTANCE: Final = b"benchmarks"
DIGEST: Final = bytes(16)
LAYERS, BLOCK_TOKENS, BLOCKS = 2, 16, 64
TOKENS: Final = 60  # in four blocks, the last one not full
TABLE: Final = [5, 9, 2, 40]
DESC: Final = CacheDesc(
    num_tensors=LAYERS,
    shape=(BLOCKS, BLOCK_TOKENS, 1, 64),
    data_type=DataType.DT_FLOAT,
    placement=Placement.HOST,
    kv_tensor_format="block token head dim",
    shard=Shard(range(LAYERS), range(1), LAYERS, 1),
)
PACKET: Final = bytes(64)


@TOPIC.row("serving_overhead_us")
def overhead(run: Run, name: str) -> Row:
    """From `fetch` to the result, without the time of the transfer by the lease.

    The messages of a request make two round trips: request and grant, then, after the transfer,
    the notification that frees the blocks. The limit is two bare round trips over a socket of the
    same kind, between event loops that do nothing else. The target is twice that: once for the
    messages, once for the work of both ends and of the transferring thread.
    """
    rounds = ROUNDS // 4 if run.quick else ROUNDS
    ours, bare, trips = [], [], []
    with producer() as there, consumer() as (engine, cache, exchange), echo() as trip:
        cluster_id, address, blob = answer(there).split()
        source = Source(int(cluster_id), address)
        engine.link_clusters([ClusterInfo(source.cluster_id, address)], 5000).raise_for_status()
        lease = BlockLease.from_bytes(bytes.fromhex(blob))
        transfer = Transfer(Rows(lease), Rows(cache, TABLE), num_tokens=TOKENS)
        engine.run(transfer)
        for number in range(rounds + 20):
            there.stdin.write(f"{number}\n")  # type: ignore[union-attr]
            there.stdin.flush()  # type: ignore[union-attr]
            handle = Handle(bytes.fromhex(answer(there)))
            reference = Reference(INSTANCE, handle, DIGEST, TOKENS, (source,))
            begun = time.perf_counter_ns()
            exchange.fetch("request", reference, Target(TABLE))
            exchange.wait(10_000)
            ours.append(time.perf_counter_ns() - begun)
            (result,) = exchange.take_results()
            if result.error is not None:
                raise result.error
            begun = time.perf_counter_ns()
            engine.run(transfer)
            bare.append(time.perf_counter_ns() - begun)
            begun = time.perf_counter_ns()
            trip()
            trip()
            trips.append(time.perf_counter_ns() - begun)
    whole, moved, limit = (statistics.median(value[20:]) / 1000 for value in (ours, bare, trips))
    return Row(
        name,
        whole - moved,
        "us",
        limit,
        target=2.0,
        note=f"fetch to result {whole:.0f} us, bare transfer {moved:.0f} us; "
        "limit: two bare round trips",
        cases={"fetch": whole, "transfer": moved, "two round trips": limit},
    )


def worker(cluster_id: int, role: LlmRole) -> tuple[LlmDataDist, Cache, Exchange]:
    engine = LlmDataDist(cluster_id, role)
    engine.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
    cache = engine.allocate_blocks_cache(DESC)
    return engine, cache, Exchange(engine, cache, Compatibility({}), INSTANCE)


@contextmanager
def consumer() -> Iterator[tuple[LlmDataDist, Cache, Exchange]]:
    engine, cache, exchange = worker(2, LlmRole.DECODER)
    try:
        yield engine, cache, exchange
    finally:
        exchange.close()
        engine.finalize()


@contextmanager
def producer(*command: str, pass_fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run this file in a process, which ends with its stdin."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
        cwd=Path(__file__).parents[1],
    )
    try:
        yield process
    finally:
        process.communicate()


@contextmanager
def echo() -> Iterator[Callable[[], None]]:
    """Yield a function that makes one round trip with a process that only answers packets.

    As in an `Exchange`, the main thread hands a packet to the thread of an event loop, and sleeps
    until that thread has the answer.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    loop, came = asyncio.new_event_loop(), threading.Condition()
    answers = 0

    def receive() -> None:
        nonlocal answers
        with came:
            answers += bool(ours.recv(len(PACKET)))
            came.notify()

    def trip() -> None:
        seen = answers
        loop.call_soon_threadsafe(ours.send, PACKET)
        with came:
            came.wait_for(lambda: answers > seen)

    with ours, producer("echo", str(theirs.fileno()), pass_fds=(theirs.fileno(),)):
        theirs.close()
        loop.call_soon(loop.add_reader, ours, receive)
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield trip
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
            ours.shutdown(socket.SHUT_RDWR)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def produce() -> None:
    """Print the producer's address and a lease of its blocks; enter a request for each line."""
    engine, cache, exchange = worker(1, LlmRole.PROMPT)
    lease = engine.lease_blocks(cache, TABLE, tokens=TOKENS)
    print(1, engine.listen_address, lease.to_bytes().hex(), flush=True)
    for line in sys.stdin:
        made = exchange.enter(f"request-{line.strip()}", TABLE, DIGEST)
        print(made.value.hex(), flush=True)
        exchange.take_freed()
    exchange.close()
    engine.finalize()


def answer_packets(fd: int) -> None:
    """Send each packet back from an event loop that sleeps."""
    loop, connection = asyncio.new_event_loop(), socket.socket(fileno=fd)

    def receive() -> None:
        if packet := connection.recv(len(PACKET)):
            connection.send(packet)
        else:
            loop.stop()

    loop.add_reader(connection, receive)
    loop.run_forever()


if __name__ == "__main__":
    if sys.argv[1:2] == ["echo"]:
        answer_packets(int(sys.argv[2]))
    else:
        produce()
