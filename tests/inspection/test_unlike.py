"""Texts about caches with different layouts: rows with tokens, costs, parts, and differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    KvCacheExtParam,
    Plan,
    RemoteCache,
    Rows,
    Transfer,
)
from kvplan.inspection.diff import changed_table
from kvplan.layout import Shard

FP16 = DataType.DT_FLOAT16


def cache(
    shape: tuple[int, ...], axes: str, tensors: int = 4, heads: range | None = None
) -> CacheDesc:
    shard = None if heads is None else Shard(range(2), heads, 2, 8)
    return CacheDesc(tensors, shape, FP16, kv_tensor_format=axes, shard=shard)


def assert_text(actual: str, expected: str) -> None:
    assert actual.splitlines() == expected.strip("\n").splitlines()


# Rank 1 of 4 has heads 2 and 3, tokens before heads; rank 0 of 2 has heads 0 to 3, heads first.
RESHARD = kvplan.plan(
    Transfer(
        Rows(
            RemoteCache(BlocksCacheKey(2), cache((64, 16, 2, 128), "NHD", heads=range(2, 4))),
            [5, 9, 6],
        ),
        Rows(Cache(cache((32, 4, 32, 128), "HND", heads=range(4)), 7), [3, 1]),
        num_tokens=40,
    ),
    local="dst",
)
MLA = cache((16, 16, 576), "block token dim", 3)
LATENT = kvplan.plan(
    Transfer(Rows(MLA, [4, 5, 9]), Rows(MLA, [7, 8, 2]), num_tokens=40), local="dst"
)
CROSS = cache((16, 4, 2, 16, 2, 64), "block layer kv token head dim", 1)
WHOLE_BLOCKS = kvplan.plan(Transfer(Rows(CROSS, [4, 5]), Rows(CROSS, [7, 8])), local="dst")
TWO_LAYERS = kvplan.plan(
    Transfer(
        Rows(CROSS, [4, 5]), Rows(CROSS, [7, 8]), layers=KvCacheExtParam(range(1, 3), range(1, 3))
    ),
    local="src",
)
APART = kvplan.plan(
    Transfer(Rows(CROSS, [4, 6]), Rows(cache((16, 16, 2, 64), "NHD", 8), [7, 8])), local="dst"
)
SLOTS = cache((3, 64, 2, 64), "slot token head dim")
NHD, HND = cache((16, 16, 2, 64), "NHD"), cache((16, 2, 16, 64), "HND")
FILLED = kvplan.plan(Transfer(Rows(SLOTS, slot=2), Rows(NHD, [4, 5, 9])), local="dst")
TURNED = kvplan.plan(
    Transfer(Rows(SLOTS, slot=2), Rows(HND, [4, 5, 9]), num_tokens=40), local="dst"
)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (RESHARD, "<Plan pull_blocks B2B L0-1 x 40 tokens, 3>2 blocks: 320 desc, 80 KiB>"),
        (LATENT, "<Plan pull_blocks B2B L0-2 x 40 tokens, 3 blocks: 6 desc, 135 KiB>"),
        (WHOLE_BLOCKS, "<Plan pull_blocks B2B L0-3 x 2 blocks: 1 desc, 64 KiB>"),
        (TWO_LAYERS, "<Plan push_blocks B2B L1-2 x 2 blocks: 4 desc, 32 KiB>"),
        (TURNED, "<Plan pull_blocks C2B L0-1 x 40 tokens, 3 blocks: 320 desc, 40 KiB>"),
    ],
)
def test_one_line(plan: Plan, text: str) -> None:
    assert repr(plan) == text


def test_tree_of_other_heads_blocks_and_order_of_axes() -> None:
    assert_text(
        RESHARD.explain(),
        """
pull_blocks  B2B   BlocksCacheKey(cluster_id=2, model_id=0) -> cache 7   plan 54f5d4
  src DT_FLOAT16 (block 64, token 16, head 2, dim 128), all 2 layers, heads 2..3 of 8
  dst DT_FLOAT16 (block 32, head 4, token 32, dim 128), all 2 layers, heads 0..3 of 8
  layers 0..1 -> 0..1 | tensors/layer 2 | 40 tokens, 3 blocks -> 2 blocks
  320 slices -> 320 descriptors (0 merged) | 80 KiB
  transposing: 32 runs of 256 B a block
