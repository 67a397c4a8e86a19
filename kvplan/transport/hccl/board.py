"""Which registrations still stand, in device memory, so that peers read it behind their data."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.hccl.metadata import MAX_SLOTS, BoardRef
from kvplan.validation import check_type

if TYPE_CHECKING:
    from kvnative._acl import DeviceBuffer
    from kvplan.ascend.device import AscendDevice

WORD_NBYTES = 8


class DeviceBoard:
    """A word for each slot: the generation of the registration that has it, or 0.

    A peer that transfers reads the words of the ranges that it used after its bytes, in the order
    of its stream: where one is not what it was told, nothing of the transfer counts.

    Args:
        device: whose memory the board lies in.
        num_slots: registrations that there can be at once.

    Raises:
        LLMException: LLM_DEVICE_OUT_OF_MEMORY, or what else the device says.
    """

    def __init__(self, device: AscendDevice, num_slots: int) -> None:
        if not 1 <= check_type("max_registrations", num_slots, int) <= MAX_SLOTS:
            raise LLMException(
                f"max_registrations={num_slots} is out of range [1, {MAX_SLOTS}]",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )
        self._device = device
        self.buffer: DeviceBuffer | None = device.allocate(num_slots * WORD_NBYTES)
        self.ref = BoardRef(self.buffer.address, num_slots)
        device.write(self.ref.address, bytes(num_slots * WORD_NBYTES))
        self._free: list[int] = []
        self._next = 0  # the first slot that was never taken
        self._generation = 0
        self._mutex = threading.Lock()

    def take(self) -> tuple[int, int]:
        """A slot, and the generation that its word says from here on.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY: all are taken; what the device says.
        """
        with self._mutex:
            if self._free:
                slot = self._free.pop()
            elif self._next < self.ref.num_slots:
                slot = self._next
                self._next += 1
            else:
                raise LLMException(
                    f"all {self.ref.num_slots} slots of the board are taken: deregister memory, or "
                    "make the transport with more max_registrations",
                    status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
                )
            self._generation += 1
            generation = self._generation
        try:
            self._write(slot, generation)
        except LLMException:
            with self._mutex:
                self._free.append(slot)
            raise
        return slot, generation

    def release(self, slot: int) -> None:
        """From here on no transfer that uses the slot's registration succeeds.

        Raises:
            LLMException: what the device says; the slot is not used again then.
        """
        self._write(slot, 0)
        with self._mutex:
            self._free.append(slot)

    def close(self) -> None:
        """Let go of the memory: no connection reaches it any more."""
        self.buffer = None

    def address_of(self, slot: int) -> int:
        """Of a slot's word."""
        return self.ref.address + WORD_NBYTES * slot

    def _write(self, slot: int, generation: int) -> None:
        self._device.write(self.address_of(slot), generation.to_bytes(WORD_NBYTES, "little"))
