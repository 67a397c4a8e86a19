"""Figures that a worker counts: their sums and their summary."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import LLMException, LLMStatusCode
from kvplan.serving import PullResult
from kvplan.vllm.step import Figures, reason_of

MISSING = LLMException("gone", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


def fetched(move_ms: float, error: Exception | None = None) -> PullResult:
    return PullResult("r", error, (1, 2), 0, 64, 1 << 20, wait_ms=3.0, move_ms=move_ms)


def test_figures_without_a_count_are_empty() -> None:
    assert Figures().is_empty
    figures = Figures()
    figures.count("freed", 0)
    assert figures.is_empty
    figures.count("freed", 1)
    assert not figures.is_empty


def test_figures_of_workers_are_added_to_one_summary() -> None:
    first, second = Figures(), Figures()
    first.ended(fetched(2.0))
    first.ended(fetched(4.0))
    first.count("offered", 3)
    second.ended(fetched(9.0))
    second.ended(fetched(0.0, MISSING))
    second.count("expired", 1)
    total = Figures(json.loads(json.dumps(first.data)))  # as the figures go to another process
    total.add(second.data)
    assert total.summary() == {
        "Fetched requests": 3,
        "Fetched tokens": 192,
        "Pushed tokens": 0,
        "Fetched MiB": 3.0,
        "Median transfer time (ms)": 4.0,
        "Longest transfer time (ms)": 9.0,
        "Median wait (ms)": 3.0,
        "Failed requests": 1,
        "Offered requests": 3,
        "Freed requests": 0,
        "Expired requests": 1,
    }
    assert total.data["failed"] == {"kv_cache_not_exist": 1}
    assert first.summary()["Fetched requests"] == 2  # `both` has only a copy


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([None, MISSING, ValueError("x")]))
    | st.tuples(st.integers(0, 2), st.sampled_from(["offered", "freed", "expired", "pushed"]))
)


@given(EVENTS, st.permutations(range(3)))
def test_the_sum_does_not_depend_on_the_parts(
    events: list[tuple[int, Any]], order: list[int]
) -> None:
    whole, parts = Figures(), [Figures() for _ in range(3)]
    for number, (worker, event) in enumerate(events):
        for figures in (whole, parts[worker]):
            if isinstance(event, str):
                figures.count(event, number)
            else:
                figures.ended(fetched(float(number), event))
    added = Figures()
    for worker in order:
        added.add(parts[worker].data)
    assert added.summary() == whole.summary()
    assert added.data["failed"] == whole.data["failed"]


def test_figures_that_were_added_stay_as_they_are() -> None:
    """Their sum has lists of its own."""
    period = Figures()
    period.ended(fetched(1.0, None))
    period.ended(fetched(1.0, MISSING))
    before = deepcopy(period.data)
    whole = Figures(period.data)
    whole.add(period.data)
    assert period.data == before
    assert len(whole.data["tokens"]) == 2


@pytest.mark.parametrize(
    ("error", "reason"), [(MISSING, "kv_cache_not_exist"), (ValueError("x"), "ValueError")]
)
def test_a_reason_is_a_short_name(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason
