"""Counts of the resources that a process holds."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import TypedDict

from kvplan.transport.local import LocalTransport


class Footprint(TypedDict):
    """Descriptors, mappings, threads, registrations that peers can see, and resident KiB."""

    descriptors: int
    mappings: int
    threads: int
    registrations: list[str]
    kib: int


def footprint() -> Footprint:
    """Return the footprint after a garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "registrations": sorted(
            repr(item).split(": ")[1] for item in gc.get_objects() if type(item) is LocalTransport
        ),
        "kib": pages * resource.getpagesize() // 1024,
    }
