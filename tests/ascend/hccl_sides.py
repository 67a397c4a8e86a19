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
    """Make sides, each on a device of its own; after the test nothing of them is left."""
    gc.collect()
    before = simulator.left()  # of a test that failed
    with ExitStack() as sides:

        def make(device_id: int, **options: Any) -> Side:
            side = Side(device_id, **options)
            sides.callback(side.close)
            return side

        yield make
    gc.collect()
    give_up = time.monotonic() + DEADLINE_S  # of what was renewed, its thread takes down the old
    while left := more(simulator.left(), before):
        assert time.monotonic() < give_up, left


def more(left: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What is left that was not there before."""
    return {kind: count for kind, count in left.items() if count > before.get(kind, 0)}


@pytest.fixture
def one(make_side: MakeSide) -> Side:
    return make_side(0)


@pytest.fixture
def two(make_side: MakeSide) -> Side:
    return make_side(1)


def error_of(call: Callable[..., object], *arguments: Any, **named: Any) -> LLMException:
    """The error that a call fails with, in whichever thread."""
    with pytest.raises(LLMException) as caught:
        call(*arguments, **named)
    return caught.value
