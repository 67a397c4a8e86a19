"""Fixtures of tests of the HCCL transport between two devices of this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvplan import LLMException
from tests.ascend.hccl_side import DEADLINE_S, Side
from tests.ascend.simulator import Controls

MakeSide = Callable[..., Side]


@pytest.fixture
def make_side(simulator: Controls) -> Iterator[MakeSide]:
    """A function that makes sides on a device each; nothing may be left after the test."""
    gc.collect()
    before = simulator.left()  # what an earlier failed test has left
    with ExitStack() as sides:

        def make(device_id: int, **options: Any) -> Side:
            side = Side(device_id, **options)
            sides.callback(side.close)
            return side

        yield make
    gc.collect()
    give_up = time.monotonic() + DEADLINE_S  # a background thread closes renewed connections
    while left := leaked(simulator.left(), before):
        assert time.monotonic() < give_up, left


def leaked(left: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Return the resources that did not exist before."""
    return {kind: count for kind, count in left.items() if count > before.get(kind, 0)}


@pytest.fixture
def one(make_side: MakeSide) -> Side:
    return make_side(0)


@pytest.fixture
def two(make_side: MakeSide) -> Side:
    return make_side(1)


def error_of(call: Callable[..., object], *arguments: Any, **named: Any) -> LLMException:
    """Return the error of a call, from whichever thread."""
    with pytest.raises(LLMException) as caught:
        call(*arguments, **named)
    return caught.value
