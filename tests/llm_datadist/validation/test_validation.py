"""The measured cases of the official package, run on kvplan's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.llm_datadist.validation.count_rows import ROWS as COUNT_ROWS
from tests.llm_datadist.validation.defects import DEFECTS
from tests.llm_datadist.validation.environments import Environments
from tests.llm_datadist.validation.others import OTHERS
from tests.llm_datadist.validation.page import PAGE, render
from tests.llm_datadist.validation.row import Accepted, Raised, Row, observe
from tests.llm_datadist.validation.table import ROWS

MEASURED = Path(__file__).with_name("measured.txt").read_text().splitlines()
DIFFERENCES = [*DEFECTS, *OTHERS]


def outcome(row: Row, environments: Environments) -> Accepted | Raised:
    if not row.environment:
        return observe(row.call)
    return observe(partial(row.call, environments.get(row.environment)))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_outcome_of_a_measured_case(row: Row, environments: Environments) -> None:
    assert outcome(row, environments) == row.expected


@pytest.mark.parametrize("row", [case for each in DIFFERENCES for case in each.cases], ids=str)
def test_a_difference_outside_of_the_table(row: Row, environments: Environments) -> None:
    assert outcome(row, environments) == row.expected


@pytest.mark.parametrize("row", COUNT_ROWS, ids=str)
def test_each_operation_takes_any_number_of_tensors(row: Row, environments: Environments) -> None:
    assert outcome(row, environments) == row.expected


def test_no_measured_case_is_lost() -> None:
    assert [f"{row.case} | {row.official}" for row in ROWS] == MEASURED
    assert len(MEASURED) == len(set(MEASURED)) == 218


def test_a_row_differs_only_with_a_reason() -> None:
    differ = [row for row in ROWS if row.ours is not None]
    assert [row.case for row in differ if row.ours == row.official or not row.why] == []
    assert [row.case for row in ROWS if row.ours is None and row.why] == []


def test_every_difference_has_its_proof() -> None:
    assert len(DEFECTS) == 8
    assert [each.official for each in DIFFERENCES if not (each.cases or each.rows)] == []
    named = [case for each in DIFFERENCES for case in each.rows]
    assert sorted(named) == sorted(row.case for row in ROWS if row.ours is not None)


def test_the_page_of_differences_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.llm_datadist.validation"
