"""`kvplan.hixl`: the time that its calls add to the transfer."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.table import Row, Run, Topic, timed
from kvnative._ranges import address_columns
from kvplan import AddressRanges, hixl
from kvplan.addressed.names import cluster_id_of, peer_endpoint
from kvplan.engine.ranges import RangeOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOPIC = Topic()
COUNT = 10_000
BLOCK = 16 << 10  # as in the sample of the original
SMALL = 512
TIMEOUT_MS = 30_000


class Pair(NamedTuple):
    """An engine that is connected with an engine in another process, and the memory of both."""

    engine: hixl.Hixl
    remote: str
    here: int
    there: int


@TOPIC.row("hixl_transfer_ratio")
def transfer_ratio(run: Run, name: str) -> Row:
    """Run `transfer_sync` of 10,000 descriptors, beside the executor alone."""
    cases = {}
    figures = []
    with pair() as item:
        for nbytes in (BLOCK, SMALL):
            descs = shuffled(item, nbytes)
            call = partial(item.engine.transfer_sync, item.remote, hixl.READ, descs, TIMEOUT_MS)
            ours, alone = run.medians(timed(call), timed(executor(item, descs)), rounds=81)
            cases[f"{nbytes} bytes"] = ours / alone
            figures.append((ours, alone))
            if nbytes == BLOCK:
                read = timed(partial(address_columns, descs), repeats=20)
                (reading,) = run.medians(read, rounds=41)
    (ours, alone), (small, small_alone) = figures
    note = (
        f"10,000 blocks of 16 KiB in random order, one READ over local: {1e3 * ours:.2f} ms, the "
        f"executor alone {1e3 * alone:.2f}; reading the objects {1e6 * reading:.0f} us of it. Of "
        f"{SMALL} bytes each {1e3 * small:.2f} and {1e3 * small_alone:.2f} ms: "
        f"{1e6 * (small - small_alone):.0f} us more"
    )
    return Row(name, 1e3 * ours, "ms", 1e3 * alone, target=1.1, note=note, cases=cases)


def shuffled(item: Pair, nbytes: int) -> list[hixl.TransferOpDesc]:
    """Return descriptors that cannot be merged."""
    rng = random.Random(nbytes)
    here, there = (rng.sample(range(COUNT), COUNT) for _ in range(2))
    return [
        hixl.TransferOpDesc(item.here + a * nbytes, item.there + b * nbytes, nbytes)
        for a, b in zip(here, there, strict=True)
    ]


def executor(item: Pair, descs: list[hixl.TransferOpDesc]) -> Callable[[], object]:
    """Return a call that runs only the transfer of `transfer_sync`."""
    engine = item.engine.datadist._running()
    cluster_id = cluster_id_of(peer_endpoint(item.remote))
    ranges = AddressRanges(cluster_id, *address_columns(descs))
    prepared = RangeOperation(engine, ranges).prepare()
    backend, descriptors, memories = engine.transfers._prepare(*prepared)
    held = (prepared[0], *memories)
    return partial(engine.transfers._executor.run, descriptors, TIMEOUT_MS, held, backend)


@contextmanager
def pair() -> Iterator[Pair]:
    """Yield two engines in two processes, linked over local."""
    command = [sys.executable, "-m", "benchmarks.hixl"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        remote, there = process.stdout.readline().split()
        engine, memory = served("127.0.0.1")
        status = engine.connect(remote, 10_000)
        if status != hixl.SUCCESS:
            raise RuntimeError(f"connect returned {status}")
        yield Pair(engine, remote, memory.ctypes.data, int(there))
        engine.finalize()
        process.stdin.close()


def served(name: str) -> tuple[hixl.Hixl, np.ndarray]:
    """Return an engine and its registered memory."""
    engine, memory = hixl.Hixl(), np.ones(COUNT * BLOCK, np.uint8)
    engine.initialize(name, {"kvplan.transport": "local"})
    engine.register_mem(hixl.MemDesc(memory.ctypes.data, memory.nbytes), hixl.MEM_HOST)
    return engine, memory


def main() -> None:
    """Run as the other process."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    name = f"127.0.0.1:{port}"
    engine, memory = served(name)
    print(name, memory.ctypes.data, flush=True)
    sys.stdin.read()
    engine.finalize()


if __name__ == "__main__":
    main()
