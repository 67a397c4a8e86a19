"""Regions of overlapping registrations: each byte is registered once, while it is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.transport.hccl.regions import HeldRegion, Regions
from tests.support.refusals import refused


class Hccl:
    """A stand-in for HCCL that refuses overlaps."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], bool] = {}
        self.refuses_from = 2**64

    def make(self, address: int, nbytes: int, *, on_device: bool, owner: object) -> Any:
        if address + nbytes > self.refuses_from:
            raise MemoryError("no more")
        for start, size in self.known:
            assert address + nbytes <= start or start + size <= address, "overlap"
        key = address, nbytes
        self.known[key] = on_device
        outer = self

        class Native:
            is_open = True

            def close(self) -> None:
                if self.is_open:
                    del outer.known[key]
                self.is_open = False

        return Native(), ()

    def bytes(self) -> set[int]:
        return {at for start, size in self.known for at in range(start, start + size)}


def end(held: HeldRegion) -> None:
    held.close()


ranges = st.tuples(st.integers(1, 40), st.integers(1, 20))


wholes = st.sampled_from([None, (1, 60)])  # the allocation of a range, if it is known


@given(
    st.lists(
        st.tuples(ranges, wholes, st.sampled_from(["stays", "ends", "ends later"])), max_size=12
    ),
    st.randoms(),
)
def test_each_byte_is_registered_once_while_it_is_needed(
    steps: list[tuple[tuple[int, int], tuple[int, int] | None, str]], random: Any
) -> None:
    hccl = Hccl()
    regions = Regions(hccl.make, end)
    later: list[HeldRegion] = []
    held: list[tuple[tuple[int, int], tuple[HeldRegion, ...]]] = []
    for (address, nbytes), whole, one in steps:
        found = regions.cover(address, nbytes, on_device=True, whole=whole)
        at = address
        for entry in found:  # they cover it without a gap
            assert entry.ref.address <= at < entry.end
            at = entry.end
        assert at >= address + nbytes
        held.append(((address, nbytes), found))
        if one != "stays":
            _, ending = held.pop(random.randrange(len(held)))
            regions.release(ending, end if one == "ends" else later.append)
        needed = {at for (first, size), _ in held for at in range(first, first + size)}
        assert needed <= hccl.bytes()
        assert {element.ref.number for element in regions.all()} <= set(
            range(1, regions.newest + 1)
        )
    for _, ending in held:
        regions.release(ending, end)
    for region in later:
        end(region)
    assert hccl.known == {}


@given(st.lists(ranges, max_size=8), st.lists(ranges, min_size=1, max_size=8))
def test_each_tensor_is_found_in_its_region(
    registered: list[tuple[int, int]], tensors: list[tuple[int, int]]
) -> None:
    regions = Regions(Hccl().make, end)
    for address, nbytes in registered:
        regions.cover(address, nbytes, on_device=True)
    columns = [np.array(column, np.uint64) for column in zip(*tensors, strict=True)]
    holding = [
        [element.ref.number for element in regions.all() if element.ref.holds(address, nbytes)]
        for address, nbytes in tensors
    ]
    expected = max(entry for found in holding for entry in found) if all(holding) else None
    assert regions.newest_of(*columns, on_device=True) == expected
    assert regions.newest_of(*columns, on_device=False) is None


@pytest.mark.parametrize(
    ("address", "nbytes", "expected"),
    [
        (10, 5, 1),
        (10, 6, None),
        (9, 2, None),
        (14, 1, 1),
        (14, 2, None),
        (15, 1, None),
        (9, 1, None),
    ],
)
def test_a_tensor_lies_inside_of_its_region_to_the_last_byte(
    address: int, nbytes: int, expected: int | None
) -> None:
    regions = Regions(Hccl().make, end)
    regions.cover(10, 5, on_device=True)
    tensor = np.array([address], np.uint64), np.array([nbytes], np.uint64)
    assert regions.newest_of(*tensor, on_device=True) == expected


def test_tensors_of_an_ended_region_are_in_no_region() -> None:
    regions = Regions(Hccl().make, end)
    gone, _ = regions.cover(10, 5, on_device=True), regions.cover(20, 5, on_device=True)
    tensors = [(np.array([at], np.uint64), np.array([5], np.uint64)) for at in (10, 20)]
    assert [regions.newest_of(*tensor, on_device=True) for tensor in tensors] == [1, 2]
    regions.release(gone, end)
    assert [regions.newest_of(*tensor, on_device=True) for tensor in tensors] == [None, 2]
    regions.cover(10, 5, on_device=True)
    assert [regions.newest_of(*tensor, on_device=True) for tensor in tensors] == [3, 2]


def test_memory_beside_a_region_that_is_kept_can_be_registered() -> None:
    """HIXL keeps a region while a connection binds it, and refuses only what overlaps it."""
    regions = Regions(Hccl().make, forget=lambda _: None)
    kept = regions.cover(10, 5, on_device=True)
    regions.release(kept, lambda _: None)
    for address in (5, 15):
        assert regions.cover(address, 5, on_device=True)
    for address in (9, 14):
        with refused("LLM_FEATURE_NOT_ENABLED", "unlink the peers first"):
            regions.cover(address, 2, on_device=True)


def test_an_allocation_is_one_region_whatever_part_is_registered_first() -> None:
    hccl = Hccl()
    regions = Regions(hccl.make, end)
    first = regions.cover(1000, 10, on_device=True, whole=(500, 1000))
    second = regions.cover(600, 50, on_device=True, whole=(500, 1000))
    assert first == second
    assert list(hccl.known) == [(500, 1000)]
    regions.release(first, end)
    assert list(hccl.known) == [(500, 1000)]
    regions.release(second, end)
    assert hccl.known == {}


def test_only_the_requested_range_of_a_partly_known_allocation_is_added() -> None:
    hccl = Hccl()
    regions = Regions(hccl.make, end)
    regions.cover(600, 50, on_device=True)
    found = regions.cover(640, 20, on_device=True, whole=(500, 1000))
    assert [(entry.ref.address, entry.ref.nbytes) for entry in found] == [(600, 50), (650, 10)]


def test_a_refused_region_changes_nothing() -> None:
    hccl = Hccl()
    regions = Regions(hccl.make, end)
    regions.cover(20, 10, on_device=True)
    hccl.refuses_from = 40
    with pytest.raises(MemoryError):
        regions.cover(10, 40, on_device=True)
    assert list(hccl.known) == [(20, 10)]
    assert len(regions.all()) == 1


def test_regions_may_end_during_a_lookup() -> None:
    regions = Regions(Hccl().make, end)
    held = [regions.cover(at, 10, on_device=True) for at in (0, 100)]

    class Ending(np.ndarray[Any, Any]):
        """Tensors that are compared only after the regions have gone."""

        def __add__(self, other: Any) -> Any:
            for item in held:
                regions.release(item, end)
            return np.asarray(self) + other

    addresses = np.array([100], np.uint64).view(Ending)
    assert regions.newest_of(addresses, np.array([1], np.uint64), on_device=True) == 2
