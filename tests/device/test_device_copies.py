"""Copies that involve a device: they move the bytes of the plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvplan
from kvplan import Cache, CacheDesc, LlmDataDist, LlmRole, Options, Placement, Rows, Transfer
from kvplan.planning import reference
from tests.ascend.simulator import Controls
from tests.device.engines import DEVICE, HOST, ROWS, contents, desc, engine_on, filled, same
from tests.support.refusals import refused

STRIDE = DEVICE.stride
PLACEMENTS = [(src, dst) for src in Placement for dst in Placement]


@pytest.mark.parametrize(("src", "dst"), PLACEMENTS)
def test_slots_are_copied_between_all_placements(
    datadist: LlmDataDist, src: Placement, dst: Placement
) -> None:
    source = filled(datadist, desc(src), 1, paged=False)
    target = filled(datadist, desc(dst), 2, paged=False)
    datadist.copy_cache(source, target, 2, 5, offset=10, size=60)
    expected = contents(2)
    for to, by in zip(expected, contents(1), strict=True):
        to[5, 5:35] = by[2, 5:35]  # two bytes per element
    assert same(datadist.arrays(target, copy=True), expected)
    assert same(datadist.arrays(source, copy=True), contents(1))


@pytest.mark.parametrize(("src", "dst"), [(DEVICE, HOST), (HOST, DEVICE)], ids=["out", "in"])
def test_blocks_are_swapped(datadist: LlmDataDist, src: CacheDesc, dst: CacheDesc) -> None:
    source, target = (filled(datadist, side, i, paged=True) for i, side in enumerate((src, dst)))
    datadist.swap_blocks(source, target, {0: 7, 1: 6, 5: 0})
    expected = contents(1)
    for to, by in zip(expected, contents(0), strict=True):
        to[[7, 6, 0]] = by[[0, 1, 5]]
    assert same(datadist.arrays(target, copy=True), expected)


@pytest.mark.parametrize("of", [DEVICE, HOST], ids=["device", "host"])
def test_a_swap_inside_one_placement_is_refused(datadist: LlmDataDist, of: CacheDesc) -> None:
    caches = [datadist.allocate_blocks_cache(of) for _ in range(2)]
    with refused("LLM_PARAM_INVALID", "HOST.*DEVICE|placement"):
        datadist.swap_blocks(*caches, {0: 1})


def test_blocks_of_a_device_cache_are_copied(datadist: LlmDataDist) -> None:
    cache = filled(datadist, DEVICE, 1, paged=True)
    datadist.copy_blocks(cache, {1: [4, 6], 2: [5]})
    expected = contents(1)
    for item in expected:
        item[[4, 6, 5]] = item[[1, 1, 2]]
    assert same(datadist.arrays(cache, copy=True), expected)


def test_a_task_holds_the_memory_that_it_copies(datadist: LlmDataDist, simulator: Controls) -> None:
    source = filled(datadist, DEVICE, 1, paged=True)
    target = filled(datadist, HOST, 2, paged=True)
    array = datadist.arrays(target)[0]
    simulator.set("latency_us", 50_000)
    try:
        task = datadist.submit(Transfer(Rows(source, [0]), Rows(target, [3])))
        datadist.deallocate_cache(source)
        datadist.deallocate_cache(target)
        task.wait()
    finally:
        simulator.set("latency_us", 0)
    assert np.array_equal(array[3], contents(1)[0][0])
    del task


def test_arrays_of_the_host_are_source_or_destination(datadist: LlmDataDist) -> None:
    cache = filled(datadist, DEVICE, 1, paged=False)
    arrays = contents(2)
    plan = kvplan.plan(Transfer(Rows(DEVICE, slot=3), Rows(DEVICE, slot=4)))
    # Pageable memory.
    kvplan.execute(plan, datadist._running().registry.resolve(cache).memory, arrays)
    assert all(np.array_equal(a[4], b[3]) for a, b in zip(arrays, contents(1), strict=True))
    for array in arrays:
        array[3] += 1
    kvplan.execute(plan, arrays, datadist._running().registry.resolve(cache).memory)
    found = datadist.arrays(cache, copy=True)
    assert all(np.array_equal(a[4], b[3]) for a, b in zip(found, arrays, strict=True))


def test_overlaps_on_the_device_are_refused(datadist: LlmDataDist) -> None:
    cache = datadist.allocate_cache(DEVICE)
    shifted = Cache(
        DEVICE,
        tensor_addrs=tuple(address + STRIDE // 2 for address in cache.tensor_addrs[::-1]),
    )
    wide = desc(rows=4)
    inside = Cache(
        wide, tensor_addrs=tuple(address + STRIDE // 2 for address in cache.tensor_addrs)
    )
    assert shifted.cache_id == inside.cache_id == -1
    with refused("LLM_PARAM_INVALID", "overlap in memory"):
        datadist.copy_cache(cache, inside, 0, 0)


def test_a_copy_between_two_devices_is_refused(simulator: Controls) -> None:
    with engine_on(simulator, 3, 1) as one, LlmDataDist(2, LlmRole.MIX) as two:
        two.initialize(Options(accelerator=simulator.accelerator, device_id=4, transport="local"))
        sides = [
            end._running().registry.resolve(end.allocate_cache(DEVICE)).memory for end in (one, two)
        ]
        with refused("LLM_FEATURE_NOT_ENABLED", "device 3 .* device 4; .*linked engine"):
            kvplan.execute(kvplan.plan(Transfer(Rows(DEVICE), Rows(DEVICE))), *sides)
        del sides


rows = st.integers(0, ROWS - 1)


class TestAnyPlan:
    """Plans between any placements."""

    @pytest.mark.parametrize(("src", "dst"), PLACEMENTS)
    def test_execution_moves_the_bytes_of_the_reference(
        self, datadist: LlmDataDist, src: Placement, dst: Placement
    ) -> None:
        source = filled(datadist, desc(src), 1, paged=True)
        target = filled(datadist, desc(dst), 2, paged=True)

        @settings(max_examples=15)
        @given(st.dictionaries(rows, rows, min_size=1).filter(_one_to_one), st.booleans())
        def check(blocks: dict[int, int], coalesce: bool) -> None:
            plan = kvplan.plan(
                Transfer(
                    Rows(DEVICE, list(blocks)),
                    Rows(DEVICE, list(blocks.values())),
                    coalesce=coalesce,
                ),
                local="src",
            )
            expected = datadist.arrays(target, copy=True)
            reference.execute(plan, datadist.arrays(source, copy=True), expected)
            kvplan.execute(
                plan,
                datadist._running().registry.resolve(source).memory,
                datadist._running().registry.resolve(target).memory,
            )
            assert same(datadist.arrays(target, copy=True), expected)

        check()


def _one_to_one(blocks: dict[int, int]) -> bool:
    return len(set(blocks.values())) == len(blocks)
