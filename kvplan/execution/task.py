"""The handle of a transfer, and the error of one that failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_DENIED,
    KVN_DEVICE_MEMORY,
    KVN_FAILED,
    KVN_INVALID,
    KVN_NO_DEVICE_MEMORY,
    KVN_NO_MEMORY,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_PENDING,
    KVN_REVOKED,
    KVN_SUSPECT_REMOTE,
    KVN_TIMEOUT,
    KVN_UNMAPPED,
    KVN_UNSUPPORTED,
    NativeError,
)
from kvnative._signals import Mutex
from kvplan.execution.awaitable import NativeTask
from kvplan.execution.completion import completion_thread, tracker
from kvplan.execution.compute_events import no_accelerator
from kvplan.execution.memory import HostMemory, revocation
from kvplan.planning.contents import source_layers_text
from kvplan.planning.texts import nbytes_text
from kvplan.status import LLMException, LLMStatusCode, message_of, without_frames
from kvplan.validation import check_timeout, check_type, shown

if TYPE_CHECKING:
    from kvnative._layered import LayeredTask
    from kvnative._report import Report
    from kvnative._task import Task
    from kvplan.execution.compute_events import ComputeStream, StreamOf
    from kvplan.execution.memory import TensorMemory
    from kvplan.planning.part import Part
    from kvplan.planning.plan import Plan

_ABANDONED = {KVN_TIMEOUT, KVN_CANCELLED, KVN_REVOKED}
_LOSING = {KVN_UNMAPPED, KVN_PEER_GONE, KVN_FAILED}
_FAILED = LLMStatusCode.LLM_FAILED
_CODES = {
    KVN_TIMEOUT: LLMStatusCode.LLM_TIMEOUT,
    KVN_CANCELLED: LLMStatusCode.LLM_CANCELLED,
    KVN_INVALID: LLMStatusCode.LLM_PARAM_INVALID,
    KVN_NO_MEMORY: LLMStatusCode.LLM_OUT_OF_MEMORY,
    KVN_PEER_GONE: LLMStatusCode.LLM_LINK_FAILED,
    KVN_DENIED: LLMStatusCode.LLM_LINK_FAILED,
    KVN_UNMAPPED: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    KVN_UNSUPPORTED: LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    KVN_FAILED: LLMStatusCode.LLM_FAILED,
    KVN_DEVICE_MEMORY: LLMStatusCode.LLM_DEVICE_MEM_ERROR,
    KVN_SUSPECT_REMOTE: LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR,
    KVN_NO_DEVICE_MEMORY: LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
    KVN_REVOKED: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
}


def status_code_of(status: int | None) -> LLMStatusCode:
    """Return the code of the interface for a KVN_ status; LLM_FAILED for anything else."""
    return _FAILED if status is None else _CODES.get(status, _FAILED)


def native_error(error: Exception, what: str) -> LLMException:
    """Return an error of the native layer as one of the interface; `what` begins its message."""
    status = getattr(error, "status", None)
    return LLMException(f"{what}: {error}", status_code=status_code_of(status))


@contextmanager
def native_errors(what: str) -> Iterator[None]:
    """Raise errors of the native layer inside the block as `native_error` with `what`."""
    try:
        yield
    except NativeError as error:
        raise native_error(error, what) from error


class StoppedError(LLMException):
    """The error of a transfer that was stopped because another source of its gather failed."""

    def __init__(
        self, text: str = "stopped because another source of the gather failed", **fields: Any
    ) -> None:
        super().__init__(text, **fields)


class TransferTask(NativeTask):
    """The handle of a submitted plan.

    The plan and both memories live until the outcome, even if the handle does not. Dropping the
    handle does not stop the transfer; `cancel` does. Any thread may call the methods. A forked
    child gets a NativeError unless the outcome was found before the fork.

    Awaiting a task under asyncio is a `wait` that does not block the event loop; it returns None or
    raises. A cancelled await cancels the transfer, and ends when no byte is touched.

    Args:
        on_outcome: called with the error or None, by the thread that finds the outcome first,
            before any caller gets it. An LLMException after a success becomes the outcome. Called
            again, with an error, only if another exception, such as an interrupt, ended the first
            call, perhaps before its first line.
        stream_of: returns the handle of a stream; None: the engine has no accelerator.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task | LayeredTask,
        memories: tuple[TensorMemory, TensorMemory],
        on_outcome: Callable[[LLMException | None], None] | None = None,
        stream_of: StreamOf | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.native = task
        self._memories: tuple[TensorMemory, TensorMemory] | None = memories  # until the outcome
        self._on_outcome = on_outcome
        self._stream_of = stream_of
        self._concluded = False
        self._error: LLMException | None = None
        self._lost: LLMException | None = None  # the failed check of a memory during the transfer
        self._is_cancelled = False
        self._reason: LLMException | None = None  # of the first `cancel`
        self._mutex = Mutex()  # re-entrant: a signal handler may wait for the task too

    @property
    def done(self) -> bool:
        """True if the transfer has an outcome, good or bad; never blocks."""
        return self.native.done

    @property
    def settled(self) -> bool:
        """See `AwaitableTask.settled`. Settles a task that is done and not `settles_aside`."""
        if not self._is_settled and not self.settles_aside and self.done:
            with suppress(LLMException):  # `wait` raises it again
                self._conclude()
        return self._is_settled

    def wait_done(self, timeout_ms: float) -> bool:
        """Wait at most `timeout_ms`, and return `done`. Does not raise the outcome."""
        return self.native.wait(timeout_ms, False).status != KVN_PENDING

    def wait(self, timeout_ms: float | None = None, *, stop: bool = True) -> None:
        """Wait until every byte has arrived.

        An interrupt (Ctrl-C) ends the call, not the transfer. During a verification or notification
        after the last byte, the transfer fails: LLM_FAILED, "interrupted after the last byte".

        Args:
            timeout_ms: milliseconds, >= 0; None waits forever.
            stop: True: a timeout stops the transfer, unless every byte has arrived. False: the
                transfer goes on. While the transfer goes on, `wait` can be called again.

        Raises:
            NativeError: in a forked child, unless the outcome was found before.
            TypeError, ValueError: timeout_ms is not a number, < 0 or NaN.
            LLMException: LLM_TIMEOUT after the timeout; otherwise the status of the failure.
                `unconfirmed` lists the descriptors that may not have arrived; `origin` is the
                place of the first failure.
        """
        if timeout_ms is None and self._is_settled and self._error is None:
            return
        if timeout_ms is not None and not (type(timeout_ms) is float and timeout_ms >= 0):
            check_timeout(timeout_ms)
        if stop is not True:
            check_type("stop", stop, bool)
        end = perf_counter() + float(timeout_ms or 0) / 1000
        report = self.native.wait(timeout_ms, stop)
        is_late = timeout_ms is not None and report.status == KVN_OK and not self._settles_by(end)
        if is_late or report.status == KVN_PENDING:
            raise self._goes_on(timeout_ms, report)
        self._conclude()

    def _goes_on(self, timeout_ms: float | None, report: Report) -> LLMException:
        plan = self.plan
        return LLMException(
            f"{plan.operation} {plan.kind}: {timeout_ms} ms passed when {report.bytes_done} of "
            f"{plan.nbytes} bytes were moved{self._missing()}; the transfer goes on",
            status_code=LLMStatusCode.LLM_TIMEOUT,
            unconfirmed=report.unconfirmed,
        )

    def _missing(self) -> str:
        """Return the text of messages about layers that were never ready; empty without layers."""
        return ""

    def block_stream(self, stream: ComputeStream) -> None:
        """Make `stream` wait for the transfer's copies before work that is issued to it later.

        The device keeps that order. The call returns when the copies were issued to the device,
        without waiting for them. Transfers that were submitted earlier on the same path come first.
        Afterwards issue the work that reads the destination, or writes the source.

        A transfer that is over, or that ends early, does not hold the stream: later work then runs
        with the bytes that have arrived. So `wait` before you use a result. Once the device keeps
        the order, the stream also waits for the event that the transfer comes `after`.

        Args:
            stream: a stream of the model's compute, on the engine's device; see `ComputeStream`. It
                must not be captured into a graph.

        Raises:
            NativeError: in a forked child, because the task belongs to its parent.
            TypeError: not a stream, such as an event or a handle.
            LLMException: LLM_FEATURE_NOT_ENABLED: no stream of a device moves these bytes (`tcp`,
                `ucx` or the host does); the host still waits for the event `after`; the engine has
                no accelerator, or an Ascend device. Wait on the host then.
                LLM_PARAM_INVALID: a stream of another accelerator, or one that is captured.
                Otherwise an error of the accelerator. After any of these the stream is not held,
                or only by a part of the copies.
        """
        if self._stream_of is None:
            raise no_accelerator("stream", stream)
        handle = self._stream_of("stream", stream)
        refusal = cast("Task", self.native).block_stream(handle)  # a LayerTask refuses itself
        if refusal is not None:
            raise LLMException(
                f"{self.plan.operation} {self.plan.kind}: stream={shown(stream)}: "
                f"{refusal.message}",
                status_code=status_code_of(refusal.status),
            )

    def _follow(self) -> None:
        if not self.is_followed:
            completion_thread()  # first, since it fails without a free thread
            self._track()

    def _track(self) -> None:
        tracker().track(self)

    def cancel(self, reason: LLMException | None = None) -> None:
        """Stop the transfer; after this call no byte is touched.

        A finished transfer keeps its outcome. Waiting for a cancelled one raises LLM_CANCELLED.

        Args:
            reason: message and status to raise and log instead. Only the first call counts, with
                or without a reason.
        """
        if not self._is_cancelled:
            self._is_cancelled = True
            self._reason = reason
        self.native.cancel()

    def _conclude(self) -> None:
        if os.getpid() == self._pid:
            try:
                self._find_outcome()
            finally:
                if self._concluded:
                    self._note_settled()
        elif not self._concluded:
            raise NativeError(
                f"the task belongs to process {self._pid}, which had not found its outcome when "
                f"process {os.getpid()} was forked from it"
            )
        if self._error is not None:
            raise without_frames(self._error)

    def _find_outcome(self) -> None:
        with self._mutex:
            if self._concluded:
                return
            report, memories = self.native.report, self._memories
            assert memories is not None, "they are dropped with the outcome"
            lost = self._lost
            if lost is None and report.status == KVN_OK:
                try:
                    for memory in memories:
                        if type(memory) is not HostMemory or not memory.held:
                            memory.check()
                except LLMException as error:
                    lost = error.with_traceback(None)
            if lost is not None or report.status != KVN_OK:
                missing = "" if report.status == KVN_OK else self._missing()
                self._error = failure(self.plan, report, memories, missing, lost, self._reason)
            # Only now: an interrupt during the checks must not leave a success behind.
            self._concluded, self._memories = True, None
            on_outcome, self._on_outcome = self._on_outcome, None
            if on_outcome is None:
                return
            try:
                on_outcome(self._error)
            except LLMException as error:
                self._error = self._error or without_frames(error.with_traceback(None))
            except BaseException:
                self._error = self._error or LLMException(
                    f"{self.plan.operation} {self.plan.kind}: interrupted after the last byte"
                )
                with suppress(LLMException):
                    on_outcome(self._error)
                raise

    def explain(self) -> str:
        """Return the confirmed descriptors of each layer, and the failure; in flight, one line."""
        if not self.native.done:
            held = getattr(self.native, "held", False)  # False for layers: each has its own event
            behind = ", waiting for its event" if held else ""
            return f"{self.plan!r} in flight{behind}"
        error = None
        try:
            self._conclude()
        except LLMException as raised:
            error = raised
        spans = error.unconfirmed if error else ()
        lines = []
        for part, first, *_ in self.plan.placed():
            lines += [f"part {part.label}"] if part.label else []
            lines += _by_layer(part, first, spans)
        lines.append(str(error) if error else LLMStatusCode.LLM_SUCCESS.name)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self.done else 'in flight'}: {self.plan!r}>"


