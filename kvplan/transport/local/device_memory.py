"""Memory of a peer's device on this host: allocations, mapped here once, and tensors in them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvnative._signals import Mutex
from kvplan.device.memory import check_device_of_link
from kvplan.device.sharing import Exported, exported
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.local.memory import LocalPeerMemory, words_of

if TYPE_CHECKING:
    from kvnative._backend import Backend, ThreadPool
    from kvnative._process import Peer
    from kvplan.device.device import CopyDirection, Device
    from kvplan.device.sharing import AllocationRef, Mapped, Sharing
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.transport.local.link import LocalLink
    from kvplan.transport.local.metadata import Range


class PeerAllocations:
    """The allocations of a peer's devices that are mapped for one here, each once.

    Args:
        process: the peer's.
        device: that the memory is mapped for.
        sharing: of that device.
    """

    def __init__(self, process: Peer, device: Device, sharing: Sharing) -> None:
        self.device = device
        self._process = process
        self._sharing = sharing
        self._mutex = Mutex()  # a signal handler may close the link
        self._mapped: WeakValueDictionary[AllocationRef, Mapped] = WeakValueDictionary()
        self._kept: dict[AllocationRef, Mapped] = {}  # pools
        self._closed = False

    def map(self, link: LocalLink, it: Range) -> Mapped:
        """The allocation that `it` is a part of; it was registered while that was mapped.

        Raises:
            LLMException: as `Sharing.map`, or `LocalLink.check_ranges`.
            OSError, ValueError: the peer's descriptor cannot be had.
        """
        ref = it.allocation
        assert ref is not None
        with self._mutex:
            mapped = self._mapped.get(ref)
            if mapped is None:
                mapped = self._map(ref)
                # As long as it is registered its owner keeps the descriptor, and its number is no
                # other's: so this is the right one.
                link.check_ranges([it], words_of([it]))
                self._mapped[ref] = mapped
            # Parts of a pool come and go, while it is mapped once. All else goes with its last user
            # here: until then no memory of the device is free, though its owner has freed it.
            if ref.is_pool and ref.is_kept_by_peers and not self._closed:
                self._kept[ref] = mapped
            return mapped

    def close(self) -> None:
        """Keep nothing that is not in use; idempotent."""
        with self._mutex:
            self._closed = True
            self._kept = {}

    def _map(self, ref: AllocationRef) -> Mapped:
        if ref.fd < 0:
            return self._sharing.map(ref, -1)
        fd = self._process.take_descriptor(ref.fd)
        try:
            return self._sharing.map(ref, fd)
        finally:
            os.close(fd)


def allocation_here(it: Range, device: Device) -> Exported | None:
    """The allocation of this process that `it` is a part of; None: of another device or context.

    Mapped a second time, one byte would have two addresses here, and no overlap would show.

    Raises:
        LLMException: LLM_KV_CACHE_NOT_EXIST: it is not offered any more.
    """
    assert it.allocation is not None
    if (found := exported(it.allocation)) is None:
        raise LLMException(
            f"{it} of this process is not registered any more",
            status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )
    return found if found.device is device.native else None


class LocalDeviceMemory(LocalPeerMemory):
    """Tensors in the memory of a peer's device, as `LocalLink.memory` found them: mapped here."""

    def backend(self, pool: ThreadPool, direction: Direction, other: TensorMemory) -> Backend:
        """What copies between the peer's device and `other`: this side's device.

        What writes announces that to the owner; what reads, too, where that is all that keeps the
        owner from freeing the memory under it.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: `other` is on another device than the link's;
                LLM_PARAM_INVALID: it is a peer's.
            NativeError: the device is closed.
        """
        device = self._link.device
        assert device is not None, "without one nothing is mapped"
        if not other.in_process or isinstance(other, LocalPeerMemory):
            raise invalid(
                "src and dst are both memory of other processes; one of them must be this one's"
            )
        check_device_of_link(other, device, self._link.peer)
        way: CopyDirection = (
            "device_to_device"
            if other.on_device
            else "device_to_host"
            if direction == "get"
            else "host_to_device"
        )
        inner = device.backend(way)
        if direction == "get" and not any(it.announces_reads for it in self._ranges):
            return inner
        known = self._backends.get(direction)
        if known is None or known[1] is not inner:
            assert self._writer is not None, "memory that is not writable is refused before"
            made = self._writer.around(inner, self._words)
            known = self._backends[direction] = pool, inner, made
        return known[2]

    @property
    def guard(self) -> None:
        """None: no plain copy reaches it."""

    @property
    def write_guard(self) -> None:
        """None: no plain copy reaches it."""
