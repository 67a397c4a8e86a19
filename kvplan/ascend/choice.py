"""Whether this process has an accelerator, and which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvplan.logs import Log
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.ascend.device import AscendDevice

ACCELERATORS: Final = ("auto", "none", "ascend")
"""What can be asked for."""

_LOG = Log("kvplan")


def open_accelerator(choice: str, device_id: int) -> AscendDevice | None:
    """Return the device to use; close it in the end.

    Args:
        choice: one of `ACCELERATORS`. "auto": the device where there is one; else none, which is
            logged with its reason.
        device_id: its logical number.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: "ascend" was asked for, and why it cannot be.
    """
    if choice == "none":
        return None
    from kvplan.ascend.device import AscendDevice

    try:
        return AscendDevice(device_id)
    except LLMException as error:
        if choice != "auto":
            raise LLMException(
                f"accelerator={choice!r}: {error.args[0]}", status_code=error.status_code
            ) from error
        _LOG.info("accelerator=auto: caches with placement=DEVICE are in host memory: %s", error)
        return None
