"""Saving plans to files, and loading them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvplan
from kvplan import CacheDesc, DataType, LLMException, Rows, Transfer
from tests.support.plans import joined

DESC = CacheDesc(4, (8, 16, 2, 8), DataType.DT_FLOAT16, kv_tensor_format="block token head dim")
PLAN = kvplan.plan(
    Transfer(Rows(DESC, [1, 2, 5]), Rows(DESC, [7, 0, 1]), num_tokens=40), local="dst"
)


def test_plans_of_one_or_several_parts_are_restored(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for plan in (PLAN, joined({"full": PLAN, "größe": PLAN})):
        plan.save(path)
        found = kvplan.load_plan(path)
        assert found == plan
        assert found.explain() == plan.explain()  # includes fields that equality ignores
        assert kvplan.load_plan(str(path)) == plan


def test_a_file_that_exists_is_replaced_but_a_folder_is_not(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("x" * 100_000)
    PLAN.save(path)
    assert kvplan.load_plan(path) == PLAN
    with pytest.raises(IsADirectoryError):
        PLAN.save(tmp_path)
    with pytest.raises(FileNotFoundError):
        PLAN.save(tmp_path / "missing" / "plan.json")


def test_errors_name_the_file_the_part_and_the_field(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    joined({"full": PLAN}).save(path)
    path.write_text(path.read_text().replace('"kind": "B2B"', '"kind": "D2D"'))
    with pytest.raises(
        LLMException, match=r"plan.json: document is not a plan: parts\[0\]: kind='D2D' must be"
    ):
        kvplan.load_plan(path)


def test_a_file_larger_than_any_plan_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.touch()
    os.truncate(path, (128 << 20) + 1)
    with pytest.raises(LLMException, match=r"plan\.json has more than 128 MiB"):
        kvplan.load_plan(path)
