"""What a worker counts, and how that is added up and said."""

from __future__ import annotations

import json
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


def test_nothing_is_empty() -> None:
    assert Figures().is_empty
    figures = Figures()
    figures.count("freed", 0)
    assert figures.is_empty
    figures.count("freed", 1)
    assert not figures.is_empty


def test_workers_are_added_up_and_said_in_one_line() -> None:
    one, two = Figures(), Figures()
    one.ended(fetched(2.0))
    one.ended(fetched(4.0))
    one.count("offered", 3)
    two.ended(fetched(9.0))
    two.ended(fetched(0.0, MISSING))
    two.count("expired", 1)
    both = Figures(json.loads(json.dumps(one.data)))  # as it goes to another process
    both.add(two.data)
    assert both.summary() == {
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
    assert both.data["failed"] == {"kv_cache_not_exist": 1}
    assert one.summary()["Fetched requests"] == 2  # it is another one's


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([None, MISSING, ValueError("x")]))
    | st.tuples(st.integers(0, 2), st.sampled_from(["offered", "freed", "expired", "pushed"]))
)


@given(EVENTS, st.permutations(range(3)))
def test_in_whatever_parts_it_was_counted_the_sum_is_the_same(
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


@pytest.mark.parametrize(
    ("error", "reason"), [(MISSING, "kv_cache_not_exist"), (ValueError("x"), "ValueError")]
)
def test_a_reason_is_a_short_name(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason
