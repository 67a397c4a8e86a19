"""Plans of many blocks, tensors and groups fit on a page, which adds up the omitted rows."""

from __future__ import annotations

import re
import tracemalloc
from itertools import islice

import pytest

import kvplan
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    Coalesce,
    DataType,
    KvCacheExtParam,
    LLMStatusCode,
    Plan,
    RemoteCache,
    Rows,
    Shard,
    Transfer,
)
from tests.support.plans import joined
from tests.support.refusals import refused

FP16 = DataType.DT_FLOAT16
LAYERS = CacheDesc(122, (8192, 16, 8, 128), FP16, kv_tensor_format="NHD")


def scattered(step: int, run: int) -> list[int]:
    """Return 4,096 blocks in an order with a single run, of 16 blocks."""
    blocks = [index * step % 8000 for index in range(4096)]
    blocks[2048:2064] = range(run, run + 16)
    return blocks


LARGE = kvplan.plan(
    Transfer(Rows(LAYERS, scattered(7, 8100)), Rows(LAYERS, scattered(2047, 8050))), local="dst"
)
MLA = CacheDesc(61, (8192, 16, 576), FP16, kv_tensor_format="block token dim")


def assert_text(actual: str, expected: str) -> None:
    assert actual.splitlines() == expected.strip("\n").splitlines()


def test_the_tree_of_61_layers_is_a_page() -> None:
    assert_text(LARGE.explain(), TREE)


def test_the_table_of_61_layers_is_a_page() -> None:
    assert_text(LARGE.explain("table"), TABLE)


def test_a_low_limit_counts_the_rest() -> None:
    tree = LARGE.explain(limit=7)
    assert tree.count(" -> ") > 7
    assert f"... {len(LARGE.part.segments) - 7:,} more segments\n" in tree
    assert LARGE.explain("table", limit=7).endswith(
        f"\n... {LARGE.num_descriptors - 7:,} more descriptors"
    )


def test_unmerged_runs_are_shown() -> None:
    plan = kvplan.plan(
        Transfer(Rows(LAYERS, range(40, 56)), Rows(LAYERS, range(16, 32)), coalesce=Coalesce.NONE),
        local="src",
    )
    assert_text(
        "\n".join(plan.explain(limit=8).splitlines()[9:11]),
        """
|   |                     ... 10 more segments. Of all 16:
|   |                           1 run of 16 blocks; in 16 segments
""",
    )


def test_runs_cut_by_heads_are_counted_in_bytes() -> None:
    half, whole = (
        CacheDesc(
            4, (64, heads, 16, 128), FP16, kv_tensor_format="HND",
            shard=Shard(heads=range(heads), num_heads=8),
        )
        for heads in (4, 8)
    )  # fmt: skip
    text = kvplan.plan(
        Transfer(Rows(half, range(0, 60, 2)), Rows(whole, range(30))), local="dst"
    ).explain()
    assert "30 segments of 16 KiB each" in text


def test_many_tensors_of_a_layer_are_one_line() -> None:
    plan = kvplan.plan(
        Transfer(
            Rows(MLA, [1, 2, 3]),
            Rows(MLA, [4, 5, 6]),
            layers=KvCacheExtParam(tensor_num_per_layer=1),
        ),
        local="dst",
    )
    assert len(plan.explain().splitlines()) == 7
    opaque = CacheDesc(61, (8192, 1024), FP16)
    as_one = KvCacheExtParam(tensor_num_per_layer=61)
    *_, first, others = (
        kvplan.plan(Transfer(Rows(opaque, [1]), Rows(opaque, [4]), layers=as_one), local="dst")
        .explain(limit=None)
        .splitlines()
    )
    assert first == "    |-- tensor 0 -> 0   1 -> 4  2 KiB"
    assert others == "    `-- tensors 1..60 -> 1..60   same blocks"


