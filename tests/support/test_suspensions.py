"""Suspensions: coroutines that are counted behave as those that are not."""

from __future__ import annotations

import asyncio

from kvplan.control.loop import ControlLoop
from tests.support.suspensions import Suspensions


def test_a_task_that_is_cancelled_before_it_begins_leaves_no_coroutine_unawaited() -> None:
    async def never() -> None:
        raise AssertionError

    async def cancel_at_once() -> bool:
        task = asyncio.get_running_loop().create_task(never())
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    control = ControlLoop()
    control.start()
    try:
        with Suspensions(control, 1000, lambda: None):
            assert control.run(cancel_at_once())
    finally:
        control.stop()
