import numpy as np
from numpy.typing import NDArray

__all__ = ["extents_clash", "first_below", "first_different"]

def first_below(values: NDArray[np.uint64], least: int) -> int: ...
def extents_clash(
    dst_bases: NDArray[np.uint64],
    dst_nbytes: int,
    src_bases: NDArray[np.uint64],
    src_nbytes: int,
) -> bool: ...
def first_different(
    left: NDArray[np.uint64], right: NDArray[np.uint64], nbytes: NDArray[np.uint64]
) -> int: ...
