"""One request from several caches: every byte of it once, from a cache that has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import CacheDesc, DataType, plan_gather, reference
from kvplan.layout import Shard
from tests.planning.unlike import Cache, Model, caches, expected, models
from tests.support.refusals import refused


def cuts(total: int) -> st.SearchStrategy[list[range]]:
    """`total` cut into ranges."""
    edges = st.sets(st.integers(1, total - 1)) if total > 1 else st.just(set())
    return edges.map(
        lambda it: [
            range(*ends) for ends in zip([0, *sorted(it)], [*sorted(it), total], strict=True)
        ]
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Cache], list[list[int]], Cache, list[int], int, int]:
    """Sources that have layers x heads in parts, some of them several times; a destination."""
    model: Model = draw(models)
    layers, heads = draw(cuts(model.layers)), draw(cuts(model.heads))
    sources = []
    for some_layers in layers:
        for some_heads in heads:
            for _ in range(draw(st.integers(1, 2))):
                own = draw(caches(model))
                axes = own.axes
                if "head" not in axes:
                    axes = (*axes, "head")
                sources.append(Cache(model, axes, own.rows, own.tokens, some_layers, some_heads))
    sources = draw(st.permutations(sources))
    dst = draw(caches(model))
    dst_blocks = draw(
        st.lists(st.integers(0, dst.rows - 1), min_size=1, max_size=dst.rows, unique=True)
    )
    tables = [draw(st.permutations(range(it.rows))) for it in sources]
    most = min([len(dst_blocks) * dst.tokens, *(it.rows * it.tokens for it in sources)])
    num_tokens = draw(st.integers(1, most))
    tables = [it[: -(-num_tokens // own.tokens)] for it, own in zip(tables, sources, strict=True)]
    dst_blocks = dst_blocks[: -(-num_tokens // dst.tokens)]
    return sources, tables, dst, dst_blocks, num_tokens, draw(st.integers(0, 5))


@given(requests())
def test_every_byte_of_the_request_is_written_once(request: Any) -> None:
    sources, tables, dst, dst_blocks, num_tokens, rank = request
    plans = plan_gather(
        [it.desc for it in sources],
        dst.desc,
        tables,
        dst_blocks,
        num_tokens=num_tokens,
        rank=rank,
    )
    assert len(plans) == len(sources)
    # All have the same model: what a layer and head hold does not depend on the source.
    whole = Cache(dst.model, ("block", "token", "head", "dim"), 1, num_tokens,
                  range(dst.model.layers), range(dst.model.heads))  # fmt: skip
    request_of = whole.tensors(3)
    target = dst.tensors(2)
    wanted = expected(whole, dst, request_of, target, [0], dst_blocks, 0, 0, num_tokens)
    touched = expected(
        whole,
        dst,
        [np.ones_like(it) for it in request_of],
        [np.zeros_like(it) for it in target],
        [0],
        dst_blocks,
        0,
        0,
        num_tokens,
    )
    writes = [np.zeros(it.nbytes, int) for it in target]
    for source, table, plan in zip(sources, tables, plans, strict=True):
        if plan is None:
            continue
        held = expected(whole, source, request_of, source.tensors(4), [0], table, 0, 0, num_tokens)
        reference.execute(plan, held, target)
        for pair in range(plan.num_tensor_pairs):
            tensor, start = plan.pair(pair)[1]
            for _, offset, nbytes in plan.segments.expanded():
                writes[tensor][start + offset : start + offset + nbytes] += 1
    for a, b in zip(wanted, target, strict=True):
        np.testing.assert_array_equal(a, b)
    for count, part in zip(writes, touched, strict=True):
        np.testing.assert_array_equal(count, np.repeat(part.ravel() != 0, part.itemsize))


def shard(layers: range, heads: range, num_layers: int = 4, num_heads: int = 8) -> CacheDesc:
    return CacheDesc(
        2 * len(layers),
        (8, 4, len(heads), 16),
        DataType.DT_FLOAT16,
        kv_tensor_format="NHD",
        shard=Shard(layers, heads, num_layers, num_heads),
    )


WHOLE = shard(range(4), range(8))


@pytest.mark.parametrize(
    ("sources", "missing"),
    [
        ([shard(range(2), range(8))], "layers 2..3, heads 0..7"),
        ([shard(range(4), range(4)), shard(range(4), range(6, 8))], "layers 0..3, heads 4..5"),
        (
            [shard(range(2), range(8)), shard(range(2, 4), range(4))],
            "layers 2..3, heads 4..7",
        ),
        (
            [shard(range(1), range(8)), shard(range(2, 4), range(8))],
            "layers 1..1, heads 0..7",
        ),
    ],
)
def test_what_no_source_has_is_named(sources: list[CacheDesc], missing: str) -> None:
    with refused("LLM_PARAM_INVALID", f"no source has {missing} of the model"):
        plan_gather(sources, WHOLE, [[0]] * len(sources), [1])


def test_replicas_are_spread_by_rank() -> None:
    """Four ranks have the same heads; a destination takes them from one, by its rank."""
    sources = [shard(range(4), range(8))] * 4
    taken = []
    for rank in range(8):
        plans = plan_gather(sources, WHOLE, [[0]] * 4, [1], rank=rank)
        (index,) = [i for i, plan in enumerate(plans) if plan is not None]
        taken.append(index)
    assert taken == [0, 1, 2, 3, 0, 1, 2, 3]


def test_without_a_rank_the_heads_of_the_destination_say_it() -> None:
    sources = [shard(range(4), range(8))] * 2
    taken = []
    for first in (0, 2, 4, 6):
        plans = plan_gather(sources, shard(range(4), range(first, first + 2)), [[0]] * 2, [1])
        taken.append([i for i, plan in enumerate(plans) if plan is not None])
    assert taken == [[0], [1], [0], [1]]


def test_one_of_a_source_beyond_the_destination_gives_nothing() -> None:
    sources = [shard(range(2), range(8)), shard(range(2, 4), range(8))]
    first, second = plan_gather(sources, shard(range(2), range(8)), [[0]] * 2, [1])
    assert first is not None
    assert second is None


def test_sources_that_overlap_so_that_no_range_is_left() -> None:
    sources = [shard(range(4), range(8)), shard(range(1, 2), range(2, 4))]
    with refused("LLM_PARAM_INVALID", r"sources\[0\] overlaps others so that no one range"):
        plan_gather(sources, WHOLE, [[0]] * 2, [1], rank=1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([], WHOLE, [], [1]), "sources has 0 caches"),
        (([WHOLE], WHOLE, [[0], [1]], [1]), "src_blocks 2 block tables"),
        (([CacheDesc(2, (8, 4), DataType.DT_INT8)], WHOLE, [[0]], [1]), r"sources\[0\] has no lay"),
        (([WHOLE], CacheDesc(2, (8, 4), DataType.DT_INT8), [[0]], [1]), "dst has no layout"),
        (([WHOLE], WHOLE, [[8]], [1]), r"src_blocks\[0\]=8 is out of range"),
        (([WHOLE], WHOLE, [[0, 1]], [1]), "src_blocks has 2 blocks and dst_blocks 1"),
    ],
)
def test_what_is_refused(arguments: Any, error: str) -> None:
    with refused("LLM_PARAM_INVALID", error):
        plan_gather(*arguments)


@pytest.mark.parametrize("arguments", [(WHOLE, WHOLE, [[0]], [1]), ([WHOLE], WHOLE, "0", [1])])
def test_one_cache_is_no_sequence_of_caches(arguments: Any) -> None:
    with pytest.raises(TypeError, match="must be a sequence"):
        plan_gather(*arguments)
