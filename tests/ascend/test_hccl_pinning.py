"""Host memory: what shares pages is refused by itself; what HCCL keeps stops nobody."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvnative._backend import NativeError
from kvplan import LLMStatusCode
from kvplan.transport.hccl.regions import HeldRegion
from tests.ascend.hccl_side import Side, link_both
from tests.ascend.simulator import Controls, Log
from tests.support.refusals import refused

PAGE = mmap.PAGESIZE
HELD: list[mmap.mmap] = []


@pytest.fixture
def sides(simulator: Controls, sim_log: Log) -> Iterator[tuple[Side, Side]]:
    with ExitStack() as closing:
        sides = Side(0), Side(1)
        for it in sides:
            closing.callback(it.close)
        yield sides
    assert sim_log.calls("violation") == []


def pages(number: int) -> int:
    """The address of so many pages, which stay as long as the process."""
    HELD.append(mmap.mmap(-1, number * PAGE))
    return int(np.frombuffer(HELD[-1], np.uint8).ctypes.data)


def registration_error(side: Side, start: int, nbytes: int) -> str:
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED) as caught:
        side.transport.register((start, nbytes))
    return str(caught.value)


def test_what_goes_beyond_a_page_that_is_pinned_is_refused_and_links_are_made(
    sides: tuple[Side, Side],
) -> None:
    one, two = sides
    at = pages(4)
    one.transport.register((at + PAGE + 64, 100))
    for start, nbytes in ((64, PAGE), (PAGE + 1000, PAGE), (64, 3 * PAGE)):
        assert "shares a page with other memory" in registration_error(one, at + start, nbytes)
    link_both(one, two)


def test_what_hccl_does_not_take_back_is_logged(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(held: HeldRegion) -> None:
        close(held)
        raise NativeError("HcclDeregisterGlobalMem: 4 (INTERNAL)")

    close = HeldRegion.close
    registration = sides[0].transport.register((pages(1), PAGE))
    monkeypatch.setattr(HeldRegion, "close", refuse)
    sides[0].transport.deregister(registration)
    assert "event=hccl_keeps device=0 reason=HcclDeregisterGlobalMem: 4" in caplog.text


def test_memory_in_a_page_that_is_pinned_shares_the_pin(sides: tuple[Side, Side]) -> None:
    one, two = sides
    at = pages(5)
    whole = one.transport.register((at + 64, 4 * PAGE))
    end = one.transport.register((at + 4 * PAGE + 64, 100))
    one.transport.deregister(whole)
    one.transport.register((at + 2 * PAGE + 64, 100))  # in the middle of what the end keeps pinned
    one.transport.deregister(end)
    link_both(one, two)
