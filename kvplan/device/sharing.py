"""Device memory that processes of one host share, and the interface of devices that can share.

The owner exports a whole allocation. A peer maps the allocation by its `AllocationRef` for a local
device, and copies to and from it like memory of that device.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Protocol
from weakref import WeakValueDictionary

import msgspec
from msgspec import Meta

from kvplan.validation import shown

if TYPE_CHECKING:
    from kvnative._device import Device as NativeDevice
    from kvnative._device import DeviceBuffer


class AllocationRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The published reference of a device allocation, or of adjacent pieces of memory.

    Attributes:
        device: UUID of the device: 32 hexadecimal digits.
        address, nbytes: The allocation, in the owner.
        number: The number of the export, unique in the owner.
        fd: The owner's descriptor of the allocation, which peers duplicate; -1: see `handle`.
        handle: A CUDA IPC handle, as 128 hexadecimal digits. If it is empty, peers map the
            allocation by `fd`, or by the descriptors of its pieces, which the owner sends.
        is_pool: True if parts of it are allocated and freed during its life.
    """

    device: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    address: Annotated[int, Meta(ge=1)]
    nbytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    number: Annotated[int, Meta(ge=0)]
    fd: Annotated[int, Meta(ge=-1, lt=2**31)]
    handle: Annotated[str, Meta(pattern=r"^([0-9a-f]{128})?\Z")]
    is_pool: bool

    def __post_init__(self) -> None:
        if self.address + self.nbytes > 2**64:
            raise ValueError(
                f"address {self.address} + nbytes {self.nbytes} ends past 2**64; the sum must be "
                "in [2, 2**64]"
            )
        if self.handle and self.fd >= 0:
            raise ValueError(
                f"handle is {shown(self.handle)}; it must be empty, as there is a descriptor"
            )

    @property
    def is_kept_by_peers(self) -> bool:
        """True if mappings keep the memory alive; False: the owner must outlive them."""
        return not self.handle

    @property
    def is_in_pieces(self) -> bool:
        """True if peers map the memory by descriptors that only its owner can make."""
        return self.fd < 0 and not self.handle


Piece = tuple[int, int]
"""A descriptor of this process, and the number of bytes that it stands for."""


class Exported:
    """An allocation that peers can map while this object exists.

    Args:
        ref: The allocation as peers name it.
        device: The device of the memory.
        held: The objects that the export keeps alive.
        take: Makes descriptors of pieces, given the first and their number; None: not in pieces.
    """

    __slots__ = ("__weakref__", "_held", "_take", "device", "ref")

    def __init__(
        self,
        ref: AllocationRef,
        device: NativeDevice,
        held: object,
        take: Callable[[int, int], list[Piece]] | None = None,
    ) -> None:
        self.ref = ref
        self.device = device
        self._held = held
        self._take = take
        _EXPORTED[ref] = self

    def descriptors(self, first: int, count: int) -> list[Piece]:
        """Return up to `count` new descriptors, from piece `first`. The caller closes them."""
        if self._take is not None:
            return self._take(first, count)
        if first or self.ref.fd < 0:
            raise IndexError(f"first={first}; the allocation has a single descriptor or none")
        return [(os.dup(self.ref.fd), self.ref.nbytes)]


class Mapped(Protocol):
    """An allocation of a peer, mapped here until this object is dropped."""

    @property
    def address(self) -> int:
        """The address of the mapping, for its device."""


class Sharing(Protocol):
    """The interface of a device that shares its memory with processes of this host.

    Attributes:
        uuid: The UUID of the device, as in `AllocationRef`.
    """

    @property
    def uuid(self) -> str:
        """See the attributes of the class."""

    def export(
        self, address: int, nbytes: int, buffer: DeviceBuffer | None, *, is_pool: bool = False
    ) -> Exported:
        """Let peers map the allocation that holds a range.

        Args:
            address, nbytes: The range.
            buffer: kvplan's allocation that holds the range; None: the user's memory.
            is_pool: True if peers should keep the mapping even while they use no part of it. The
                first export of an allocation decides.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: no peer can map it, with the remedy; an error of
                the device.
        """

    def map(self, ref: AllocationRef, batches: Iterable[list[Piece]]) -> Mapped:
        """Map an allocation of a peer.

        Args:
            ref: The reference that the peer has published; not trusted.
            batches: The pieces of the allocation, not trusted; empty if it has a handle. The
                descriptors of a batch are closed when the next batch is requested.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: this device does not reach that memory, and why;
                an error of the device.
        """

    def shortfall(self, uuid: str) -> str | None:
        """Return the reason why this device and another cannot reach each other's memory.

        None: they can, or only an attempt to map will tell.
        """


# A link to this process finds an export here instead of mapping it again.
_EXPORTED: WeakValueDictionary[AllocationRef, Exported] = WeakValueDictionary()
_numbers = itertools.count(1)


def next_number() -> int:
    """Return the number for another export of this process."""
    return next(_numbers)


def exported(ref: AllocationRef) -> Exported | None:
    """Return the export of this process that `ref` names, if it still exists."""
    return _EXPORTED.get(ref)
