"""Exact texts of differences between two plans, and the verdict at the end."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, KvCacheExtParam, Plan, Rows, Transfer
from tests.planning.transfers import Example, transfers

Ranges = tuple[tuple[int, int], tuple[int, int]]
"""Ranges of layers at src and at dst."""

SLOTS, BLOCKS, MORE_BLOCKS = (
    CacheDesc(4, shape, DataType.DT_INT8) for shape in ((3, 10), (16, 4), (17, 4))
)


def blocks(src, dst, *, into: CacheDesc = BLOCKS, **kwargs) -> Plan:  # type: ignore[no-untyped-def]
    return kvplan.plan(Transfer(Rows(BLOCKS, src), Rows(into, dst), **kwargs), local="dst")


def slots(local="dst", src_offset=3, dst_offset=1, nbytes=5) -> Plan:  # type: ignore[no-untyped-def]
    src, dst = Rows(SLOTS, slot=1, offset=src_offset), Rows(SLOTS, offset=dst_offset)
    return kvplan.plan(Transfer(src, dst, nbytes=nbytes), local=local)


PLAN = blocks([4, 5, 9], [7, 8, 2])


def assert_diff(old: Plan, new: Plan, expected: str) -> None:
    assert old.diff(new).splitlines() == expected.strip("\n").splitlines()


def test_a_plan_and_itself_are_identical() -> None:
    assert_diff(
        PLAN,
        blocks([4, 5, 9], [7, 8, 2]),
        """
  desc     8 = 8      bytes 48 B = 48 B
  verdict: identical
""",
    )


def test_rows_with_another_stride() -> None:
    apart = dataclasses.replace(BLOCKS, row_stride=6)
    assert_diff(
        blocks([4, 5], [7, 9]),
        blocks([4, 5], [7, 9], into=apart),
        """
  option   dst.stride: 4 -> 6
  desc     8 = 8      bytes 32 B = 32 B
  tensor 0>0
-   4>7           4
-   5>9           4
+   4>7           4
+   5>9           4
  (same change in 3 more tensors)
  verdict: different caches - their sizes are not the same
""",
    )


@pytest.mark.parametrize("change", [{"row_stride": 6}, {"num_tensors": 8}], ids=str)
@pytest.mark.parametrize("side", ["src", "dst"])
def test_caches_of_another_size_are_others_on_either_side(side: str, change: dict) -> None:  # type: ignore[type-arg]
    caches = {"src": BLOCKS, "dst": BLOCKS}
    other = caches | {side: dataclasses.replace(BLOCKS, **change)}
    first = KvCacheExtParam((0, 0), (0, 0))
    old, new = (
        kvplan.plan(Transfer(Rows(src, [4, 5]), Rows(dst, [7, 9]), layers=first), local="dst")
        for src, dst in (caches.values(), other.values())
    )
    for text in (old.diff(new), new.diff(old)):
        assert text.endswith("verdict: different caches - their sizes are not the same")


def test_tensors_that_are_cut_into_layers_have_no_equal_among_whole_ones() -> None:
    desc = CacheDesc(2, (8, 3, 4, 2), DataType.DT_INT8, kv_tensor_format="block layer token dim")
    moved = Transfer(Rows(desc, [1]), Rows(desc, [2]))
    whole, cut = (kvplan.plan(moved, local="dst", by_layer=by_layer) for by_layer in (False, True))
    for text in (whole.diff(cut), cut.diff(whole)):
        assert "more tensor" not in text
        assert "alone" not in text
        assert text.endswith("verdict: equivalent - same byte mapping, different segmentation")


def test_the_same_bytes_in_other_segments() -> None:
    assert_diff(
        PLAN,
        blocks([4, 5, 9], [7, 8, 2], coalesce=Coalesce.NONE),
        """
  option   coalesce: sorted -> none
  desc     8 -> 12      bytes 48 B = 48 B
  tensor 0>0
-   4-5>7-8       8
+   4>7           4
+   5>8           4
  (same change in 3 more tensors)
  verdict: equivalent - same byte mapping, different segmentation
""",
    )


def test_one_wrong_block() -> None:
    assert_diff(
        PLAN,
        blocks([4, 5, 10], [7, 8, 2]),
        """
  desc     8 = 8      bytes 48 B = 48 B
  tensor 0>0
-   9>2           4
+   10>2          4
  (same change in 3 more tensors)
  cause    src_blocks[2] is 10, and was 9
  verdict: different bytes - 16 destination bytes from another source
