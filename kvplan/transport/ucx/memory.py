"""Tensors in a peer's registered memory, as a side of a transfer over UCX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvnative._backend import NativeError
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.ucx.end import ucx_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvnative._backend import Backend, ThreadPool
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.transport.ucx.link import UcxLink
    from kvplan.transport.ucx.metadata import Metadata, Range

    Column = NDArray[np.uint64]


class UcxPeerMemory:
    """Tensors in a peer, as `UcxLink.memory` found them.

    Attributes:
        addresses: of each tensor, in the peer.
        nbytes: of each tensor.
        writable: whether a transfer may write to them.
    """

    in_process = False
    on_device = False

    def __init__(
        self,
        link: UcxLink,
        addresses: Column,
        nbytes: Column,
        writable: bool,
        ranges: Sequence[Range],
        known: Metadata,
    ) -> None:
        for column in (addresses, nbytes):
            column.flags.writeable = False
        self.addresses = addresses
        self.nbytes = nbytes
        self.writable = writable
        self._link = link
        self._ranges = ranges
        self._known = known  # the peer's, that names the ranges
        self._backends: dict[tuple[Direction, bool], Backend] = {}

    def backend(self, pool: ThreadPool, direction: Direction, other: TensorMemory) -> Backend:
        """What moves bytes between the peer and `other`.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: `other` is on a device; or as `check`.
        """
        if other.on_device and not self._link.takes_device:
            raise LLMException(
                f"the local side is in device memory; over UCX ({self._link.way}) "
                f"{self._link.peer} and host memory are the sides of a transfer: pull to, or push "
                "from, a cache with Placement.HOST, and copy between that and the device",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        way = direction, other.on_device
        if (known := self._backends.get(way)) is None:
            self._link.check()
            try:
                made = self._link.backend(
                    direction, self._ranges, self._known, on_device=other.on_device
                )
            except NativeError as error:
                raise ucx_error(error, f"{self._link.peer} cannot be reached") from error
            known = self._backends.setdefault(way, made)
        return known

    def check(self) -> None:
        """Call before a transfer and after it.

        Whether the peer still has the ranges registered is a part of each transfer, which fails
        with LLM_KV_CACHE_NOT_EXIST if not.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer is gone; or the link was closed, and why.
        """
        self._link.check()

    def check_tensors(self, tensors: range) -> None:
        """As `check`."""
        self._link.check()

    def __repr__(self) -> str:
        return (
            f"<UcxPeerMemory {len(self.addresses)} tensors, {self.nbytes.sum()} bytes: "
            f"{self._link!r}>"
        )
