"""Exact texts for people: the tree, the table and the one line of a plan."""

from __future__ import annotations

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
    Placement,
    Plan,
    RemoteCache,
    Rows,
    Transfer,
)
from kvplan.planning.texts import nbytes_text
from tests.support.refusals import refused

INT8 = DataType.DT_INT8
PREFILL, DECODE = (CacheDesc(n, (16, 16, 8, 1024), DataType.DT_FLOAT16) for n in (12, 4))
SLOTS, BLOCKS = CacheDesc(4, (3, 10), INT8), CacheDesc(4, (8, 4), INT8)
WIDE = CacheDesc(40, (8, 4), INT8)

PUSH = kvplan.plan(
    Transfer(
        Rows(Cache(PREFILL, 7), [4, 5, 9]),
        Rows(RemoteCache(BlocksCacheKey(1), DECODE), [7, 8, 2]),
        layers=KvCacheExtParam(range(4, 6), (0, 1)),
    ),
    local="src",
)
C2B = kvplan.plan(Transfer(Rows(SLOTS, slot=2), Rows(BLOCKS, [4, 5, 0])), local="dst")
C2B_UNMERGED = kvplan.plan(
    Transfer(Rows(SLOTS, slot=2), Rows(BLOCKS, [4, 5, 0]), coalesce=Coalesce.NONE), local="dst"
)
C2C = kvplan.plan(
    Transfer(Rows(SLOTS, slot=1, offset=3), Rows(SLOTS, slot=2, offset=1), nbytes=5), local="dst"
)
COPY = kvplan.plan(Transfer(Rows(SLOTS), Rows(SLOTS, slot=2)))
COPY_BLOCKS = kvplan.plan(
    Transfer(Rows(Cache(BLOCKS, 1), [0, 0, 3]), Rows(Cache(BLOCKS, 1), [1, 2, 6]))
)
SWAP = kvplan.plan(
    Transfer(Rows(CacheDesc(4, (8, 4), INT8, Placement.HOST), [0]), Rows(BLOCKS, [1]))
)
REVERSED = kvplan.plan(
    Transfer(
        Rows(WIDE, range(8)),
        Rows(WIDE, range(7, -1, -1)),
        layers=KvCacheExtParam(tensor_num_per_layer=4),
    ),
    local="dst",
)
ONE_LAYER = kvplan.plan(
    Transfer(Rows(WIDE, [0]), Rows(WIDE, [1]), layers=KvCacheExtParam((0, 0), (0, 0), 1)),
    local="dst",
)


def assert_text(actual: str, expected: str) -> None:
    assert actual.splitlines() == expected.strip("\n").splitlines()


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (PUSH, "<Plan push_blocks B2B L4-5>0-1 x 3 blocks: 8 desc, 3.0 MiB>"),
        (C2B, "<Plan pull_blocks C2B L0-1 x 3 blocks: 8 desc, 40 B>"),
        (C2B_UNMERGED, "<Plan pull_blocks C2B L0-1 x 3 blocks: 12 desc, 40 B>"),
        (C2C, "<Plan pull_cache C2C L0-1 x 1 slot: 4 desc, 20 B>"),
        (COPY, "<Plan copy_cache C2C L0-1 x 1 slot: 4 desc, 40 B>"),
        (COPY_BLOCKS, "<Plan copy_blocks B2B L0-1 x 3 blocks: 12 desc, 48 B>"),
        (SWAP, "<Plan swap_blocks B2B L0-1 x 1 block: 4 desc, 16 B>"),
        (REVERSED, "<Plan pull_blocks B2B L0-9 x 8 blocks: 320 desc, 1.2 KiB>"),
        (ONE_LAYER, "<Plan pull_blocks B2B L0 x 1 block: 1 desc, 4 B>"),
    ],
)
def test_one_line(plan: Plan, text: str) -> None:
    assert repr(plan) == text


def test_tree_of_a_push_of_layers() -> None:
    assert_text(
        PUSH.explain(),
        """
push_blocks  B2B   cache 7 -> BlocksCacheKey(cluster_id=1, model_id=0)   plan 23dcac
  DT_FLOAT16 (16, 16, 8, 1024), both sides
  layers 4..5 -> 0..1 | tensors/layer 2 | 3 blocks x 256 KiB
  12 slices -> 8 descriptors (4 merged) | 3.0 MiB
|-- layer 4 -> 0   desc [0:4)   1.5 MiB
|   |-- tensor 8 -> 0   4-5 -> 7-8  512 KiB  merged 2  positions 0..1
|   |                   9   -> 2    256 KiB  alone: not adjacent (src 5 -> 9, dst 8 -> 2)  position 2
|   `-- tensor 9 -> 1   same blocks
`-- layer 5 -> 1   desc [4:8)   1.5 MiB   same blocks
""",  # noqa: E501
    )


