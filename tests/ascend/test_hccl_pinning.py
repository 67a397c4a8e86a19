"""Host memory that shares pages or is kept pinned by HCCL fails alone."""

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
        for side in sides:
            closing.callback(side.close)
        yield sides
    assert sim_log.calls("violation") == []


def pages(number: int) -> int:
    """Return the address of pages that exist until the process ends."""
    HELD.append(mmap.mmap(-1, number * PAGE))
    return int(np.frombuffer(HELD[-1], np.uint8).ctypes.data)


def test_registrations_that_share_pages_are_reached_in_parts(sides: tuple[Side, Side]) -> None:
    """HCCL maps whole pages. Each page belongs to the region of the first registration."""
    one, two = sides
    at = pages(4)
    first = one.transport.register((at + PAGE + 64, 100))
    both = one.transport.register((at + 64, 2 * PAGE))
    assert [region.nbytes for region in first.range.regions] == [PAGE]
    assert [(region.address - at, region.nbytes) for region in both.range.regions] == [
        (0, PAGE),
        (PAGE, PAGE),
        (2 * PAGE, PAGE),
    ]
    assert both.range.region_of(at + PAGE + 64, 200) is not None
    assert both.range.region_of(at + PAGE - 64, 200) is None
    link_both(one, two)


def test_memory_that_the_program_has_mapped_is_refused_alone(
    simulator: Controls, sides: tuple[Side, Side]
) -> None:
    """Otherwise HCCL would fail when the link is made, and all other memory with it."""
    one, two = sides
    at = pages(1)
    simulator.add_fault("aclrtHostRegister:1=507899")
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED) as error:
        one.transport.register((at + 64, 100))
    assert f"cannot map [{at:#x}, {at + PAGE:#x})" in str(error.value)
    assert "is mapped already" in str(error.value)
    link_both(one, two)


def test_memory_that_hccl_keeps_is_logged(
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
    # In the middle of the range that the end keeps pinned.
    middle = one.transport.register((at + 2 * PAGE + 64, 100))
    assert middle.range.region_of(at + 2 * PAGE + 64, 100) is not None
    one.transport.deregister(end)
    for link in link_both(one, two):
        link.check()
