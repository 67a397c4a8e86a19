from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Descriptors", "lower"]

@final
class Descriptors:
    @staticmethod
    def from_columns(
        dst: NDArray[np.uint64], src: NDArray[np.uint64], nbytes: NDArray[np.uint64]
    ) -> Descriptors: ...
    @staticmethod
    def joined(parts: Sequence[Descriptors]) -> Descriptors: ...
    count: Final[int]
    total_nbytes: Final[int]
    dst: Final[NDArray[np.uint64]]
    src: Final[NDArray[np.uint64]]
    nbytes: Final[NDArray[np.uint64]]
    def __len__(self) -> int: ...

def lower(
    src_offsets: NDArray[np.uint64],
    dst_offsets: NDArray[np.uint64],
    nbytes: NDArray[np.uint64],
    src_bases: NDArray[np.uint64],
    dst_bases: NDArray[np.uint64],
    out: Descriptors | None = None,
    repeats: Sequence[tuple[NDArray[np.uint64], int, int]] = (),
) -> Descriptors: ...
