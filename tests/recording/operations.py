"""Arguments of a recorder, made by hand: operations that have ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import kvplan
from kvplan import CacheDesc, DataType, LLMStatusCode, Plan, Rows, Transfer
from kvplan.recording import read
from kvplan.recording.writer import Recorder

DESC = CacheDesc(2, (4096, 16), DataType.DT_FLOAT)
PLAN = kvplan.plan(Transfer(Rows(DESC, [1, 2, 9]), Rows(DESC, [4, 5, 6])), local="dst")
SMALLEST = 64 << 10  # bytes of a file


@dataclass
class Link:
    """A link to a peer."""

    cluster_id: int = 7


@dataclass
class Done:
    """An operation that has ended."""

    plan: Plan | None
    name: str = "pull_blocks"
    tag: str = ""
    started: float = 0.0
    cache_id: int = 1
    link: Link | None = field(default_factory=Link)
    leases: tuple[int, ...] = ()


def recorder(path: Path, **options: int) -> Recorder:
    """Return the recorder of an engine of cluster 3."""
    return Recorder(path, 3, "MIX", **{"max_bytes": 64 << 20, "files": 2, **options})


def record(writer: Recorder, plan: Plan | None, tag: str = "", error: str = "") -> None:
    """Record a transfer of 1 ms that has just ended."""
    status = LLMStatusCode.LLM_FAILED if error else LLMStatusCode.LLM_SUCCESS
    nbytes = 0 if plan is None or error else plan.nbytes
    operation = Done(plan, tag=tag, started=perf_counter() - 1e-3)
    writer.transfer(operation, status, 1e-3, nbytes, error)


def tags(path: Path) -> list[str]:
    return [transfer.tag for transfer in read(path).transfers]
