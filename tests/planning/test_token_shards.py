"""Transfers between caches that hold some tokens of each request (context parallelism).

The oracle goes through a request token by token, by the definition of the holder of a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, DataType, Interleaved, Plan, Rows, Shard, Transfer, reference
from kvplan.planning.blocks import RequestBlocks
from kvplan.planning.contents import tokens_moved
from kvplan.planning.gather import plan_gather
from kvplan.planning.layers import ALL_LAYERS
from kvplan.planning.side import side
from kvplan.planning.templates import templates_of
from tests.planning.test_gather import cuts
from tests.planning.unlike import Cache, Model, caches, models
from tests.support.refusals import refused

Held = Interleaved | range | None
Places = dict[int, tuple[int, int]]


def holds(held: Held, token: int) -> bool:
    """Return True if the cache holds the token, as vLLM defines it."""
    if isinstance(held, Interleaved):
        return token // held.size % held.ranks == held.rank
    return held is None or token in held


def tokens_of(held: Held, end: int) -> list[int]:
    return [token for token in range(end) if holds(held, token)]


def table_of(draw: st.DrawFn, cache: Cache, end: int) -> tuple[Cache, list[int]]:
    """Return a cache with room for its tokens before `end`, and the blocks of those tokens."""
    needed = -(-len(tokens_of(cache.held, end)) // cache.tokens)
    rows = needed + draw(st.integers(1, 2))
    return replace(cache, rows=rows), draw(st.permutations(range(rows)))[:needed]


def places(cache: Cache, table: list[int], first: int, num_tokens: int) -> Places:
    """Return the block and the position in it of each moved token, counted from the first one."""
    own = tokens_of(cache.held, first + num_tokens)
    return {
        token - first: (table[place // cache.tokens], place % cache.tokens)
        for place, token in enumerate(own)
        if token >= first
    }


def moved(
    src: Cache, dst: Cache, sources: list[Any], targets: list[Any],
    src_places: Places, dst_places: Places,
) -> list[Any]:  # fmt: skip
    """Return the destination after a copy, token by token, of the tokens that both sides hold."""
    result = [item.copy() for item in targets]
    layers = [item for item in src.layers if item in dst.layers]
    for layer, kv in itertools.product(layers, range(src.model.kv)):
        source, target = src.named(sources, layer, kv), dst.named(result, layer, kv)
        for token, head in itertools.product(src_places.keys() & dst_places.keys(), src.heads):
            if head in dst.heads:
                to, of = dst_places[token], src_places[token]
                target[(*to, head - dst.heads.start)] = source[(*of, head - src.heads.start)]
    return result


interleaved = st.integers(2, 4).flatmap(
    lambda ranks: st.builds(
        Interleaved, st.integers(0, ranks - 1), st.just(ranks), st.integers(1, 5)
    )
)
ranges = st.builds(
    lambda first, more: range(first, first + more), st.integers(0, 9), st.integers(1, 20)
)
helds = st.one_of(st.none(), interleaved, ranges)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Cache, Cache, list[int], list[int], int, int, int]:
    model: Model = draw(models)
    src, dst = (replace(draw(caches(model)), held=draw(helds)) for _ in range(2))
    whole = replace(dst, layers=src.layers, heads=src.heads)  # only common layers and heads
    if "head" not in src.axes or "head" not in dst.axes:
        src, whole = (replace(value, axes=(*(a for a in value.axes if a != "head"), "head"))
                      for value in (src, whole))  # fmt: skip
    num_tokens = draw(st.integers(1, 24))
    src_token, dst_token = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    src, src_blocks = table_of(draw, src, src_token + num_tokens)
    dst, dst_blocks = table_of(draw, whole, dst_token + num_tokens)
    return src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens


@given(pairs())
def test_a_pair_moves_the_tokens_that_both_hold(pair: Any) -> None:
    src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens = pair
    transfer = Transfer(
        Rows(src.desc, src_blocks, first_token=src_token),
        Rows(dst.desc, dst_blocks, first_token=dst_token),
        num_tokens=num_tokens,
    )
    if not src_blocks and src.held is None:
        return  # without blocks, a cache of all tokens is a slot
    plan = kvplan.plan(transfer, local="dst")
    sources, targets = src.tensors(1), dst.tensors(2)
    here = places(src, src_blocks, src_token, num_tokens)
    there = places(dst, dst_blocks, dst_token, num_tokens)
    wanted = moved(src, dst, sources, targets, here, there)
    reference.execute(plan, sources, targets)
    for a, b in zip(wanted, targets, strict=True):
        np.testing.assert_array_equal(a, b)
    again = Plan.from_dict(plan.to_dict())  # checks that no byte is written twice
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert tokens_moved(plan.part) == len(here.keys() & there.keys())
    assert plan.num_descriptors == 0 or plan.origin(0).tokens
    for descriptor in range(min(plan.num_descriptors, 3)):
        said = [index for first, last in plan.origin(descriptor).tokens
                for index in range(first, last + 1)]  # fmt: skip
        assert {item - src_token for item in said} <= here.keys() & there.keys()


@given(pairs())
def test_without_num_tokens_the_fewest_tokens_that_fill_both_tables_move(pair: Any) -> None:
    src, dst, src_blocks, dst_blocks, src_token, dst_token, _ = pair
    if not src_blocks or not dst_blocks:
        return
    sides = [(src, len(src_blocks), src_token), (dst, len(dst_blocks), dst_token)]
    counts = range(1, 200)
    held = [[len(tokens_of(its.held, skip + count)) for count in counts] for its, _, skip in sides]
    places_of = [rows * its.tokens for its, rows, _ in sides]
    fills = [
        next((count for count, own in zip(counts, have, strict=True) if own >= room), 200)
        for have, room in zip(held, places_of, strict=True)
    ]
    number = max(fills)
    if number == 200 and isinstance(src.held, range) and isinstance(dst.held, range):
        return  # equal stretches move whole blocks, and the last may have places beyond its stretch
    transfer = Transfer(
        Rows(src.desc, src_blocks, first_token=src_token),
        Rows(dst.desc, dst_blocks, first_token=dst_token),
    )
    if number == 200 or any(
        have[number - 1] > room for have, room in zip(held, places_of, strict=True)
    ):
        with refused("LLM_PARAM_INVALID"):
            kvplan.plan(transfer, local="dst")
        return
    sources, targets = src.tensors(1), dst.tensors(2)
    here = places(src, src_blocks, src_token, number)
    there = places(dst, dst_blocks, dst_token, number)
    wanted = moved(src, dst, sources, targets, here, there)
    plan = kvplan.plan(transfer, local="dst")
    reference.execute(plan, sources, targets)
    for a, b in zip(wanted, targets, strict=True):
        np.testing.assert_array_equal(a, b)
    if plan.part.src.spread != plan.part.dst.spread:
        assert tokens_moved(plan.part) == len(here.keys() & there.keys())


@pytest.mark.parametrize("leased", ["src", "dst"])
@given(pair=pairs())
def test_a_lease_of_more_blocks_moves_the_same_tokens(leased: str, pair: Any) -> None:
    """The blocks of a lease for later tokens neither move nor count."""
    src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens = pair
    if not src_blocks or not dst_blocks:
        return
    here = places(src, src_blocks, src_token, num_tokens)
    there = places(dst, dst_blocks, dst_token, num_tokens)
    sources, targets = src.tensors(1), dst.tensors(2)
    wanted = moved(src, dst, sources, targets, here, there)
    tables = {"src": (src, src_blocks), "dst": (dst, dst_blocks)}
    cache, blocks = tables[leased]
    tables[leased] = cache, RequestBlocks([*blocks, *({*range(cache.rows)} - {*blocks})])
    transfer = Transfer(
        Rows(src.desc, tables["src"][1], first_token=src_token),
        Rows(dst.desc, tables["dst"][1], first_token=dst_token),
        num_tokens=num_tokens,
    )
    reference.execute(kvplan.plan(transfer, local="dst"), sources, targets)
    for a, b in zip(wanted, targets, strict=True):
        np.testing.assert_array_equal(a, b)


@st.composite
def splits(draw: st.DrawFn, num_tokens: int) -> list[Held]:
    """Draw the tokens that each rank with the same part of the model holds."""
    kind = draw(st.sampled_from(["all", "interleaved", "ranges"]))
    if kind == "interleaved":
        ranks, size = draw(st.integers(2, 4)), draw(st.integers(1, 5))
        helds: list[Held] = [Interleaved(rank, ranks, size) for rank in range(ranks)]
    elif kind == "ranges":
        helds = [*draw(cuts(num_tokens + 5))]
    else:
        helds = [None]
    replicas = draw(st.lists(st.sampled_from([*helds, None]), max_size=2))
    return draw(st.permutations(helds + replicas))


@st.composite
def gathers(draw: st.DrawFn) -> Any:
    model: Model = draw(models)
    num_tokens, dst_token = draw(st.integers(1, 24)), draw(st.integers(0, 4))
    sources, tables, firsts = [], [], []
    first = draw(st.integers(0, 4))
    for layers, heads in itertools.product(draw(cuts(model.layers)), draw(cuts(model.heads))):
        for held in draw(splits(num_tokens + first)):
            cache = replace(draw(caches(model)), layers=layers, heads=heads, held=held)
            cache = replace(cache, axes=(*(a for a in cache.axes if a != "head"), "head"))
            cache, table = table_of(draw, cache, first + num_tokens)
            sources.append(cache)
            tables.append(table)
            firsts.append(first)
    dst = replace(draw(caches(model)), held=draw(helds))
    dst, dst_blocks = table_of(draw, dst, dst_token + num_tokens)
    rank = draw(st.integers(0, 5))
    return sources, tables, firsts, dst, dst_blocks, dst_token, num_tokens, rank


@given(gathers())
def test_a_gather_takes_each_token_once(request: Any) -> None:
    sources, tables, firsts, dst, dst_blocks, dst_token, num_tokens, rank = request
    rows = [
        Rows(cache.desc, blocks, first_token=first)
        for cache, blocks, first in zip(sources, tables, firsts, strict=True)
    ]
    transfer = Transfer(
        rows, Rows(dst.desc, dst_blocks, first_token=dst_token), num_tokens=num_tokens, rank=rank
    )
    parts = plan_gather(transfer, [item.desc for item in sources], dst.desc)
    all_layers, all_heads = range(dst.model.layers), range(dst.model.heads)
    whole = Cache(
        dst.model, ("block", "token", "head", "dim"), 1, num_tokens, all_layers, all_heads
    )
    request_of, target = whole.tensors(3), dst.tensors(2)
    every = {token: (0, token) for token in range(num_tokens)}
    there = places(dst, dst_blocks, dst_token, num_tokens)
    wanted = moved(whole, dst, request_of, target, every, there)
    ones, zeros = (
        [np.ones_like(item) for item in request_of],
        [np.zeros_like(item) for item in target],
    )
    touched = moved(whole, dst, ones, zeros, every, there)
    writes = [np.zeros(array.nbytes, int) for array in target]
    for source, table, first, part in zip(sources, tables, firsts, parts, strict=True):
        if part is None:
            continue
        plan = Plan([part])
        here = places(source, table, first, num_tokens)
        held = moved(whole, source, request_of, source.tensors(4), every, here)
        reference.execute(plan, held, target)
        assert Plan.from_dict(plan.to_dict()) == plan
        for pair in range(plan.num_tensor_pairs):
            tensor, start = part.pair(pair)[1]
            for _, offset, nbytes in part.segments.expanded():
                writes[tensor][start + offset : start + offset + nbytes] += 1
    for a, b in zip(wanted, target, strict=True):
        np.testing.assert_array_equal(a, b)
    for count, part in zip(writes, touched, strict=True):
        np.testing.assert_array_equal(count, np.repeat(part.ravel() != 0, part.itemsize))


def desc(held: Held = None, tokens: int = 16, heads: int = 2) -> CacheDesc:
    return CacheDesc(
        2,
        (8, tokens, heads, 8),
        DataType.DT_FLOAT16,
        kv_tensor_format="NHD",
        shard=Shard(num_layers=1, num_heads=heads, tokens=held),
    )


FIRST, SECOND = (desc(Interleaved(rank, 2, 16)) for rank in range(2))
WHOLE = desc(tokens=32)
TOKEN_NBYTES = 2 * 2 * 8 * 2  # keys and values


def gather(*sources: CacheDesc, blocks: list[int] | None = None, **fields: Any) -> Plan:
    rows = [Rows(source, [4, 5]) for source in sources]
    return kvplan.plan(Transfer(rows, Rows(WHOLE, blocks or [6, 7]), **fields), local="dst")


def test_without_num_tokens_all_blocks_belong_to_the_request() -> None:
    plans = gather(FIRST, SECOND).by_part()
    assert [plan.nbytes for plan in plans.values()] == [32 * TOKEN_NBYTES] * 2
    assert plans == gather(FIRST, SECOND, num_tokens=64).by_part()
    with refused(
        "LLM_PARAM_INVALID", r"src\[0\].blocks has 2 blocks of 16 tokens and dst.blocks has 1"
    ):
        gather(FIRST, SECOND, blocks=[6])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_first_token_selects_different_tokens_of_one_rank(order: tuple[int, int]) -> None:
    """The first cache has 16 tokens in its block 4, the other has the next 16 in its block 3."""
    rows = [Rows(FIRST, [4]), Rows(FIRST, [5, 3], first_token=16)]
    transfer = Transfer([rows[i] for i in order], Rows(WHOLE, [6]), num_tokens=32)
    parts = kvplan.plan(transfer, local="dst").parts
    block = 16 * TOKEN_NBYTES // 2
    moved = [(4 * block, 12 * block, block), (3 * block, 13 * block, block)]
    assert [list(part.segments.expanded()) for part in parts] == [[moved[i]] for i in order]


@pytest.mark.parametrize(("source", "target"), [(FIRST, desc()), (SECOND, WHOLE)])
def test_without_num_tokens_the_request_ends_with_the_last_token_of_the_rank(
    source: CacheDesc, target: CacheDesc
) -> None:
    """The tokens up to the next one of this rank belong to others, and may not exist."""
    rows = Rows(source, [4]), Rows(target, [6])
    plan, numbered = (
        kvplan.plan(Transfer(*rows, num_tokens=number), local="dst")
        for number in (None, target.shape[1])
    )
    assert plan.nbytes == 16 * TOKEN_NBYTES
    assert plan == numbered


def test_a_rank_that_has_no_token_of_a_request_gives_nothing() -> None:
    rows = [Rows(FIRST, [4]), Rows(SECOND, [])]
    plan = kvplan.plan(Transfer(rows, Rows(WHOLE, [6]), num_tokens=9), local="dst")
    assert [*plan.by_part()] == ["source 0"]
    alone = kvplan.plan(Transfer(rows[1], Rows(WHOLE, [6]), num_tokens=9), local="dst")
    assert (alone.nbytes, alone.num_descriptors) == (0, 0)


def test_a_destination_that_holds_no_token_of_a_request_gets_nothing() -> None:
    rows = [Rows(desc(), [4]), Rows(desc(), [5])]
    plan = kvplan.plan(Transfer(rows, Rows(SECOND, []), num_tokens=9, rank=1), local="dst")
    assert ([*plan.by_part()], plan.nbytes) == (["source 1"], 0)


def test_replicas_of_a_rank_share_the_work() -> None:
    sources = [FIRST, SECOND, FIRST, SECOND]
    assert [[*gather(*sources, rank=rank).by_part()] for rank in range(3)] == [
        ["source 0", "source 1"],
        ["source 2", "source 3"],
        ["source 0", "source 1"],
    ]


@pytest.mark.parametrize(
    ("sources", "missing"),
    [
        ([FIRST], r"tokens 16\.\.31, 48\.\.63"),
        ([desc(Interleaved(0, 3, 16)), desc(Interleaved(2, 3, 16))], r"tokens 16\.\.31"),
        ([desc(range(40)), desc(range(41, 99))], "token 40"),
    ],
)
def test_a_token_that_no_source_has_is_named(sources: list[CacheDesc], missing: str) -> None:
    text = f"no source has {missing} of the request in layers 0..0, heads 0..1 of the model"
    with refused("LLM_PARAM_INVALID", text):
        gather(*sources, num_tokens=64)


def test_sources_that_leave_different_tokens_for_different_heads_are_refused() -> None:
    low = Shard(num_layers=1, heads=range(1), num_heads=2)
    lower = CacheDesc(2, (8, 64, 1, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD", shard=low)
    rows = [Rows(desc(tokens=32), [4, 5]), Rows(lower, [4]), Rows(SECOND, [4, 5])]
    with refused("LLM_PARAM_INVALID", r"sources\[0\] overlaps others so that its share"):
        kvplan.plan(Transfer(rows, Rows(WHOLE, [6, 7]), num_tokens=64, rank=2), local="dst")


def test_sources_that_leave_different_tokens_for_the_last_layer_are_refused() -> None:
    """The second source gives all tokens of two layers, and every other token of the third."""
    even, all_layers, middle = (
        CacheDesc(
            2 * len(layers),
            (8, 32, 2, 8),
            DataType.DT_FLOAT16,
            kv_tensor_format="NHD",
            shard=Shard(layers, num_layers=3, tokens=tokens),
        )
        for layers, tokens in (
            (range(2, 3), Interleaved(0, 2)), (range(3), None), (range(1, 2), None)
        )
    )  # fmt: skip
    rows = [Rows(even, [4]), Rows(all_layers, [4, 5]), Rows(middle, [4, 5])]
    with refused("LLM_PARAM_INVALID", r"sources\[1\] overlaps others so that its share"):
        kvplan.plan(Transfer(rows, Rows(all_layers, [6, 7]), num_tokens=64, rank=0), local="dst")


@pytest.mark.parametrize("held", [Interleaved(1, 2), Interleaved(1, 4, 16), range(3, 90)])
def test_caches_of_one_rank_move_whole_blocks(held: Held) -> None:
    plan = kvplan.plan(Transfer(Rows(desc(held), [1, 2]), Rows(desc(held), [4, 5])), local="dst")
    assert plan.nbytes == 32 * TOKEN_NBYTES
    assert len(plan.part.segments) == 1


def test_only_whole_rows_of_one_rank_are_lowered_without_the_planner() -> None:
    """Templates cut requests by arithmetic without any knowledge of tokens on other ranks."""

    def templates(src: CacheDesc, dst: CacheDesc, *, by_tokens: bool) -> int:
        sides = (side("", item, paged=True) for item in (src, dst))
        return len(
            templates_of(
                "pull_blocks", "B2B", *sides, ALL_LAYERS,
                by_layer=False, by_tokens=by_tokens, reinterpret=False,
            )
        )  # fmt: skip

    assert templates(desc(), desc(), by_tokens=True) > 0
    for src, dst in ((FIRST, desc()), (desc(), FIRST), (FIRST, SECOND), (FIRST, FIRST)):
        assert templates(src, dst, by_tokens=True) == 0
    for src, dst in ((FIRST, desc()), (FIRST, SECOND)):
        assert templates(src, dst, by_tokens=False) == 0
    assert templates(FIRST, FIRST, by_tokens=False) == 1


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (Interleaved(1, 4, 16), "tokens 16..31 of every 64"),
        (Interleaved(1, 2), "token 1 of every 2"),
        (range(8, 12), "tokens 8..11"),
        (range(8, 9), "token 8"),
    ],
)
def test_texts_and_plan_files_have_the_tokens(held: Held, text: str) -> None:
    shard = Shard(tokens=held)
    assert str(shard) == text
    assert shard != Shard()
    plan = kvplan.plan(Transfer(Rows(desc(held), [1]), Rows(desc(held), [4])), local="dst")
    assert text in plan.explain()
    document = plan.to_dict()
    assert Plan.from_dict(document) == plan
    document["parts"][0]["src"]["shard"]["tokens"] = {"rank": 0, "ranks": 2}
    with refused("LLM_PARAM_INVALID", r"missing fields \['size'\]"):
        Plan.from_dict(document)


def test_one_rank_of_interleaved_tokens_has_all() -> None:
    assert Shard(tokens=Interleaved(0, 1, 16)) == Shard()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Interleaved(2, 2), r"rank=2 is out of range \[0, 2\)"),
        (lambda: Interleaved(0, 0), r"ranks=0 is out of range \[1, 4294967296\)"),
        (lambda: Interleaved(0, 2, 0), r"size=0 is out of range \[1, 4294967296\)"),
        (lambda: Interleaved(0, 2**16, 2**16), "ranks=65536 times size=65536 is out of range"),
        (lambda: Shard(tokens=range(0)), r"tokens=range\(0, 0\) must be one or more of"),
        (lambda: Shard(tokens=range(0, 9, 2)), "give Interleaved for every n-th"),
        (lambda: replace(FIRST, kv_tensor_format=None, shard=Shard(tokens=range(9))),
         "shard has tokens 0..8, but kv_tensor_format=None names no axis token"),
    ],
)  # fmt: skip
def test_wrong_shards_are_refused(make: Any, text: str) -> None:
    with refused("LLM_PARAM_INVALID", text):
        make()


@pytest.mark.parametrize("held", [[0, 1], 3, "0..3"])
def test_tokens_of_another_type_are_refused(held: Any) -> None:
    with pytest.raises(TypeError, match="must be Interleaved, a range or None"):
        Shard(tokens=held)


@pytest.mark.parametrize("leased", ["src", "dst"])
def test_the_table_that_has_too_few_blocks_is_named(leased: str) -> None:
    """The error names the other table, not the lease, which has equally many blocks left."""
    desc = CacheDesc(
        2, (64, 8, 2, 16), DataType.DT_FLOAT16, kv_tensor_format="NHD",
        shard=Shard(num_layers=1, num_heads=2),
    )  # fmt: skip
    tables: dict[str, Sequence[int]] = {"src": [0, 1], "dst": [3, 4]}
    tables[leased] = RequestBlocks([8, 6, 7])
    src, dst = (Rows(desc, tables[side]) for side in ("src", "dst"))
    other = "dst" if leased == "src" else "src"
    with refused("LLM_PARAM_INVALID", rf"num_tokens=17 .* \[1, 16\], the room in the {other} rows"):
        kvplan.plan(Transfer(src, dst, num_tokens=17), local="dst")


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_places_beyond_a_stretch_have_no_token(size: int) -> None:
    """Equal stretches move whole blocks, whose last one may not be full."""
    shard = Shard(num_layers=1, num_heads=1, tokens=range(10, 10 + size))
    axes = "block token dim head"
    desc = CacheDesc(1, (2, 3, 1, 1), DataType.DT_INT8, kv_tensor_format=axes, shard=shard)
    plan = kvplan.plan(Transfer(Rows(desc, [0, 1]), Rows(desc, [0, 1])), local="dst")
    assert (plan.nbytes, plan.origin(0).tokens) == (6, ((10, 9 + size),))
