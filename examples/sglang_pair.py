"""SGLang's sender and receiver over kvplan.serving: one request arrives, one is given up.

The classes have the calls of SGLang's `BaseKVSender` and `BaseKVReceiver`: `init`, `send`,
`send_metadata`, `poll`, `failure_exception`, `abort`. SGLang itself is not needed, and has not run
with them: this shows where each call of its disaggregation goes. A room (`bootstrap_room`) names a
request at both ends, so it is the transfer of kvplan. SGLang's bootstrap server, which tells
decode where prefill listens, is a pipe here. The indices are pages of the KV pool, in the order of
the request.
"""

import argparse
import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from kvplan import CacheDesc, DataType, LlmDataDist, LlmRole, Options, Placement, Shard
from kvplan.serving import (
    Compatibility,
    Exchange,
    Handle,
    PullResult,
    Reference,
    Source,
    Target,
    token_digest,
)

PAGE_SIZE, LAYERS, HEADS = 16, 2, 4
DESC = CacheDesc(
    2 * LAYERS,
    (32, PAGE_SIZE, HEADS, 8),
    DataType.DT_FLOAT16,
    Placement.HOST,
    kv_tensor_format="NHD",
    shard=Shard(num_layers=LAYERS, num_heads=HEADS),
)
ROOM, GIVEN_UP = 4711, 4712
THEIRS, MINE = np.array([9, 3, 4, 20], np.int32), np.array([1, 30, 2, 8], np.int32)
Indices = NDArray[np.int32]


class KVPoll:
    """The states of a transfer, with SGLang's numbers."""

    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class KVManager:
    """The engine, KV pool and exchange of one worker, called by the scheduler's thread."""

    def __init__(self, cluster_id: int) -> None:
        self.cluster_id, self.instance = cluster_id, f"worker {cluster_id}".encode()
        self.engine = LlmDataDist(cluster_id, LlmRole.MIX)
        self.engine.initialize(Options(listen_ip_info="127.0.0.1:0"))
        self.pool = self.engine.allocate_blocks_cache(DESC)
        fits = Compatibility({"model": "tiny", "page_size": str(PAGE_SIZE)})
        self.exchange = Exchange(self.engine, self.pool, fits, self.instance)
        self.freed: set[Handle] = set()
        self.results: dict[str, PullResult] = {}

    def look(self) -> None:
        """Take what has ended since the last look."""
        self.freed |= self.exchange.take_freed()
        self.results |= {result.request: result for result in self.exchange.take_results()}

    def close(self) -> None:
        """End the exchange before its engine."""
        self.exchange.close()
        self.engine.finalize()


class KVSender:
    """Prefill's end of a request. SGLang frees the pages when `poll` returns Success or Failed."""

    def __init__(self, manager: KVManager, bootstrap_room: int) -> None:
        self._manager, self._room = manager, str(bootstrap_room)
        self._pages: list[int] = []
        self._num_pages = 0
        self._handle: Handle | None = None
        self._refused = False

    def init(self, num_kv_indices: int) -> None:
        """Note how many pages the request has."""
        self._num_pages = num_kv_indices

    def send(self, kv_indices: Indices) -> None:
        """Add the pages of a chunk; offer the request with the last one."""
        self._pages += kv_indices.tolist()
        if len(self._pages) == self._num_pages:
            exchange = self._manager.exchange
            self._handle = exchange.enter(self._room, self._pages, digest(self._room), self._room)

    def poll(self) -> int:
        """Return the state: Success when decode has read every page."""
        self._manager.look()
        if self._refused:
            return KVPoll.Failed
        if self._handle is None:
            return KVPoll.WaitingForInput
        done = self._handle in self._manager.freed
        return KVPoll.Success if done else KVPoll.Transferring

    def abort(self) -> None:
        """Give the request up, and tell decode why."""
        self._refused = True
        if self._handle is None:
            self._manager.exchange.refuse(self._room, "was given up by prefill")
        else:
            self._manager.exchange.abort(self._handle)


