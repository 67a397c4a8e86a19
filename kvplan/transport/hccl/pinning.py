"""Pages of the host that are pinned so that HCCL can know the memory in them."""

from __future__ import annotations

import mmap
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.ascend.device import AscendDevice, PinnedMemory


class _Pin(NamedTuple):
    """Pages [first, last] that are pinned as long as `memory` is held."""

    first: int
    last: int
    memory: ref[PinnedMemory]


class Pinning:
    """Pins whole pages, each once: memory inside of what is pinned already shares its pin.

    HCCL is told no memory that begins in one pinned range and ends behind it: whether it takes that
    shows only when a connection is prepared, which then fails with all that is bound to it.

    Not for several threads at once.

    Args:
        device: that shall reach the memory.
    """

    def __init__(self, device: AscendDevice) -> None:
        self._device = device
        self._pins: list[_Pin] = []  # disjoint, by page

    def pin(self, address: int, nbytes: int) -> tuple[PinnedMemory, ...]:
        """What pins [address, address + nbytes), until it is dropped; nothing: others do already.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: the device does not pin it, and why; it shares a
                page with memory that is pinned, and goes beyond that.
        """
        first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
        touched = self._touched(first, last)
        if len(touched) == 1 and touched[0].first <= first and last <= touched[0].last:
            shared = touched[0].memory()
            if shared is not None:
                return (shared,)
        if touched:
            raise _not_pinned(
                f"[{address:#x}, {address + nbytes:#x}) shares a page with other memory that is "
                "registered: let tensors begin at pages, or lie in one cache without gaps"
            )
        if all(self._is_pinned(it) for it in (address, address + nbytes - 1)):
            return ()
        try:
            made = self._device.pin(first * mmap.PAGESIZE, (last + 1 - first) * mmap.PAGESIZE)
        except LLMException as error:
            raise _not_pinned(str(error.args[0])) from error
        insort(self._pins, _Pin(first, last, ref(made)), key=lambda it: it.first)
        return (made,)

    def _touched(self, first: int, last: int) -> list[_Pin]:
        """Those that have pages of [first, last], in order; forgets some that were dropped."""
        start = end = bisect_left(self._pins, first, key=lambda it: it.last)
        while end < len(self._pins) and self._pins[end].first <= last:
            end += 1
        held = [it for it in self._pins[start:end] if it.memory() is not None]
        self._pins[start:end] = held
        return held

    def _is_pinned(self, address: int) -> bool:
        return self._device.native.locate(address)[0] == "host"


def _not_pinned(reason: str) -> LLMException:
    return LLMException(
        f"HCCL takes pinned memory of the host alone, and this cannot be pinned: {reason}",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    )
