"""The kernel's data about one mapping of this process, as the oracle of tests of pages."""

from __future__ import annotations

import re
from pathlib import Path


def smaps_of(address: int) -> dict[str, int]:
    """Return the fields of the mapping that begins at `address`, in bytes; empty if none does."""
    text = Path("/proc/self/smaps").read_text()
    entry = re.search(rf"^{address:08x}-.*\n((?:[A-Z]\w*:.*\n?)*)", text, re.MULTILINE)
    fields = [] if entry is None else re.findall(r"^(\w+): +(\d+) kB$", entry[1], re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in fields}


def num_mappings(inode: int) -> int:
    """Return how many mappings of this process belong to the file with that inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) for line in lines)


def nodes_of(address: int) -> set[int]:
    """Return the NUMA nodes of the pages of the mapping at `address`."""
    text = Path("/proc/self/numa_maps").read_text()
    entry = re.search(rf"^{address:08x} .*$", text, re.MULTILINE)
    return set() if entry is None else {int(match) for match in re.findall(r" N(\d+)=", entry[0])}
