"""NUMA nodes of this machine, and copies by threads on the processors of one node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvplan.execution import Transfers, default_transfers
from kvplan.planning.texts import plural
from kvplan.status import invalid

MAX_NODE: Final = 1023
"""Largest node number of Linux."""


def numa_nodes(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """Return the processors of each online node; empty if the kernel does not list nodes.

    `root` is the directory that contains sys.
    """
    folder = root / "sys/devices/system/node"
    try:
        online = _numbers((folder / "online").read_text())
        return {
            node: _numbers((folder / f"node{node}/cpulist").read_text()) for node in sorted(online)
        }
    except (OSError, ValueError):
        return {}


def check_node(name: str, node: int, nodes: Mapping[int, frozenset[int]]) -> None:
    """Refuse a node that this machine does not have: LLM_PARAM_INVALID."""
    if node in nodes:
        return
    if not nodes:
        raise invalid(f"{name}={node}: the kernel of this machine does not list NUMA nodes")
    low, high = min(nodes), max(nodes)
    missing = "" if len(nodes) == high - low + 1 else f", of which {sorted(nodes)} are online"
    raise invalid(
        f"{name}={node} is out of range [{low}, {high}]: this machine has "
        f"{plural(len(nodes), 'NUMA node')}{missing}"
    )


def transfers_on(
    node: int | None, nodes: Mapping[int, frozenset[int]], tuning: str | None
) -> Transfers:
    """Return this process's transfers with threads on the processors of `node`.

    The threads run on any processor if `node` is None, the only node, or has no usable processor.
    """
    usable = frozenset() if node is None else nodes[node] & os.sched_getaffinity(0)
    if len(nodes) < 2 or not usable:
        return default_transfers(tuning)
    with _running_on(usable):  # new threads inherit the affinity of this one
        return default_transfers(tuning, usable)


@contextmanager
def _running_on(processors: frozenset[int]) -> Iterator[None]:
    """Restrict only this thread to some processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _numbers(text: str) -> frozenset[int]:
    """Return the numbers of a list such as "0-3,8", which may be empty."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
