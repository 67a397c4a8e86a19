"""Tasks under asyncio: a thread waits, the event loop goes on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplan.execution.task import TransferTask


async def wait_in_thread(task: TransferTask) -> None:
    """Wait for `task` in a daemon thread of its own; cancelled, cancel the transfer.

    Raises:
        LLMException: as `TransferTask.wait`.
        RuntimeError: the process may have no more threads.
    """
    if task.done:
        task.wait()
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    Thread(target=_wait, args=(task, loop, ended), name="kvplan-await", daemon=True).start()
    try:
        await ended
    except asyncio.CancelledError:
        task.cancel()
        raise


def _wait(task: TransferTask, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    error: BaseException | None = None
    try:
        task.wait()
    except BaseException as raised:  # for whoever awaits: nobody sees it here
        error = raised
    with suppress(RuntimeError):  # the loop was closed meanwhile: nobody awaits any more
        loop.call_soon_threadsafe(_tell, ended, error)


def _tell(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():  # cancelled
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
