"""NIXL: descriptor lists and requests are prepared; posting and waiting are timed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_driver import Driver
from benchmarks.movers.paged import (
    BLOCK,
    POOL_BLOCKS,
    POOL_NBYTES,
    POOLS,
    TENSORS,
    Ids,
    OnePool,
    answers,
    forwarding,
    obey,
    serve,
    timed,
)

try:
    from nixl_cu12 import nixl_agent, nixl_agent_config
except ImportError:  # the wheel for CUDA 13
    from nixl_cu13 import nixl_agent, nixl_agent_config

OPERATIONS = {"pull": "READ", "push": "WRITE"}


EACH_TENSOR = np.arange(TENSORS)[:, None] * POOL_BLOCKS


def descriptors(address: int) -> NDArray[np.uint64]:
    """Return NIXL's row (address, size, device) of every block of the pool at `address`."""
    rows = np.zeros((TENSORS * POOL_BLOCKS, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(address) + np.arange(len(rows), dtype=np.uint64) * np.uint64(BLOCK)
    rows[:, 1] = BLOCK
    return rows


def indices(ids: Ids, tensors: NDArray[np.intp] = EACH_TENSOR) -> NDArray[np.int32]:
    """Return the rows of blocks in `descriptors`."""
    return (tensors + ids).ravel().astype(np.int32)


def kind_of(pool: OnePool | None) -> str:
    """Return NIXL's name for the kind of memory."""
    return "VRAM" if pool is None else "DRAM"


class NixlMover:
    """The moving end with NIXL. A pool on a GPU is None: its requests are timed, not verified."""

    def __init__(
        self, agent: nixl_agent, pool: OnePool | None, peer: str, ours: int, theirs: int
    ) -> None:
        self.pool = pool
        self._agent = agent
        kind = kind_of(pool)
        self._local = agent.prep_xfer_dlist("", descriptors(ours), kind)
        self._remote = agent.prep_xfer_dlist(peer, descriptors(theirs), kind)

    def prepared(self, direction: str, remote: Ids, local: Ids) -> Callable[[], object]:
        agent = self._agent
        request = agent.make_prepped_xfer(
            OPERATIONS[direction], self._local, indices(local), self._remote, indices(remote)
        )

        def move() -> None:
            state = agent.transfer(request)
            while state == "PROC":
                state = agent.check_xfer_state(request)
            if state != "DONE":
                raise RuntimeError(f"NIXL answered {state}")

        return move

    def request(self, tensors: int, remote: Ids, local: Ids) -> None:
        agent, each = self._agent, EACH_TENSOR[:tensors]
        request = agent.make_prepped_xfer(
            "READ", self._local, indices(local, each), self._remote, indices(remote, each)
        )
        state = agent.transfer(request)
        while state == "PROC":
            state = agent.check_xfer_state(request)
        agent.release_xfer_handle(request)
        if state != "DONE":
            raise RuntimeError(f"NIXL answered {state}")


Work = Callable[[str, int], Callable[[], float]]


def observing(site: str, folder: str) -> Callable[[Work], Work]:
    """Let kvplan, in `site`, record agents that are made from here on.

    The result extends work: words that begin with "observed-" use recorded methods, words that
    begin with "forwarded-" methods that only forward, and other words NIXL's own methods.
    """
    sys.path.append(site)
    from kvplan.observe import install

    plain = dict(vars(nixl_agent))
    install(["nixl"], folder)
    wrapped = {name: value for name, value in vars(nixl_agent).items() if value is not plain[name]}
    forwarded = {name: forwarding(plain[name]) for name in wrapped}

    def added(work: Work) -> Work:
        def chosen(word: str, number: int) -> Callable[[], float]:
            kind, dash, own = word.partition("-")
            seconds = work(own if dash else kind, number)
            methods = {"observed": wrapped, "forwarded": forwarded}.get(kind, plain)

            def measured() -> float:
                for name in wrapped:
                    setattr(nixl_agent, name, methods[name])
                return seconds()

            return measured

        return chosen

    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--thread", type=int, default=1, help="a progress thread: 0 or 1")
    parser.add_argument("--workers", type=int, default=0, help="threads of the backend")
    parser.add_argument("--memory", choices=[*POOLS, "gpu"], default="ordinary")
    parser.add_argument("--observe", nargs=2, metavar=("SITE", "FOLDER"))
    parser.add_argument("peer", nargs="?", help="what the serving end said")
    asked = parser.parse_args()
    say = answers()
    pool = None if asked.memory == "gpu" else POOLS[asked.memory]()
    ours = Driver().allocate(POOL_NBYTES) if pool is None else pool.ctypes.data
    name = "moving" if asked.peer else "serving"
    threads = {"enable_prog_thread": bool(asked.thread), "num_threads": asked.workers}
    adds = observing(*asked.observe) if asked.observe else lambda work: work
    agent = nixl_agent(name, nixl_agent_config(**threads))
    agent.register_memory([(ours, POOL_NBYTES, 0, "pool")], kind_of(pool))
    if asked.peer is None:
        there = {"metadata": agent.get_agent_metadata().hex(), "address": ours}
        serve(say, there, None if asked.thread else agent.get_new_notifs)
    else:
        there = json.loads(asked.peer)
        peer = agent.add_remote_agent(bytes.fromhex(there["metadata"]))
        obey(say, adds(timed(NixlMover(agent, pool, peer, ours, there["address"]))))


if __name__ == "__main__":
    main()
