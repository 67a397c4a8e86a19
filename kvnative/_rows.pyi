from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from kvnative._lower import Descriptors
from kvnative._process import Peer
from kvnative._writers import WriteGuard

__all__ = ["Rows"]

@final
class Rows:
    def __init__(
        self,
        src_bases: NDArray[np.uint64],
        dst_bases: NDArray[np.uint64],
        src_count: int,
        dst_count: int,
        stride: int,
        is_one: bool = False,
    ) -> None: ...
    def lower(
        self,
        src_rows: Sequence[int] | NDArray[np.integer],
        dst_rows: Sequence[int] | NDArray[np.integer],
    ) -> Descriptors | None: ...
    def move_now(
        self,
        peer: Peer,
        words: bytes,
        guard: WriteGuard | None,
        src_rows: Sequence[int] | NDArray[np.integer],
        dst_rows: Sequence[int] | NDArray[np.integer],
        most: int,
    ) -> int: ...
