"""The device that a thread of the program has set current."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvplan.device.choice import current_device, open_accelerator
from tests.ascend.simulator import Controls
from tests.device.compute import compute_on


@pytest.mark.parametrize("number", [0, 2])
def test_it_is_found_in_its_thread_if_that_kind_is_asked_for(
    simulator: Controls, number: int
) -> None:
    kind = simulator.accelerator
    choices = "auto", kind, "none", "cuda" if kind == "ascend" else "ascend"
    device = open_accelerator(kind, 3)
    assert device is not None
    compute = compute_on(simulator, number)
    try:
        assert [current_device(choice) for choice in choices] == [number, number, None, None]
        with ThreadPoolExecutor(1) as thread:
            assert [*thread.map(current_device, choices)] == [None] * 4
    finally:
        compute.close()
        device.close()
