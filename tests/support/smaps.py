"""What the kernel says of one mapping of this process: the oracle of what pages it has."""

from __future__ import annotations

import re
from pathlib import Path


def smaps_of(address: int) -> dict[str, int]:
    """The fields of the mapping that begins at `address`, in bytes; empty where there is none."""
    text = Path("/proc/self/smaps").read_text()
    entry = re.search(rf"^{address:08x}-.*\n((?:[A-Z]\w*:.*\n?)*)", text, re.MULTILINE)
    fields = [] if entry is None else re.findall(r"^(\w+): +(\d+) kB$", entry[1], re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in fields}


def num_mappings(inode: int) -> int:
    """How many mappings of this process are of the file with that inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) for line in lines)


def nodes_of(address: int) -> set[int]:
    """Return the NUMA nodes that pages of the mapping at `address` come from."""
    text = Path("/proc/self/numa_maps").read_text()
    entry = re.search(rf"^{address:08x} .*$", text, re.MULTILINE)
    return set() if entry is None else {int(match) for match in re.findall(r" N(\d+)=", entry[0])}
