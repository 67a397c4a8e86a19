"""Descriptions, block tables and executed plans, as users' tests make them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import DataType, LLMStatusCode, Placement, Plan, Rows, Transfer, load_plan
from kvplan.planning.plan import OBSERVERS
from kvplan.testing import (
    BlockTables,
    Budget,
    GoldenPlans,
    make_desc,
    observe_plans,
    request_tokens,
    run_reference,
)
from kvplan.testing.plans import write_plan
from tests.planning.transfers import Example, transfers
from tests.support.plans import joined
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("layout", "tensors", "shape"),
    [
        ("NHD", 6, (8, 16, 4, 32)),
        ("HND", 6, (8, 4, 16, 32)),
        ("MLA", 3, (8, 16, 32)),
        ("slot token dim", 3, (8, 16, 32)),
        ("block layer kv token head dim", 1, (8, 3, 2, 16, 4, 32)),
        ("block kv token head dim", 3, (8, 2, 16, 4, 32)),
        ("slot token head dim", 6, (8, 16, 4, 32)),
        ("LBNHC", 3, (8, 16, 4, 2, 32)),
    ],
)
def test_the_shape_of_a_layout(layout: str, tensors: int, shape: tuple[int, ...]) -> None:
    desc = make_desc(layout, blocks=8, layers=3, heads=4, dim=32)
    assert (desc.num_tensors, desc.shape) == (tensors, shape)
    assert desc.layout is not None
    plan = (
        kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst")
        if "slot" not in layout
        else None
    )
    assert plan is None or plan.nbytes == 3 * (1 if layout == "MLA" else 8) * 16 * 32 * 2


def test_a_cache_without_arguments_is_of_a_usual_shape() -> None:
    desc = make_desc()
    assert (desc.num_tensors, desc.shape) == (4, (64, 16, 8, 128))
    assert (desc.data_type, desc.placement) == (DataType.DT_FLOAT16, Placement.DEVICE)


def test_layouts_without_known_lengths_are_refused() -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "layout='block state': no length is known"):
        make_desc("block state")
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "axes='no'"):
        make_desc("no")


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.floats(0, 1),
    st.integers(0, 3),
)
def test_tables_have_their_lengths_and_share_no_block(
    seed: int, lengths: list[int], fragmentation: float, reserved: int
) -> None:
    total = sum(lengths) + reserved
    kept = [*range(reserved)]
    calls = [
        BlockTables(seed)(total, *lengths, fragmentation=fragmentation, reserved=kept)
        for _ in range(2)
    ]
    assert calls[0] == calls[1]
    tables = [calls[0]] if len(lengths) == 1 else [*calls[0]]
    assert [*map(len, tables)] == lengths
    assert sorted(item for table in tables for item in table) == [*range(reserved, total)]


def test_fragmentation_is_the_frequency_of_ends_of_runs() -> None:
    def steps(fragmentation: float) -> int:
        table = BlockTables(1)(10_000, 500, fragmentation=fragmentation)
        return sum(abs(b - a) == 1 for a, b in itertools.pairwise(table))

    assert steps(0) > 450
    assert 150 < steps(0.5) < 350
    assert steps(1) < 10
    table = BlockTables(1)(10_000, 500)
    assert any(b - a == -1 for a, b in itertools.pairwise(table))
    for seed in range(20):  # runs are ascending
        table = BlockTables(seed)(10_000, 50, fragmentation=0)
        assert all(b - a != -1 for a, b in itertools.pairwise(table)), seed


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((4,), {}, r"lengths=\(\) must be"),
        ((4, 0), {}, r"lengths=\(0,\) must be"),
        ((4, 3, 2), {}, r"lengths=\(3, 2\) must be >= 1 each, and 4 in all"),
        ((4, 4), {"reserved": [0]}, "and 3 in all: of num_blocks=4, 1 are reserved"),
        ((4, 1), {"fragmentation": 2}, r"fragmentation=2 is out of range \[0, 1\]"),
    ],
)
def test_impossible_tables_are_refused(arguments, options, message: str) -> None:  # type: ignore[no-untyped-def]
    with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
        BlockTables()(*arguments, **options)


@pytest.mark.parametrize("num_blocks", [0, 2**32 + 1])
def test_the_number_of_blocks_is_checked_before_a_pool_is_made(num_blocks: int) -> None:
    """A later check also refuses the call, so that a wrong bound makes no pool of this size."""
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} "):
        BlockTables()(num_blocks, 1, fragmentation=2)


@given(transfers())
def test_any_plan_is_executed_on_filled_arrays(example: Example) -> None:
    plan = example.plan()
    moved = run_reference(plan)
    flat = [tensor.reshape(-1).view(np.uint8) for tensor in moved.src]
    src = [item.reshape(example.src.batch_size, example.src.stride) for item in flat]
    zeros = [
        np.zeros((example.dst.batch_size, example.dst.stride), np.uint8)
        for _ in range(example.dst.num_tensors)
    ]
    for found, wanted in zip(moved.dst, example.apply(src, zeros), strict=True):
        assert found.reshape(-1).view(np.uint8).tobytes() == wanted.tobytes()
    assert all(tensor.all() for tensor in moved.src)  # the source has no 0
    assert [*moved.parts] == [""]


@pytest.mark.parametrize(
    ("data_type", "dtype"),
    [
        (DataType.DT_FLOAT8_E5M2, np.uint8),
        (DataType.DT_BF16, np.uint16),
        (DataType.DT_FLOAT, np.uint32),
        (DataType.DT_DOUBLE, np.uint64),
    ],
)
def test_arrays_have_the_shape_of_the_cache(
    data_type: DataType, dtype: type[np.unsignedinteger[Any]]
) -> None:
    desc = make_desc("HND", blocks=8, data_type=data_type)
    moved = run_reference(kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst"))
    assert [tensor.shape for tensor in moved.dst] == [desc.shape] * 4
    assert moved.dst[0].dtype == moved.src[0].dtype == dtype
    np.testing.assert_array_equal(moved.dst[3][2], moved.src[3][1])


def test_groups_are_executed_together_and_compared_separately() -> None:
    latent, heads = make_desc("MLA"), make_desc()
    plan = joined(
        {
            "latent": kvplan.plan(Transfer(Rows(latent, [1]), Rows(latent, [2])), local="dst"),
            "heads": kvplan.plan(Transfer(Rows(heads, [3]), Rows(heads, [4])), local="dst"),
        }
    )
    moved = run_reference(plan)
    assert len(moved.dst) == 6
    np.testing.assert_array_equal(moved.parts["heads"].dst[0][4], moved.src[2][3])
    np.testing.assert_array_equal(moved.dst[1][2], moved.parts["latent"].src[1][1])


def test_the_arrays_of_a_group_are_found_on_the_side_with_more_tensors() -> None:
    whole, apart = make_desc("block layer kv token head dim", blocks=8), make_desc(blocks=8)
    for src, dst in ((whole, apart), (apart, whole)):
        plan = kvplan.plan(Transfer(Rows(src, [1]), Rows(dst, [2])), local="dst")
        moved = run_reference(joined({"a": plan, "b": plan}))
        for label, group in moved.parts.items():
            assert (len(group.src), len(group.dst)) == (src.num_tensors, dst.num_tensors), label
            sent, arrived = request_tokens(src, group.src, [1]), request_tokens(dst, group.dst, [2])
            np.testing.assert_array_equal(sent, arrived)


def test_a_copy_inside_one_cache_is_executed() -> None:
    desc = make_desc(blocks=4)
    plan = kvplan.plan(Transfer(Rows(desc, [0, 0]), Rows(desc, [1, 2])))
    arrays = run_reference(plan).src
    moved = run_reference(plan, arrays, arrays)
    np.testing.assert_array_equal(moved.dst[0][1], moved.src[0][2])


def test_observers_are_removed_in_any_order() -> None:
    desc = make_desc()
    with observe_plans() as outer:
        with observe_plans() as inner:
            one = kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst")
        other = kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [3])), local="dst")
        assert Plan.from_dict(other.to_dict()) == other  # observers see no read plan
    assert outer == [one, other]
    assert inner == [one]
    assert OBSERVERS == []
    first, second = observe_plans(), observe_plans()
    a, b = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst")
    second.__exit__(None, None, None)
    assert (len(a), len(b)) == (0, 1)


@pytest.mark.parametrize("limit", ["max_descriptors", "max_nbytes"])
def test_any_plan_exceeds_a_budget_of_zero(limit: str) -> None:
    desc = make_desc()
    plan = kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst")
    assert f"{limit}=0" in Budget(**{limit: 0}).failure([plan])


def test_a_budget_without_limits_is_refused() -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "has max_descriptors, max_nbytes, or both"):
        Budget()


@given(transfers())
def test_a_written_plan_is_read_back(tmp_path_factory, example: Example) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan = example.plan()
    groups = joined({"b": plan, "a": plan})
    for item in (plan, groups):
        write_plan(path, item)
        assert load_plan(path) == item
    assert "\n".join(path.read_text().splitlines()[:2]) == '{\n  "parts": ['


def test_golden_plans_work_without_pytest(tmp_path) -> None:  # type: ignore[no-untyped-def]
    desc = make_desc()
    plan = kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [2])), local="dst")
    with pytest.raises(AssertionError, match="does not exist; the plan of the test is"):
        GoldenPlans(tmp_path / "plans", "mine")(plan)
    golden = GoldenPlans(tmp_path / "plans", "mine", update=True, how="make golden")
    golden(plan)
    assert golden.written == [golden.path()]
    assert repr(golden) == repr(GoldenPlans(tmp_path / "plans", "mine"))
    GoldenPlans(tmp_path / "plans", "mine")(plan)
    with pytest.raises(AssertionError, match=r"only in the old plan; part a only in the new"):
        GoldenPlans(tmp_path / "plans", "mine")(joined({"a": plan}))


@pytest.mark.parametrize(
    "names", [("a:b", "a;b"), ("a b", "a-b"), ("a/b", "a-b"), ("x" * 300 + "1", "x" * 300 + "2")]
)
def test_impossible_names_of_files_get_a_file_each(tmp_path: Path, names: tuple[str, str]) -> None:
    """The name of the test and the given name may both be impossible names of files."""
    golden = GoldenPlans(tmp_path, "mine", update=True)
    transfers = [
        Transfer(Rows(make_desc(), [number]), Rows(make_desc(), [3])) for number in range(2)
    ]
    plans = [kvplan.plan(transfer, local="dst") for transfer in transfers]
    for name, plan in zip(names, plans, strict=True):
        golden(plan, name)
    again = GoldenPlans(tmp_path, "mine")
    for name, plan in zip(names, plans, strict=True):
        again(plan, name)
    assert len({*golden.written, *(GoldenPlans(tmp_path, name).path() for name in names)}) == 4


def test_parameters_and_names_are_kept_apart(tmp_path: Path) -> None:
    given = [("t", "a"), ("t[a]", ""), ("t[a]", "b"), ("t[a-b]", ""), ("t[a b]", ""), ("t-a", "")]
    paths = [GoldenPlans(tmp_path, test).path(name).name for test, name in given]
    assert paths[:4] == ["t+a.json", "t-a.json", "t-a+b.json", "t-a-b.json"]
    assert len({*paths}) == len(given)


@pytest.mark.parametrize("layout", ["NHD", "HND", "block kv token head dim", "NHD, apart"])
@pytest.mark.parametrize("other", ["block layer kv token head dim", "block head kv token dim"])
def test_tokens_of_a_request_compare_between_layouts(layout: str, other: str) -> None:
    """The layouts have blocks of 16 and 8 tokens, and blocks with gaps."""
    src = make_desc(layout.partition(",")[0], blocks=8, heads=3, dim=4)
    if "apart" in layout:
        src = replace(src, row_stride=src.row_nbytes + 64)
    dst = make_desc(other, blocks=20, tokens=8, heads=3, dim=4)
    theirs, mine = [5, 2, 7], [9, 3, 4, 19, 0, 1]
    moved = run_reference(
        kvplan.plan(
            Transfer(Rows(src, theirs, first_token=3), Rows(dst, mine, first_token=3), 40),
            local="dst",
        )
    )
    sent = request_tokens(src, moved.src, theirs)
    arrived = request_tokens(dst, moved.dst, mine)
    assert sent.shape == arrived.shape == (48, 2, 2, 3, 4)
    assert (arrived[3:43] == sent[3:43]).all()
    assert not arrived[:3].any()
    assert not arrived[43:].any()
    assert arrived.astype(bool).sum() == sum(tensor.astype(bool).sum() for tensor in moved.dst)


def test_tokens_of_a_latent_and_of_a_layout_without_tokens() -> None:
    desc = make_desc("MLA", blocks=4, layers=3, dim=5)
    tensors = [np.full(desc.shape, number) for number in range(3)]
    tokens = request_tokens(desc, tensors, [3, 1])
    assert tokens.shape == (32, 3, 1, 1, 5)
    assert tokens[7, :, 0, 0, 0].tolist() == [0, 1, 2]
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "tensors has 2 arrays; desc has 3"):
        request_tokens(desc, tensors[:2], [3])
    for block in (-1, 4):
        with pytest.raises(IndexError):
            request_tokens(desc, tensors, [3, block])
    opaque = kvplan.CacheDesc(1, (4, 16), DataType.DT_FLOAT16)
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "must have a layout with an axis of tokens"):
        request_tokens(opaque, tensors[:1], [3])
