"""A side that was made before plans like the description that it was made of."""

import pytest

from kvplan import Cache, CacheDesc, DataType, LLMException, plan_pull_blocks, plan_pull_cache
from kvplan.planning.side import side

DESC = CacheDesc(4, (8, 16), DataType.DT_INT8)


def test_a_side_plans_like_its_description() -> None:
    slots, blocks = (side("cache", Cache(DESC, 3), paged=paged) for paged in (False, True))
    assert plan_pull_cache(slots, slots, src_batch_index=2) == plan_pull_cache(
        DESC, DESC, src_batch_index=2
    )
    assert plan_pull_blocks(blocks, blocks, [1], [0]) == plan_pull_blocks(DESC, DESC, [1], [0])
    assert plan_pull_blocks(slots, blocks, None, [5]) == plan_pull_blocks(DESC, DESC, None, [5])
    assert plan_pull_cache(slots, slots).dst.name == "cache 3"


def test_a_side_is_read_as_what_it_is() -> None:
    slots, blocks = (side("cache", Cache(DESC, 3), paged=paged) for paged in (False, True))
    with pytest.raises(LLMException, match="src=cache 3 has blocks"):
        plan_pull_cache(blocks, slots)
    with pytest.raises(LLMException, match="dst=cache 3 has slots"):
        plan_pull_blocks(blocks, slots, [1], [0])
