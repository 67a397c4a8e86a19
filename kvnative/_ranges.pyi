from collections.abc import Sequence
from typing import Any, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

from kvnative._lower import Descriptors

__all__ = [
    "Pieces",
    "TransferOpDesc",
    "address_columns",
    "choose",
    "first_bad",
    "first_overlap",
    "locate",
    "place",
]

_Column = NDArray[np.uint64]

@disjoint_base
class TransferOpDesc:
    def __init__(
        self, local_addr: SupportsIndex, remote_addr: SupportsIndex, len: SupportsIndex
    ) -> None: ...
    @property
    def local_addr(self) -> int: ...
    @local_addr.setter
    def local_addr(self, value: SupportsIndex) -> None: ...
    @property
    def remote_addr(self) -> int: ...
    @remote_addr.setter
    def remote_addr(self, value: SupportsIndex) -> None: ...
    @property
    def len(self) -> int: ...
    @len.setter
    def len(self, value: SupportsIndex) -> None: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Pieces:
    def __init__(
        self, firsts: _Column, lasts: _Column, owners: _Column | None, num_extents: int
    ) -> None: ...

def address_columns(op_descs: Sequence[TransferOpDesc]) -> tuple[_Column, _Column, _Column]: ...
def first_overlap(starts: _Column, nbytes: _Column) -> tuple[int, int] | None: ...
def locate(
    firsts: _Column, lasts: _Column, starts: _Column, nbytes: _Column
) -> tuple[_Column, int, bool]: ...
def place(
    own: Pieces, peer: Pieces, local: _Column, remote: _Column, nbytes: _Column, pulls: bool
) -> (
    tuple[Descriptors, list[tuple[int, int, int]], _Column | None, tuple[int, int] | None] | None
): ...
def first_bad(local: _Column, remote: _Column, nbytes: _Column) -> int: ...
def choose(
    local: _Column,
    remote: _Column,
    local_indices: NDArray[np.integer[Any]] | None = None,
    remote_indices: NDArray[np.integer[Any]] | None = None,
) -> tuple[_Column, _Column, _Column, int, int]: ...
