"""Ascend devices: the ACL library, loaded at run time, and the capabilities of each product."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvnative.ascend_files import driver_version
from kvplan.device.device import Device, find_library

if TYPE_CHECKING:
    from kvnative._acl import AclLibrary

Kind = Literal["host", "device"]

_DEVICE: Final[frozenset[Kind]] = frozenset({"device"})
_BOTH: Final[frozenset[Kind]] = frozenset({"host", "device"})

OVERRIDE: Final = "KVPLAN_ASCEND_LIBRARY"
"""Environment variable with the only place to search: a library, or the folder of a toolkit.

If it is empty, no library is loaded. If it is not set, the usual places are searched.
"""


@dataclass(frozen=True, slots=True)
class Product:
    """A generation of devices that transfer one-sided over HCCL.

    Attributes:
        name: Its common name.
        max_batch: The maximum number of descriptors of one batch of HCCL.
        registers: The kinds of memory that HCCL transfers directly. Other local memory is staged
            in device memory, and cannot be offered to peers.
        hccs: The kinds of local memory that transfers over HCCS reach; HCCS connects devices of a
            host or super pod. At the other end HCCS reaches only device memory.
    """

    name: str
    max_batch: int
    registers: frozenset[Kind]
    hccs: frozenset[Kind]

    def local_kinds(self, *, is_hccs: bool) -> frozenset[Kind]:
        """Return the kinds of memory that HCCL transfers directly at the local end of a link."""
        return self.hccs if is_hccs else self.registers

    def remote_kinds(self, *, is_hccs: bool) -> frozenset[Kind]:
        """Return the kinds of memory that HCCL reaches at the other end of a link."""
        return self.registers & _DEVICE if is_hccs else self.registers


A2: Final = Product("A2", 256, _BOTH, _DEVICE)
A3: Final = Product("A3", 256, _BOTH, _BOTH)
A950: Final = Product("950", 64, _DEVICE, _DEVICE)

# A3 chips have names such as Ascend910_9391, A2 chips such as Ascend910B1.
_SOCS: Final = (
    (re.compile(r"Ascend910_93"), A3),
    (re.compile(r"Ascend910B"), A2),
    (re.compile(r"Ascend950"), A950),
)


def product_of(soc_name: str) -> Product | None:
    """Return the product of a chip ("Ascend910B3"); None: unknown, or no one-sided transfers."""
    return next((product for soc, product in _SOCS if soc.match(soc_name)), None)


def load_library() -> AclLibrary:
    """Return the ACL library, which a process loads once; see `find_library`.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: no library, or one that lacks a call.
    """

    def load(place: str | None) -> AclLibrary:
        from kvnative._acl import AclLibrary

        return AclLibrary.load(place)

    return find_library("runtime library of Ascend (ACL)", OVERRIDE, load)


class AscendDevice(Device):
    """An Ascend device of this process; see `Device`.

    If `library` is None, the installed library is used.

    Attributes:
        notes_pins: True if pinning does not map memory for the device (since CANN 8.5), so that
            HCCL can map it: memory cannot be mapped twice.
    """

    tensor_kind = "npu"

    def __init__(self, device_id: int, library: AclLibrary | None = None) -> None:
        library = library or load_library()
        super().__init__(device_id, library)
        self.notes_pins: bool = "aclrtHostRegisterV2" not in library.missing

    @property
    def product(self) -> Product | None:
        """The product of the device; None: the device has no one-sided transfers."""
        return product_of(self.name)

    def describe(self) -> dict[str, object]:
        """Return the properties of the device by name, for display."""
        product = self.product
        name = None if product is None else product.name
        return {**super().describe(), "soc": self.name, "product": name, "driver": driver_version()}