def test_groups_of_the_same_blocks() -> None:
    index = CacheDesc(61, (8192, 16, 132), DataType.DT_UINT8, kv_tensor_format="block token dim")
    latent = Transfer(Rows(MLA, [4, 5, 9]), Rows(MLA, [7, 8, 2]))
    plan = kvplan.plan(
        {
            "latent": latent,
            "indexer": Transfer(Rows(index, [4, 5, 9]), Rows(index, [7, 8, 2])),
            "again": latent,
            "window": Transfer(Rows(MLA, [9]), Rows(MLA, [2])),
        },
        local="dst",
    )
    assert_text(plan.explain(), GROUPS)
    assert plan.explain("table").count("\npart") == 3


def test_groups_of_the_same_slot_have_the_same_blocks() -> None:
    slots, blocks = (
        [CacheDesc(61, (8, tokens, dim), FP16, kv_tensor_format=f"{row} token dim")
         for dim in (576, 132)]
        for row, tokens in (("slot", 64), ("block", 16))
    )  # fmt: skip
    plan = kvplan.plan(
        {
            name: Transfer(Rows(slot, slot=5), Rows(block, [3, 4]))
            for name, slot, block in zip(("latent", "indexer"), slots, blocks, strict=True)
        },
        local="dst",
    )
    tree = plan.explain().partition("part indexer\n")[2]
    assert "  |   `-- tensor 0 -> 0   same blocks as part latent\n" in tree


def test_groups_with_another_order_are_listed_separately() -> None:
    plans = [
        kvplan.plan(Transfer(Rows(MLA, src), Rows(MLA, dst)), local="dst")
        for src, dst in (([4, 6], [7, 9]), ([6, 4], [9, 7]))
    ]
    assert plans[0] == plans[1]
    text = joined(dict(zip("ab", plans, strict=True))).explain()
    assert "part a\n" in text
    assert "part b\n" in text
    assert text.count("4 -> 7  18 KiB  tokens 0..15") == 1
    assert text.count("4 -> 7  18 KiB  tokens 16..31") == 1


@pytest.mark.parametrize("wide", [1, 2], ids=["equal plans", "other rows"])
def test_groups_of_other_tokens_are_listed_separately(wide: int) -> None:
    """A block that is in the table twice has equal rows for different tokens of the request."""
    other = CacheDesc(61, (8192, 16, 576 * wide), FP16, kv_tensor_format="block token dim")
    plans = {
        "a": kvplan.plan(Transfer(Rows(MLA, [4]), Rows(MLA, [7]), num_tokens=16), local="dst"),
        "b": kvplan.plan(
            Transfer(Rows(other, [4, 4], first_token=16), Rows(other, [7]), num_tokens=16),
            local="dst",
        ),
    }
    text = joined(plans).explain()
    assert re.search(r"^part a\n(  .*\n)*  .*tokens 0\.\.15$", text, re.MULTILINE), text
    assert re.search(r"^part b\n(  .*\n)*  .*tokens 16\.\.31$", text, re.MULTILINE), text


def test_the_same_change_in_several_groups_is_named_once() -> None:
    old, new, other = (
        kvplan.plan(Transfer(Rows(MLA, [number]), Rows(MLA, [1])), local="dst")
        for number in (1, 2, 3)
    )
    groups = [
        joined(dict(zip("abcde", row, strict=True)))
        for row in ((old, old, old, old, old), (old, old, new, new, other))
    ]
    text = groups[0].diff(groups[1])
    assert_text("\n".join([text.splitlines()[0], *text.splitlines()[-2:]]), GROUP_CHANGES)
    assert "\npart d: same change as in part c\npart e\n" in text


def test_lines_come_one_by_one() -> None:
    for plan in (LARGE, joined({"a": LARGE})):
        for form in ("tree", "table"):
            some = [*islice(plan.explain_lines(form), 2000)]  # type: ignore[arg-type]
            assert some[-1]
    small = kvplan.plan(
        Transfer(Rows(LAYERS, range(0, 80, 2)), Rows(LAYERS, range(40))), local="dst"
    )
    for form in ("tree", "table"):
        lines = [*small.explain_lines(form)]  # type: ignore[arg-type]
        assert "\n".join(lines) == small.explain(form, limit=None)  # type: ignore[arg-type]
    assert "\n".join(small.explain_lines("table", 16)) == small.explain("table")


