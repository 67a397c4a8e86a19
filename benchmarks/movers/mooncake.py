"""Mooncake's transfer engine over TCP: address lists are prepared, and batches are timed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from mooncake.engine import TransferEngine

from benchmarks.movers.paged import (
    BLOCK,
    POOL_NBYTES,
    Ids,
    OnePool,
    answers,
    obey,
    offsets,
    ordinary_pool,
    serve,
    timed,
)

HELP_OF_MOST = "descriptors of a batch; more than its queues hold fails, and so do all later calls"


class MooncakeMover:
    """The moving end with Mooncake."""

    def __init__(
        self, engine: TransferEngine, pool: OnePool, peer: str, address: int, most: int
    ) -> None:
        self.pool = pool
        self._calls = {
            "pull": engine.batch_transfer_sync_read,
            "push": engine.batch_transfer_sync_write,
        }
        self._peer, self._address, self._most = peer, address, most

    def prepared(self, direction: str, remote: Ids, local: Ids) -> Callable[[], object]:
        call, peer, most = self._calls[direction], self._peer, self._most
        ours = (self.pool.ctypes.data + offsets(local)).tolist()
        theirs = (self._address + offsets(remote)).tolist()
        sizes = [BLOCK] * len(ours)
        batches = [
            (ours[start : start + most], theirs[start : start + most], sizes[start : start + most])
            for start in range(0, len(ours), most)
        ]

        def move() -> None:
            for batch in batches:
                status = call(peer, *batch)
                if status != 0:
                    raise RuntimeError(f"Mooncake answered {status}")

        return move


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="of this end")
    parser.add_argument("--most", type=int, default=2048, help=HELP_OF_MOST)
    parser.add_argument("peer", nargs="?", help="what the serving end said")
    asked = parser.parse_args()
    say = answers()
    pool = ordinary_pool()
    engine = TransferEngine()
    for status in (
        engine.initialize(asked.address, "P2PHANDSHAKE", "tcp", ""),
        engine.register_memory(pool.ctypes.data, POOL_NBYTES),
    ):
        if status != 0:
            raise RuntimeError(f"Mooncake answered {status}")
    if asked.peer is None:
        name = f"{asked.address}:{engine.get_rpc_port()}"
        serve(say, {"name": name, "address": pool.ctypes.data})
    else:
        there = json.loads(asked.peer)
        obey(say, timed(MooncakeMover(engine, pool, there["name"], there["address"], asked.most)))


if __name__ == "__main__":
    main()
