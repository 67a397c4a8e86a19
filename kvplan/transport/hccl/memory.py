"""Tensors in a peer's registered memory, as a side of a transfer over HCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from weakref import ref

import numpy as np

from kvplan.ascend.memory import DeviceMemory
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvnative._backend import Backend, ThreadPool
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.transport.hccl.connections import Connection
    from kvplan.transport.hccl.link import HcclLink
    from kvplan.transport.hccl.metadata import Range

    Column = NDArray[np.uint64]
    # Of the local side: which memory it is, and whether it goes through the staging memory.
    Way = tuple[Literal["device", "host"], bool]

_TRIES = 3  # what is registered while a connection is renewed needs another


class HcclPeerMemory:
    """Tensors in a peer, as `HcclLink.memory` found them.

    Attributes:
        addresses: of each tensor, in the peer.
        nbytes: of each tensor.
        writable: whether a transfer may write to them.
        on_device: whether they are in its device's memory.
    """

    in_process = False

    def __init__(
        self,
        link: HcclLink,
        addresses: Column,
        nbytes: Column,
        writable: bool,
        ranges: Sequence[Range],
        newest: int,
    ) -> None:
        for column in (addresses, nbytes):
            column.flags.writeable = False
        self.addresses = addresses
        self.nbytes = nbytes
        self.writable = writable
        self.on_device = ranges[0].on_device
        self._link = link
        self._newest = newest  # the highest number of the peer's regions that hold them
        self._guards = link.guards(ranges)
        # A connection that was used once is held: a transfer over it may be in flight.
        self._backends: dict[tuple[Connection, Direction, Way], Backend] = {}
        self._seen: tuple[ref[TensorMemory], int, int | None] | None = None

    def backend(self, pool: ThreadPool, direction: Direction, other: TensorMemory) -> Backend:
        """What moves bytes between the peer and `other`, over the connection of now.

        One that was made before either side's memory was registered is renewed first, by both ends.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: `other` is reached in no way, and why;
                LLM_TIMEOUT, LLM_LINK_FAILED: the connection could not be renewed; or as `check`.
        """
        for _ in range(_TRIES):
            connection = self._link.connection()
            way = self._way(other, connection)
            if way is not None and not self._link.needs_renewal(connection, self._newest):
                return self._backend(connection, direction, way)
            self._link.renew(connection)
        raise LLMException(
            f"the connection to {self._link.peer} was renewed {_TRIES} times, and memory was "
            "registered during each: try again",
            status_code=LLMStatusCode.LLM_TIMEOUT,
        )

    def check(self) -> None:
        """Call before a transfer and after it.

        Whether the peer still has the ranges registered is a part of each transfer: it reads that
        from the peer's board after its bytes, and fails with LLM_KV_CACHE_NOT_EXIST if not.

        Raises:
            LLMException: the link was closed, and why.
        """
        self._link.check()

    def check_tensors(self, tensors: range) -> None:
        """As `check`."""
        self._link.check()

    def _backend(self, connection: Connection, direction: Direction, way: Way) -> Backend:
        key = connection, direction, way
        if (known := self._backends.get(key)) is None:
            local, is_staged = way
            made = connection.communicator.backend(
                direction,
                self._guards,
                self._link.end.staging if is_staged else None,
                local,
            )
            known = self._backends.setdefault(key, made)
        return known

    def _way(self, other: TensorMemory, connection: Connection) -> Way | None:
        """How `other` is reached; None: over a newer connection.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: in no way.
        """
        end = self._link.end
        local: Literal["device", "host"] = "device" if other.on_device else "host"
        if isinstance(other, DeviceMemory) and other.device.native is not end.device.native:
            raise LLMException(
                f"the local side is on device {other.device.id}, the link to {self._link.peer} is "
                f"device {end.device.id}'s: use the engine of that device",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        kinds = end.product.local_kinds(is_hccs=self._link.is_hccs)
        newest = self._newest_region(other) if local in kinds else None
        if newest is not None:
            return (local, False) if newest <= connection.newest else None
        if end.staging is None:
            takes = " and ".join(sorted(kinds))
            raise LLMException(
                f"the local side is {local} memory that is not registered with HCCL, and there is "
                "no staging memory (kvplan.staging_nbytes=0): on this product "
                f"({end.product.name}) register {takes} memory, or give staging memory",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        return local, True

    def _newest_region(self, other: TensorMemory) -> int | None:
        """The highest number of the local regions that hold `other`; None: none do."""
        regions, seen = self._link.end.regions, self._seen
        changes = regions.changes
        if seen is not None and seen[0]() is other and seen[1] == changes:
            return seen[2]
        newest = regions.newest_of(other.addresses, other.nbytes, on_device=other.on_device)
        self._seen = ref(other), changes, newest
        return newest

    def __repr__(self) -> str:
        total = int(self.nbytes.sum())
        return f"<HcclPeerMemory {len(self.addresses)} tensors, {total} bytes: {self._link!r}>"
