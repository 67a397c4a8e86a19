"""A plan is a value: equal, hashable, frozen and copied like one, with its declared size."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import kvplan
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    Coalesce,
    DataType,
    KvCacheExtParam,
    Part,
    Placement,
    Plan,
    RemoteCache,
    Rows,
    Transfer,
)
from kvplan.layout import CacheLayout, Shard
from kvplan.planning import Segments
from tests.planning.transfers import Example, transfers

DESC = CacheDesc(8, (16, 3), DataType.DT_FLOAT16)


def make(src: Any = DESC, dst: Any = DESC, **kwargs: Any) -> Plan:
    layers = KvCacheExtParam(range(1, 3), range(2))
    transfer = Transfer(Rows(src, [4, 5, 9]), Rows(dst, [7, 8, 2]), layers=layers, **kwargs)
    return kvplan.plan(transfer, local="dst")


PLAN = make()
FINGERPRINT = "fa75249a7641b74000d768528c5f38474d28208e19757399592fa5f70b006bc4"
"""Fingerprint of PLAN in every process on every machine; it changes only with SCHEMA_VERSION."""


def test_the_fingerprint_is_the_same_everywhere() -> None:
    assert PLAN.fingerprint == FINGERPRINT


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_the_fingerprint_is_the_same_in_another_process(hash_seed: str) -> None:
    program = (
        "import pickle, sys; plan = pickle.load(sys.stdin.buffer);"
        "assert 'fingerprint' not in vars(plan); print(plan.fingerprint)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(make()),
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
    ).stdout
    assert output.decode().strip() == FINGERPRINT


def other_side(**change: Any) -> dict[str, Any]:
    return {"src": dataclasses.replace(PLAN.part.src, **change)}


CHANGES: list[dict[str, Any]] = [
    {"operation": "push_blocks"},
    {"kind": "C2B"},
    {"src_tensors": range(3, 7)},
    {"dst_tensors": range(1, 5)},
    {"src_tensors": range(2, 4), "dst_tensors": range(2)},
    {"tensors_per_layer": 4},
    {"num_slices": 4},
    {"coalesce": Coalesce.CALLER_ORDER},
    {"dst": dataclasses.replace(PLAN.part.dst, count=17)},
    *(
        other_side(**change)
        for change in (
            {"num_tensors": 9},
            {"count": 17},
            {"stride": 7},
            {"paged": False},
            {"placement": Placement.HOST},
            {"data_type": DataType.DT_BF16},
            {"data_type": None},
            {"shape": (16, 1, 3)},
            {"layout": CacheLayout("block state")},
            {"label": "NHD"},
            {"shard": Shard(range(2), None, 2)},
            {"shard": Shard(None, range(2), None, 4)},
        )
    ),
    {"split": ("layer",)},
    {"split": ("kv",)},
    {"reinterpret": True},
    *(
        {"segments": Segments(*columns)}
        for columns in (
            ([24, 54], [42, 12], [12, 5]),
            ([24, 54], [42, 13], [12, 6]),
            ([24, 55], [42, 12], [12, 6]),
            ([54, 24], [12, 42], [6, 12]),
            ([24], [42], [12]),
            ([24, 54, 0], [42, 12, 0], [12, 6, 1]),
            ([24, 54], [42, 12], [12, 6], [([1, 1], 6, 6)]),
            ([24, 54], [42, 12], [12, 6], [([1, 2], 6, 6)]),
            ([24, 54], [42, 12], [12, 6], [([1, 1], 7, 6)]),
            ([24, 54], [42, 12], [12, 6], [([1, 1], 6, 7)]),
            ([24, 54], [42, 12], [12, 6], [([1, 1], 6, 6), ([1, 1], 6, 6)]),
        )
    ),
]


@pytest.mark.parametrize("change", CHANGES, ids=repr)
def test_any_change_makes_another_plan(change: dict[str, Any]) -> None:
    assert list(PLAN.part.segments) == [(24, 42, 12), (54, 12, 6)]
    other = Plan([dataclasses.replace(PLAN.part, **change)])
    assert other != PLAN
    assert other.fingerprint != PLAN.fingerprint
    assert len({PLAN, other}) == 2


def test_every_field_is_changed_above() -> None:
    changed = {name for change in CHANGES for name in change}
    names = {field.name for field in dataclasses.fields(Part)}
    assert changed == names - {"tables", "name", "source"}


def test_another_label_makes_another_plan() -> None:
    part = PLAN.part
    labelled = [
        Plan([part.labelled(*value)]) for value in (("a",), ("b",), ("", 0), ("", 1), ("a", 0))
    ]
    plans = [PLAN, *labelled]
    assert len(set(plans)) == len({plan.fingerprint for plan in plans}) == 6
    assert all(a == b for a, b in zip(plans, map(copy.copy, plans), strict=True))
    assert all(plan.part == part for plan in plans)


def test_the_order_of_block_tables_does_not_change_the_plan() -> None:
    """The same pairs of blocks in another order are an equal plan of another request."""
    other = kvplan.plan(
        Transfer(
            Rows(DESC, [9, 5, 4]),
            Rows(DESC, [2, 8, 7]),
            layers=KvCacheExtParam(range(1, 3), range(2)),
        ),
        local="dst",
    )
    assert other.part.tables is not None
    assert other.part.tables.dst.tolist() == [2, 8, 7]
    assert other == PLAN
    assert other.fingerprint == PLAN.fingerprint
    assert "identical" in PLAN.diff(other)


@given(transfers(), transfers())
def test_plans_are_equal_exactly_if_their_fingerprints_are(a: Example, b: Example) -> None:
    plans = [transfer.plan(how) for transfer in (a, b, a) for how in Coalesce]
    for one in plans:
        for other in plans:
            assert (one == other) == (one.fingerprint == other.fingerprint)
            if one == other:
                assert hash(one) == hash(other)
                # Equality ignores names of caches, and the order of the request.
                names = {"src": 0, "dst": 0, "tables": 0}
                ((a_part,), (b_part,)) = one.to_dict()["parts"], other.to_dict()["parts"]
                assert a_part | names == b_part | names


def test_a_plan_differs_from_values_of_other_types() -> None:
    for other in (PLAN.to_dict(), PLAN.fingerprint, hash(PLAN)):
        assert other != PLAN
    assert PLAN != None  # noqa: E711
    assert Segments([], [], []) != []


def test_names_of_caches_do_not_matter() -> None:
    named = make(RemoteCache(BlocksCacheKey(1), DESC), Cache(DESC, 7))
    assert named == PLAN
    assert hash(named) == hash(PLAN)
    assert Plan.from_dict(named.to_dict()).part.dst.name == "cache 7"


def test_a_plan_is_a_key_of_a_dict() -> None:
    cache = {make(): "first"}
    assert cache[make()] == "first"
    assert make(coalesce=Coalesce.NONE) not in cache


@pytest.mark.parametrize("touched", [False, True], ids=["fresh", "after its fingerprint was read"])
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_equal_and_frozen(duplicate: Any, touched: bool) -> None:
    original = make()
    if touched:
        assert original.fingerprint == FINGERPRINT
    other = duplicate(original)
    assert other == original
    assert other.fingerprint == FINGERPRINT
    assert hash(other) == hash(original)
    assert other.explain() == original.explain()
    with pytest.raises(ValueError, match="read-only"):
        other.part.segments.nbytes[0] = 1
    with pytest.raises(AttributeError):
        other.part.segments.nbytes = other.part.segments.src_offsets
    with pytest.raises(dataclasses.FrozenInstanceError):
        other.part.kind = "C2C"
    with pytest.raises(AttributeError):
        other.parts = ()


@pytest.mark.parametrize("name", [*(field.name for field in dataclasses.fields(Part)), "new"])
def test_no_attribute_can_be_assigned(name: str) -> None:
    for value in (make(), make().part):
        with pytest.raises(AttributeError):
            setattr(value, name, 1)
        with pytest.raises(AttributeError):
            delattr(value, name)


@pytest.mark.parametrize("how", Coalesce)
def test_a_planned_plan_equals_one_made_by_hand(how: Coalesce) -> None:
    """The planner bypasses the constructor, and for a single segment also its checks."""
    slot, block = (
        kvplan.plan(Transfer(Rows(DESC), Rows(DESC), nbytes=5, coalesce=how), local="dst"),
        single(how),
    )
    assert list(slot.part.segments) == [(0, 0, 5)]
    assert list(block.part.segments) == [(4 * DESC.stride, 7 * DESC.stride, DESC.stride)]
    for plan in (slot, block, make(coalesce=how)):
        part = plan.part
        again = dataclasses.replace(part, segments=Segments(*columns_of(plan)))
        assert again == part
        computed = again.nbytes, again.nbytes_per_tensor  # the planner sets both without segments
        assert computed == (part.nbytes, part.nbytes_per_tensor)
        own = {"name", "source"}  # fields that the planner leaves to the class
        assert vars(again).keys() - own == vars(part).keys() - {"by_rows"}  # set by the planner
        assert not again.by_rows
        for side in (part.src, part.dst):
            assert repr(side) == repr(dataclasses.replace(side))
            assert vars(dataclasses.replace(side)).items() <= vars(side).items()


def single(how: Coalesce) -> Plan:
    return kvplan.plan(Transfer(Rows(DESC, [4]), Rows(DESC, [7]), coalesce=how), local="dst")


def columns_of(plan: Plan) -> list[Any]:
    return [getattr(plan.part.segments, name) for name in Segments.columns()]


@pytest.mark.parametrize("name", ["src_offsets", "dst_offsets", "nbytes"])
@pytest.mark.parametrize("plan", [*(make(coalesce=how) for how in Coalesce), single(Coalesce.NONE)])
def test_no_column_can_be_written(name: str, plan: Plan) -> None:
    column = getattr(plan.part.segments, name)
    with pytest.raises(ValueError, match="read-only"):
        column += np.uint64(1)
    with pytest.raises(ValueError, match="read-only"):
        column.sort()
    with pytest.raises(AttributeError, match="frozen"):
        setattr(make().part.segments, name, column)


class TestSegments:
    def test_columns_are_copied(self) -> None:
        given = np.array([0, 8], dtype=np.uint64)
        segments = Segments(given, given, [4, 4])
        given[:] = 99
        assert list(segments) == [(0, 0, 4), (8, 8, 4)]
        assert segments.src_offsets.flags.c_contiguous

    def test_any_layout_becomes_a_column(self) -> None:
        for layout in (
            [8, 0],
            [np.int64(8), np.uint8(0)],
            np.array([0, 8])[::-1],
            np.array([8, 0], dtype=">u2"),
        ):
            segments = Segments(layout, layout, [4, 4])
            assert segments == Segments([8, 0], (8, 0), [4, 4])
            assert segments.src_offsets.flags.c_contiguous

    def test_64_bits_are_kept(self) -> None:
        top = 2**64 - 1
        segments = Segments([4, top], [top, 2**63], [1, 2])
        assert list(segments) == [(4, top, 1), (top, 2**63, 2)]

    @pytest.mark.parametrize(
        ("column", "error"),
        [
            ([-1], ValueError),
            (np.array([-1]), ValueError),
            ([2**64], ValueError),
            ([1, 2**64 - 1, -1], ValueError),
            ([1.5], TypeError),
            ([True], TypeError),
            (["1"], TypeError),
            ([[1]], ValueError),
            (1, ValueError),
            ([1, 2], ValueError),
        ],
    )
    def test_values_that_a_cast_would_change_are_refused(
        self, column: Any, error: type[Exception]
    ) -> None:
        for position in range(3):
            columns = [[1], [1], [1]]
            columns[position] = column
            with pytest.raises(error):
                Segments(*columns)

    def test_repr_is_one_line(self) -> None:
        assert repr(PLAN.part.segments) == "<Segments 2: 18 bytes>"


def test_segments_with_equal_sort_keys_have_one_order() -> None:
    """Many segments share one source block, and all sort algorithms must give the same result."""
    rng = np.random.default_rng(0)
    dst = rng.permutation(4096)
    src = rng.integers(0, 64, 4096)
    desc = CacheDesc(1, (4096, 8), DataType.DT_INT8)
    plan = kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")
    segments = list(plan.part.segments)
    assert segments == sorted(segments)
    shuffled = rng.permutation(4096)
    assert (
        kvplan.plan(Transfer(Rows(desc, src[shuffled]), Rows(desc, dst[shuffled])), local="dst")
        == plan
    )


@pytest.mark.parametrize("edge", [2**31, 2**32, 2**62])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_block_indices_of_more_than_31_bits_are_sorted(edge: int, side: str) -> None:
    few, many = (CacheDesc(1, (count, 1), DataType.DT_INT8) for count in (8, edge + 8))
    small, large = [6, 2, 4, 0], [edge, 3, edge - 2, 1]
    src, dst = Rows(many, large), Rows(few, small)
    if side == "dst":
        src, dst = dst, src
    plan = kvplan.plan(Transfer(src, dst))
    pairs = sorted(zip(src.blocks, dst.blocks, strict=True))
    assert list(plan.part.segments) == [(src, dst, 1) for src, dst in pairs]


def size_of(plan: Plan) -> int:
    return len(pickle.dumps(plan))


def planned(num_layers: int, num_blocks: int) -> Plan:
    desc = CacheDesc(2 * num_layers, (2 * num_blocks, 8), DataType.DT_FLOAT16)
    rng = np.random.default_rng(0)
    src, dst = rng.permutation(2 * num_blocks)[:num_blocks], rng.permutation(2 * num_blocks)
    return kvplan.plan(
        Transfer(Rows(desc, src), Rows(desc, dst[:num_blocks]), coalesce=Coalesce.NONE), local="src"
    )


COLUMNS = [0, 64], [8, 96], [4, 4]
REPEATS = ([2, 3], 16, 32), ([1, 2], 4, 8)


class TestRepeats:
    """Tables that differ in one thing: an entry of a column, a count, or a stride."""

    @pytest.mark.parametrize(
        ("level", "place"), [(level, place) for level in (-1, 0, 1) for place in range(3)]
    )
    def test_any_difference_makes_another_table(self, level: int, place: int) -> None:
        table = Segments(*COLUMNS, REPEATS)
        columns, repeats = copy.deepcopy([*COLUMNS]), [[*repeat] for repeat in REPEATS]
        changed = columns if level < 0 else repeats[level]
        if isinstance(changed[place], list):
            changed[place] = [changed[place][0], changed[place][1] + 1]
        else:
            changed[place] += 1
        other = Segments(*columns, [tuple(repeat) for repeat in repeats])
        assert table == Segments(*COLUMNS, REPEATS)
        assert hash(table) == hash(Segments(*COLUMNS, REPEATS))
        assert table != other
        assert [part.tolist() for part in table.parts()] != [
            part.tolist() for part in other.parts()
        ]
        assert pickle.loads(pickle.dumps(other)) == other

    def test_the_order_of_levels_matters(self) -> None:
        table, other = Segments(*COLUMNS, REPEATS), Segments(*COLUMNS, REPEATS[::-1])
        assert table != other
        assert [*table.expanded()] != [*other.expanded()]
        assert table != Segments(*COLUMNS, REPEATS[:1])
        assert table != Segments(*COLUMNS)


class TestGrowth:
    def test_a_segment_is_24_bytes(self) -> None:
        few, many = (
            Plan([dataclasses.replace(planned(4, number).part, tables=None)])
            for number in (1_000, 11_000)
        )
        assert size_of(many) - size_of(few) == pytest.approx(24 * 10_000, abs=64)

    def test_a_block_of_the_request_is_16_bytes(self) -> None:
        few, many = (planned(4, number).part.tables for number in (1_000, 11_000))
        size = len(pickle.dumps(many)) - len(pickle.dumps(few))
        assert size == pytest.approx(16 * 10_000, abs=64)

    def test_more_layers_do_not_enlarge_a_plan(self) -> None:
        assert abs(size_of(planned(1_000, 100)) - size_of(planned(1, 100))) < 64
        assert planned(1_000, 100).num_descriptors == 200_000

    @pytest.mark.parametrize("num_blocks", [1_000, 10_000])
    def test_planning_allocates_for_blocks_not_for_layers(self, num_blocks: int) -> None:
        desc = CacheDesc(2_000_000, (2 * num_blocks, 8), DataType.DT_FLOAT16)
        src, dst = np.arange(num_blocks)[::-1], np.arange(num_blocks)

        def peak() -> int:
            tracemalloc.start()
            try:
                plan = kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="src")
                text = plan.explain() + plan.explain("table")
                assert f"{plan.num_descriptors - 12:,} more descriptors" in text
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

        # The smallest of several: the first call fills caches, and other threads allocate, too.
        assert min(peak() for _ in range(5)) < 20 * 8 * num_blocks + 100_000

    def test_reading_one_descriptor_of_four_trillion(self) -> None:
        desc = CacheDesc(2**32 - 1, (1_000, 8), DataType.DT_FLOAT16)
        three = KvCacheExtParam(tensor_num_per_layer=3)
        plan = kvplan.plan(
            Transfer(Rows(desc, range(1_000)), Rows(desc, range(999, -1, -1)), layers=three),
            local="src",
        )
        last = plan.origin(plan.num_descriptors - 1)
        assert (last.src_tensor, last.src_rows, last.dst_rows) == (2**32 - 2, (999, 999), (0, 0))
        assert plan.explain().endswith(
            "`-- layers 1..1431655764 -> 1..1431655764   desc [3000:4294967295000)   62.5 TiB   "
            "same blocks"
        )
        assert plan.for_layers(range(5, 6)).num_descriptors == 3_000