|-- layer 0 -> 0   desc [0:160)   40 KiB
|   |-- tensor 0 -> 0 K   5 -> 3+0x4000  32 x 256 B  tokens 0..15
|   |                     9 -> 3+0x5000  32 x 256 B  tokens 16..31
|   |                     6 -> 1+0x4000  16 x 256 B  tokens 32..39
|   `-- tensor 1 -> 1 V   same blocks
`-- layer 1 -> 1   desc [160:320)   40 KiB   same blocks
""",
    )


def test_table_of_a_plan_of_repeats_has_each_run() -> None:
    assert_text(
        RESHARD.explain("table", limit=4),
        """
#  layer  tensor            blocks  local       remote     nbytes
0    0>0     0>0        5>3+0x4000  t0+0x1c000  t0+0xa000     256
1    0>0     0>0  5+0x200>3+0x4100  t0+0x1c100  t0+0xa200     256
2    0>0     0>0  5+0x400>3+0x4200  t0+0x1c200  t0+0xa400     256
3    0>0     0>0  5+0x600>3+0x4300  t0+0x1c300  t0+0xa600     256
... 316 more descriptors
""",
    )


def test_tree_of_latents_whose_last_block_is_not_full() -> None:
    assert_text(
        LATENT.explain(),
        """
pull_blocks  B2B   src -> dst   plan 6efa84
  DT_FLOAT16 (block 16, token 16, dim 576), both sides
  layers 0..2 -> 0..2 | tensors/layer 1 | 40 tokens, 3 blocks -> 3 blocks
  9 slices -> 6 descriptors (3 merged) | 135 KiB
|-- layer 0 -> 0   desc [0:2)   45 KiB
|   `-- tensor 0 -> 0   4-5 -> 7-8  36 KiB   merged 2  tokens 0..31
|                       9   -> 2    9 KiB    alone: not adjacent (src 5 -> 9, dst 8 -> 2)  tokens 32..39
`-- layers 1..2 -> 1..2   desc [2:6)   90 KiB   same blocks
""",  # noqa: E501
    )


def test_tree_of_blocks_that_hold_all_layers() -> None:
    assert_text(
        WHOLE_BLOCKS.explain(),
        """
pull_blocks  B2B   src -> dst   plan d62c15
  DT_FLOAT16 (block 16, layer 4, kv 2, token 16, head 2, dim 64), both sides
  layers 0..3 -> 0..3 | tensors/layer 1 | 2 blocks x 32 KiB
  2 slices -> 1 descriptor (1 merged) | 64 KiB
`-- layers 0..3 -> 0..3   desc [0:1)   64 KiB
    `-- tensor 0 -> 0   4-5 -> 7-8  64 KiB   merged 2  tokens 0..31
""",
    )


def test_tree_of_some_of_the_layers_of_blocks_that_hold_all() -> None:
    assert_text(
        TWO_LAYERS.explain(),
        """
push_blocks  B2B   src -> dst   plan a84ad3
  DT_FLOAT16 (block 16, layer 4, kv 2, token 16, head 2, dim 64), both sides
  layers 1..2 -> 1..2 | tensors/layer 1 | parts of 2 blocks
  4 slices -> 4 descriptors (0 merged) | 32 KiB
|-- layer 1 -> 1   desc [0:2)   16 KiB
|   `-- tensor 0 -> 0   4 -> 7  8 KiB  tokens 0..15
|                       5 -> 8  8 KiB  tokens 16..31
`-- layer 2 -> 2   desc [2:4)   16 KiB   same blocks
""",
    )


def test_table_of_layers_of_one_tensor() -> None:
    assert_text(
        TWO_LAYERS.explain("table"),
        """
#  layer  tensor  blocks  local       remote      nbytes
0    1>1     0>0     4>7  t0+0x22000  t0+0x3a000    8192
1    1>1     0>0     5>8  t0+0x2a000  t0+0x42000    8192
2    2>2     0>0     4>7  t0+0x24000  t0+0x3c000    8192
3    2>2     0>0     5>8  t0+0x2c000  t0+0x44000    8192
""",
    )


def test_tree_of_one_tensor_to_one_for_each_of_keys_and_values() -> None:
    assert_text(
        APART.explain(),
        """
pull_blocks  B2B   src -> dst   plan d604fc
  src DT_FLOAT16 (block 16, layer 4, kv 2, token 16, head 2, dim 64)
  dst DT_FLOAT16 (block 16, token 16, head 2, dim 64)
  layers 0..3 -> 0..3 | tensors/layer 2 | parts of 2 blocks
  16 slices -> 16 descriptors (0 merged) | 64 KiB
