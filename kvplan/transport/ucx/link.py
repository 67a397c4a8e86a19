"""A link to a peer over UCX: its registered memory, reached without its Python."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from kvnative._backend import NativeError
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.columns import sized_tensors
from kvplan.transport.identity import link_failed
from kvplan.transport.ranges import RangeTable
from kvplan.transport.ucx import backends
from kvplan.transport.ucx.memory import UcxPeerMemory
from kvplan.transport.ucx.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvnative._backend import Backend
    from kvnative._ucx import UcxNativeLink
    from kvnative._ucx_one_sided import UcxRegions
    from kvplan.execution.memory import Direction
    from kvplan.transport.ucx.metadata import Range

    Column = NDArray[np.uint64]


_CLOSED_BY_PEER = "the peer has closed the link"  # how the native layer begins what it says then


class UcxLink:
    """Made by `UcxTransport.connect`; also a context manager.

    Attributes:
        metadata: of the peer, when the link was made.
        renewable: nothing, as memory is reached as it comes.
        way: see `TransportLink`.
    """

    renewable = None

    def __init__(
        self, native: UcxNativeLink, metadata: Metadata, regions: UcxRegions | None = None
    ) -> None:
        self._pid = os.getpid()
        self._regions = regions  # None: the peer serves messages
