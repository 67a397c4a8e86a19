"""NUMA nodes of this machine, and copies by threads on the processors of one node, or of all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from kvnative._backend import node_of
from kvplan.engine.telemetry import logger
from kvplan.execution import Transfers, default_transfers
from kvplan.planning.texts import plural
from kvplan.status import invalid
from kvplan.validation import check_range, shown

MAX_NODE: Final = 1023
"""Largest node number of Linux."""

ALL_NODES: Final = "all"
"""The choice of the processors of all nodes; the system chooses the node of memory."""

_IN_A_SET: Final = frozenset(range(1024))  # the processors that a cpu_set_t of Linux can name


def check_choice_of_node(name: str, value: object) -> None:
    """Refuse a value that is neither `ALL_NODES` nor a number that a node can have."""
    if isinstance(value, str) and value != ALL_NODES:
        raise invalid(f'{name}={shown(value)} must be "{ALL_NODES}" or a number in [0, {MAX_NODE}]')
    if value != ALL_NODES:
        check_range(name, value, 0, MAX_NODE)


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


def check_node(name: str, node: int | str, nodes: Mapping[int, frozenset[int]]) -> None:
    """Refuse a node that this machine does not have: LLM_PARAM_INVALID."""
    if node in nodes or node == ALL_NODES:
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
    node: int | str | None, nodes: Mapping[int, frozenset[int]], tuning: str | None
) -> Transfers:
    """Return this process's transfers with threads on the processors of `node`, or of all nodes.

    The threads run on any processor if `node` is None, the only node, or has no usable processor.
    For all nodes they also do if only one is usable, threads are fewer than nodes, or the kernel
    does not tell a page's node.
    """
    allowed = os.sched_getaffinity(0)
    usable = tuple(
        (number, processors & allowed)
        for number, processors in nodes.items()
        if node in (number, ALL_NODES) and processors & allowed
    )
    if len(nodes) < 2 or not usable:
        return default_transfers(tuning)
    if node == ALL_NODES:
        bound = tuple((number, kept) for number, each in usable if (kept := each & _IN_A_SET))
        return default_transfers(tuning, bound if len(bound) > 1 and _are_pages_told() else ())
    try:
        os.sched_setaffinity(0, usable[0][1])  # new threads inherit the affinity of this one
        return default_transfers(tuning, usable)
    finally:
        os.sched_setaffinity(0, allowed)


def _are_pages_told() -> bool:
    """Return whether the kernel tells the node of a page; log if it does not."""
    try:
        node_of(np.zeros(1).ctypes.data)
    except OSError as error:
        logger.warning("event=numa_node_all_without_effect reason=move_pages: %s", error)
        return False
    return True


def _numbers(text: str) -> frozenset[int]:
    """Return the numbers of a list such as "0-3,8", which may be empty."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