|-- layer 0 -> 0   desc [0:4)   16 KiB
|   |-- tensor 0 -> 0 K   4 -> 7  4 KiB  tokens 0..15
|   |                     6 -> 8  4 KiB  tokens 16..31
|   `-- tensor 0 -> 1 V   same blocks
`-- layers 1..3 -> 1..3   desc [4:16)   48 KiB   same blocks
""",
    )


def test_tree_of_a_slice_of_heads() -> None:
    """Adjacent blocks are not merged if other heads are between their parts."""
    half = cache((64, 4, 16, 128), "HND", heads=range(4, 8))
    whole = cache((64, 8, 16, 128), "HND", heads=range(8))
    assert_text(
        kvplan.plan(Transfer(Rows(half, [4, 5, 9]), Rows(whole, [7, 8, 2])), local="dst").explain(),
        """
pull_blocks  B2B   src -> dst   plan 2e3f58
  src DT_FLOAT16 (block 64, head 4, token 16, dim 128), all 2 layers, heads 4..7 of 8
  dst DT_FLOAT16 (block 64, head 8, token 16, dim 128), all 2 layers, all 8 heads
  layers 0..1 -> 0..1 | tensors/layer 2 | parts of 3 blocks
  12 slices -> 12 descriptors (0 merged) | 192 KiB
|-- layer 0 -> 0   desc [0:6)   96 KiB
|   |-- tensor 0 -> 0 K   4 -> 7+0x4000  16 KiB  tokens 0..15
|   |                     5 -> 8+0x4000  16 KiB   alone: not adjacent (dst 7 -> 8+0x4000)  tokens 16..31
|   |                     9 -> 2+0x4000  16 KiB   alone: not adjacent (src 5 -> 9, dst 8 -> 2+0x4000)  tokens 32..47
|   `-- tensor 1 -> 1 V   same blocks
`-- layer 1 -> 1   desc [6:12)   96 KiB   same blocks
""",  # noqa: E501
    )


def test_tree_of_a_slot_cut_into_blocks_of_tokens() -> None:
    assert_text(
        FILLED.explain(),
        """
pull_blocks  C2B   src -> dst   plan 789ab7
  DT_FLOAT16 (slot 3, token 64, head 2, dim 64) -> DT_FLOAT16 (block 16, token 16, head 2, dim 64)
  layers 0..1 -> 0..1 | tensors/layer 2 | 3 blocks x 4 KiB
  12 slices -> 8 descriptors (4 merged) | 48 KiB
|-- layer 0 -> 0   desc [0:4)   24 KiB
|   |-- tensor 0 -> 0 K   2        -> 4-5  8 KiB    merged 2  tokens 0..31
|   |                     2+0x2000 -> 9    4 KiB    alone: not adjacent (dst 5 -> 9)  tokens 32..47
|   `-- tensor 1 -> 1 V   same blocks
`-- layer 1 -> 1   desc [4:8)   24 KiB   same blocks
""",
    )


def test_tree_of_a_slot_with_another_layout() -> None:
    assert_text(
        TURNED.explain(),
        """
pull_blocks  C2B   src -> dst   plan 0e19f5
  DT_FLOAT16 (slot 3, token 64, head 2, dim 64) -> DT_FLOAT16 (block 16, head 2, token 16, dim 64)
  layers 0..1 -> 0..1 | tensors/layer 2 | 40 tokens, 1 slot -> 3 blocks
  320 slices -> 320 descriptors (0 merged) | 40 KiB
  transposing: 32 runs of 128 B a block
|-- layer 0 -> 0   desc [0:160)   20 KiB
|   |-- tensor 0 -> 0 K   2        -> 4  32 x 128 B  tokens 0..15
|   |                     2+0x1000 -> 5  32 x 128 B  tokens 16..31
|   |                     2+0x2000 -> 9  16 x 128 B  tokens 32..39
|   `-- tensor 1 -> 1 V   same blocks
`-- layer 1 -> 1   desc [160:320)   20 KiB   same blocks
""",
    )


def test_tree_of_bytes_that_are_reinterpreted() -> None:
    bf16 = CacheDesc(4, (16, 16, 2, 64), DataType.DT_BF16, kv_tensor_format="NHD")
    assert_text(
        kvplan.plan(
            Transfer(Rows(NHD, [1]), Rows(bf16, [2]), reinterpret=True), local="dst"
        ).explain(),
        """
