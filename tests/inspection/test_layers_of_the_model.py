"""Pipeline stages: layers are counted from the first of each cache, and named as in the model."""

from __future__ import annotations

import pytest

import kvplan
from kvplan import CacheDesc, DataType, LLMStatusCode, Plan, Rows, Shard, Transfer
from kvplan.planning.gather import plan_gather
from tests.inspection.test_unlike import assert_text
from tests.support.refusals import refused

FP16 = DataType.DT_FLOAT16


def stage(layers: range, num_layers: int = 32) -> CacheDesc:
    return CacheDesc(
        2 * len(layers),
        (64, 16, 8, 128),
        FP16,
        kv_tensor_format="NHD",
        shard=Shard(layers=layers, num_layers=num_layers),
    )


WHOLE, FIRST, LAST = stage(range(32)), stage(range(16)), stage(range(16, 32))
SECOND = kvplan.plan(Transfer(Rows(LAST, [4, 5, 9]), Rows(WHOLE, [7, 8, 2])), local="dst")


def test_tree_of_the_last_stage() -> None:
    assert_text(
        SECOND.explain(),
        """
pull_blocks  B2B   src -> dst   plan e103a6
  src DT_FLOAT16 (block 64, token 16, head 8, dim 128), layers 16..31 of 32
  dst DT_FLOAT16 (block 64, token 16, head 8, dim 128), all 32 layers
  layers 0..15 -> 16..31 (16..31 of the model) | tensors/layer 2 | 3 blocks x 32 KiB
  96 slices -> 64 descriptors (32 merged) | 3.0 MiB
|-- layer 0 -> 16 (16 of the model)   desc [0:4)   192 KiB
|   |-- tensor 0 -> 32 K   4-5 -> 7-8  64 KiB   merged 2  tokens 0..31
|   |                      9   -> 2    32 KiB   alone: not adjacent (src 5 -> 9, dst 8 -> 2)  tokens 32..47
|   `-- tensor 1 -> 33 V   same blocks
`-- layers 1..15 -> 17..31 (17..31 of the model)   desc [4:64)   2.8 MiB   same blocks
""",  # noqa: E501
    )


def test_table_of_the_last_stage() -> None:
    assert_text(
        SECOND.explain("table", limit=5),
        """
#  layer  model  tensor   blocks  local        remote      nbytes
0   0>16     16    0>32  4-5>7-8  t32+0x38000  t0+0x20000   65536
1   0>16     16    0>32      9>2  t32+0x10000  t0+0x48000   32768
2   0>16     16    1>33  4-5>7-8  t33+0x38000  t1+0x20000   65536
3   0>16     16    1>33      9>2  t33+0x10000  t1+0x48000   32768
4   1>17     17    2>34  4-5>7-8  t34+0x38000  t2+0x20000   65536
... 59 more descriptors
""",
    )


def test_numbers_equal_to_those_of_the_model_are_not_repeated() -> None:
    plan = kvplan.plan(Transfer(Rows(FIRST, [4]), Rows(WHOLE, [7])), local="dst")
    assert "  layers 0..15 -> 0..15 | " in plan.explain()
    assert "model" not in plan.explain() + plan.explain("table") + str(plan.origin(0))
    assert plan.origin(2).model_layer == 1
    bare = CacheDesc(4, (64, 16, 8, 128), FP16, kv_tensor_format="NHD")
    assert (
        kvplan.plan(Transfer(Rows(bare, [0]), Rows(bare, [1])), local="dst").origin(0).model_layer
        is None
    )


def test_two_stages_of_one_gather() -> None:
    plans = plan_gather(
        Transfer([Rows(FIRST, [4]), Rows(LAST, [9])], Rows(WHOLE, [7])), [FIRST, LAST], WHOLE
    )
    assert [str(plan.origin(2)) for plan in plans if plan is not None] == [
        "layer 1>1 tensor 2>2 block 4>7 K heads 0..7 tokens 0..15",
        "layer 1>17 (17 of the model) tensor 2>34 block 9>7 K heads 0..7 tokens 0..15",
    ]


def test_the_number_in_the_model_is_beside_two_different_ones() -> None:
    """The number appears at either of the two."""
    back = kvplan.plan(Transfer(Rows(WHOLE, [7]), Rows(LAST, [4])), local="dst")
    assert str(back.origin(2)) == (
        "layer 17>1 (17 of the model) tensor 34>2 block 7>4 K heads 0..7 tokens 0..15"
    )
    assert "layers 16..31 -> 0..15 (16..31 of the model) | " in back.explain()


def in_one(layers: range) -> CacheDesc:
    return CacheDesc(
        1,
        (64, len(layers), 2, 16, 8, 128),
        FP16,
        kv_tensor_format="block layer kv token head dim",
        shard=Shard(layers=layers, num_layers=8),
    )


