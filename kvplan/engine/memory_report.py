"""What pages the memory of an engine has: of its caches, and of peers' memory mapped here."""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvnative._host import page_nodes, page_use
from kvplan.device.memory import DeviceMemory
from kvplan.engine.memory import merged_ranges
from kvplan.inspection.units import nbytes_text

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist
    from kvplan.types import Placement

_WINDOW: Final = 2 << 20
_MOST_NBYTES: Final = 2 << 30
"""That are looked at of one report, at 30 ms a GiB at most; of more, as much in even parts."""


@dataclass(frozen=True, slots=True)
class PageUse:
    """The pages of some memory, as they were when looked at. Whole pages that it touches count.

    Attributes:
        nbytes: of the memory.
        resident: bytes whose pages are in memory, whoever has mapped them; the rest costs an
            allocation at its first use.
        mapped: bytes that this process uses without a fault; None: not known before Linux 6.7.
        huge: bytes of those by huge pages; None likewise.
        page_nbytes: of the smallest pages there are here: 4096, mostly.
        nodes: how many pages are of which NUMA node: of up to 64 in each of some ranges of it,
            chosen evenly, as far as they are mapped here.
        is_exact: whether all of it was looked at; otherwise even parts of it were, and the bytes
            are what these come to.
    """

    nbytes: int
    resident: int
    mapped: int | None
    huge: int | None
    page_nbytes: int
    nodes: Mapping[int, int]
    is_exact: bool

    @property
    def pages(self) -> str:
        """What pages are in use here: "4 KiB", "huge", such as "70% huge", or "not mapped"."""
        small = nbytes_text(self.page_nbytes)
        if self.mapped is None or self.huge is None:
            return f"{small} or huge"
        if not self.mapped:
            return "not mapped"
        if self.huge in (0, self.mapped):
            return "huge" if self.huge else small
        return f"{min(99, max(1, 100 * self.huge // self.mapped))}% huge"


@dataclass(frozen=True, slots=True)
class CachePages:
    """The pages of a cache of this engine.

    Attributes:
        cache_id: of the cache.
        placement: its own.
        allocated: by the engine; otherwise registered.
        use: its pages; None: it is in device memory, or was unmapped.
    """

    cache_id: int
    placement: Placement
    allocated: bool
    use: PageUse | None


@dataclass(frozen=True, slots=True)
class PeerPages:
    """The pages of a peer's arena that is mapped here.

    Attributes:
        cluster_id: of the peer.
        writable: whether it is mapped to be written.
        use: its pages; None: the link has ended meanwhile.
    """

    cluster_id: int
    writable: bool
    use: PageUse | None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What `kvplan.memory_report` returns. As text it is a table, with a line for each.

    Attributes:
        caches: of this engine, in the order of ids.
        peers: mappings of peers' arenas, by cluster id.
        seconds: that looking at all of it took.
    """

    caches: tuple[CachePages, ...]
    peers: tuple[PeerPages, ...]
    seconds: float

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("memory", "bytes", "resident", "mapped here", "pages", "NUMA nodes")
        ]
        for cache in self.caches:
            how = "allocated" if cache.allocated else "registered"
            name = f"cache {cache.cache_id} ({cache.placement.name}, {how})"
            rows.append((name, *_cells(cache.use)))
        for peer in self.peers:
            access = "" if peer.writable else ", read-only"
            rows.append((f"arena of cluster {peer.cluster_id}{access}", *_cells(peer.use)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        uses = [*(it.use for it in self.caches), *(it.use for it in self.peers)]
        if not all(it is None or it.is_exact for it in uses):
            lines.append("~: from even parts of the memory, as there is much of it")
        return "\n".join(lines)


def memory_report(datadist: LlmDataDist) -> MemoryReport:
    """Look at the pages of every cache of an engine, and of peers' memory that is mapped here.

    How much of it is in memory, how much this process uses without a fault, and by what pages; and
    on which NUMA nodes. `print` it for a table. It reads page tables, no byte of a cache, and takes
    up to 30 ms for each GiB, 60 ms in all: of more, even parts are looked at.

    Raises:
        LLMException: LLM_FAILED: not initialized, or in a forked child; LLM_ENGINE_FINALIZED.
    """
    engine = datadist._running()
    began = time.perf_counter()
    entries = [it for it, _ in engine.registry.entries()]
    arenas = engine.links.mapped()
    ranges = [
        [] if isinstance(it.memory, DeviceMemory) else merged_ranges(it.memory) for it in entries
    ]
    total = sum(size for it in ranges for _, size in it) + sum(it.nbytes for _, it in arenas)
    share = min(1.0, _MOST_NBYTES / total) if total else 1.0
    caches = tuple(
        CachePages(
            it.cache.cache_id,
            it.cache.cache_desc.placement,
            it.owned,
            _use_of(where, share) if where else None,
        )
        for it, where in zip(entries, ranges, strict=True)
    )
    peers = tuple(
        PeerPages(cluster_id, it.writable, _use_of([(it.address, it.nbytes)], share))
        for cluster_id, it in arenas  # held, so that they stay mapped
    )
    return MemoryReport(caches, peers, time.perf_counter() - began)


def _use_of(ranges: list[tuple[int, int]], share: float) -> PageUse | None:
    """None: some of it is not mapped (any more)."""
    nbytes = sum(size for _, size in ranges)
    try:
        parts = list(_parts(ranges, share))
        looks = [page_use(*it) for it in parts]
    except ValueError:
        return None
    scale = 1.0 if share == 1.0 else nbytes / sum(size for _, size in parts)
    is_known = all(mapped is not None for _, mapped, _ in looks)
    mapped = round(scale * sum(it or 0 for _, it, _ in looks)) if is_known else None
    huge = round(scale * sum(it or 0 for *_, it in looks)) if is_known else None
    nodes: Counter[int] = Counter()
    for start, size in ranges[:: max(1, len(ranges) // 8)]:
        nodes.update(page_nodes(start, size))
    return PageUse(
        nbytes,
        round(scale * sum(it for it, *_ in looks)),
        mapped,
        huge,
        mmap.PAGESIZE,
        dict(sorted(nodes.items())),
        is_exact=share == 1.0,
    )


def _parts(ranges: Iterable[tuple[int, int]], share: float) -> Iterator[tuple[int, int]]:
    """All of `ranges`, or windows of them that are about `share` of it, and at least one."""
    due: float = _WINDOW  # bytes
    for start, size in ranges:
        if share == 1.0:
            yield start, size
            continue
        due += size * share
        window = min(size, _WINDOW)
        count = min(int(due // window), size // window)
        due -= count * window
        for i in range(count):
            offset = (size - window) * i // count
            yield start + offset // mmap.PAGESIZE * mmap.PAGESIZE, window


def _cells(use: PageUse | None) -> tuple[str, ...]:
    if use is None:
        return ("-",) * 5
    about = "" if use.is_exact else "~"
    nodes = ", ".join(f"{node}: {count}" for node, count in use.nodes.items())
    only = next(iter(use.nodes)) if len(use.nodes) == 1 else None
    return (
        nbytes_text(use.nbytes),
        about + nbytes_text(use.resident),
        "not known" if use.mapped is None else about + nbytes_text(use.mapped),
        use.pages,
        str(only) if only is not None else nodes or "-",
    )
