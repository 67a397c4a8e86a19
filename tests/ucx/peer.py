"""The tests' side of peer_process.py: a peer, its memory, and backends that reach it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvnative._backend import Backend
from kvnative._lower import Descriptors
from kvnative._ucx import UcxEnd, UcxLibrary, UcxNativeLink
from kvnative._ucx_gathered import gathered_backend
from kvplan.transport.ucx.library import find
from tests.transport.owner import Owner

NBYTES = 16 << 20
TIMEOUT_MS = 20_000

Bytes = NDArray[np.uint8]
Column = NDArray[np.uint64]

_TOKENS = itertools.count(1)


def u64(*values: int) -> Column:
    return np.array(values, dtype=np.uint64)


def open_end(mode: str = "gathered", **settings: str) -> UcxEnd:
    given = {"UCX_NET_DEVICES": "lo", **settings}
    return UcxEnd(UcxLibrary.load(find().path), mode=mode, settings=given)


class UcxPeer(Owner):
    """A process with an end, whose memory is a file that this one sees as `memory`."""

    script = Path(__file__).with_name("peer_process.py")

    def __init__(self, file: Path, mode: str = "gathered") -> None:
        with file.open("wb") as made:
            made.truncate(NBYTES)
        self.memory: Bytes = np.memmap(file, dtype=np.uint8)
        self._content = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
        self.fill()
        super().__init__(arguments=[str(file), mode])
        self.base: int = self.run("result = base")
        self.address = bytes.fromhex(self.run("result = end.address.hex()"))

    def fill(self) -> None:
        """Put its memory back to what it was."""
        self.memory[:] = self._content

    def pull_and_stop(self, memory: Bytes, slot: int, times: int) -> None:
        """Let it pull `memory`, all of a slot of this end, so many times, and stop meanwhile.

        It stops itself as soon as something has come: the rest is under way. After `resume`
        comes an `answer`; the pull is `task` there, and what came is in `into`.
        """
        base, nbytes = memory.ctypes.data, memory.nbytes
        self.send(
            f"""
            import os, signal
            from kvnative._executor import Executor
            from kvnative._lower import Descriptors
            from kvnative._ucx_gathered import gathered_backend
            from tests.ucx.peer import u64
            ranges = u64({slot}), u64(1), u64({base}), u64({nbytes})
            into = np.zeros(({times}, {nbytes}), dtype=np.uint8)
            task = Executor(gathered_backend(links[-1], "get", *ranges)).submit(
                Descriptors.from_columns(
                    u64(*(row.ctypes.data for row in into)),
                    u64(*[{base}] * {times}), u64(*[{nbytes}] * {times})))
            while not task.done and not task.report.bytes_done:
                pass
            os.kill(os.getpid(), signal.SIGSTOP)
            """
        )
        self.wait_until_stopped()

    def link(self, end: UcxEnd) -> UcxNativeLink:
        """A link of `end` to it, connected."""
        token = next(_TOKENS).to_bytes(16, "big")
        self.run(
            f"links.append(end.link(bytes.fromhex({token.hex()!r}),"
            f" bytes.fromhex({end.address.hex()!r})))"
        )
        link = end.link(token, self.address)
        link.connect(TIMEOUT_MS)
        return link

    def add_range(
        self, slot: int, offset: int, nbytes: int, *, writable: bool = True, generation: int = 1
    ) -> None:
        self.run(f"end.add_range({slot}, base + {offset}, {nbytes}, {writable}, {generation})")

    def remove_range(self, slot: int) -> None:
        self.run(f"end.remove_range({slot})")

    def backend(
        self,
        link: UcxNativeLink,
        direction: str,
        *,
        slot: int = 0,
        generation: int = 1,
        offset: int = 0,
        nbytes: int = NBYTES,
        hands_over: bool = False,
    ) -> Backend:
        """A backend that knows one range of the peer."""
        columns = map(u64, (slot, generation, self.base + offset, nbytes))
        return gathered_backend(link, direction, *columns, hands_over=hands_over)  # type: ignore[arg-type]

    def descriptors(
        self, direction: str, local: Bytes, spans: Sequence[tuple[int, int, int]]
    ) -> Descriptors:
        """Descriptors of (local offset, peer's offset, nbytes)."""
        columns = np.array(spans, dtype=np.uint64).reshape(-1, 3)
        here = columns[:, 0] + np.uint64(local.ctypes.data)
        there = columns[:, 1] + np.uint64(self.base)
        dst, src = (here, there) if direction == "get" else (there, here)
        return Descriptors.from_columns(dst, src, np.ascontiguousarray(columns[:, 2]))


def blocks(count: int, nbytes: int, seed: int = 2) -> list[tuple[int, int, int]]:
    """Spans of `count` blocks, at random places of the peer, one after another here."""
    places = np.random.default_rng(seed).permutation(NBYTES // nbytes)[:count]
    return [(i * nbytes, int(place) * nbytes, nbytes) for i, place in enumerate(places)]
