"""Submitted transfers come to their outcome whether or not somebody waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from kvnative._signals import Mutex, signals_deferred
from kvplan.engine.pollable_queue import PollableQueue
from kvplan.execution.completion import Tracker
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.engine.gather_task import GatherTask
    from kvplan.execution import TransferTask

_Ended: TypeAlias = "TransferTask | GatherTask"

MAX_UNTAKEN: Final = 65536
"""Tasks that have ended and that nobody has taken; further ones are not submitted."""


class Completions(PollableQueue["_Ended"]):
    """The submitted tasks of one engine that have ended, in that order; `wait` of each says how.

    While 65536 have ended and nobody has taken them, no other can be submitted. A task here keeps
    what it refers to, its plan above all, but no block of a cache.
    """


class EngineTracker(Tracker):
    """The tracker of one engine, and the queue where its tasks are reported if a program asks."""

    def __init__(self) -> None:
        super().__init__()
        self._mutex = Mutex()
        self._completions: Completions | None = None

    def open_completions(self) -> Completions:
        """Return where tasks are reported that are submitted from now on."""
        with signals_deferred, self._mutex:
            if self._completions is None:
                self._completions = Completions()
            return self._completions

    def report(self) -> Completions | None:
        """Return where a task is reported that is about to be submitted; None: nobody has asked.

        Raises:
            LLMException: LLM_LINK_BUSY: too many that have ended were not taken.
        """
        if (completions := self._completions) is not None and len(completions) >= MAX_UNTAKEN:
            raise LLMException(
                f"{len(completions)} tasks have ended and nobody has taken them from "
                f"completions(); at most {MAX_UNTAKEN} can",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
            )
        return completions

    def close(self, timeout_s: float) -> None:
        """Wait until all tasks are settled, or `timeout_s` seconds; nothing is reported then."""
        super().close(timeout_s)
        if self._completions is not None:
            self._completions.close()
