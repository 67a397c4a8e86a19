"""Native outcomes as exceptions of the interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnative import _executor as native
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.execution.memory import TensorMemory
    from kvplan.planning.plan import Plan

_ABANDONED = {native.KVN_TIMEOUT, native.KVN_CANCELLED}
_LOSING = {native.KVN_UNMAPPED, native.KVN_PEER_GONE, native.KVN_FAILED}
_FAILED = LLMStatusCode.LLM_FAILED
_CODES = {
    native.KVN_TIMEOUT: LLMStatusCode.LLM_TIMEOUT,
    native.KVN_CANCELLED: LLMStatusCode.LLM_FAILED,
    native.KVN_INVALID: LLMStatusCode.LLM_PARAM_INVALID,
    native.KVN_NO_MEMORY: LLMStatusCode.LLM_OUT_OF_MEMORY,
    native.KVN_PEER_GONE: LLMStatusCode.LLM_LINK_FAILED,
    native.KVN_DENIED: LLMStatusCode.LLM_LINK_FAILED,
    native.KVN_UNMAPPED: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    native.KVN_UNSUPPORTED: LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    native.KVN_FAILED: LLMStatusCode.LLM_FAILED,
    native.KVN_DEVICE_MEMORY: LLMStatusCode.LLM_DEVICE_MEM_ERROR,
    native.KVN_SUSPECT_REMOTE: LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR,
    native.KVN_NO_DEVICE_MEMORY: LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
}


def status_code_of(status: int | None) -> LLMStatusCode:
    """The code of the interface for a KVN_ status; of what has none, or is none: LLM_FAILED."""
    return _FAILED if status is None else _CODES.get(status, _FAILED)


def outcome(
    plan: Plan,
    report: native.Report,
    memories: tuple[TensorMemory, TensorMemory],
    missing: str = "",
    lost: LLMException | None = None,
    reason: LLMException | None = None,
) -> LLMException | None:
    """Return what went wrong, or None if every byte arrived where and whence the plan says.

    Args:
        missing: what a transfer that was given up still waited for besides the copying.
        lost: the failed check of a memory that the transfer was given up for.
        reason: what else it was cancelled for, if it was.
    """
    if lost is None:
        moved = report.status == native.KVN_OK
        # What failed may have failed because a side's owner, or the way to it, has gone: then that
        # is the reason.
        lost = _lost(memories) if moved or report.status in _LOSING else None
        if not moved:
            if report.status == native.KVN_CANCELLED:
                lost = lost or reason
            return _failure(plan, report, lost, missing if report.status in _ABANDONED else "")
    if lost is None:
        return None
    # What was copied went through, but to or from what is not what was registered.
    return LLMException(
        f"{plan.operation} {plan.kind}: {lost.args[0]}; no descriptor is confirmed",
        status_code=lost.status_code,
        unconfirmed=((0, plan.num_descriptors),),
    )


def _lost(memories: tuple[TensorMemory, TensorMemory]) -> LLMException | None:
    try:
        for memory in memories:
            memory.check()
    except LLMException as error:
        return error
    return None


def _failure(
    plan: Plan, report: native.Report, cause: LLMException | None, missing: str
) -> LLMException:
    """What a report says; `cause` is why the memory went, or why it was cancelled, if known."""
    origin = None if report.failed is None else plan.origin(report.failed)
    open_descriptors = sum(last - first for first, last in report.unconfirmed)
    told = cause.args[0] if cause and cause.args else report.message
    parts = [f"{plan.operation} {plan.kind}: {told}{missing}"]
    if report.failed is not None:
        parts.append(f"descriptor {report.failed} ({origin})")
    if cause is not None or report.status not in _ABANDONED:  # that report tells it itself
        parts.append(f"{open_descriptors} of {plan.num_descriptors} descriptors are not confirmed")
    return LLMException(
        "; ".join(parts),
        status_code=cause.status_code if cause else status_code_of(report.status),
        origin=origin,
        unconfirmed=report.unconfirmed,
    )
