"""Block tables, copies and layers of the official package as the engine's, by simple loops."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvplan
from kvplan.llm_datadist import CacheDesc, DataType, LLMException, Placement
from kvplan.llm_datadist.conversion import (
    copies_of,
    desc_of,
    each_once,
    indices_of,
    last_wins,
    layers_of,
    pushed_layers_of,
    table_of,
)
from kvplan.planning.layers import ALL_LAYERS
from kvplan.types import KvCacheExtParam

SMALL = st.integers(0, 6)
INDEX = SMALL | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64 - 1])
TABLES = st.lists(INDEX, max_size=5) | st.lists(SMALL, min_size=63, max_size=66)


@given(TABLES, st.sampled_from([list, tuple]))
@example([1] * 63 + [2**63], list)
@example([2**63 - 1] * 64, tuple)
def test_a_table_keeps_its_indices(blocks: list[int], kind: type) -> None:
    for found in (indices_of("blocks", kind(blocks)), table_of("blocks", kind(blocks))):
        assert list(found) == blocks
        assert found is not blocks


@pytest.mark.parametrize("wrong", [-1, 2**64])
@pytest.mark.parametrize("length", [1, 64, 65])
@pytest.mark.parametrize("place", [0, -1])
def test_an_index_that_is_none_is_refused_in_a_table_of_any_length(
    wrong: int, length: int, place: int
) -> None:
    blocks = [3] * length
    blocks[place] = wrong
    for call in (indices_of, table_of):
        with pytest.raises(TypeError, match=f"blocks holds {wrong}; .* must be in range"):
            call("blocks", blocks)
    with pytest.raises(KeyError):
        indices_of("blocks", blocks, KeyError)
    for value in (1.0, "1", None, True):
        blocks[place] = value  # type: ignore[call-overload]
        for call in (indices_of, table_of):
            with pytest.raises(TypeError, match="blocks"):
                call("blocks", blocks)


def test_a_table_may_be_missing_only_where_it_is_optional() -> None:
    assert list(indices_of("blocks", None)) == list(table_of("blocks", None)) == []
    assert list(indices_of("blocks", ())) == list(table_of("blocks", [], allow_none=False)) == []
    with pytest.raises(TypeError, match="blocks"):
        table_of("blocks", None, allow_none=False)


PAIRS = st.lists(st.tuples(SMALL, SMALL), max_size=9)
LONG_PAIRS = st.builds(
    lambda seed, targets: [(i % 7, target) for i, target in enumerate(seed.choices(targets, k=66))],
    st.integers(0, 999).map(Random),
    st.sampled_from([range(60), range(4200), range(4300, 9000)]),
)


@given(PAIRS | LONG_PAIRS, st.booleans())
@example([(i, i) for i in range(64)], True)
@example([(i, 64 * i + 63) for i in range(64)], True)
@example([(i, 70 * i) for i in range(64)] + [(9, 0)], True)
def test_the_last_copy_to_each_block_counts(pairs: list[tuple[int, int]], as_array: bool) -> None:
    src: Any = [source for source, _ in pairs]
    dst: Any = [target for _, target in pairs]
    if as_array and pairs:
        src, dst = np.array(src), np.array(dst)
    found = last_wins(src, dst)
    expected = {target: source for source, target in pairs}
    assert len(found[0]) == len(found[1]) == len(expected)
    assert dict(zip(map(int, found[1]), map(int, found[0]), strict=True)) == expected
    if len(expected) == len(pairs):
        assert found[0] is src
        assert found[1] is dst
    unequal = last_wins([1, 1], [2])
    assert unequal == ([1, 1], [2])


@given(PAIRS)
def test_copies_inside_a_cache_have_one_source_each(pairs: list[tuple[int, int]]) -> None:
    """A block is copied to itself only if no other block is copied to it."""
    found = each_once(pairs)
    sources: dict[int, int] = {}
    for target in {target for _, target in pairs}:
        others = [source for source, other in pairs if other == target and source != target]
        sources[target] = others[-1] if others else target
    assert {target: source for source, them in found.items() for target in them} == sources
    assert sum(map(len, found.values())) == len(sources)
    assert copies_of({0: [1, 2], 3: (1,)}) == {3: [1], 0: [2]}
    assert copies_of({2**64 - 1: [0]}) == {2**64 - 1: [0]}


@pytest.mark.parametrize("wrong", [{-1: [1]}, {1: [-1]}, {2**64: [1]}, {1: [2, 2**64]}])
def test_a_copy_of_no_block_is_refused(wrong: dict[int, list[int]]) -> None:
    with pytest.raises(TypeError, match="copy_block_info holds"):
        copies_of(wrong)


def test_layers_without_ranges_are_all_tensors_only_with_two_for_each() -> None:
    assert layers_of(None, None, 2) is ALL_LAYERS
    assert layers_of(None, None, 3) == KvCacheExtParam(None, None, 3)
    for src, dst in ((range(1), None), (None, range(2)), (range(1), range(1, 2))):
        assert layers_of(src, dst, 2) == KvCacheExtParam(src, dst, 2)
    with pytest.raises(LLMException, match="tensor_num_per_layer=0 is out of range"):
        layers_of(None, None, 0)


@pytest.mark.parametrize(
    ("src", "dst", "per_layer", "num_tensors", "expected"),
    [
        (None, None, 2, 6, (range(3), range(3), 2)),
        (None, None, 2, 5, (range(5), range(5), 1)),
        (None, None, 3, 7, (None, None, 3)),
        (None, range(2), 2, 5, (None, range(2), 2)),
        (None, range(2, 5), 2, 6, (range(3), range(2, 5), 2)),
        (range(1, 2), range(2, 3), 2, 5, (range(1, 2), range(2, 3), 2)),
        (range(3), None, 2, 6, (range(3), range(3), 2)),
    ],
)
def test_a_push_without_ranges_has_all_local_layers(
    src: Any, dst: Any, per_layer: int, num_tensors: int, expected: Any
) -> None:
    assert pushed_layers_of(src, dst, per_layer, num_tensors) == KvCacheExtParam(*expected)


@pytest.mark.parametrize(("src", "dst"), [(range(2), range(3)), (range(2), None), (None, range(2))])
def test_a_push_of_layers_that_are_not_as_many_is_refused(src: Any, dst: Any) -> None:
    with pytest.raises(LLMException, match="must be of equal length"):
        pushed_layers_of(src, dst, 2, 6)


@pytest.mark.parametrize(
    ("shape", "text", "expected"),
    [
        ((4, 2, 2, 8), "NHD", "NHD"),
        ((4, 2, 2), "NHD", "opaque NHD"),
        ((4, 2, 2, 8), "token block head dim", "opaque token block head dim"),
        ((4, 3, 2, 8), "block layer token dim", "opaque block layer token dim"),
        ((4, 8), "anything", "opaque anything"),
        ((4, 8), None, None),
    ],
)
def test_a_format_is_opaque_unless_rows_come_first_and_a_tensor_is_of_one_layer(
    shape: tuple[int, ...], text: str | None, expected: str | None
) -> None:
    token = (text or "").split().index("token") if "token" in (text or "") else 1
    official = CacheDesc(3, list(shape), DataType.DT_INT8, Placement.HOST, 0, token, text)
    assert desc_of(official) == kvplan.CacheDesc(
        3, shape, kvplan.DataType.DT_INT8, kvplan.Placement.HOST, 0, token, expected
    )
