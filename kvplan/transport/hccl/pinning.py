"""Pages of the host that are pinned so that HCCL can know the memory in them."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.ascend.device import AscendDevice, PinnedMemory


class Pinning:
    """Pins whole pages, each once: memory that shares a page with other memory shares its pin.

    Not for several threads at once.

    Args:
        device: that shall reach the memory.
    """

    def __init__(self, device: AscendDevice) -> None:
        self._device = device
        # By its first page and by its last: what has nothing in common shares no page in between.
        self._pins: WeakValueDictionary[int, PinnedMemory] = WeakValueDictionary()

    def pin(self, address: int, nbytes: int) -> tuple[PinnedMemory, ...]:
        """What pins [address, address + nbytes), until it is dropped; nothing: others do already.

        No byte of it was given here before, unless that pin has been dropped.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: the device does not pin it, and why.
        """
        first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
        if first not in self._pins and self._device.native.locate(address)[0] == "host":
            return ()
        held = []
        if (shared := self._pins.get(first)) is not None:
            held.append(shared)
            first += 1
        if first <= last and (shared := self._pins.get(last)) is not None:
            held.append(shared)
            last -= 1
        if first <= last:
            size = (last + 1 - first) * mmap.PAGESIZE
            made = self._pin(first * mmap.PAGESIZE, size)
            self._pins[first] = self._pins[last] = made
            held.append(made)
        return tuple(held)

    def _pin(self, address: int, nbytes: int) -> PinnedMemory:
        try:
            return self._device.pin(address, nbytes)
        except LLMException as error:
            raise LLMException(
                "HCCL takes pinned memory of the host alone, and this cannot be pinned: "
                f"{error.args[0]}",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            ) from error
