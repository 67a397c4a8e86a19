"""The reference executor refuses wrong arrays before it has copied a byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import CacheDesc, DataType, LLMException, LLMStatusCode, Rows, Transfer
from kvplan.planning import reference
from tests.support.plans import joined
from tests.support.refusals import refused

DESC = CacheDesc(2, (4, 8), DataType.DT_FLOAT16)
PLAN = kvplan.plan(Transfer(Rows(DESC, [3, 0]), Rows(DESC, [1, 2])), local="dst")


def arrays(fill: int = 0, **kwargs: Any) -> list[Any]:
    return [np.full((4, 8), fill, dtype=np.float16, **kwargs) for _ in range(2)]


def with_second(array: Any) -> list[Any]:
    return [arrays()[0], array]


def read_only() -> Any:
    array = arrays()[1]
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (arrays()[:1], "1 arrays; the plan needs 2"),
        (arrays() * 2, "4 arrays; the plan needs 2"),
        (with_second(np.zeros((4, 9), np.float16)), r"\[1\] has 72 bytes; the plan needs 64"),
        (with_second(np.zeros((4, 16), np.float16)[:, ::2]), r"\[1\] has 64 bytes, not contiguous"),
        (with_second(np.zeros((8, 4), np.float16).T), r"\[1\] has 64 bytes, not contiguous"),
    ],
)
@pytest.mark.parametrize("side", ["src", "dst"])
def test_arrays_that_do_not_fit_are_refused(side: str, bad: list[Any], message: str) -> None:
    sides = {"src": arrays(1), "dst": arrays(0)} | {side: bad}
    with refused(LLMStatusCode.LLM_PARAM_INVALID, f"{side}.*{message}"):
        reference.execute(PLAN, **sides)
    if side == "src":
        assert not np.any(sides["dst"])


def test_a_read_only_destination_is_found_before_anything_is_written() -> None:
    dst = with_second(read_only())
    with pytest.raises(LLMException, match=r"dst\[1\] is read-only"):
        reference.execute(PLAN, arrays(1), dst)
    assert not np.any(dst)


@pytest.mark.parametrize(
    ("side", "bad", "message"),
    [
        ("src", np.zeros((4, 9), np.float16), "has 72 bytes"),
        ("dst", np.zeros((4, 9), np.float16), "has 72 bytes"),
        ("dst", read_only(), "is read-only"),
    ],
)
def test_arrays_of_all_parts_are_checked_before_the_first_part_is_written(
    side: str, bad: Any, message: str
) -> None:
    """The message counts the arrays as the caller does, over all parts."""
    plan = joined({"first": PLAN, "last": PLAN})
    sides = {"src": arrays(1) * 2, "dst": [*arrays(), *arrays()]}
    sides[side][3] = bad
    with refused(LLMStatusCode.LLM_PARAM_INVALID, rf"^{side}\[3\] {message}"):
        reference.execute(plan, **sides)
    assert not np.any(sides["dst"][0])


def test_a_tensor_that_the_plan_does_not_write_may_be_read_only() -> None:
    one_layer = kvplan.plan(Transfer(Rows(DESC, [3]), Rows(DESC, [1])), local="dst").for_layers(
        range(1)
    )
    assert one_layer.num_tensor_pairs == 2
    single = CacheDesc(1, (4, 8), DataType.DT_FLOAT16)
    reference.execute(
        kvplan.plan(Transfer(Rows(single, [3]), Rows(single, [1])), local="dst"),
        [read_only()],
        arrays()[:1],
    )


@pytest.mark.parametrize("bad", [[1, 2], with_second(b"x" * 64), with_second(None)])
def test_a_value_that_is_not_an_array_is_refused(bad: list[Any]) -> None:
    with pytest.raises(TypeError, match=r"src\[[01]\]="):
        reference.execute(PLAN, bad, arrays())


@pytest.mark.parametrize("dtype", ["u1", "f2", "<i4", ">i8", "c16", [("k", "u1"), ("v", "u1")]])
def test_any_type_with_the_same_size_is_accepted(dtype: Any) -> None:
    dtype = np.dtype(dtype)
    src = [np.arange(64, dtype=np.uint8).view(dtype) for _ in range(2)]
    dst = arrays()
    reference.execute(PLAN, src, dst)
    for array in dst:
        expected = np.zeros((4, 16), dtype=np.uint8)
        expected[[1, 2]] = np.arange(64, dtype=np.uint8).reshape(4, 16)[[3, 0]]
        np.testing.assert_array_equal(array.view(np.uint8), expected)