def _by_layer(part: Part, first: int, unconfirmed: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield a line for each layer: how many of its descriptors, from `first` on, are confirmed."""
    for index, layer in enumerate(part.layers):
        last = first + len(layer.tensors) * part.segments.num_runs
        missing = sum(max(0, min(last, b) - max(first, a)) for a, b in unconfirmed)
        size = nbytes_text(len(layer.tensors) * part.nbytes_per_tensor)
        name = source_layers_text(part, slice(index, index + 1))
        yield f"{name}  {last - first - missing}/{last - first} desc  {size}"
        first = last


def failure(
    plan: Plan,
    report: Report,
    memories: tuple[TensorMemory, TensorMemory],
    missing: str = "",
    lost: LLMException | None = None,
    reason: LLMException | None = None,
) -> LLMException:
    """Return the error of a transfer that is not reported as complete, or that lost a memory.

    `missing` names the layers that a stopped transfer waited for; `lost` is the failed check of a
    memory; `reason` is that of `cancel`.
    """
    if lost is None:
        # If the owner of a side, or the way to it, is gone, that is the reason.
        cause = _lost(memories) if report.status in _LOSING else None
        if report.status == KVN_CANCELLED:
            cause = cause or reason
        elif report.status == KVN_REVOKED:
            cause = revocation(memories)
        return _failure(plan, report, cause, missing if report.status in _ABANDONED else "")
    # The bytes that moved may be of other memory than was registered.
    unconfirmed = ((0, plan.num_descriptors),)
    return LLMException(
        f"{plan.operation} {plan.kind}: {message_of(lost)}; no descriptor is confirmed"
        f"{plan.missing_text(unconfirmed)}",
        status_code=lost.status_code,
        unconfirmed=unconfirmed,
    )


def _lost(memories: tuple[TensorMemory, TensorMemory]) -> LLMException | None:
    try:
        for memory in memories:
            memory.check()
    except LLMException as error:
        return error.with_traceback(None)
    return None


def _failure(plan: Plan, report: Report, cause: LLMException | None, missing: str) -> LLMException:
    """Return the error of a report; `cause` is the loss of a memory or the reason of `cancel`."""
    origin = None if report.failed is None else plan.origin(report.failed)
    open_descriptors = sum(last - first for first, last in report.unconfirmed)
    words = cause.args[0] if cause and cause.args else report.message
    parts = [f"{plan.operation} {plan.kind}: {words}{missing}"]
    if report.failed is not None:
        parts.append(f"descriptor {report.failed} ({origin})")
    if cause is not None or report.status not in _ABANDONED:  # otherwise the message has the number
        parts.append(f"{open_descriptors} of {plan.num_descriptors} descriptors are not confirmed")
    kind = StoppedError if isinstance(cause, StoppedError) else LLMException
    return kind(
        "; ".join(parts) + plan.missing_text(report.unconfirmed),
        status_code=cause.status_code if cause else status_code_of(report.status),
        origin=origin,
        unconfirmed=report.unconfirmed,
    )
