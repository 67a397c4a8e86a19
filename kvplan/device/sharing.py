"""Memory of devices that processes of one host share, and what a kind of device does for it.

The owner exports an allocation, whole; a peer that holds its `AllocationRef` maps it for a device
of its own, and copies to and from it as if it were that device's memory.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Protocol
from weakref import WeakValueDictionary

import msgspec
from msgspec import Meta

from kvplan.validation import shown

if TYPE_CHECKING:
    from kvnative._device import Device as NativeDevice
    from kvnative._device import DeviceBuffer


class AllocationRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An allocation of a device as its owner publishes it.

    Attributes:
        device: UUID of the device: 32 hexadecimal digits.
        address, nbytes: The allocation, in the owner.
        number: The number of the export, unique in the owner.
        fd: The owner's descriptor of it, which peers duplicate; -1: they map it by `handle`.
        handle: 128 hexadecimal digits; empty if there is a descriptor.
        is_pool: Whether its parts come and go.
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
        if bool(self.handle) is (self.fd >= 0):
            must_be = "empty, as there is a descriptor" if self.handle else "128 hexadecimal digits"
            raise ValueError(f"handle is {shown(self.handle)}; it must be {must_be}")

    @property
    def is_kept_by_peers(self) -> bool:
        """Whether a peer that has mapped it keeps it; else its owner must not free it meanwhile."""
        return self.fd >= 0


class Exported:
    """An allocation that peers can map as long as this is held."""

    __slots__ = ("__weakref__", "_held", "device", "ref")

    def __init__(self, ref: AllocationRef, device: NativeDevice, held: object) -> None:
        self.ref = ref
        self.device = device
        self._held = held
        _EXPORTED[ref] = self


class Mapped(Protocol):
    """An allocation of a peer, mapped here until this is let go."""

    @property
    def address(self) -> int:
        """Where it is, for the device that it was mapped for."""


class Sharing(Protocol):
    """What a device adds that shares its memory with processes of this host.

    Attributes:
        uuid: of the device, as in `AllocationRef`.
    """

    @property
    def uuid(self) -> str:
        """See above."""

    def export(
        self, address: int, nbytes: int, buffer: DeviceBuffer | None, *, is_pool: bool = False
    ) -> Exported:
        """Let peers map the allocation that a range is a part of.

        Args:
            address, nbytes: of the range.
            buffer: what was allocated here, that it is a part of; None: it is the user's.
            is_pool: whether peers shall keep it mapped though they use no part of it; of what is
                exported already, as it was said first.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: no peer can map it, and what to do; what the
                device says.
        """

    def map(self, ref: AllocationRef, fd: int) -> Mapped:
        """Map an allocation of a peer.

        Args:
            ref: the peer's; nothing in it is believed.
            fd: of this process, for what `ref.fd` is in the peer; -1 where that is -1.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: this device does not reach that one, and why;
                what the device says.
        """

    def shortfall(self, uuid: str) -> str | None:
        """Why this device and the one with that UUID do not reach each other's memory.

        None: they do, or it shows only when memory is mapped.
        """


# What this process exports, so that a link to itself finds it instead of mapping it again.
_EXPORTED: WeakValueDictionary[AllocationRef, Exported] = WeakValueDictionary()
_numbers = itertools.count(1)


def next_number() -> int:
    """The number of another export of this process."""
    return next(_numbers)


def exported(ref: AllocationRef) -> Exported | None:
    """What this process exports as `ref`, if it still does."""
    return _EXPORTED.get(ref)