def test_tree_is_cut_at_the_limit() -> None:
    assert_text(
        PUSH.explain(limit=1),
        """
push_blocks  B2B   cache 7 -> BlocksCacheKey(cluster_id=1, model_id=0)   plan 23dcac
  DT_FLOAT16 (16, 16, 8, 1024), both sides
  layers 4..5 -> 0..1 | tensors/layer 2 | 3 blocks x 256 KiB
  12 slices -> 8 descriptors (4 merged) | 3.0 MiB
|-- layer 4 -> 0   desc [0:4)   1.5 MiB
|   |-- tensor 8 -> 0   4-5 -> 7-8  512 KiB  merged 2  positions 0..1
|   |                   ... 1 more segment
|   `-- tensor 9 -> 1   same blocks
`-- layer 5 -> 1   desc [4:8)   1.5 MiB   same blocks
""",
    )


def test_table_of_a_push_of_layers() -> None:
    assert_text(
        PUSH.explain("table"),
        """
#  layer  tensor   blocks  local         remote       nbytes
0    4>0     8>0  4-5>7-8  t8+0x100000   t0+0x1c0000  524288
1    4>0     8>0      9>2  t8+0x240000   t0+0x80000   262144
2    4>0     9>1  4-5>7-8  t9+0x100000   t1+0x1c0000  524288
3    4>0     9>1      9>2  t9+0x240000   t1+0x80000   262144
4    5>1    10>2  4-5>7-8  t10+0x100000  t2+0x1c0000  524288
5    5>1    10>2      9>2  t10+0x240000  t2+0x80000   262144
6    5>1    11>3  4-5>7-8  t11+0x100000  t3+0x1c0000  524288
7    5>1    11>3      9>2  t11+0x240000  t3+0x80000   262144
""",
    )


def test_table_is_cut_at_the_limit() -> None:
    assert_text(
        PUSH.explain("table", limit=3),
        """
#  layer  tensor   blocks  local        remote       nbytes
0    4>0     8>0  4-5>7-8  t8+0x100000  t0+0x1c0000  524288
1    4>0     8>0      9>2  t8+0x240000  t0+0x80000   262144
2    4>0     9>1  4-5>7-8  t9+0x100000  t1+0x1c0000  524288
... 5 more descriptors
""",
    )


def test_tree_of_a_slot_cut_into_blocks() -> None:
    assert_text(
        C2B.explain(),
        """
pull_blocks  C2B   src -> dst   plan 704aa5
  DT_INT8 (3, 10) -> DT_INT8 (8, 4)
  layers 0..1 -> 0..1 | tensors/layer 2 | 3 blocks x 4 B
  12 slices -> 8 descriptors (4 merged) | 40 B
|-- layer 0 -> 0   desc [0:4)   20 B
|   |-- tensor 0 -> 0   2     -> 4-5  8 B      merged 2  positions 0..1
|   |                   2+0x8 -> 0    2 B      alone: not adjacent (dst 5 -> 0)  position 2
|   `-- tensor 1 -> 1   same blocks
`-- layer 1 -> 1   desc [4:8)   20 B   same blocks
""",
    )


def test_a_size_has_the_largest_unit_that_it_reaches() -> None:
    sizes = [1023, 1024, 2**20 - 1024, 2**20, 2**30]
    written = ["1023 B", "1 KiB", "1023 KiB", "1.0 MiB", "1.0 GiB"]
    assert [nbytes_text(size) for size in sizes] == written


def test_a_block_whose_values_lie_elsewhere_has_the_bytes_of_both() -> None:
    desc = CacheDesc(1, (2, 4, 3, 2, 4), INT8, kv_tensor_format="kv block token head dim")
    plan = kvplan.plan(Transfer(Rows(desc, [1, 3]), Rows(desc, [2, 0])), local="dst")
    assert plan.nbytes == 96
    assert "| 2 blocks x 48 B\n" in plan.explain()


def test_a_block_that_is_filled_in_part_counts_as_a_slice() -> None:
    row, blocks = (CacheDesc(1, shape, DataType.DT_INT8) for shape in ((1, 10), (3, 4)))
    plan = kvplan.plan(Transfer(Rows(row), Rows(blocks, [0, 1, 2])), local="dst")
    assert "10 B     merged 3  positions 0..2" in plan.explain()


