"""A program on a fake NIXL that is observed."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvplan.observe import Observer
from kvplan.observe.surfaces import wrap_nixl
from kvplan.recording import Recording, read
from tests.observe import fake_nixl

BLOCK, BLOCKS, LAYERS = 64, 8, 3


class Program:
    """A program with two layers: memory of this process and of a peer, and an agent."""

    def __init__(self, folder: Path, *, sums: bool = False) -> None:
        self.module = types.ModuleType("nixl._api")
        agent = type("nixl_agent", (), dict(vars(fake_nixl.nixl_agent)))
        self.module.nixl_agent = agent  # type: ignore[attr-defined] # of this program alone
        self.observer = Observer(folder, sums=sums)
        self.folder = folder
        wrap_nixl(self.module, self.observer)
        self.agent: Any = agent("decode")
        numbers = np.random.default_rng(3)
        shape = (LAYERS, 2 * BLOCKS * BLOCK)
        self.here, self.there = (numbers.integers(0, 256, shape, np.uint8) for _ in range(2))
        self.registered = [
            (its.ctypes.data, BLOCKS * BLOCK, 0, f"layer.{i}") for i, its in enumerate(self.here)
        ]
        self.agent.register_memory(self.registered, "DRAM")
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.blocks(self.here))
        self.remote = self.agent.prep_xfer_dlist("prefill", self.blocks(self.there))

    @staticmethod
    def blocks(memory: Any) -> list[tuple[int, int, int]]:
        return [
            (layer.ctypes.data + block * BLOCK, BLOCK, 0)
            for layer in memory
            for block in range(BLOCKS)
        ]

    @staticmethod
    def every_layer(blocks: list[int]) -> list[int]:
        return [layer * BLOCKS + block for layer in range(LAYERS) for block in blocks]

    def make(self, here: list[int], there: list[int], op: str = "READ", request: str = "") -> Any:
        return self.agent.make_prepped_xfer(
            op, self.local, self.every_layer(here), self.remote, self.every_layer(there),
            f"{request}:2".encode() if request else b"",
        )  # fmt: skip

    def recording(self) -> Recording:
        self.observer.flush()
        (path,) = self.folder.glob("*.kvrec")
        return read(path)

    def findings(self) -> list[str]:
        rows = self.recording().events
        return [str(row.fields["finding"]) for row in rows if row.operation == "warning"]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    yield made
    made.observer.close()


def run(program: Program, here: list[int], there: list[int], op: str = "READ") -> Any:
    handle = program.make(here, there, op)
    program.agent.transfer(handle)
    return handle
