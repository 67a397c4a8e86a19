from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from kvnative._lower import Descriptors

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
    ) -> None: ...
    def lower(
        self,
        src_rows: Sequence[int] | NDArray[np.integer],
        dst_rows: Sequence[int] | NDArray[np.integer],
    ) -> Descriptors | None: ...
