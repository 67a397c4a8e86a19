"""`python -m benchmarks.control_costs`: the costs of the control plane, message by message.

All engines are in one process, each with its own control thread. The processor time of a thread is
read before and after many messages; a cost is the mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from kvplan import CacheDesc, CacheKey, ClusterInfo, DataType, LlmDataDist, LlmRole, Placement
from kvplan.control.messages import Offer, Ping, Table, TableEntry, encode

TENSORS = 122
"""Tensors of each cache: keys and values of 61 layers."""
SMALL = CacheDesc(TENSORS, (1, 64), DataType.DT_UINT8)
HUB = 0
PUBLISH_S = 0.02
"""Twice the time that an engine collects changes, so that it publishes each change alone."""
CACHES = 512
"""Number of caches for measuring the cost of each additional cache."""
ZMTP_NBYTES, PACKET_NBYTES, SEGMENT_NBYTES = 9, 66, 1448
"""Maximum head of a frame; headers of Ethernet, IP and TCP; payload of a packet."""
ENTRY = TableEntry(
    cache_id=1000,
    num_tensors=TENSORS,
    shape=SMALL.shape,
    data_type=SMALL.data_type,
    placement=Placement.HOST,
    batch_dim_index=0,
    seq_len_dim_index=-1,
    kv_tensor_format=None,
    shard=None,
    paged=False,
    model_id_of_blocks_key=None,
    addresses=tuple(range(2**46, 2**46 + TENSORS)),
    offers=(Offer("local", bytes(200)),),
    writable=True,
)
TABLE = Table(version=1000, first=False, entries=(ENTRY,), removed=(999,))
"""An update with one new and one freed cache."""


@dataclass(frozen=True)
class ControlCosts:
    """Microseconds of one control thread's processor time, and bytes on the wire.

    Attributes:
        call_us, answer_us: making a link, at the end that calls and at the other end.
        link_ms: making a link, in the whole process: both ends and worker threads.
        beat_us: a link in one heartbeat interval: a check, a Ping out and a Pong in.
        publish_us: publishing one change of the caches to one linked peer.
        publish_cache_us: additional time of `publish_us` for each cache of the engine.
        receive_us: receiving a published change.
        claim_us, claimed_us: a pull by a request's key, at the end that pulls and at the owner.
        table_nbytes, beat_nbytes: packets of a published change, and of a Ping or Pong.
    """

    call_us: float
    answer_us: float
    link_ms: float
    beat_us: float
    publish_us: float
    publish_cache_us: float
    receive_us: float
    claim_us: float
    claimed_us: float
    table_nbytes: int
    beat_nbytes: int


class LinkedEngines:
    """One engine, the hub, and its peers; the hub makes the links."""

    def __init__(self, opened: ExitStack, peers: int, options: dict[str, str]) -> None:
        self.hub = self._engine(opened, HUB, options)
        self.peers = [self._engine(opened, index + 1, options) for index in range(peers)]
        clusters = [
            ClusterInfo(item + 1, peer.listen_address) for item, peer in enumerate(self.peers)
        ]
        before, process = self.read(), time.process_time()
        self.hub.link_clusters(clusters, timeout_ms=60_000).raise_for_status()
        time.sleep(5 * PUBLISH_S)
        self.link_s = (time.process_time() - process) / peers
        self.linking = self._since(before)

    @staticmethod
    def _engine(opened: ExitStack, cluster_id: int, options: dict[str, str]) -> LlmDataDist:
        role = LlmRole.PROMPT if cluster_id == HUB else LlmRole.DECODER
        engine = opened.enter_context(LlmDataDist(cluster_id, role))
        engine.initialize({"llm.ListenIpInfo": "127.0.0.1:0", **options})
        return engine

    def read(self) -> tuple[float, float]:
        """Return processor seconds of the hub's control thread, and of all peers' together."""
        mine = theirs = 0.0
        for thread in threading.enumerate():
            name, _, cluster_id = thread.name.rpartition("-")
            if name == "kvplan-control" and thread.ident is not None:
                seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                if cluster_id == str(HUB):
                    mine += seconds
                else:
                    theirs += seconds
        return mine, theirs

    def _since(self, before: tuple[float, float]) -> tuple[float, float]:
        """Return microseconds for each link since then, at the hub and at a peer."""
        now, count = self.read(), len(self.peers)
        return 1e6 * (now[0] - before[0]) / count, 1e6 * (now[1] - before[1]) / count

    def cost(self, work: Callable[[], int]) -> tuple[float, float]:
        """Return microseconds for each link and repetition; `work` returns the repetitions."""
        before = self.read()
        times = work()
        hub, peer = self._since(before)
        return hub / times, peer / times


@contextmanager
def linked_engines(peers: int, key_file: str, interval_ms: int = 60_000) -> Iterator[LinkedEngines]:
    """Yield linked engines. By default the heartbeat interval is too long to matter."""
    options = {"kvplan.cluster_key_file": key_file} if key_file else {}
    options |= {
        "kvplan.heartbeat_interval_ms": str(interval_ms),
        "kvplan.heartbeat_timeout_ms": str(100 * interval_ms),
    }
    with ExitStack() as opened:
        yield LinkedEngines(opened, peers, options)


def beating(peers: int, key_file: str, seconds: float) -> float:
    """Return `beat_us`, at an interval short enough to measure it."""
    interval_ms = 50
    with linked_engines(peers, key_file, interval_ms) as linked:

        def wait() -> int:
            time.sleep(seconds)
            return round(1e3 * seconds / interval_ms)

        hub, peer = linked.cost(wait)
    return (hub + peer) / 2  # either end may send the Ping


def changes(linked: LinkedEngines, caches: int, times: int) -> tuple[float, float]:
    """Return the costs of publishing a change, at hub and peer, with `caches` caches."""
    kept = [linked.hub.allocate_cache(SMALL) for _ in range(caches)]
    time.sleep(10 * PUBLISH_S)

    def change() -> int:
        for _ in range(times):
            cache = linked.hub.allocate_cache(SMALL)
            time.sleep(PUBLISH_S)
            linked.hub.deallocate_cache(cache)
            time.sleep(PUBLISH_S)
        return 2 * times

    found = linked.cost(change)
    for cache in kept:
        linked.hub.deallocate_cache(cache)
    return found


def claims(linked: LinkedEngines, times: int) -> tuple[float, float]:
    """Return the costs of a pull by a request's key, at the owner (the hub) and at the puller."""
    mine = [peer.allocate_cache(SMALL) for peer in linked.peers]
    keys = [CacheKey(HUB, index) for index in range(times * len(mine))]
    owned = [linked.hub.allocate_cache(SMALL, [key]) for key in keys]
    time.sleep(10 * PUBLISH_S)

    def pull() -> int:
        for number, key in enumerate(keys):
            which = number % len(mine)
            linked.peers[which].pull_cache(key, mine[which])
        return times

    found = linked.cost(pull)
    for cache in owned:
        linked.hub.deallocate_cache(cache)
    return found


