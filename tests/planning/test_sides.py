"""A side that was made before its plans is equivalent to its description."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import Cache, CacheDesc, DataType, LLMException, Rows, Transfer
from kvplan.planning.side import side
from tests.planning.unlike import Cache as UnlikeCache
from tests.planning.unlike import caches, models

DESC = CacheDesc(4, (8, 16), DataType.DT_INT8)


def test_a_side_plans_like_its_description() -> None:
    slots, blocks = (side("cache", Cache(DESC, 3), paged=paged) for paged in (False, True))
    assert kvplan.plan(Transfer(Rows(slots, slot=2), Rows(slots)), local="dst") == kvplan.plan(
        Transfer(Rows(DESC, slot=2), Rows(DESC)), local="dst"
    )
    assert kvplan.plan(Transfer(Rows(blocks, [1]), Rows(blocks, [0])), local="dst") == kvplan.plan(
        Transfer(Rows(DESC, [1]), Rows(DESC, [0])), local="dst"
    )
    assert kvplan.plan(Transfer(Rows(slots), Rows(blocks, [5])), local="dst") == kvplan.plan(
        Transfer(Rows(DESC), Rows(DESC, [5])), local="dst"
    )
    assert kvplan.plan(Transfer(Rows(slots), Rows(slots)), local="dst").part.dst.name == "cache 3"


def test_a_format_is_named_once() -> None:
    """The names of a layout are at the lengths of the shape, and are not repeated after them."""
    desc = CacheDesc(1, (4, 16), DataType.DT_INT8, kv_tensor_format="block token")
    assert str(side("cache", desc, paged=True)) == "DT_INT8 (block 4, token 16)"


def test_a_side_of_another_kind_is_refused() -> None:
    slots, blocks = (side("cache", Cache(DESC, 3), paged=paged) for paged in (False, True))
    with pytest.raises(LLMException, match="src=cache 3 has blocks, not slots"):
        kvplan.plan(Transfer(Rows(blocks), Rows(slots)), local="dst")
    with pytest.raises(LLMException, match="dst=cache 3 has slots, not blocks"):
        kvplan.plan(Transfer(Rows(blocks, [1]), Rows(slots, [0])), local="dst")


spans = st.lists(st.tuples(st.integers(0, 2**12), st.integers(1, 99)), min_size=1, max_size=4)


@given(models.flatmap(caches), spans)
def test_the_rows_of_ranges_are_those_of_their_bytes(
    cache: UnlikeCache, ranges: list[tuple[int, int]]
) -> None:
    """A range may pass through all rows several times if an axis lies outside of them."""
    read = side("cache", cache.desc, paged=True)
    each = [
        [byte // read.stride % read.count for byte in range(first, first + nbytes)]
        for first, nbytes in ranges
    ]
    assert [read.rows(*span) for span in ranges] == [(rows[0], rows[-1]) for rows in each]
    offsets, sizes = np.array(ranges, np.uint64).T
    assert read.rows_of(offsets, sizes).tolist() == sorted({*chain.from_iterable(each)})