pull_blocks  B2B   src -> dst   plan 7a47ef
  src DT_FLOAT16 (block 16, token 16, head 2, dim 64)
  dst DT_BF16 (block 16, token 16, head 2, dim 64)
  REINTERPRETED: bytes as they are
  layers 0..1 -> 0..1 | tensors/layer 2 | 1 block x 4 KiB
  4 slices -> 4 descriptors (0 merged) | 16 KiB
|-- layer 0 -> 0   desc [0:2)   8 KiB
|   |-- tensor 0 -> 0 K   1 -> 2  4 KiB  tokens 0..15
|   `-- tensor 1 -> 1 V   same blocks
`-- layer 1 -> 1   desc [2:4)   8 KiB   same blocks
""",
    )


@pytest.mark.parametrize(
    ("plan", "descriptor", "text"),
    [
        (RESHARD, 0, "layer 0>0 tensor 0>0 block 5>3 K head 2 token 0"),
        (RESHARD, 79, "layer 0>0 tensor 0>0 block 6>1 K head 3 token 39"),
        (RESHARD, 319, "layer 1>1 tensor 3>3 block 6>1 V head 3 token 39"),
        (LATENT, 5, "layer 2>2 tensor 2>2 block 9>2 tokens 32..39"),
        (WHOLE_BLOCKS, 0, "layers 0..3>0..3 tensor 0>0 block 4-5>7-8 K+V heads 0..1 tokens 0..31"),
        (TWO_LAYERS, 3, "layer 2>2 tensor 0>0 block 5>8 K+V heads 0..1 tokens 16..31"),
        (APART, 7, "layer 1>1 tensor 0>3 block 6>8 V heads 0..1 tokens 16..31"),
        (FILLED, 1, "layer 0>0 tensor 0>0 slot>block 2>9 K heads 0..1 tokens 32..47"),
    ],
)
def test_an_origin_names_layer_and_head_of_the_model(
    plan: Plan, descriptor: int, text: str
) -> None:
    assert str(plan.origin(descriptor)) == text


def test_an_origin_has_each_part_as_a_value() -> None:
    origin = RESHARD.origin(161)
    assert (origin.src_layer, origin.dst_layer) == (1, 1)
    assert (origin.kv, origin.heads, origin.tokens) == ("K", (2, 2), ((1, 1),))
    assert (origin.src_rows, origin.dst_rows) == ((5, 5), (3, 3))


TABLE = [4, 6, 9, 2]


def pull(
    src: list[int] = TABLE, dst: list[int] | None = None, of: CacheDesc = NHD, **more: Any
) -> Plan:
    transfer = Transfer(Rows(of, src), Rows(of, dst or [7, 8, 5, 1]), **more)
    return kvplan.plan(transfer, local="dst")


@pytest.mark.parametrize(
    ("new", "cause"),
    [
        (
            pull([6, 9, 2, 3]),
            "src_blocks are shifted by one: what was src_blocks[1] is first",
        ),
        (
            pull([0, 4, 6, 9]),
            "src_blocks are shifted by one: what was src_blocks[0] is second",
        ),
        (pull([4, 9, 6, 2]), "src_blocks[1] and src_blocks[2] are swapped (6 and 9)"),
        (pull(dst=[1, 8, 5, 7]), "dst_blocks[0] and dst_blocks[3] are swapped (7 and 1)"),
        (pull([5, 7, 10, 3]), "every one of src_blocks is +1"),
        (pull(dst=[6, 7, 4, 0]), "every one of dst_blocks is -1"),
        (pull([8, 10, 13, 6]), "every one of src_blocks is +4"),
        (pull([4, 6, 3, 2]), "src_blocks[2] is 3, and was 9"),
        (pull([2, 9, 6, 4]), "src_blocks are in reverse order"),
        (pull([4, 9, 2, 6]), "src_blocks are the same in another order, from src_blocks[1] on"),
        (pull([4, 6, 3, 1]), "src_blocks are others from src_blocks[2] on"),
        (pull([*TABLE, 3], [7, 8, 5, 1, 2]), "1 block more at the end of both block tables"),
        (pull([4, 6], [7, 8]), "2 blocks fewer at the end of both block tables"),
        (pull(num_tokens=50), "num_tokens is 50, and was not given"),
        (
            pull([4, 9, 6, 2], num_tokens=50),
            "num_tokens is 50, and was not given; src_blocks[1] and src_blocks[2] are swapped (6 "
            "and 9)",
        ),
        (
            pull([4, 9, 2, 11], num_tokens=50),
            "num_tokens is 50, and was not given; src_blocks are others from src_blocks[1] on",
        ),
        (
            pull([4, 9, 6, 2], [9, 1, 5, 3], num_tokens=50),
            "num_tokens is 50, and was not given; the block tables differ as well",
        ),
    ],
)
def test_changes_of_a_block_table_are_recognized(new: Plan, cause: str) -> None:
    *_, message, verdict = pull().diff(new).splitlines()
    assert verdict.startswith("  verdict: different bytes - ")
    assert message == f"  cause    {cause}"


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ([4, 6, 9], [6, 9, 2], "what was src_blocks[1] is first"),
        ([4, 6, 9], [1, 4, 6], "what was src_blocks[0] is second"),
        ([4, 6], [6, 9], ""),
        ([4, 6], [1, 4], ""),
    ],
)
def test_a_table_of_two_blocks_is_not_shifted(old: list[int], new: list[int], change: str) -> None:
    assert changed_table("src", np.array(old), np.array(new)).partition(": ")[2] == change


def test_a_swapped_table_in_full() -> None:
    assert_text(
        pull().diff(pull([4, 9, 6, 2])),
        """
  desc     16 = 16      bytes 64 KiB = 64 KiB
  tensor 0>0
