"""A transfer of several groups: one plan of plans, one array of descriptors."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, DataType, Plan, Rows, Transfer, reference
from tests.planning.unlike import Cache, caches, expected, models, of_one_request
from tests.support.plans import joined
from tests.support.refusals import refused

INVALID = "LLM_PARAM_INVALID"
LATENT = CacheDesc(4, (8, 16, 576), DataType.DT_BF16, kv_tensor_format="block token dim")
INDEXER = CacheDesc(4, (8, 64, 132), DataType.DT_UINT8, kv_tensor_format="block token dim")
STATE = CacheDesc(2, (6, 4096), DataType.DT_FLOAT, kv_tensor_format="block state")


def deepseek(indexer: list[int]) -> Plan:
    return joined(
        {
            "latent": kvplan.plan(
                Transfer(Rows(LATENT, [1, 2, 5]), Rows(LATENT, [0, 1, 2])), local="dst"
            ),
            "indexer": kvplan.plan(
                Transfer(Rows(INDEXER, indexer), Rows(INDEXER, [7]), num_tokens=40), local="dst"
            ),
            "state": kvplan.plan(Transfer(Rows(STATE, [3]), Rows(STATE, [5])), local="dst"),
        }
    )


PLAN = deepseek([4])


def test_a_plan_of_groups_counts_all_of_them() -> None:
    latent, indexer, state = PLAN.by_part().values()
    assert (PLAN.operation, PLAN.kind, PLAN.local) == ("pull_groups", "B2B", "dst")
    assert PLAN.num_descriptors == 8 + 4 + 2
    assert PLAN.num_tensor_pairs == 10
    assert PLAN.nbytes == 4 * (3 * 16 * 1152) + 4 * 40 * 132 + 2 * 16384
    assert (latent.nbytes, indexer.nbytes, state.nbytes) == (221184, 21120, 32768)
    assert repr(PLAN) == "<Plan pull_groups B2B latent, indexer, state: 14 desc, 268.6 KiB>"
    assert not PLAN.reinterpret


@pytest.mark.parametrize("odd", range(3))
def test_any_part_may_differ_from_the_others(odd: int) -> None:
    usual = kvplan.plan(Transfer(Rows(LATENT, [1]), Rows(LATENT, [0])), local="dst").part
    slots, others = (
        CacheDesc(1, (4, 64), data_type, kv_tensor_format="slot token")
        for data_type in (DataType.DT_INT8, DataType.DT_UINT8)
    )
    other = kvplan.plan(Transfer(Rows(slots), Rows(others), reinterpret=True), local="dst").part
    parts = [(other if number == odd else usual).labelled(str(number)) for number in range(3)]
    plan = Plan(parts)
    assert (plan.kind, plan.reinterpret) == ("B2B+C2C", True)
    renamed = [part.labelled("new") if number == odd else part for number, part in enumerate(parts)]
    assert plan != Plan(renamed)


def test_an_origin_names_its_group() -> None:
    assert str(PLAN.origin(0)).startswith("latent: layer 0>0 tensor 0>0 block 1-2>0-1 tokens 0..31")
    assert str(PLAN.origin(7)).startswith("latent: layer 3>3 tensor 3>3 block 5>2")
    assert str(PLAN.origin(8)).startswith("indexer: layer 0>0 tensor 0>0 block 4>7")
    assert PLAN.origin(13).part == "state"
    with refused(INVALID, "descriptor=14"):
        PLAN.origin(14)


def test_explain_shows_each_group_below_its_name() -> None:
    lines = PLAN.explain().splitlines()
    assert lines[0] == f"pull_groups  B2B   3 parts   plan {PLAN.fingerprint[:6]}"
    assert lines[1] == "  14 descriptors | 268.6 KiB"
    assert [line for line in lines if not line.startswith(" ")] == [
        lines[0], "part latent", "part indexer", "part state",
    ]  # fmt: skip
    latent = lines[lines.index("part latent") + 1 : lines.index("part indexer")]
    assert "\n".join(item[2:] for item in latent) == PLAN.by_part()["latent"].explain()
    assert PLAN.explain("table", 1).count("... ") == 3


def test_diff_names_the_group_that_differs() -> None:
    other = deepseek([3])
    text = PLAN.diff(other)
    assert text.splitlines()[0] == "part latent: identical"
    assert "part state: identical" in text
    verdict = text.splitlines()[-1]
    assert verdict.startswith("verdict: part indexer: different bytes - 21,120 destination bytes")
    assert PLAN.diff(deepseek([4])).endswith("verdict: identical")
    less = joined({name: PLAN.by_part()[name] for name in ("latent", "state")})
    assert PLAN.diff(less).endswith("verdict: part indexer only in the old plan")
    turned = joined(dict(reversed(PLAN.by_part().items())))
    assert turned != PLAN
    assert PLAN.diff(turned).endswith("verdict: the parts are in another order")


def test_equal_plans_are_equal_and_others_are_not() -> None:
    same, other = deepseek([4]), deepseek([3])
    assert same == PLAN
    assert hash(PLAN) == hash(same)
    assert PLAN.fingerprint == same.fingerprint != other.fingerprint
    assert other != PLAN
    assert PLAN.by_part()["latent"] != PLAN
    renamed = joined(dict(zip("abc", PLAN.by_part().values(), strict=True)))
    assert renamed != PLAN
    assert renamed.fingerprint != PLAN.fingerprint
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN


def test_a_plan_of_groups_goes_through_json() -> None:
    document = json.loads(json.dumps(PLAN.to_dict()))
    assert Plan.from_dict(document) == PLAN
    with refused(INVALID, "schema_version=7"):
        Plan.from_dict({**document, "schema_version": 7})
    del document["parts"][0]["kind"]
    with refused(INVALID, "kind"):
        Plan.from_dict(document)


def test_a_plan_of_groups_is_frozen() -> None:
    with pytest.raises(AttributeError):
        PLAN.parts = ()
    with pytest.raises(AttributeError):
        del PLAN.parts


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "parts is empty"),
        ({"a\nb": PLAN.by_part()["state"]}, "1 to 64 printable"),
        (
            {
                "a": PLAN.by_part()["state"],
                "b": kvplan.plan(Transfer(Rows(STATE, [1]), Rows(STATE, [1])), local="src"),
            },
            "'a' is a pull, 'b' is a push; one transfer has one direction",
        ),
    ],
)
def test_a_wrong_mapping_of_groups_is_refused(groups: dict[str, Any], message: str) -> None:
    with refused(INVALID, message):
        joined(groups)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"parts\[1\]=.* must be Part"):
        Plan([PLAN.parts[0], PLAN])  # type: ignore[list-item]


def test_a_plan_of_several_parts_has_no_single_part() -> None:
    with refused(INVALID, r"has 3 parts: \['latent', 'indexer', 'state'\]; take one of plan.parts"):
        _ = PLAN.part
    with refused(INVALID, r"parts\[1\] repeats the label 'latent' of an earlier one"):
        Plan([PLAN.parts[0], PLAN.parts[0]])


Drawn = tuple[Cache, Cache, list[int], list[int], int]


@st.composite
def transfers(draw: st.DrawFn) -> Drawn:
    model = draw(models)
    src, dst = draw(caches(model)), draw(caches(model))
    assume(set(src.layers) & set(dst.layers) and set(src.heads) & set(dst.heads))
    rows = [draw(st.permutations(range(side.rows))) for side in (src, dst)]
    *rows, most = of_one_request(src, dst, *rows, 0, 0)
    return src, dst, *rows, draw(st.integers(1, most))


@given(st.lists(transfers(), min_size=1, max_size=4))
def test_groups_move_the_same_bytes_as_each_group_alone(drawn: list[Drawn]) -> None:
    plan = joined(
        {
            f"group {i}": kvplan.plan(
                Transfer(Rows(src.desc, src_rows), Rows(dst.desc, dst_rows), num_tokens=num_tokens),
                local="dst",
            )
            for i, (src, dst, src_rows, dst_rows, num_tokens) in enumerate(drawn)
        }
    )
    sources = [item[0].tensors(i) for i, item in enumerate(drawn)]
    targets = [item[1].tensors(100 + i) for i, item in enumerate(drawn)]
    wanted = [
        array
        for (src, dst, src_rows, dst_rows, num_tokens), source, target in zip(
            drawn, sources, targets, strict=True
        )
        for array in expected(src, dst, source, target, src_rows, dst_rows, 0, 0, num_tokens)
    ]
    flat = [[array for group in groups for array in group] for groups in (sources, targets)]
    by_reference, by_native = ([item.copy() for item in flat[1]] for _ in range(2))
    reference.execute(plan, flat[0], by_reference)
    kvplan.execute(plan, flat[0], by_native)
    for found in (by_reference, by_native):
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert Plan.from_dict(plan.to_dict()) == plan
