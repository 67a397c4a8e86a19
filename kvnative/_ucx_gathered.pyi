"""The backend that pulls and pushes over UCX by messages which carry many blocks each."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvnative._backend import Backend
from kvnative._ucx import UcxNativeLink

__all__ = ["gathered_backend"]

def gathered_backend(
    link: UcxNativeLink,
    direction: Literal["get", "put"],
    slots: NDArray[np.uint64],
    generations: NDArray[np.uint64],
    addresses: NDArray[np.uint64],
    nbytes: NDArray[np.uint64],
    hands_over: bool = False,
) -> Backend: ...