def measure(peers: int, times: int, key_file: str) -> ControlCosts:
    """Measure all costs, in a few seconds."""
    with linked_engines(peers, key_file) as linked:
        call_us, answer_us = linked.linking
        few, receive_us = changes(linked, 0, times)
        many, _ = changes(linked, CACHES, times)
        claimed_us, claim_us = claims(linked, times // 2)
        link_ms = 1e3 * linked.link_s
    return ControlCosts(
        call_us=call_us,
        answer_us=answer_us,
        link_ms=link_ms,
        beat_us=beating(peers, key_file, times / 10),
        publish_us=few,
        publish_cache_us=max(0.0, many - few) / CACHES,
        receive_us=receive_us,
        claim_us=claim_us,
        claimed_us=claimed_us,
        table_nbytes=on_the_wire(len(encode(TABLE))),
        beat_nbytes=on_the_wire(len(encode(Ping()))),
    )


def on_the_wire(nbytes: int) -> int:
    """Return the bytes of a frame of `nbytes` including the headers of its packets."""
    framed = nbytes + ZMTP_NBYTES
    return framed + PACKET_NBYTES * -(-framed // SEGMENT_NBYTES)


def main() -> None:
    """Print the costs, each as a line of JSON: medians of several rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_costs", description=__doc__)
    parser.add_argument("--peers", type=int, default=32)
    parser.add_argument("--times", type=int, default=20, help="changes; pulls are a fifth")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--key-file", default="", help="a cluster key: links are encrypted")
    asked = parser.parse_args()
    rounds = []
    for _ in range(asked.rounds):
        rounds.append(asdict(measure(asked.peers, asked.times, asked.key_file)))
        print(json.dumps({name: round(value, 2) for name, value in rounds[-1].items()}))
    middle = {name: statistics.median(item[name] for item in rounds) for name in rounds[0]}
    print(f"medians of {len(rounds)} rounds, {asked.peers} peers:")
    for name, value in middle.items():
        print(f"  {name:16}{value:10.2f}")


if __name__ == "__main__":
    main()
