"""A side that was made before plans like the description that it was made of."""

import pytest

import kvplan
from kvplan import Cache, CacheDesc, DataType, LLMException, Rows, Transfer
from kvplan.planning.side import side

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


def test_a_side_is_read_as_what_it_is() -> None:
    slots, blocks = (side("cache", Cache(DESC, 3), paged=paged) for paged in (False, True))
    with pytest.raises(LLMException, match="src=cache 3 has blocks"):
        kvplan.plan(Transfer(Rows(blocks), Rows(slots)), local="dst")
    with pytest.raises(LLMException, match="dst=cache 3 has slots"):
        kvplan.plan(Transfer(Rows(blocks, [1]), Rows(slots, [0])), local="dst")