def test_table_of_a_slot_cut_into_blocks() -> None:
    assert_text(
        C2B.explain("table"),
        """
#  layer  tensor   blocks  local    remote   nbytes
0    0>0     0>0    2>4-5  t0+0x10  t0+0x14       8
1    0>0     0>0  2+0x8>0  t0+0x0   t0+0x1c       2
2    0>0     1>1    2>4-5  t1+0x10  t1+0x14       8
3    0>0     1>1  2+0x8>0  t1+0x0   t1+0x1c       2
4    1>1     2>2    2>4-5  t2+0x10  t2+0x14       8
5    1>1     2>2  2+0x8>0  t2+0x0   t2+0x1c       2
6    1>1     3>3    2>4-5  t3+0x10  t3+0x14       8
7    1>1     3>3  2+0x8>0  t3+0x0   t3+0x1c       2
""",
    )


def test_a_tree_says_why_slices_were_not_merged() -> None:
    assert_text(
        C2B_UNMERGED.explain(),
        """
pull_blocks  C2B   src -> dst   plan 0d5c36
  DT_INT8 (3, 10) -> DT_INT8 (8, 4)
  layers 0..1 -> 0..1 | tensors/layer 2 | 3 blocks x 4 B
  12 slices -> 12 descriptors (0 merged) | 40 B
|-- layer 0 -> 0   desc [0:6)   20 B
|   |-- tensor 0 -> 0   2     -> 4  4 B  position 0
|   |                   2+0x4 -> 5  4 B  position 1
|   |                   2+0x8 -> 0  2 B      alone: not adjacent (dst 5 -> 0)  position 2
|   `-- tensor 1 -> 1   same blocks
`-- layer 1 -> 1   desc [6:12)   20 B   same blocks
""",
    )


def test_tree_of_a_part_of_a_slot() -> None:
    assert_text(
        C2C.explain(),
        """
pull_cache  C2C   src -> dst   plan 5da2e7
  DT_INT8 (3, 10), both sides
  layers 0..1 -> 0..1 | tensors/layer 2 | 1 slot x 10 B
  4 slices -> 4 descriptors (0 merged) | 20 B
|-- layer 0 -> 0   desc [0:2)   10 B
|   |-- tensor 0 -> 0   1+0x3 -> 2+0x1  5 B
|   `-- tensor 1 -> 1   same slots
`-- layer 1 -> 1   desc [2:4)   10 B   same slots
""",
    )


def test_table_of_a_part_of_a_slot() -> None:
    assert_text(
        C2C.explain("table"),
        """
#  layer  tensor        slots  local    remote  nbytes
0    0>0     0>0  1+0x3>2+0x1  t0+0x15  t0+0xd       5
1    0>0     1>1  1+0x3>2+0x1  t1+0x15  t1+0xd       5
2    1>1     2>2  1+0x3>2+0x1  t2+0x15  t2+0xd       5
3    1>1     3>3  1+0x3>2+0x1  t3+0x15  t3+0xd       5
""",
    )


def test_table_inside_a_process_has_no_local_and_remote() -> None:
    assert_text(
        COPY.explain("table"),
        """
#  layer  tensor  slots  src     dst      nbytes
0    0>0     0>0    0>2  t0+0x0  t0+0x14      10
1    0>0     1>1    0>2  t1+0x0  t1+0x14      10
2    1>1     2>2    0>2  t2+0x0  t2+0x14      10
3    1>1     3>3    0>2  t3+0x0  t3+0x14      10
""",
    )


def test_table_of_one_block_to_many() -> None:
    assert_text(
        COPY_BLOCKS.explain("table", limit=4),
        """
#  layer  tensor  blocks  src     dst      nbytes
0    0>0     0>0     0>1  t0+0x0  t0+0x4        4
1    0>0     0>0     0>2  t0+0x0  t0+0x8        4
2    0>0     0>0     3>6  t0+0xc  t0+0x18       4
3    0>0     1>1     0>1  t1+0x0  t1+0x4        4
... 8 more descriptors
""",
    )


def test_tree_of_a_swap() -> None:
    assert_text(
        SWAP.explain(),
        """
swap_blocks  B2B   src -> dst   plan 4d3648
  DT_INT8 (8, 4), both sides
  layers 0..1 -> 0..1 | tensors/layer 2 | 1 block x 4 B
  4 slices -> 4 descriptors (0 merged) | 16 B
|-- layer 0 -> 0   desc [0:2)   8 B
|   |-- tensor 0 -> 0   0 -> 1  4 B
|   `-- tensor 1 -> 1   same blocks
`-- layer 1 -> 1   desc [2:4)   8 B   same blocks
""",
    )


