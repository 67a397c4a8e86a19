"""A thread that asks for layer after layer, and tells each destination when one is ready."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from time import monotonic
from traceback import format_exc
from typing import TYPE_CHECKING

from kvplan.llm_datadist.utils import log
from kvplan.status import LLMException, LLMStatusCode, invalid

if TYPE_CHECKING:
    from kvplan.execution import LayerTask
    from kvplan.llm_datadist.v2.llm_types import LayerSynchronizer


class Destination:
    """One transfer on its way, or the refusal of one.

    Args:
        name: for the log.
        task: None: it could not be begun.
        refusal: why not.
    """

    def __init__(
        self,
        name: str,
        task: LayerTask | None,
        refusal: LLMStatusCode = LLMStatusCode.LLM_FAILED,
    ) -> None:
        self._name = name
        self._task = task
        self._refusal = refusal
        self._layers: Sequence[int] = () if task is None else task.layers
        self._ready_at = monotonic()  # seconds: of the last layer

    @property
    def layers(self) -> Sequence[int]:
        """Source layers that it needs."""
        return self._layers

    @property
    def ended(self) -> bool:
        """Whether there is an outcome."""
        return self._task is None or self._task.done

    def needs(self, layer: int) -> bool:
        """Whether `layer` is one of its own, and it has no outcome yet."""
        return layer in self._layers and not self.ended

    def ready(self, layer: int) -> None:
        """`layer` holds its final values."""
        if self._task is not None:
            self._ready_at = monotonic()
            self._task.ready(layer)

    def give_up(self, reason: LLMException) -> None:
        """Stop it, if it has no outcome yet: it has failed then as `reason` says.

        On return no byte moves any more.
        """
        if self._task is not None:
            self._task.cancel(reason)

    def finish(self, timeout_ms: float) -> None:
        """Stop it if it has no outcome `timeout_ms` after its last layer was ready."""
        if self._task is not None:
            left_ms = timeout_ms - (monotonic() - self._ready_at) * 1000
            try:
                self._task.wait(max(0.0, left_ms))
            except LLMException as error:
                log.error("%s: %s", self._name, error)

    def status(self, timeout_s: float | None) -> LLMStatusCode | None:
        """Wait up to `timeout_s` seconds for the outcome, and return it; None: it goes on."""
        task = self._task
        if task is None:
            return self._refusal
        try:
            task.wait(None if timeout_s is None else timeout_s * 1000, stop=False)
        except LLMException:
            if not task.done:
                return None
        try:
            task.wait()  # it has ended: as what?
        except LLMException as error:
            return error.status_code
        return LLMStatusCode.LLM_SUCCESS


class LayerFeed:
    """The destinations of one call, and the thread that feeds them layers.

    Args:
        destinations: in the order of the configs.
        synchronizer: tells when a layer is ready; called for each that is needed, ascending, until
            it says no.
        finish_ms: milliseconds that a destination may take after its last layer.
        running_status: as of `AsyncTransfer`.
    """

    def __init__(
        self,
        destinations: Sequence[Destination],
        synchronizer: LayerSynchronizer,
        finish_ms: float,
        running_status: LLMStatusCode = LLMStatusCode.LLM_TIMEOUT,
    ) -> None:
        self._destinations = tuple(destinations)
        self._synchronizer = synchronizer
        self._finish_ms = finish_ms
        self.running_status = running_status

    def start(self) -> None:
        """Begin to ask for layers.

        Raises:
            RuntimeError: the process can have no more threads; nothing moves then.
        """
        # A daemon: a synchronizer may never return, and the process must end all the same.
        thread = Thread(target=self._run, name="kvplan-layers", daemon=True)
        try:
            thread.start()
        except BaseException:
            self._give_up(LLMException("the process can have no more threads"))
            raise

    def statuses(self, timeout_s: float | None) -> list[LLMStatusCode | None]:
        """Wait up to `timeout_s` seconds; return what became of each (None: it goes on)."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        return [
            it.status(None if deadline is None else max(0.0, deadline - monotonic()))
            for it in self._destinations
        ]

    def _run(self) -> None:
        try:
            self._feed()
            for it in self._destinations:
                it.finish(self._finish_ms)
        finally:
            # Nobody would end it any more.
            self._give_up(LLMException("the thread that asks for layers has ended"))

    def _feed(self) -> None:
        for layer in sorted({layer for it in self._destinations for layer in it.layers}):
            waiting = [it for it in self._destinations if it.needs(layer)]
            if not waiting:
                continue
            failure = self._await(layer)
            if failure is not None:
                for it in self._destinations:
                    if it.layers and it.layers[-1] >= layer:
                        it.give_up(failure)
                return
            for it in waiting:
                it.ready(layer)

    def _await(self, layer: int) -> LLMException | None:
        """Ask for a layer; return why it does not come, None: it is there."""
        called = f"synchronize_layer({layer})"
        try:
            if self._synchronizer.synchronize_layer(layer, None):
                return None
        except BaseException as error:  # also SystemExit: the thread is ours
            log.error("%s has raised:\n%s", called, format_exc())
            return LLMException(f"{called} has raised {type(error).__name__}")
        log.error("%s has returned False", called)
        return invalid(f"{called} has returned False")

    def _give_up(self, reason: LLMException) -> None:
        for it in self._destinations:
            it.give_up(reason)
