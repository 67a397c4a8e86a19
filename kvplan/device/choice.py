"""Which accelerators there are, and whether this process has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvplan.logs import Log
from kvplan.status import LLMException

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvplan.device.device import Device

_LOG = Log("kvplan")


def _ascend(device_id: int) -> Device:
    from kvplan.device.ascend import AscendDevice  # its modules only where it is used

    return AscendDevice(device_id)


# In order of preference.
_OPEN: Final[Mapping[str, Callable[[int], Device]]] = {"ascend": _ascend}

ACCELERATORS: Final = ("auto", "none", *_OPEN)
"""What can be asked for."""


def open_accelerator(choice: str, device_id: int) -> Device | None:
    """Return the device to use; close it in the end.

    Args:
        choice: one of `ACCELERATORS`. "auto": the device where there is one; else none, which is
            logged with its reason.
        device_id: its logical number.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: the one that was asked for cannot be used, and why.
    """
    if choice == "none":
        return None
    for name in _OPEN if choice == "auto" else (choice,):
        try:
            return _OPEN[name](device_id)
        except LLMException as error:
            if choice != "auto":
                raise LLMException(
                    f"accelerator={choice!r}: {error.args[0]}", status_code=error.status_code
                ) from error
            _LOG.info(
                "accelerator=auto: caches with placement=DEVICE are in host memory: %s", error
            )
    return None