-   9>5           4096  tokens 32..47
+   6>5           4096  tokens 32..47
-   6>8           4096  tokens 16..31
+   9>8           4096  tokens 16..31
  (same change in 3 more tensors)
  cause    src_blocks[1] and src_blocks[2] are swapped (6 and 9)
  verdict: different bytes - 32,768 destination bytes from another source
""",
    )


def test_shifted_layers() -> None:
    old, new = (pull(layers=KvCacheExtParam(span, range(1))) for span in (range(1), range(1, 2)))
    assert_text(
        old.diff(new),
        """
  option   src_tensors: range(0, 2) -> range(2, 4)
  desc     8 = 8      bytes 32 KiB = 32 KiB
  cause    layers are shifted by +1: layer 0 at dst came from layer 0, and comes from layer 1
  verdict: different bytes - other layers
""",
    )


def other(**changes: Any) -> CacheDesc:
    values: dict[str, Any] = {
        "num_tensors": 4,
        "shape": (16, 16, 2, 64),
        "data_type": FP16,
        "kv_tensor_format": "NHD",
    }
    return CacheDesc(**(values | changes))


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (other(data_type=DataType.DT_BF16), "src.data_type: DT_FLOAT16 -> DT_BF16"),
        (
            other(kv_tensor_format="block token kv dim"),
            "src.layout: block token head dim -> block token kv dim",
        ),
        (other(kv_tensor_format=None), "src.layout: block token head dim -> None"),
        (
            other(shard=Shard(heads=range(2, 4), num_heads=8)),
            "src.shard: None -> heads 2..3 of 8",
        ),
        (other(shape=(16, 16, 4, 32)), "src.shape: (16, 16, 2, 64) -> (16, 16, 4, 32)"),
    ],
)
def test_plans_of_different_caches_are_never_identical(of: CacheDesc, message: str) -> None:
    old, new = pull(), pull(of=of)
    assert list(old.part.segments) == list(new.part.segments)
    assert old != new
    assert old.fingerprint != new.fingerprint
    lines = old.diff(new).splitlines()
    assert lines[0] == f"  cache    {message}"
    assert lines[-1] == f"  verdict: different caches - {message}"


def test_a_wrong_head_is_named() -> None:
    """In the second gather, a source declares other heads than it has."""
    old, new = (
        kvplan.plan(
            Transfer(
                Rows(cache((64, 16, 1, 128), "NHD", heads=range(head, head + 1)), [5]),
                Rows(cache((32, 4, 16, 128), "HND", heads=range(4)), [3]),
            ),
            local="dst",
        )
        for head in (2, 3)
    )
    assert_text(
        old.diff(new),
        """
  cache    src.shard: all 2 layers, head 2 of 8 -> all 2 layers, head 3 of 8
  desc     4 = 4      bytes 16 KiB = 16 KiB
  tensor 0>0
-   5>3+0x2000    4096  tokens 0..15 head 2
+   5>3+0x3000    4096  tokens 0..15 head 3
  (same change in 3 more tensors)
  verdict: different caches - src.shard: all 2 layers, head 2 of 8 -> all 2 layers, head 3 of 8
""",
    )
