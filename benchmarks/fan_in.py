"""`python -m benchmarks.fan_in`: one decode engine that pulls from many prefill engines at once.

Each engine is a process. --namespaces spreads the prefill engines over that many virtual hosts, and
puts the decode engine on another. All bytes are checked; a table shows the share of each peer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.fan_in_decode import Orders, Outcome, anonymous_kib
from benchmarks.filled_peer import Filled, Shape, started
from kvplan.control.auth import ClusterKey
from tools.namespaces import Namespace, namespaces

KIB: Final = 1 << 10
OPTIONS: Final[dict[str, dict[str, str]]] = {
    "local": {},
    "local-registered": {},
    "tcp": {"kvplan.transport": "tcp"},
    "ucx": {"kvplan.transport": "ucx", "kvplan.ucx_settings": '{"UCX_TLS": "shm"}'},
}
"""Options of all engines, by the value of --transport."""
FAIR: Final = 0.5
"""Minimum ratio of the fewest to the most bytes of a peer in the sustained part."""
MAX_LINK_KIB: Final = 1024
"""Maximum memory of a link at either end, from before the link to the end."""


@dataclass(frozen=True)
class FanIn:
    """One run.

    Attributes:
        peers: number of prefill engines.
        shape: shape of the cache of each, which is pulled as a whole.
        transport: a key of OPTIONS.
        bursts, sustained_s: see `Orders`.
        hosts: number of namespaces of the peers; 0: all on this host.
    """

    peers: int
    shape: Shape
    transport: str
    bursts: int
    sustained_s: float
    hosts: int = 0


@dataclass(frozen=True)
class Result:
    """The measured values.

    Attributes:
        decode: values of the decode engine.
        peer_kib: growth of each peer's process since its cache was filled.
    """

    run: FanIn
    decode: Outcome
    peer_kib: list[int]

    @property
    def total_nbytes(self) -> int:
        """Bytes of one burst."""
        return self.run.peers * self.run.shape.nbytes

    @property
    def burst_gigabytes_per_s(self) -> float:
        """Throughput of the median burst, until its last byte."""
        return self.total_nbytes / statistics.median(map(max, self.decode.finished_s)) / 1e9

    @property
    def gigabytes_per_s(self) -> float:
        """Throughput of the sustained part."""
        return sum(self.decode.pulled) / self.decode.sustained_s / 1e9

    @property
    def fairness(self) -> float:
        """Ratio of the fewest to the most bytes of a peer in the sustained part."""
        return min(self.decode.pulled) / max(self.decode.pulled)

    @property
    def link_kib(self) -> float:
        """Memory of each link in the decode engine, at the end."""
        before, *_, after = self.decode.anonymous_kib
        return (after - before) / self.run.peers

    def faults(self) -> list[str]:
        """Missed limits. Wrong bytes and failed pulls have already raised."""
        found = []
        if self.fairness < FAIR:
            found.append(f"shares of {self.fairness:.2f}, at least {FAIR} was expected")
        if self.link_kib > MAX_LINK_KIB:
            found.append(f"{self.link_kib:.0f} KiB for each link, at most {MAX_LINK_KIB} may be")
        if max(self.peer_kib) > MAX_LINK_KIB:
            found.append(f"a peer gained {max(self.peer_kib)} KiB, at most {MAX_LINK_KIB} may be")
        return found


@contextmanager
def hosts(number: int) -> Iterator[tuple[Namespace | None, Sequence[Namespace | None]]]:
    """Yield the host of the decode engine and those of its peers; None is this host."""
    if not number:
        yield None, [None]
        return
    with namespaces(number + 1) as (decode, *rest):
        yield decode, rest


def measure(run: FanIn) -> Result:
    """Start all processes, pull, and check.

    Raises:
        subprocess.CalledProcessError: the decode engine failed; its standard error has the reason.
        NamespacesError: namespaces cannot be made here.
    """
    options = dict(OPTIONS[run.transport])
    registered = run.transport == "local-registered"
    with ExitStack() as opened:
        decode, places = opened.enter_context(hosts(run.hosts))
        if run.hosts:  # a key, because other users' processes could connect
            folder = opened.enter_context(TemporaryDirectory())
            key = Path(folder, "cluster-key")
            ClusterKey.generate().save(key)
            options["kvplan.cluster_key_file"] = str(key)
        engines, commands = [], []
        for number in range(run.peers):
            place = places[number % len(places)]
            address = place.address if place else "127.0.0.1"
            own = {**options, "llm.ListenIpInfo": f"{address}:0"}
            engines.append(Filled(number + 1, (run.shape,), registered, own))
            commands.append(place.command() if place else [])
        peers = opened.enter_context(started(engines, commands))
        before = [anonymous_kib(peer.process.pid) for peer in peers]
        addresses = [(peer.cluster_id, peer.address) for peer in peers]
        orders = Orders(addresses, run.shape, run.bursts, run.sustained_s, options)
        command = [sys.executable, "-m", "benchmarks.fan_in_decode", json.dumps(asdict(orders))]
        done = subprocess.run(
            decode.command(*command) if decode else command,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        after = [anonymous_kib(peer.process.pid) for peer in peers]
    gained = [b - a for a, b in zip(before, after, strict=True)]
    return Result(run, Outcome(**json.loads(done.stdout)), gained)


def table(result: Result) -> Iterator[str]:
    """Yield the lines of the table."""
    run, decode = result.run, result.decode
    where = f"{run.hosts} namespaces" if run.hosts else "this host"
    last = [max(times) for times in decode.finished_s]
    first = [min(times) for times in decode.finished_s]
    middle = [statistics.median(times) for times in decode.finished_s]
    counts = [item // run.shape.nbytes for item in decode.pulled]
    before, linked, bursts, end = decode.anonymous_kib
    opened = decode.descriptors[1] - decode.descriptors[0]
    rows = [
        ("peers", f"{run.peers} processes on {where}, over {run.transport}"),
        ("each pull", f"{run.shape.nbytes / KIB**2:.1f} MiB in blocks of "
         f"{run.shape.block_nbytes // KIB} KiB; every byte checked"),
        ("all linked in", f"{1e3 * decode.link_s:.0f} ms"),
        ("a burst", f"{result.burst_gigabytes_per_s:.2f} GB/s; its first, median and last pull end "
         f"after {' / '.join(f'{1e3 * statistics.median(s):.0f}' for s in (first, middle, last))}"
         f" ms (medians of {run.bursts})"),
        ("sustained", f"{result.gigabytes_per_s:.2f} GB/s over {decode.sustained_s:.1f} s; "
         f"{decode.cpu_s / decode.sustained_s:.2f} cores in decode"),
        ("shares", f"{min(counts)} to {max(counts)} pulls a peer: {result.fairness:.2f}"),
        ("memory of decode", f"{before / KIB:.0f} MiB, linked {linked / KIB:.0f}, after the bursts "
         f"{bursts / KIB:.0f}, at the end {end / KIB:.0f}: {result.link_kib:.0f} KiB a link"),
        ("memory of a peer", f"+{statistics.median(result.peer_kib):.0f} KiB, the most "
         f"+{max(result.peer_kib)}"),
        ("descriptors, threads", f"{opened / run.peers:.1f} descriptors a link, "
         f"{decode.threads} threads in decode"),
    ]  # fmt: skip
    for name, value in rows:
        yield f"{name:22}{value}"


def main() -> int:
    """Print the table; return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fan_in", description=__doc__)
    parser.add_argument("--peers", type=int, default=32)
    parser.add_argument("--transport", choices=OPTIONS, default="local")
    parser.add_argument("--namespaces", type=int, default=0, help="hosts of the peers; 0: this one")
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=32, help="of 32 KiB, of each tensor")
    parser.add_argument("--bursts", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the sustained part")
    asked = parser.parse_args()
    shape = Shape(asked.tensors, asked.blocks, 32 * KIB)
    run = FanIn(
        asked.peers, shape, asked.transport, asked.bursts, asked.seconds, hosts=asked.namespaces
    )
    result = measure(run)
    print("\n".join(table(result)))
    for fault in result.faults():
        print(f"NOT AS IT MUST BE: {fault}")
    return int(bool(result.faults()))


if __name__ == "__main__":
    sys.exit(main())
