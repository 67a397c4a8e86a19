"""This process and the other one, linked, with caches that both have."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvplan.cli.measuring.samples import Sample
from kvplan.cli.measuring.sizes import PEER, Setup, Shape
from kvplan.control.auth import ClusterKey
from kvplan.engine.datadist import LlmDataDist
from kvplan.links.values import ClusterInfo
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException
from kvplan.types import KvCacheExtParam, LlmRole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.types import Cache

_OWN: Final = 1
_TIMEOUT_MS: Final = 30_000
_SAID: Final = 3
"""Lines of what a peer that did not start has said, the last ones."""


class Pair(NamedTuple):
    """Two linked engines: this one, and that of the other process.

    Attributes:
        engine: this one.
        setup: what the other one has.
        caches: here, one for each of there; with the same bytes, so that a push changes nothing.
        pid: of the other process.
        plain_address: of its memory that is read without an engine.
        port: of its plain socket.
    """

    engine: LlmDataDist
    setup: Setup
    caches: Sequence[Cache]
    pid: int
    plain_address: int
    port: int

    def pull(self, shape: int, tensors: int, blocks: int) -> Sample:
        """Pulls of that many blocks of the first tensors, each time of others."""
        key, cache, part = self.setup.key(shape), self.caches[shape], _layers(tensors)
        some = self._choice(shape, blocks)

        def move() -> float:
            chosen = some()
            began = time.perf_counter()
            self.engine.pull_blocks(key, cache, chosen, chosen, part, timeout_ms=_TIMEOUT_MS)
            return time.perf_counter() - began

        transfer = Transfer(Rows(key, some()), Rows(cache, some()), layers=part)
        return Sample(move, self.engine.plan(transfer))

    def push(self, shape: int, tensors: int, blocks: int) -> Sample:
        """The same in the other direction; the peer has these bytes already."""
        key, cache, part = self.setup.key(shape), self.caches[shape], _layers(tensors)
        some = self._choice(shape, blocks)

        def move() -> float:
            chosen = some()
            began = time.perf_counter()
            self.engine.push_blocks(cache, key, chosen, chosen, part, timeout_ms=_TIMEOUT_MS)
            return time.perf_counter() - began

        transfer = Transfer(Rows(cache, some()), Rows(key, some()), layers=part)
        return Sample(move, self.engine.plan(transfer))

    def _choice(self, shape: int, blocks: int) -> Callable[[], NDArray[np.int64]]:
        """Chooses among every second block, so that none are adjacent and merge."""
        generator = np.random.default_rng(0)
        half = self.setup.shapes[shape].blocks // 2
        return lambda: 2 * generator.permutation(half)[:blocks]


@contextmanager
def linked(transport: str, shapes: Sequence[Shape], plain_nbytes: int = 0) -> Iterator[Pair]:
    """Two engines that are linked over `transport`, in this process and in one that is started.

    Raises:
        LLMException: it does not work here, and why; or the peer's bytes did not arrive as they
            are.
        OSError: no process can be started.
    """
    with ExitStack() as stack:
        # The user's own key is made at first use: do not make it here. Both read it once.
        with TemporaryDirectory(prefix="kvplan-measuring-") as folder:
            key = Path(folder) / "key"
            ClusterKey.generate().save(key)
            setup = Setup(str(key), transport, tuple(shapes), plain_nbytes)
            pid, found = stack.enter_context(_started(setup))
            engine = stack.enter_context(LlmDataDist(_OWN, LlmRole.DECODER))
            engine.initialize(setup.options(""))
        peer = ClusterInfo(PEER, found["address"])
        engine.link_clusters([peer], timeout_ms=_TIMEOUT_MS).raise_for_status()
        caches = []
        for number, shape in enumerate(shapes):
            cache, blocks = engine.allocate_blocks_cache(shape.desc), np.arange(shape.blocks)
            # Touches every page, and compares every byte.
            engine.pull_blocks(
                setup.key(number), cache, blocks, blocks, timeout_ms=_TIMEOUT_MS, verify=True
            )
            caches.append(cache)
        yield Pair(engine, setup, caches, pid, found["plain_address"], found["port"])


@contextmanager
def _started(setup: Setup) -> Iterator[tuple[int, dict[str, Any]]]:
    """The other process: its id, and what it says of itself."""
    command = [sys.executable, "-m", "kvplan.cli.measuring.peer_process", setup.to_json()]
    with (
        TemporaryFile() as said,
        # Its exit closes the standard input, and waits.
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
            raise LLMException("the other process has not started: " + "; ".join(lines[-_SAID:]))
        yield process.pid, json.loads(line)


def _layers(tensors: int) -> KvCacheExtParam:
    layers = range(tensors // 2)
    return KvCacheExtParam(layers, layers)