class KVReceiver:
    """Decode's end of a request."""

    def __init__(self, manager: KVManager, prefill: tuple[bytes, Source], bootstrap_room: int):
        self._manager, self._prefill, self._room = manager, prefill, str(bootstrap_room)
        self._sent = False

    def send_metadata(self, kv_indices: Indices) -> None:
        """Fetch the request into these pages, as soon as prefill has it."""
        instance, source = self._prefill
        num_tokens = PAGE_SIZE * len(kv_indices)
        reference = Reference(
            instance, None, digest(self._room), num_tokens, (source,), transfer=self._room
        )
        self._manager.exchange.fetch(self._room, reference, Target(kv_indices.tolist()))
        self._sent = True

    def poll(self) -> int:
        """Return the state: Success when every byte has arrived."""
        self._manager.look()
        if not self._sent:
            return KVPoll.WaitingForInput
        result = self._manager.results.get(self._room)
        if result is None:
            return KVPoll.Transferring
        return KVPoll.Success if result.error is None else KVPoll.Failed

    def failure_exception(self) -> None:
        """Raise the reason of a failure."""
        error = self._manager.results[self._room].error
        assert error is not None
        raise error

    def abort(self) -> None:
        """Wait no longer: no byte is written to the pages on return of the result."""
        self._manager.exchange.cancel(self._room)


def digest(room: str) -> bytes:
    """Return a digest for the room: neither class of SGLang is given the tokens."""
    return token_digest([], room)


def prefill(pipe: Connection) -> None:
    """Send one request in two chunks, and give another one up."""
    manager = KVManager(1)
    source = Source(manager.cluster_id, manager.engine.listen_address or "")
    pipe.send((manager.instance, source))
    for number, tensor in enumerate(manager.engine.arrays(manager.pool)):
        for position, page in enumerate(THEIRS):
            tensor[page] = 100 * number + position + 1
    sender, other = KVSender(manager, ROOM), KVSender(manager, GIVEN_UP)
    sender.init(len(THEIRS))
    other.init(1)
    sender.send(THEIRS[:3])
    pipe.recv()  # decode waits for both
    sender.send(THEIRS[3:])
    other.abort()
    while sender.poll() == KVPoll.Transferring:
        manager.exchange.wait(1000)
    print("prefill:", "Success" if sender.poll() == KVPoll.Success else "FAILED", flush=True)
    pipe.recv()  # decode has its answers
    manager.close()


def decode(pipe: Connection) -> None:
    """Receive both, as far as they come."""
    manager = KVManager(2)
    whence = pipe.recv()
    receiver = KVReceiver(manager, whence, ROOM)
    other = KVReceiver(manager, whence, GIVEN_UP)
    receiver.send_metadata(MINE)
    other.send_metadata(np.array([5], np.int32))
    pipe.send("decode waits")
    for each in (receiver, other):
        while each.poll() == KVPoll.Transferring:
            manager.exchange.wait(1000)
    if receiver.poll() != KVPoll.Success or other.poll() != KVPoll.Failed:
        sys.exit("FAILED: the wrong request has arrived")
    for number, tensor in enumerate(manager.engine.arrays(manager.pool)):
        expected = np.zeros_like(tensor)
        for position, page in enumerate(MINE):
            expected[page] = 100 * number + position + 1
        if not np.array_equal(tensor, expected):
            sys.exit(f"FAILED: tensor {number} differs")
        print(f"  tensor {number}, pages {MINE.tolist()}:", *tensor[MINE, 0, 0, 0].astype(int))
    try:
        other.failure_exception()
    except Exception as error:
        print(f"room {GIVEN_UP}: {error}")
    pipe.send("done")
    manager.close()


def main() -> None:
    """Prefill in a new process, decode in this one."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # if that process ends early, we read the end of file
    decode(ours)
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
