"""`assert_equivalent`: the same bytes in the same places, as the execution of both plans shows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, Plan, Rows, Transfer, reference
from tests.planning.test_unlike import planned, transfers
from tests.planning.transfers import Example
from tests.planning.transfers import transfers as plain_transfers
from tests.support.plans import joined

DESC = CacheDesc(4, (16, 4), DataType.DT_INT8)
CROSS = CacheDesc(
    1, (16, 4, 2, 16, 2, 8), DataType.DT_FLOAT16, kv_tensor_format="block layer kv token head dim"
)


def pull(src: list[int], dst: list[int], **more: Any) -> Plan:
    return kvplan.plan(Transfer(Rows(DESC, src), Rows(DESC, dst), **more), local="dst")


def is_equivalent(old: Any, new: Any) -> bool:
    try:
        old.assert_equivalent(new)
    except AssertionError:
        return False
    return True


def outcome(plan: Plan) -> list[bytes]:
    """Return the destination for several contents, so that two sources are always distinguished."""
    random = np.random.default_rng(3)
    left = []
    for _ in range(8):
        src, dst = (
            [random.integers(0, 256, side.tensor_nbytes, np.uint8) for _ in range(side.num_tensors)]
            for side in (plan.part.src, plan.part.dst)
        )
        reference.execute(plan, src, dst)
        left += [tensor.tobytes() for tensor in dst]
    return left


@given(transfers(), st.sampled_from(Coalesce), st.sampled_from(Coalesce), st.data())
def test_plans_with_the_same_outcome_are_equivalent(
    transfer: Any, how: Coalesce, other: Coalesce, data: st.DataObject
) -> None:
    src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens = transfer
    old = planned(transfer, how)
    change = data.draw(st.sampled_from(["none", "order", "by_layer", "tokens"]))
    if change == "order":
        src_blocks = data.draw(st.permutations(src_blocks))
    if change == "tokens":
        num_tokens = data.draw(st.integers(1, num_tokens))
    changed = src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens
    by_layer = change == "by_layer"
    new = planned(changed, other, "src" if by_layer else "dst", by_layer=by_layer)
    assert is_equivalent(old, new) is (outcome(old) == outcome(new))


@given(plain_transfers(), plain_transfers(), st.sampled_from(Coalesce))
def test_a_plan_is_equivalent_to_itself_and_any_two_can_be_compared(
    example: Example, other: Example, how: Coalesce
) -> None:
    plan = example.plan()
    plan.assert_equivalent(example.plan(how))
    new = other.plan()
    if is_equivalent(plan, new):
        assert outcome(plan) == outcome(new)


def test_layer_by_layer_is_equivalent_to_whole_blocks() -> None:
    whole = kvplan.plan(Transfer(Rows(CROSS, [4, 5]), Rows(CROSS, [7, 8])), local="src")
    by_layer = kvplan.plan(
        Transfer(Rows(CROSS, [4, 5]), Rows(CROSS, [7, 8])), local="src", by_layer=True
    )
    assert whole != by_layer
    assert whole.num_descriptors < by_layer.num_descriptors
    whole.assert_equivalent(by_layer)
    assert "verdict: equivalent - same byte mapping, different segmentation" in whole.diff(by_layer)
    other = kvplan.plan(
        Transfer(Rows(CROSS, [4, 6]), Rows(CROSS, [7, 8])), local="src", by_layer=True
    )
    with pytest.raises(AssertionError, match="4,096 destination bytes from another source"):
        whole.assert_equivalent(other)


def test_layer_by_layer_every_tensor_is_compared() -> None:
    """The sides have different sizes, so that rows of two tensors of dst cannot be confused."""
    src, dst = (
        CacheDesc(2, (rows, *CROSS.shape[1:]), CROSS.data_type, kv_tensor_format=str(CROSS.layout))
        for rows in (4, 8)
    )
    whole = kvplan.plan(Transfer(Rows(src, [0, 1]), Rows(dst, [0, 4])), local="src")
    for read, verdict in (
        ([0, 1], "equivalent - same byte mapping, different segmentation"),
        ([0, 2], f"different bytes - {2 * src.row_nbytes:,} destination bytes from another source"),
    ):
        transfer = Transfer(Rows(src, read), Rows(dst, [0, 4]))
        by_layer = kvplan.plan(transfer, local="src", by_layer=True)
        assert whole.diff(by_layer).endswith(f"verdict: {verdict}")


def test_a_difference_is_in_the_error() -> None:
    old, new = pull([4, 5], [7, 8]), pull([5, 4], [7, 8])
    with pytest.raises(AssertionError) as caught:
        old.assert_equivalent(new)
    assert str(caught.value) == f"{old!r} and\n{new!r} differ\n{old.diff(new)}"
    assert "cause    src_blocks[0] and src_blocks[1] are swapped (4 and 5)" in str(caught.value)


def test_the_segments_do_not_matter_and_the_caches_do() -> None:
    old = pull([4, 5], [7, 8])
    old.assert_equivalent(pull([4, 5], [7, 8], coalesce=Coalesce.NONE))
    old.assert_equivalent(pull([5, 4], [8, 7]))
    old.assert_equivalent(
        kvplan.plan(Transfer(Rows(DESC, [4, 5]), Rows(DESC, [7, 8])), local="src")
    )
    more = dataclasses.replace(DESC, shape=(17, 4))
    with pytest.raises(AssertionError, match="different caches"):
        old.assert_equivalent(
            kvplan.plan(Transfer(Rows(DESC, [4, 5]), Rows(more, [7, 8])), local="dst")
        )


def groups(*plans: Plan) -> Plan:
    return joined(dict(zip("abc", plans, strict=False)))


def test_groups_are_equivalent_if_each_is() -> None:
    old = groups(pull([4, 5], [7, 8]), pull([1], [2]))
    old.assert_equivalent(groups(pull([5, 4], [8, 7]), pull([1], [2])))
    with pytest.raises(AssertionError, match="part b: different bytes"):
        old.assert_equivalent(groups(pull([5, 4], [8, 7]), pull([1], [3])))
    with pytest.raises(AssertionError, match="part b only in the old plan"):
        old.assert_equivalent(groups(pull([4, 5], [7, 8])))
    turned = joined(dict(reversed(old.by_part().items())))
    with pytest.raises(AssertionError, match="the parts are in another order"):
        old.assert_equivalent(turned)


def test_only_plans_are_compared() -> None:
    plan = pull([4], [7])
    with pytest.raises(TypeError, match="other="):
        plan.assert_equivalent(plan.to_dict())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"part a only in the old plan; part \(unnamed\) only"):
        groups(plan).assert_equivalent(plan)
