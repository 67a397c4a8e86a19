"""Lists of strided descriptors, as in NIXL, made into caches and into ranges of addresses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import AddressRanges, LlmDataDist, LlmRole, Rows, Transfer
from kvplan.tensors.strided import strided_caches, strided_ranges
from tests.support.refusals import refused

MEMORY = 4096
rows = st.tuples(st.integers(0, 900), st.integers(1, 40), st.integers(0, 50), st.integers(1, 9))


@given(st.lists(rows, max_size=8))
def test_both_forms_have_the_bytes_of_the_list(drawn: list[tuple[int, int, int, int]]) -> None:
    base = 1 << 20
    listed = [(base + start, length, 3, length + gap, count) for start, length, gap, count in drawn]
    wanted = [
        {address + piece * stride + byte for piece in range(count) for byte in range(length)}
        for address, length, _, stride, count in listed
    ]
    addresses, nbytes, devices = strided_ranges(listed)
    assert set(devices.tolist()) <= {3}
    spans = [range(a, a + n) for a, n in zip(addresses.tolist(), nbytes.tolist(), strict=True)]
    assert len(spans) == sum(count for *_, count in listed)
    assert {byte for span in spans for byte in span} == set().union(*wanted)
    seen = []
    for desc, starts, places, device in strided_caches(listed):
        assert device == 3
        for start, place in zip(starts, places, strict=True):
            named = {
                start + block * desc.stride + byte
                for block in range(desc.batch_size)
                for byte in range(desc.row_nbytes)
            }
            assert named == wanted[place]
            seen.append(place)
    assert sorted(seen) == [*range(len(listed))]


def test_caches_of_a_list_move() -> None:
    """Blocks of 4,096 bytes every 4,160, and of 64 bytes in two runs; the gaps stay."""
    theirs, mine = np.arange(20_000, dtype=np.uint64).view(np.uint8), np.zeros(160_000, np.uint8)
    at = mine.ctypes.data
    listed = [(at, 4096, 0, 4160, 8), (at + 80_000, 64, 0, 80, 9), (at + 90_000, 64, 0, 80, 9)]
    large, small = sorted(strided_caches(listed), key=lambda value: -value.desc.row_nbytes)
    assert (large.desc.num_tensors, small.desc.num_tensors) == (1, 2)
    with LlmDataDist(1, LlmRole.MIX) as engine:
        engine.initialize()
        for cache in (large, small):
            there = [address - at + theirs.ctypes.data for address in cache.addresses]
            source = engine.register_blocks_cache(cache.desc, there)
            target = engine.register_blocks_cache(cache.desc, cache.addresses)
            engine.run(Transfer(Rows(source, [1, 7]), Rows(target, [2, 5])))
    wanted = np.zeros_like(mine)
    for start, length, stride in ((0, 4096, 4160), (80_000, 64, 80), (90_000, 64, 80)):
        for block, to in ((1, 2), (7, 5)):
            piece = theirs[start + block * stride :][:length]
            wanted[start + to * stride :][:length] = piece
    np.testing.assert_array_equal(mine, wanted)


def test_ranges_of_a_list_are_ranges_of_addresses() -> None:
    local, nbytes, _ = strided_ranges([(4096, 8, 0, 64, 3)])
    remote, *_ = strided_ranges(np.array([(8192, 8, 0, 8, 2), (1 << 40, 8, 0, 0, 1)]))
    ranges = AddressRanges(2, local, remote, nbytes)
    assert ranges.local.tolist() == [4096, 4160, 4224]
    assert ranges.remote.tolist() == [8192, 8200, 1 << 40]
    assert strided_caches([]) == []


def test_the_stride_of_a_single_piece_is_ignored() -> None:
    listed = [(4096, 8, 0, 0, 1), (8192, 8, 0, 99, 1), (12288, 8, 0, 8, 1)]
    (cache,) = strided_caches(listed)
    assert (cache.desc.num_tensors, cache.desc.stride) == (3, 8)
    assert [*zip(cache.descriptors, cache.addresses, strict=True)] == [
        (place, address) for place, (address, *_) in enumerate(listed)
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ((0, 8, 0, 8, 1), "address, length and count must be > 0"),
        ((4096, 0, 0, 8, 1), "address, length and count must be > 0"),
        ((4096, 8, 0, 8, 0), "address, length and count must be > 0"),
        ((4096, 8, -1, 8, 1), "device >= 0"),
        ((4096, 8, 0, 7, 2), r"stride=7 is out of range \[length=8, 2\*\*63\)"),
        ((2**63 - 100, 8, 0, 64, 3), r"ends beyond 2\*\*63"),
        ((4096, 8, 0), r"has shape \(1, 3\); rows of"),
    ],
)
def test_a_wrong_descriptor_is_refused(row: tuple[int, ...], reason: str) -> None:
    for function in (strided_caches, strided_ranges):
        with refused("LLM_PARAM_INVALID", reason):
            function([row])


def test_the_last_byte_may_be_the_last_of_2_63() -> None:
    """The gap behind the last piece does not belong to the list."""
    length, stride, count = 8, 4096, 3
    first = 2**63 - 1 - length - stride * (count - 1)
    starts, _, _ = strided_ranges([(first, length, 0, stride, count)])
    assert int(starts[-1]) + length == 2**63 - 1
    with refused("LLM_PARAM_INVALID", r"ends beyond 2\*\*63"):
        strided_ranges([(first + 1, length, 0, stride, count)])


def test_numbers_are_whole() -> None:
    for wrong in (4096.0, 2**63, 2**64):
        with pytest.raises(TypeError, match=r"must hold int below 2\*\*63, not (float64|object)"):
            strided_ranges([(wrong, 8, 0, 8, 1)])