""",
    )


def test_one_block_more() -> None:
    assert_diff(
        PLAN,
        blocks([4, 5, 9, 0], [7, 8, 2, 15]),
        """
  desc     8 -> 12      bytes 48 B -> 64 B
  tensor 0>0
+   0>15          4
  (same change in 3 more tensors)
  cause    1 block more at the end of both block tables
  verdict: different bytes - 16 destination bytes newly written
""",
    )


def test_another_destination() -> None:
    assert_diff(
        PLAN,
        blocks([4, 5, 9], [7, 8, 3]),
        """
  desc     8 = 8      bytes 48 B = 48 B
  tensor 0>0
-   9>2           4
+   9>3           4
  (same change in 3 more tensors)
  cause    dst_blocks[2] is 3, and was 2
  verdict: different bytes - bytes at dst: 16 no longer written, 16 newly written
""",
    )


def test_other_layers() -> None:
    assert_diff(
        PLAN,
        blocks([4, 5, 9], [7, 8, 2], layers=KvCacheExtParam((0, 0), (1, 1))),
        """
  option   src_tensors: range(0, 4) -> range(0, 2)
  option   dst_tensors: range(0, 4) -> range(2, 4)
  desc     8 -> 4      bytes 48 B -> 24 B
  cause    layers are shifted by -1: layer 1 at dst came from layer 1, and comes from layer 0
  verdict: different bytes - other layers
""",
    )


LAYERS = CacheDesc(8, (16, 4), DataType.DT_INT8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            ((0, 1), (0, 1)),
            ((1, 3), (0, 2)),
            "layers are shifted by +1: layer 0 at dst came from layer 0, and comes from layer 1",
        ),
        (
            ((0, 3), (0, 3)),
            ((0, 0), (2, 2)),
            "layers are shifted by -2: layer 2 at dst came from layer 2, and comes from layer 0",
        ),
        (
            ((0, 1), (0, 1)),
            ((0, 0), (3, 3)),
            "layers 0..1 -> 0..1 before, and layer 0 -> 3 now",
        ),
        (
            ((0, 3), (0, 3)),
            ((1, 2), (1, 2)),
            "layers 0..3 -> 0..3 before, and layers 1..2 -> 1..2 now",
        ),
    ],
)
def test_ranges_of_other_layers_are_a_cause(old: Ranges, new: Ranges, message: str) -> None:
    plans = [
        kvplan.plan(
            Transfer(Rows(LAYERS, [4]), Rows(LAYERS, [7]), layers=KvCacheExtParam(*version)),
            local="dst",
        )
        for version in (old, new)
    ]
    *_, found, verdict = plans[0].diff(plans[1]).splitlines()
    assert (found, verdict) == (
        f"  cause    {message}",
        "  verdict: different bytes - other layers",
    )


def test_exchanged_tables_are_a_cause() -> None:
    message = PLAN.diff(blocks([7, 8, 2], [4, 5, 9]))
    assert "  cause    src_blocks and dst_blocks are exchanged\n" in message


def test_a_larger_cache() -> None:
    assert_diff(
        PLAN,
        blocks([4, 5, 9], [7, 8, 2], into=MORE_BLOCKS),
        """
  cache    dst.shape: (16, 4) -> (17, 4)
  desc     8 = 8      bytes 48 B = 48 B
  verdict: different caches - dst.shape: (16, 4) -> (17, 4)
""",
    )


def test_only_another_direction() -> None:
    assert_diff(
        slots(),
        slots("src"),
        """
  option   operation: pull_cache -> push_cache
  desc     4 = 4      bytes 20 B = 20 B
  verdict: equivalent - same byte mapping, different options
""",
    )


def test_an_offset_into_a_row() -> None:
    assert_diff(
        slots(),
        slots(dst_offset=2),
        """
  desc     4 = 4      bytes 20 B = 20 B
  tensor 0>0
-   1+0x3>0+0x1   5
+   1+0x3>0+0x2   5
  (same change in 3 more tensors)
  verdict: different bytes - bytes at dst: 16 from another source, 4 no longer written, 4 newly written
""",  # noqa: E501
    )


def test_the_number_of_lines_is_limited() -> None:
    assert_diff(
        blocks(range(16), range(16)),
        blocks(range(16), range(15, -1, -1)),
        """
  desc     4 -> 64      bytes 256 B = 256 B
  tensor 0>0