@pytest.mark.parametrize("plan", [LARGE, joined({"a": LARGE})], ids=["plan", "groups"])
def test_a_full_table_is_never_in_memory(plan: Plan) -> None:
    few = LARGE.for_layers(range(2))
    tracemalloc.start()
    try:
        characters = sum(map(len, few.explain_lines("table")))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len([*islice(plan.explain_lines("table"), 100)]) == 100
    assert characters > 800_000
    assert peak < 3_000_000  # the texts of the rows of one chunk, not of all tensors


def test_bad_arguments_are_refused_before_the_first_line() -> None:
    for plan in (LARGE, joined({"a": LARGE})):
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "limit=0 must be None or >= 1"):
            plan.explain_lines("table", 0)
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "format='map'"):
            plan.explain_lines("map")  # type: ignore[arg-type]


def test_long_names_and_large_numbers_are_wrapped() -> None:
    most = 2**63 - 1
    desc = CacheDesc(
        2**32 - 2, (8192, 16, 1 << 20), FP16, kv_tensor_format="opaque" + " no layout" * 20
    )
    plan = kvplan.plan(
        Transfer(
            Rows(Cache(desc, most), range(0, 60, 2)),
            Rows(RemoteCache(BlocksCacheKey(most, most), desc), range(30)),
        ),
        local="src",
    )
    other = kvplan.plan(
        Transfer(Rows(desc, range(0, 60, 2)), Rows(desc, range(1, 31))), local="src"
    )
    groups = {"g" * 64: plan, "h" * 64: plan}
    for text in (
        plan.for_layers(range(64)).explain("table"),
        plan.diff(other),
        joined(groups).explain(),
        joined(groups).diff(joined({**groups, "h" * 64: other})),
    ):
        assert max(map(len, text.splitlines())) <= 120, text


