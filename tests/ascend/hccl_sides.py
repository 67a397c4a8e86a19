"""Fixtures of tests of the HCCL transport between two devices of this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvplan import LLMException
from tests.ascend.hccl_side import Side
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
    left = simulator.left()
    assert {kind: left[kind] for kind in left if left[kind] > before.get(kind, 0)} == {}


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