def test_layers_of_one_tensor() -> None:
    part = in_one(range(4, 8))
    moved_whole = kvplan.plan(Transfer(Rows(part, [4, 5]), Rows(part, [7, 8])), local="dst")
    assert_text(
        moved_whole.explain(),
        """
pull_blocks  B2B   src -> dst   plan 84a034
  DT_FLOAT16 (block 64, layer 4, kv 2, token 16, head 8, dim 128), layers 4..7 of 8, both sides
  layers 0..3 -> 0..3 (4..7 of the model) | tensors/layer 1 | 2 blocks x 256 KiB
  2 slices -> 1 descriptor (1 merged) | 512 KiB
`-- layers 0..3 -> 0..3 (4..7 of the model)   desc [0:1)   512 KiB
    `-- tensor 0 -> 0   4-5 -> 7-8  512 KiB  merged 2  tokens 0..31
""",
    )
    assert_text(
        moved_whole.explain("table"),
        """
#    layer  model  tensor   blocks  local        remote       nbytes
0  0-3>0-3   4..7     0>0  4-5>7-8  t0+0x1c0000  t0+0x100000  524288
""",
    )
    assert str(moved_whole.origin(0)) == (
        "layers 0..3>0..3 (4..7 of the model) tensor 0>0 block 4-5>7-8 K+V heads 0..7 tokens 0..31"
    )
    cut = kvplan.plan(Transfer(Rows(part, [4]), Rows(in_one(range(8)), [7])), local="dst")
    assert "\n  layers 0..3 -> 4..7 (4..7 of the model) | " in cut.explain()
    assert str(cut.origin(3)).startswith("layer 3>7 (7 of the model) tensor 0>0 block 4>7 ")


def test_a_long_shard_has_a_line_of_its_own() -> None:
    part = CacheDesc(
        1,
        (10_000, 16, 2, 16, 8, 128),
        FP16,
        kv_tensor_format="block layer kv token head dim",
        shard=Shard(range(16, 32), range(8, 16), 32, 64),
    )
    other = CacheDesc(
        1,
        (20_000, 16, 2, 16, 8, 128),
        FP16,
        kv_tensor_format="block layer kv token head dim",
        shard=Shard(range(16, 32), range(8, 16), 32, 64),
    )
    alike, unlike = (
        kvplan.plan(Transfer(Rows(part, [1]), Rows(item, [2])), local="dst").explain()
        for item in (part, other)
    )
    assert_text(
        "\n".join([*alike.splitlines()[1:3], *unlike.splitlines()[1:5]]),
        """
  DT_FLOAT16 (block 10000, layer 16, kv 2, token 16, head 8, dim 128),
  layers 16..31 of 32, heads 8..15 of 64, both sides
  src DT_FLOAT16 (block 10000, layer 16, kv 2, token 16, head 8, dim 128),
      layers 16..31 of 32, heads 8..15 of 64
  dst DT_FLOAT16 (block 20000, layer 16, kv 2, token 16, head 8, dim 128),
      layers 16..31 of 32, heads 8..15 of 64
""",
    )


def test_diff_of_a_table_of_a_stage() -> None:
    assert_text(
        SECOND.diff(
            kvplan.plan(Transfer(Rows(LAST, [4, 5, 10]), Rows(WHOLE, [7, 8, 2])), local="dst")
        ),
        """
  desc     64 = 64      bytes 3.0 MiB = 3.0 MiB
  tensor 0>32, layer 0 -> 16 (16 of the model)
-   9>2           32768  tokens 32..47
+   10>2          32768  tokens 32..47
  (same change in 31 more tensors)
  cause    src_blocks[2] is 10, and was 9
  verdict: different bytes - 1,048,576 destination bytes from another source
""",
    )


def test_diff_of_two_stages() -> None:
    assert_text(
        kvplan.plan(Transfer(Rows(FIRST, [4, 5, 9]), Rows(WHOLE, [7, 8, 2])), local="dst").diff(
            SECOND
        ),
        """
  cache    src.shard: layers 0..15 of 32 -> layers 16..31 of 32
  option   dst_tensors: range(0, 32) -> range(32, 64)
  layers   0..15 of the model -> 16..31 of the model
  desc     64 = 64      bytes 3.0 MiB = 3.0 MiB
  verdict: different caches - src.shard: layers 0..15 of 32 -> layers 16..31 of 32
""",
    )


def test_diff_of_other_layers_of_a_stage() -> None:
    old, new = SECOND.for_layers(range(8)), SECOND.for_layers(range(8, 16))
    assert old.diff(new).splitlines()[-2:] == [
        "  cause    layers 0..7 -> 16..23 (16..23 of the model) before, and layers 8..15 -> 24..31 "
        "(24..31 of the model) now",
        "  verdict: different bytes - other layers",
    ]


def test_a_wrong_stage_that_is_reinterpreted_shows_both_numbers() -> None:
    forced = kvplan.plan(Transfer(Rows(LAST, [4]), Rows(FIRST, [7]), reinterpret=True), local="dst")
    assert "  layers 0..15 -> 0..15 (16..31 -> 0..15 of the model) | " in forced.explain()
    assert "  REINTERPRETED: bytes as they are\n" in forced.explain()
    assert str(forced.origin(0)).startswith("layer 0>0 (16 of the model) ")


@pytest.mark.parametrize("layers", [range(16, 18), range(15, 17)])
def test_layers_outside_of_the_plan_are_refused_with_both_numbers(layers: range) -> None:
    message = r"of range\(0, 16\) \(16\.\.31 of the model\)"
    with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
        SECOND.for_layers(layers)


def test_a_stage_from_a_document_has_the_same_text() -> None:
    assert Plan.from_dict(SECOND.to_dict()).explain() == SECOND.explain()
