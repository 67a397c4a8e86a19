from collections.abc import Sequence
from typing import Literal, Never, final

import numpy as np
from numpy.typing import NDArray

from kvnative._backend import Backend
from kvnative._ucx import UcxEnd, UcxNativeLink

__all__ = ["UcxRegion", "UcxRegions", "one_sided_backend"]

_Kind = Literal["host", "cuda", "rocm"]
_Column = NDArray[np.uint64]

@final
class UcxRegions:
    def __init__(self, end: UcxEnd) -> None: ...
    @property
    def end(self) -> UcxEnd: ...
    def map(
        self, address: int, nbytes: int, *, kind: _Kind = "host", owner: object = None
    ) -> UcxRegion: ...

@final
class UcxRegion:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def regions(self) -> UcxRegions: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def kind(self) -> _Kind: ...
    @property
    def rkey(self) -> bytes: ...
    @property
    def released(self) -> bool: ...
    def release(self) -> None: ...

def one_sided_backend(
    link: UcxNativeLink,
    direction: Literal["get", "put"],
    regions: UcxRegions,
    *,
    addresses: _Column,
    nbytes: _Column,
    slots: _Column,
    generations: _Column,
    keys: _Column,
    rkeys: Sequence[bytes],
    board_address: int,
    board_slots: int,
    board_rkey: bytes,
    local: _Kind = "host",
) -> Backend: ...
