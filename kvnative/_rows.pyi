from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from kvnative._lower import Descriptors
from kvnative._process import Peer
from kvnative._writers import WriteGuard

__all__ = ["RowLowering"]

@final
class RowLowering:
    def __init__(
        self,
        src_bases: NDArray[np.uint64],
        dst_bases: NDArray[np.uint64],
        src: tuple[int, int, int, int, int, bool],
        dst: tuple[int, int, int, int, int, bool],
        run: int,
        levels: tuple[tuple[int, int, int], ...],
        kv: tuple[int, int, int] | None,
        src_nbytes: int,
        dst_nbytes: int,
        is_one: bool = False,
        orders_ties: bool = False,
    ) -> None: ...
    def lower(
        self,
        src_rows: Sequence[int] | NDArray[np.integer],
        dst_rows: Sequence[int] | NDArray[np.integer],
        num_tokens: int = 0,
        src_token: int = 0,
        dst_token: int = 0,
        src_is_lease: bool = False,
        dst_is_lease: bool = False,
    ) -> tuple[Descriptors, int] | None: ...
    def move_now(
        self,
        peer: Peer,
        words: bytes,
        guard: WriteGuard | None,
        living: dict[int, Any],
        cache_id: int,
        entry: object,
        src_rows: Sequence[int] | NDArray[np.integer],
        dst_rows: Sequence[int] | NDArray[np.integer],
        most: int,
        num_tokens: int = 0,
        src_token: int = 0,
        dst_token: int = 0,
    ) -> int: ...
