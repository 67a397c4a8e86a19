"""What the generations of Ascend can do, told by the names of their chips."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["host", "device"]

_DEVICE: Final[frozenset[Kind]] = frozenset({"device"})
_BOTH: Final[frozenset[Kind]] = frozenset({"host", "device"})


@dataclass(frozen=True, slots=True)
class Product:
    """A generation of devices that transfer one-sided over HCCL.

    Attributes:
        name: as people call it.
        max_batch: descriptors that one batch of HCCL takes.
        registers: the kinds of memory that HCCL takes as they are; what it does not goes through
            device memory at this end, and cannot be offered to peers.
        hccs: the same at this end of HCCS, which connects devices inside a host or super pod. What
            it reaches at the other end is device memory alone.
    """

    name: str
    max_batch: int
    registers: frozenset[Kind]
    hccs: frozenset[Kind]

    def local_kinds(self, *, is_hccs: bool) -> frozenset[Kind]:
        """What HCCL takes as it is at this end of a link."""
        return self.hccs if is_hccs else self.registers

    def remote_kinds(self, *, is_hccs: bool) -> frozenset[Kind]:
        """What HCCL reaches at the other end of a link."""
        return self.registers & _DEVICE if is_hccs else self.registers


A2: Final = Product("A2", 256, _BOTH, _DEVICE)
A3: Final = Product("A3", 256, _BOTH, _BOTH)
A950: Final = Product("950", 64, _DEVICE, _DEVICE)

# The first that matches counts: A3 chips have the name of A2's, and go on with _93.
_SOCS: Final = (
    (re.compile(r"Ascend910_93"), A3),
    (re.compile(r"Ascend910B"), A2),
    (re.compile(r"Ascend950"), A950),
)


def product_of(soc_name: str) -> Product | None:
    """The product of a chip ("Ascend910B3"); None: unknown, or it does not transfer one-sided."""
    return next((product for soc, product in _SOCS if soc.match(soc_name)), None)
