"""The memory of a cache on a device: an address for each tensor, and the memory's owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvnative._task import Revocable
from kvplan.device.device import Device
from kvplan.status import invalid, not_exist, unsupported
from kvplan.types import Cache, CacheDesc

if TYPE_CHECKING:
    from kvnative._backend import Backend, ThreadPool
    from kvplan.device.device import Watch
    from kvplan.execution.memory import Addresses, Direction, TensorMemory
    from kvplan.tensors.form import TensorForm


def check_device_of_link(side: TensorMemory, device: Device, peer: object) -> None:
    """Refuse a local side on another device than that of the link to `peer`.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED.
    """
    if isinstance(side, DeviceMemory) and side.device.native is not device.native:
        raise unsupported(
            f"the local side is on device {side.device.id}, but the engine of the link to {peer} "
            f"has device {device.id}: use the engine of device {side.device.id}"
        )


class DeviceMemory(Revocable):
    """Tensors in the memory of a device of this process.

    Args:
        device: The device.
        addresses: The address of each tensor, on the device.
        nbytes: The size of each tensor.
        writable: True if a transfer may write to them.
        owner: An object that keeps the memory alive, or guarantees it; None: the addresses are
            checked before and after each transfer.
        watches: Watches over memory that its owner may free during a transfer.
        parts: The memories that this one consists of; revoking a part revokes the whole.
    """

    __slots__ = ("__weakref__", "_owner", "addresses", "device", "nbytes", "watches", "writable")
    in_process = True
    on_device = True

    def __init__(
        self,
        device: Device,
        addresses: Addresses,
        nbytes: NDArray[np.uint64],
        *,
        writable: bool,
        owner: object,
        watches: tuple[Watch, ...] = (),
        parts: tuple[Revocable, ...] = (),
    ) -> None:
        super().__init__(parts)
        for column in (addresses, nbytes):
            column.flags.writeable = False
        self.device = device
        self.addresses = addresses
        self.nbytes = nbytes
        self.writable = writable
        self.watches = watches
        self._owner = owner

    @classmethod
    def from_addresses(
        cls,
        device: Device,
        desc: CacheDesc,
        addresses: Sequence[int],
        *,
        writable: bool = True,
        owner: object = None,
    ) -> DeviceMemory:
        """Return the memory at `addresses`, one for each tensor of `desc`, on the device.

        Raises:
            TypeError, ValueError: an address that is not a uint64.
            LLMException: LLM_PARAM_INVALID for another number of addresses, or a range that is not
                of this device.
        """
        cache = Cache(desc, tensor_addrs=tuple(addresses))
        if not cache.tensor_addrs:
            raise invalid(f"addresses is empty; num_tensors={desc.num_tensors} are needed")
        memory = cls(
            device,
            np.array(cache.tensor_addrs, dtype=np.uint64),
            np.full(desc.num_tensors, desc.tensor_nbytes, dtype=np.uint64),
            writable=writable,
            owner=owner,
        )
        memory.check_located()
        if owner is not None:
            memory.watches = device.watch(memory.addresses, memory.nbytes)
        return memory

    @classmethod
    def from_forms(cls, device: Device, forms: Sequence[TensorForm]) -> DeviceMemory:
        """Return the memory of tensors that claim to be on the device, which keeps them alive.

        Raises:
            LLMException: LLM_PARAM_INVALID: the address of a tensor is not on the device.
        """
        memory = cls(
            device,
            np.array([form.address for form in forms], dtype=np.uint64),
            np.array([form.span_nbytes for form in forms], dtype=np.uint64),
            writable=not any(form.read_only for form in forms),
            owner=tuple(form.owner for form in forms),
        )
        memory.check_located()
        memory.watches = device.watch(memory.addresses, memory.nbytes)
        return memory

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory, timeout_ms: float | None
    ) -> Backend | None:
        """See `TensorMemory`.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: `other` is on another device.
        """
        if not other.in_process:
            return None  # the peer's memory chooses the backend
        if not other.on_device:
            return self.device.backend("device_to_host" if direction == "get" else "host_to_device")
        if isinstance(other, DeviceMemory) and other.device.native is not self.device.native:
            sides = (
                f"both sides are on device {self.device.id}, in different contexts"
                if other.device.id == self.device.id
                else f"one side is on device {self.device.id} and the other on device "
                f"{other.device.id}"
            )
            raise unsupported(f"{sides}; transfer between devices with a linked engine on each")
        return self.device.backend("device_to_device") if direction == "get" else None

    @property
    def held(self) -> bool:
        """True if an owner keeps the memory in place."""
        return self._owner is not None

    def check(self, tensors: range | None = None) -> None:
        """Check raw addresses again; if an owner holds the memory, check its watches.

        Raises:
            LLMException: LLM_PARAM_INVALID: see `check_located`; LLM_KV_CACHE_NOT_EXIST: the memory
                was freed, and other memory has its addresses.
        """
        if self._owner is None:
            self.check_located(tensors)
        elif any(watch.is_replaced for watch in self.watches):
            raise not_exist(
                f"registered memory of device {self.device.id} was freed, and other memory has its "
                "addresses now: unregister a cache before its memory is freed, and register the "
                "new memory"
            )

    def check_located(self, tensors: range | None = None) -> None:
        """Refuse tensors that are not in memory of the device.

        Raises:
            LLMException: LLM_PARAM_INVALID.
        """
        for i in range(len(self.addresses)) if tensors is None else tensors:
            self.device.check_range(f"tensor {i}", int(self.addresses[i]), int(self.nbytes[i]))

    def __reduce__(self) -> NoReturn:
        raise TypeError("DeviceMemory cannot be copied or pickled: it belongs to this process")

    def __repr__(self) -> str:
        total = int(self.nbytes.sum())
        return f"<DeviceMemory {len(self.addresses)} tensors, {total} bytes: {self.device!r}>"
