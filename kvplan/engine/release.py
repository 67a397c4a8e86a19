"""Engines that nobody finalized are released all the same: when dropped, and at exit."""

from __future__ import annotations

import atexit
import weakref
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.engine.engine import Engine

_open: set[Engine] = set()
"""Held here, so that a forked child never collects what is its parent's."""


def released_with(owner: object, engine: Engine) -> None:
    """Close `engine` when `owner` is collected, or the process ends."""
    _open.add(engine)
    # Not the engine itself: its owner may live on for long after it was closed.
    weakref.finalize(owner, _release_soon, weakref.ref(engine)).atexit = False


def _release_soon(held: weakref.ref[Engine]) -> None:
    # The collector runs in any thread, also in one that `close` would wait for, and holding locks.
    engine = held()
    if not (engine is None or engine.inherited or engine.in_flight.closed):
        with suppress(RuntimeError):  # no more threads: then at exit
            Thread(target=release, args=(engine,), name="kvplan-release", daemon=True).start()


def release(engine: Engine) -> None:
    """Close `engine`, and do not hold it any more."""
    try:
        engine.close()
    finally:
        _open.discard(engine)


@atexit.register
def _release_all() -> None:
    for engine in tuple(_open):
        release(engine)


def finalized() -> LLMException:
    """The refusal of a call after `finalize`."""
    return LLMException(
        "the engine is finalized; initialize it again",
        status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
    )


def stopped() -> LLMException:
    """Why a transfer ended that was under way when `finalize` was called."""
    return LLMException("stopped, as the engine was finalized")
