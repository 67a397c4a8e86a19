"""The tests' side of `peer_process.py`: a peer, its memory, and backends that reach it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvnative._backend import Backend
from kvnative._lower import Descriptors
from kvnative._ucx import UcxEndpoint, UcxLibrary, UcxWorker
from kvnative._ucx_backend import ucx_backend
from kvplan.transport.ucx.library import find
from tests.support import forked
from tests.support.peer import ROOT, Peer
from tests.support.spare import copy_of

NBYTES = 4 << 20
SLOTS = 16
TAG = 0xC0FFEE
TIMEOUT_MS = 20_000

Bytes = NDArray[np.uint8]
Column = NDArray[np.uint64]
Range = tuple[int, int, tuple[int, int]]
"""A range: offset, size, (slot, generation)."""


PRELUDE = """
import ctypes, os, sys
from kvnative._ucx import *

path = sys.argv[1]
"""


def run(script: str, *arguments: str) -> str:
    """Run a script in a process of its own, which must succeed, and return its output."""
    imported = ("kvnative._ucx_backend", "kvnative._executor", "tests.ucx.peer")
    done = forked.python(PRELUDE + dedent(script), *arguments, imported=imported)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def stand_in(folder: Path, name: str, ucx: str, *flags: str) -> str:
    """Compile a C file of this folder to a library that wraps the libucp at `ucx`."""
    made = folder / f"{name}.so"
    subprocess.run(
        [
            *("gcc", "-std=gnu11", "-shared", "-fPIC", f"-I{ROOT / 'include'}", *flags, "-o", made),
            *(Path(__file__).with_name(f"{name}.c"), "-ldl"),
            *("-Wl,--no-as-needed", ucx, f"-Wl,-rpath,{Path(ucx).parent}"),
        ],
        env=os.environ | {"LD_PRELOAD": ""},
        check=True,
    )
    return str(made)


def u64(*values: int) -> Column:
    return np.array(values, dtype=np.uint64)


def open_worker(**settings: str) -> UcxWorker:
    return UcxWorker(UcxLibrary.load(find().path), settings=settings)


class UcxPeer(Peer):
    """A process with a region (a file, which this one sees as `memory`) and a generation table."""

    module = "tests.ucx.peer_process"

    def __init__(self, file: Path) -> None:
        with file.open("wb") as made:
            made.truncate(NBYTES)
        self.memory: Bytes = np.memmap(file, dtype=np.uint8).view(np.ndarray)  # slices faster
        self._content = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
        self.fill()
        super().__init__(str(file))
        self.base: int = self.run("result = base")
        self.address: bytes = self.run("result = worker.address")
        self.board: int = self.run("result = board.address")
        self.board_key: bytes = self.run("result = shown.rkey")
        self.tickets: int = self.run("result = tickets.address")
        self.tickets_key: bytes = self.run("result = tickets.rkey")
        self.key: bytes = self.run("result = region.rkey")

    def fill(self) -> None:
        """Restore the original content of its memory."""
        self.memory[:] = self._content

    def endpoint(self, worker: UcxWorker, **changes: Any) -> UcxEndpoint:
        """Return an endpoint of `worker` to the peer that is not connected."""
        given = {
            "address": self.address,
            "generations_address": self.board,
            "num_slots": SLOTS,
            "generations_rkey": self.board_key,
            "tickets_address": self.tickets,
            "tickets_rkey": self.tickets_key,
            "tag": TAG,
            **changes,
        }
        return worker.endpoint(**given)

    def connect(self, worker: UcxWorker) -> UcxEndpoint:
        """Return a connected endpoint of `worker` to the peer."""
        made = self.endpoint(worker)
        made.connect(TIMEOUT_MS)
        return made

    def take(self) -> tuple[int, int]:
        """Return a slot of its generation table, and the generation."""
        slot, generation = self.run("result = board.take()")
        return slot, generation

    def backend(
        self, endpoint: UcxEndpoint, direction: str, ranges: Iterable[Range], **changes: Any
    ) -> Backend:
        """Return a backend that knows `ranges`."""
        rows = list(ranges)
        given = {
            "addresses": u64(*(self.base + offset for offset, _, _ in rows)),
            "nbytes": u64(*(nbytes for _, nbytes, _ in rows)),
            "slots": u64(*(slot for _, _, (slot, _) in rows)),
            "generations": u64(*(generation for _, _, (_, generation) in rows)),
            "keys": u64(*(0 for _ in rows)),
            "rkeys": [self.key],
            **changes,
        }
        return ucx_backend(endpoint, direction, **given)  # type: ignore[arg-type]

    def descriptors(
        self, direction: str, local: Bytes, spans: Sequence[tuple[int, int, int]]
    ) -> Descriptors:
        """Return descriptors of spans (local offset, peer's offset, nbytes)."""
        columns = np.array(spans, dtype=np.uint64).reshape(-1, 3)
        here = columns[:, 0] + np.uint64(local.ctypes.data)
        there = columns[:, 1] + np.uint64(self.base)
        dst, src = (here, there) if direction == "get" else (there, here)
        return Descriptors.from_columns(dst, src, np.ascontiguousarray(columns[:, 2]))


def blocks(count: int, nbytes: int, seed: int = 2) -> list[tuple[int, int, int]]:
    """Return spans of `count` blocks at random places of the peer, which are adjacent here."""
    places = np.random.default_rng(seed).permutation(NBYTES // nbytes)[:count]
    return [(i * nbytes, int(place) * nbytes, nbytes) for i, place in enumerate(places)]


def both(
    there: Bytes, direction: str, here: Bytes, spans: list[tuple[int, int, int]]
) -> tuple[Bytes, Bytes]:
    """Return the expected memory here and there after a transfer, computed by NumPy."""
    here, there = copy_of(here), copy_of(there)
    for mine, theirs, nbytes in spans:
        if direction == "get":
            here[mine : mine + nbytes] = there[theirs : theirs + nbytes]
        else:
            there[theirs : theirs + nbytes] = here[mine : mine + nbytes]
    return here, there
