"""Descriptors between two byte arrays at random places, and the expected result."""

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvnative._lower import Descriptors, lower
from tests.support.spare import assert_same, is_same, spare_bytes

UNTOUCHED = 0xA5
NOISE_NBYTES = 16 << 20  # shared by sources; longer sources have their own bytes

_noise: list[NDArray[np.uint8]] = []
_lock = threading.Lock()  # cases are made by several threads at once


@dataclass
class Scattered:
    """A source of random bytes, an untouched destination, and descriptors from one to the other."""

    source: NDArray[np.uint8]
    target: NDArray[np.uint8]
    src_offsets: NDArray[np.uint64]
    dst_offsets: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    descriptors: Descriptors

    @property
    def total(self) -> int:
        return int(self.nbytes.sum())

    def expected(self, moved: set[int] | None = None) -> NDArray[np.uint8]:
        """Return the destination after `moved` (all) of the descriptors."""
        target = spare_bytes(len(self.target))
        target.fill(UNTOUCHED)
        for index in range(len(self.nbytes)) if moved is None else moved:
            src, dst, nbytes = (
                int(column[index]) for column in (self.src_offsets, self.dst_offsets, self.nbytes)
            )
            target[dst : dst + nbytes] = self.source[src : src + nbytes]
        return target

    def assert_moved(self, moved: set[int] | None = None) -> None:
        assert_same(self.target, self.expected(moved))

    def arrived(self, index: int) -> bool:
        """Return whether all bytes of descriptor `index` arrived."""
        src, dst, nbytes = (
            int(column[index]) for column in (self.src_offsets, self.dst_offsets, self.nbytes)
        )
        return is_same(self.target[dst : dst + nbytes], self.source[src : src + nbytes])


def random_bytes(nbytes: int, seed: int) -> NDArray[np.uint8]:
    """Return random bytes to read, which depend on the seed.

    Making them takes longer than most tests, so they are a part of bytes that are made once.
    """
    first = seed * 7919 % (1 << 20)
    if first + nbytes > NOISE_NBYTES:
        return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    with _lock:
        if not _noise:
            _noise.append(np.random.default_rng(0).integers(0, 256, NOISE_NBYTES, dtype=np.uint8))
            _noise[0].flags.writeable = False
    return _noise[0][first : first + nbytes]


def scatter(
    sizes: list[int], seed: int = 0, gap: int = 100, *, writes_source: bool = False
) -> Scattered:
    """Place ranges of these sizes in random order, up to `gap` bytes apart, on both sides."""
    rng = np.random.default_rng(seed)
    nbytes = np.array(sizes, np.uint64)

    def places() -> tuple[NDArray[np.uint64], int]:
        order = rng.permutation(len(sizes))
        gaps = rng.integers(0, gap + 1, len(sizes), dtype=np.uint64)
        ends = np.cumsum(nbytes[order] + gaps)
        offsets = np.empty(len(sizes), np.uint64)
        offsets[order] = ends - nbytes[order]
        return offsets, int(ends[-1]) + gap

    src_offsets, src_nbytes = places()
    dst_offsets, dst_nbytes = places()
    source = random_bytes(src_nbytes, seed)
    if writes_source:
        source = source.copy()
    target = spare_bytes(dst_nbytes)
    target.fill(UNTOUCHED)
    descriptors = Descriptors.from_columns(
        dst_offsets + np.uint64(target.ctypes.data),
        src_offsets + np.uint64(source.ctypes.data),
        nbytes,
    )
    return Scattered(source, target, src_offsets, dst_offsets, nbytes, descriptors)


def indices(spans: tuple[tuple[int, int], ...]) -> set[int]:
    """Return the descriptors of half-open spans: ascending, disjoint, none empty."""
    edges = [edge for span in spans for edge in span]
    assert edges == sorted(set(edges))
    return {index for first, last in spans for index in range(first, last)}


def write_again(descriptors: Descriptors) -> None:
    """Empty descriptors, which is refused as long as a transfer holds them."""
    lower(*(np.array([], np.uint64),) * 5, descriptors)
    assert descriptors.count == 0
