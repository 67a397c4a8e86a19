"""What the generations of Ascend can do, told by the names of their chips."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Product:
    """A generation of devices that transfer one-sided over HCCL.

    Attributes:
        name: as people call it.
        max_batch: descriptors that one batch of HCCL takes.
        registers: the kinds of memory that HCCL takes as they are; what it does not goes through
            device memory at this end, and cannot be offered to peers.
    """

    name: str
    max_batch: int
    registers: frozenset[Literal["host", "device"]]


A2: Final = Product("A2", 256, frozenset({"host", "device"}))
A3: Final = Product("A3", 256, frozenset({"host", "device"}))
A950: Final = Product("950", 64, frozenset({"device"}))

# The first that matches counts: A3 chips have the name of A2's, and go on with _93.
_SOCS: Final = (
    (re.compile(r"Ascend910_93"), A3),
    (re.compile(r"Ascend910B"), A2),
    (re.compile(r"Ascend950"), A950),
)


def product_of(soc_name: str) -> Product | None:
    """The product of a chip ("Ascend910B3"); None: unknown, or it does not transfer one-sided."""
    return next((product for soc, product in _SOCS if soc.match(soc_name)), None)