def test_every_list_of_a_tree_is_cut() -> None:
    assert_text(
        REVERSED.explain(limit=2),
        """
pull_blocks  B2B   src -> dst   plan 28f8f0
  DT_INT8 (8, 4), both sides
  layers 0..9 -> 0..9 | tensors/layer 4 | 8 blocks x 4 B
  320 slices -> 320 descriptors (0 merged) | 1.2 KiB
|-- layer 0 -> 0   desc [0:32)   128 B
|   |-- tensor 0 -> 0   0 -> 7  4 B  position 0
|   |                   1 -> 6  4 B      alone: not adjacent (dst 7 -> 6)  position 1
|   |                   ... 6 more segments
|   `-- tensors 1..3 -> 1..3   same blocks
`-- layers 1..9 -> 1..9   desc [32:320)   1.1 KiB   same blocks
""",
    )


def test_tree_of_one_tensor() -> None:
    assert_text(
        ONE_LAYER.explain(),
        """
pull_blocks  B2B   src -> dst   plan 0767a5
  DT_INT8 (8, 4), both sides
  layers 0..0 -> 0..0 | tensors/layer 1 | 1 block x 4 B
  1 slice -> 1 descriptor (0 merged) | 4 B
`-- layer 0 -> 0   desc [0:1)   4 B
    `-- tensor 0 -> 0   0 -> 1  4 B
""",
    )


@pytest.mark.parametrize("plan", [PUSH, C2B, C2C, COPY_BLOCKS, REVERSED], ids=repr)
@pytest.mark.parametrize("format", ["tree", "table"])
def test_a_large_limit_or_none_shows_everything(plan: Plan, format: str) -> None:  # noqa: A002
    everything = plan.explain(format, limit=None)  # type: ignore[arg-type]
    assert everything == plan.explain(format, limit=10**6)  # type: ignore[arg-type]
    assert "... " not in everything


def test_the_default_limit_is_sixteen() -> None:
    assert REVERSED.explain("table") == REVERSED.explain("table", limit=16)
    # With more rows, those at both ends are shown; the other lines add up the rest.
    assert len(REVERSED.explain("table").splitlines()) == 1 + 8 + 2 + 4
    assert "\n... 308 more descriptors. In each of 40 tensors:\n" in REVERSED.explain("table")
    one = CacheDesc(1, (64, 4), INT8)
    turned = kvplan.plan(Transfer(Rows(one, range(40)), Rows(one, range(39, -1, -1))), local="dst")
    assert "\n... 28 more descriptors. Of all:\n" in turned.explain("table")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"format": "map"}, r"format='map' must be one of \('tree', 'table'\)"),
        ({"format": None}, "format=None must be one of"),
        ({"limit": 0}, "limit=0 must be None or >= 1"),
        ({"limit": -1}, "limit=-1 must be None or >= 1"),
    ],
)
def test_wrong_arguments_are_refused(kwargs, message: str) -> None:  # type: ignore[no-untyped-def]
    with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
        PUSH.explain(**kwargs)


def test_a_plan_that_moves_nothing() -> None:
    """The tree has a line for each tensor, and the table has its head."""
    plan = kvplan.plan(Transfer(Rows(BLOCKS, []), Rows(BLOCKS, [])), local="dst")
    lines = plan.explain().splitlines()
    assert lines[-4:] == [
        "|-- layer 0 -> 0   desc [0:0)   0 B",
        "|   |-- tensor 0 -> 0   nothing",
        "|   `-- tensor 1 -> 1   same blocks",
        "`-- layer 1 -> 1   desc [0:0)   0 B   same blocks",
    ]
    assert plan.explain("table").splitlines()[-1].split()[:2] == ["#", "layer"]
    assert plan.explain("table", limit=None) == plan.explain("table")


@pytest.mark.parametrize("limit", ["1", 1.0, True])
def test_a_limit_is_an_int(limit: object) -> None:
    with pytest.raises(TypeError, match=f"limit={limit!r}"):
        PUSH.explain(limit=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "descriptor", "text"),
    [
        (PUSH, 5, "layer 5>1 tensor 10>2 block 9>2"),
        (PUSH, 0, "layer 4>0 tensor 8>0 block 4-5>7-8"),
        (C2B, 1, "layer 0>0 tensor 0>0 slot>block 2>0"),
        (C2C, 2, "layer 1>1 tensor 2>2 slot 1>2"),
    ],
)
def test_an_origin_says_where_a_descriptor_came_from(
    plan: Plan, descriptor: int, text: str
) -> None:
    assert str(plan.origin(descriptor)) == text
