"""An owner and a writer of a writer table, and transfers between them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvnative._backend import Backend, ThreadPool, host_backend
from kvnative._executor import Executor
from kvnative._host import GenerationTable
from kvnative._lower import lower
from kvnative._report import Report
from kvnative._writers import Writer, WriterTable

NBYTES = 1 << 20


def column(*numbers: int) -> NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


def move(backend: Backend, src: int, dst: int, nbytes: int = NBYTES) -> Report:
    descriptors = lower(column(0), column(0), column(nbytes), column(src), column(dst))
    return Executor(backend).run(descriptors, 30_000)


def address_of(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


@dataclass
class Here:
    """An owner and a writer in this process, with one registration."""

    entries: int = 8
    pool: ThreadPool = field(default_factory=lambda: ThreadPool(2))

    def __post_init__(self) -> None:
        self.generations, self.table = GenerationTable(4), WriterTable(self.entries)
        self.slot, self.generation = self.generations.take()
        self.src = np.full(NBYTES, 7, np.uint8)
        self.dst = np.zeros(NBYTES, np.uint8)
        self.registered = column(self.slot, self.generation).tobytes()

    @property
    def facts(self) -> dict[str, int]:
        """Return the arguments of a writer's constructor."""
        return {
            "generations_fd": self.generations.fd,
            "generations_inode": self.generations.inode,
            "num_slots": self.generations.num_slots,
            "table_fd": self.table.fd,
            "table_inode": self.table.inode,
            "num_entries": self.table.num_entries,
            "address": self.table.address,
        }

    def writer(self) -> Writer:
        return Writer(os.getpid(), **self.facts)

    def backend(self, kind: str) -> Backend:
        writer = self.writer()
        if kind == "around":
            return writer.around(host_backend(self.pool), self.registered)
        make = {"mapped": writer.mapped, "by_address": writer.by_address}[kind]
        return make(self.pool, self.registered)

    @property
    def sides(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        return column(address_of(self.src)), column(address_of(self.dst))

    def move(self, backend: Backend, nbytes: int = NBYTES) -> Report:
        return move(backend, address_of(self.src), address_of(self.dst), nbytes)

    def end(self) -> None:
        self.generations.release(self.slot, self.generation)