-   0-15>0-15     64
+   15>0          4
+   14>1          4
+   13>2          4
+   12>3          4
+   11>4          4
+   10>5          4
+   9>6           4
  ... 5 more lines. In all -1 and +16 segments
      16 of 16 dst blocks from another
+   3>12          4
+   2>13          4
+   1>14          4
+   0>15          4
  (same change in 3 more tensors)
  cause    dst_blocks are in reverse order
  verdict: different bytes - 256 destination bytes from another source
""",
    )


def test_only_existing_tensors_are_mentioned() -> None:
    def change(before: int, after: int) -> str:
        old, new = (
            kvplan.plan(Transfer(Rows(desc, [block]), Rows(desc, [1])), local="dst")
            for block, count in ((0, before), (2, after))
            for desc in [CacheDesc(count, (8, 4), DataType.DT_INT8)]
        )
        return old.diff(new)

    assert "more" not in change(1, 1)
    assert "  (same change in 1 more tensor)\n" in change(2, 2)
    assert "  (same change in 3 more tensors; 4 tensors in the new plan alone)\n" in change(4, 8)
    assert "  (3 tensors in the old plan alone)\n" in change(4, 1)


def test_names_of_caches_are_not_compared() -> None:
    src = dataclasses.replace(PLAN.part.src, name="cache 1")
    named = Plan([dataclasses.replace(PLAN.part, src=src)])
    assert PLAN.diff(named).endswith("verdict: identical")


@given(transfers(), transfers())
def test_plans_of_one_transfer_are_equivalent(example: Example, other: Example) -> None:
    plans = [example.plan(how) for how in Coalesce]
    for old in plans:
        for new in plans:
            verdict = "identical" if old == new else "equivalent - same byte mapping"
            assert f"  verdict: {verdict}" in old.diff(new)
    # Unrelated plans can be compared, too.
    assert "  verdict: " in plans[0].diff(other.plan())


def byte_map(plan: Plan) -> dict[tuple[int, int], tuple[int, int]]:
    """Map every destination byte of every tensor to its source byte."""
    return {
        (dst_tensor, dst + byte): (src_tensor, src + byte)
        for src_tensor, dst_tensor in zip(plan.part.src_tensors, plan.part.dst_tensors, strict=True)
        for src, dst, nbytes in plan.part.segments.expanded()
        for byte in range(nbytes)
    }


tables = st.lists(st.integers(0, 15), min_size=1, unique=True)
plans = st.builds(
    lambda dst, src, how: blocks(src[: len(dst)], dst, coalesce=how),
    tables,
    st.lists(st.integers(0, 15), min_size=16, max_size=16),
    st.sampled_from(Coalesce),
)
parts = st.builds(
    lambda src, dst, size: slots("dst", src, dst, size),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(1, 5),
)


NHD, HND = (
    CacheDesc(2, shape, DataType.DT_FLOAT16, kv_tensor_format=axes)
    for shape, axes in (((6, 3, 2, 2), "NHD"), ((4, 2, 5, 2), "HND"))
)
turned = st.builds(
    lambda src, dst, tokens, skipped: kvplan.plan(
        Transfer(Rows(NHD, src), Rows(HND, dst, first_token=skipped), num_tokens=tokens),
        local="dst",
    ),
    st.lists(st.integers(0, 5), min_size=2, max_size=2),
    st.permutations(range(4)).map(lambda value: value[:2]),
    st.integers(1, 6),
    st.integers(0, 4),
)


@given(st.one_of(st.tuples(plans, plans), st.tuples(parts, parts), st.tuples(turned, turned)))
def test_every_byte_of_a_difference_is_counted(pair: tuple[Plan, Plan]) -> None:
    old, new = pair
    before, after = byte_map(old), byte_map(new)
    both = before.keys() & after.keys()
    counts = {
        "from another source": sum(before[b] != after[b] for b in both),
        "no longer written": len(before.keys() - both),
        "newly written": len(after.keys() - both),
    }
    facts = [f"{count:,} {what}" for what, count in counts.items() if count]
    if len(facts) == 1:
        number, what = facts[0].split(" ", 1)
        facts = [f"{number} destination byte{'' if number == '1' else 's'} {what}"]
    elif facts:
        facts[0] = f"bytes at dst: {facts[0]}"
    verdict = old.diff(new).splitlines()[-1].removeprefix("  verdict: ")
    if facts:
        assert verdict == "different bytes - " + ", ".join(facts)
    else:
        assert verdict.split(" - ")[0] == ("identical" if old == new else "equivalent")