# Compared above.
TREE = """
pull_blocks  B2B   src -> dst   plan 7dbd6c
  DT_FLOAT16 (block 8192, token 16, head 8, dim 128), both sides
  layers 0..60 -> 0..60 | tensors/layer 2 | 4,096 blocks x 32 KiB
  499,712 slices -> 497,882 descriptors (1,830 merged) | 15.2 GiB
|-- layer 0 -> 0   desc [0:8162)   256.0 MiB
|   |-- tensor 0 -> 0 K   0         -> 0          32 KiB  tokens 0..15
|   |                     1         -> 3721       32 KiB   alone: not adjacent (dst 0 -> 3721)  tokens 18288..18303
|   |                     2         -> 7442       32 KiB   alone: not adjacent (dst 3721 -> 7442)  tokens 36576..36591
|   |                     3         -> 3163       32 KiB   alone: not adjacent (dst 7442 -> 3163)  tokens 54864..54879
|   |                     7         -> 2047       32 KiB   alone: not adjacent  tokens 16..31
|   |                     8         -> 5768       32 KiB   alone: not adjacent (dst 2047 -> 5768)  tokens 18304..18319
|   |                     9         -> 1489       32 KiB   alone: not adjacent (dst 5768 -> 1489)  tokens 36592..36607
|   |                     10        -> 5210       32 KiB   alone: not adjacent (dst 1489 -> 5210)  tokens 54880..54895
|   |                     ... 4,069 more segments. Of all 4,081:
|   |                           4,081 runs of 1 to 16 blocks, median 1; 4,080 of one block alone
|   |                     7994      -> 1674       32 KiB   alone: not adjacent  tokens 18272..18287
|   |                     7995      -> 5395       32 KiB   alone: not adjacent (dst 1674 -> 5395)  tokens 36560..36575
|   |                     7996      -> 1116       32 KiB   alone: not adjacent (dst 5395 -> 1116)  tokens 54848..54863
|   |                     8100-8115 -> 8050-8065  512 KiB  merged 16: not adjacent  tokens 32768..33023
|   `-- tensor 1 -> 1 V   same blocks
`-- layers 1..60 -> 1..60   desc [8162:497882)   15.0 GiB   same blocks
"""  # noqa: E501
TABLE = """
     #  layer   tensor               blocks  local           remote          nbytes
     0    0>0      0>0                  0>0  t0+0x0          t0+0x0           32768
     1    0>0      0>0               1>3721  t0+0x7448000    t0+0x8000        32768
     2    0>0      0>0               2>7442  t0+0xe890000    t0+0x10000       32768
     3    0>0      0>0               3>3163  t0+0x62d8000    t0+0x18000       32768
     4    0>0      0>0               7>2047  t0+0x3ff8000    t0+0x38000       32768
     5    0>0      0>0               8>5768  t0+0xb440000    t0+0x40000       32768
     6    0>0      0>0               9>1489  t0+0x2e88000    t0+0x48000       32768
     7    0>0      0>0              10>5210  t0+0xa2d0000    t0+0x50000       32768
... 497,870 more descriptors. In each of 122 tensors:
      4,081 runs of 1 to 16 blocks, median 1; 4,080 of one block alone
497878  60>60  121>121            7994>1674  t121+0x3450000  t121+0xf9d0000   32768
497879  60>60  121>121            7995>5395  t121+0xa898000  t121+0xf9d8000   32768
497880  60>60  121>121            7996>1116  t121+0x22e0000  t121+0xf9e0000   32768
497881  60>60  121>121  8100-8115>8050-8065  t121+0xfb90000  t121+0xfd20000  524288
"""
GROUPS = """
pull_groups  B2B   4 parts   plan 2d3a09
  427 descriptors | 7.9 MiB
parts latent, again
  pull_blocks  B2B   src -> dst   plan 3a6859
    DT_FLOAT16 (block 8192, token 16, dim 576), both sides
    layers 0..60 -> 0..60 | tensors/layer 1 | 3 blocks x 18 KiB
    183 slices -> 122 descriptors (61 merged) | 3.2 MiB
  |-- layer 0 -> 0   desc [0:2)   54 KiB
  |   `-- tensor 0 -> 0   4-5 -> 7-8  36 KiB   merged 2  tokens 0..31
  |                       9   -> 2    18 KiB   alone: not adjacent (src 5 -> 9, dst 8 -> 2)  tokens 32..47
  `-- layers 1..60 -> 1..60   desc [2:122)   3.2 MiB   same blocks
part indexer
  pull_blocks  B2B   src -> dst   plan 544c9d
    DT_UINT8 (block 8192, token 16, dim 132), both sides
    layers 0..60 -> 0..60 | tensors/layer 1 | 3 blocks x 2.1 KiB
    183 slices -> 122 descriptors (61 merged) | 377.4 KiB
  |-- layer 0 -> 0   desc [0:2)   6.2 KiB
  |   `-- tensor 0 -> 0   same blocks as part latent
  `-- layers 1..60 -> 1..60   desc [2:122)   371.2 KiB   same blocks
part window
  pull_blocks  B2B   src -> dst   plan 2972c7
    DT_FLOAT16 (block 8192, token 16, dim 576), both sides
    layers 0..60 -> 0..60 | tensors/layer 1 | 1 block x 18 KiB
    61 slices -> 61 descriptors (0 merged) | 1.1 MiB
  |-- layer 0 -> 0   desc [0:1)   18 KiB
  |   `-- tensor 0 -> 0   9 -> 2  18 KiB  tokens 0..15
  `-- layers 1..60 -> 1..60   desc [1:61)   1.1 MiB   same blocks
"""  # noqa: E501
GROUP_CHANGES = """
parts a, b: identical
    verdict: different bytes - 1,124,352 destination bytes from another source
verdict: parts c, d, e: different bytes - 1,124,352 destination bytes from another source
"""
