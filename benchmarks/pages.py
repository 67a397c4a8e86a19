"""First pulls of memory that the process has not touched, and pulls from huge pages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import numpy as np

from benchmarks.filled_peer import Filled, Peer, Shape, check_blocks, started
from benchmarks.table import Row, Run, Topic, timed
from kvnative._host import page_use
from kvplan import BlocksCacheKey, Cache, ClusterInfo, LlmDataDist, LlmRole

TOPIC = Topic()
SHAPE: Final = Shape(tensors=64, blocks=512, block_nbytes=32 << 10)  # 1 GiB
SMALL_BLOCKS: Final = Shape(tensors=64, blocks=1024, block_nbytes=4 << 10)
REQUEST_NBYTES: Final = SHAPE.tensors * SHAPE.block_nbytes
SOON_S: Final = 1.0
"""Seconds from linking to the first pull, in which a serving engine waits for a request."""
PULLED_AT_ONCE: Final = 32  # 64 MiB, more than CPU caches hold; then all again


@contextmanager
def linked(
    peer: Peer, shape: Shape, options: dict[str, str]
) -> Iterator[tuple[LlmDataDist, Cache]]:
    """Yield an engine that was just linked, and a cache of it whose pages are all touched."""
    with LlmDataDist(100, LlmRole.DECODER) as datadist:
        datadist.initialize(options)
        cache = datadist.allocate_blocks_cache(shape.desc)
        for tensor in datadist.arrays(cache):
            tensor[:] = 0
        clusters = [ClusterInfo(peer.cluster_id, peer.address)]
        datadist.link_clusters(clusters, timeout_ms=10_000).raise_for_status()
        yield datadist, cache


def first_and_later(peer: Peer, options: dict[str, str], rounds: int) -> tuple[float, float]:
    """Return median seconds of first and of repeated pulls of a block of each tensor."""
    first: list[float] = []
    later: list[float] = []
    for number in range(rounds):
        with linked(peer, SHAPE, options) as (datadist, cache):
            time.sleep(SOON_S)
            blocks = np.random.default_rng(number).permutation(SHAPE.blocks)[:256].tolist()
            key = BlocksCacheKey(peer.cluster_id, 0)
            for start in range(0, len(blocks), PULLED_AT_ONCE):
                for taken in (first, later):
                    for block in blocks[start : start + PULLED_AT_ONCE]:
                        pull = partial(datadist.pull_blocks, key, cache, [block], [block])
                        taken.append(timed(pull)())
            ids = np.array(blocks)
            check_blocks(datadist.arrays(cache), peer.cluster_id, ids, ids)
    return statistics.median(first), statistics.median(later)


def seconds_until_mapped(peer: Peer) -> float:
    """Return the seconds from linking until all pages of the peer's cache are mapped."""
    with linked(peer, SHAPE, {}) as (datadist, _):
        start = time.perf_counter()
        while time.perf_counter() < start + 60:
            arenas = [arena for _, arena in datadist._running().links.mapped()]
            if arenas and page_use(arenas[0].address, SHAPE.nbytes)[1] in (None, SHAPE.nbytes):
                break
            time.sleep(0.02)
        return time.perf_counter() - start


@TOPIC.row("cold_pull_ratio")
def cold_pull(run: Run, name: str) -> Row:
    """Pull each page for the first time, a second after linking, beside its second pull."""
    rounds = 2 if run.quick else 4
    with started([Filled(1, (SHAPE,))]) as [peer]:
        first, later = first_and_later(peer, {}, rounds)
        without, _ = first_and_later(peer, {"kvplan.populate": "off"}, rounds)
        mapped_s = seconds_until_mapped(peer)
    note = (
        f"64 x 1 blocks of 32 KiB, {1e6 * first:.0f} us the first time, {1e6 * later:.0f} us "
        f"later, {1e6 * without:.0f} us with kvplan.populate=off; 1 GiB is mapped {mapped_s:.2f} s "
        "after linking"
    )
    rates = REQUEST_NBYTES / first / 1e9, "GB/s", REQUEST_NBYTES / later / 1e9
    return Row(name, *rates, "at least", 0.85, note)


@TOPIC.row("huge_page_gain")
def huge_page_gain(run: Run, name: str) -> Row:
    """Pull between caches in huge pages, beside pages of 4 KiB; all are prefaulted."""
    kinds = ("auto", "small")
    shapes = (SHAPE, SMALL_BLOCKS)
    with started(
        Filled(number, shapes, options={"kvplan.prefault": "1", "kvplan.pages": pages})
        for number, pages in enumerate(kinds, 1)
    ) as peers:
        cases, rates = {}, []
        for number, shape in enumerate(shapes):
            huge, small = run.medians(
                *(
                    partial(median_pull, peer, number, shape, pages)
                    for peer, pages in zip(peers, kinds, strict=True)
                ),
                rounds=5,
            )
            cases[f"{shape.block_nbytes >> 10} KiB"] = small / huge
            nbytes = shape.tensors * shape.block_nbytes
            rates.append((nbytes / huge / 1e9, nbytes / small / 1e9))
    gains = ", ".join(f"{size}: {gain:.2f}" for size, gain in cases.items())
    note = f"64 x 1 blocks, both ends prefaulted; {gains}"
    ours, limit = rates[0]
    return Row(name, ours, "GB/s", limit, "at least", 1.0, note, cases)


def median_pull(peer: Peer, number: int, shape: Shape, pages: str) -> float:
    """Return the median seconds of pulls of one random block of each tensor, in mapped pages."""
    options = {"kvplan.prefault": "1", "kvplan.pages": pages}
    with linked(peer, shape, options) as (datadist, cache):
        key = BlocksCacheKey(peer.cluster_id, number)
        everything = list(range(shape.blocks))
        datadist.pull_blocks(key, cache, everything, everything, timeout_ms=10_000)
        blocks = np.random.default_rng(number).permutation(shape.blocks).tolist()
        return statistics.median(
            timed(partial(datadist.pull_blocks, key, cache, [block], [block]))() for block in blocks
        )
