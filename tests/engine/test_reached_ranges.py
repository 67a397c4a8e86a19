"""Ranges whose peer's memory is mapped here at other addresses, above or below the peer's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvnative._lower import Descriptors
from kvplan.engine.ranges import _as_reached
from kvplan.links.address_index import Extent

OWN = [3, 9, 21, 40]  # addresses in this process, of ranges of 1, 2, 3 and 4 bytes
# addresses of the peer: two in one tensor, two in a tensor of another cache
REMOTE = [1000, 1010, 5000, 5004]


def column(*numbers: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(numbers, dtype=np.uint64)


@pytest.mark.parametrize("pulls", [True, False])
@pytest.mark.parametrize(
    ("first", "second"), [(1000, 5000), (70, 5000), (1000, 2**63), (2**64 - 64, 1), (0, 9000)]
)
def test_each_range_is_reached_in_its_own_tensor(pulls: bool, first: int, second: int) -> None:
    """Ranges name the second of three tensors of the first cache, and the last of the other."""
    caches = [SimpleNamespace(addresses=[0] * count) for count in (3, 2)]
    extents = [Extent(1000, 64, caches[0], 1), Extent(5000, 64, caches[1], 1)]
    memory = SimpleNamespace(addresses=column(7, first, 7, 7, second))
    here, there, nbytes = column(*OWN), column(*REMOTE), column(1, 2, 3, 4)
    src, dst = (there, here) if pulls else (here, there)
    listed = Descriptors.from_columns(dst, src, nbytes)
    parts = [(0, 0, 0), (0, 1, 2)]
    reached = _as_reached(listed, pulls, cast(Any, memory), cast(Any, extents), parts)
    moved = [first, first + 10, second, second + 4]
    found = (reached.src, reached.dst) if pulls else (reached.dst, reached.src)
    assert [side.tolist() for side in found] == [moved, OWN]
    assert reached.nbytes.tolist() == [1, 2, 3, 4]
    assert (listed.src.tolist(), listed.dst.tolist()) == (src.tolist(), dst.tolist())
