from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvnative._backend import Backend
from kvnative._ucx import UcxEndpoint

__all__ = ["ucx_backend", "ucx_leased"]

_Column = NDArray[np.uint64]

def ucx_backend(
    endpoint: UcxEndpoint,
    direction: Literal["get", "put"],
    *,
    addresses: _Column,
    nbytes: _Column,
    slots: _Column,
    generations: _Column,
    keys: _Column,
    rkeys: Sequence[bytes],
    local: Literal["host", "cuda"] = "host",
) -> Backend: ...
def ucx_leased(backend: Backend, leases: Iterable[tuple[int, int, str]]) -> Backend: ...
