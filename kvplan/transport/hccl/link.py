"""A link to a peer's device, and tensors in its registered memory."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Literal, Self
from weakref import ref

import numpy as np

from kvnative._hccl_memory import MAX_GUARDS, Guards
from kvplan.device.memory import check_device_of_link
from kvplan.status import LLMException, invalid, not_exist, timed_out, unsupported
from kvplan.transport.hccl.metadata import WORD_NBYTES, Metadata, Range
from kvplan.transport.link import (
    Located,
    PeerMemory,
    TransportLink,
    columns,
    lease_words,
    mixed_places,
)
from kvplan.transport.metadata import tag_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvnative._backend import Backend, ThreadPool
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.lease import BlockLease, LeaseWord
    from kvplan.transport.hccl.connections import Connection, Connections
    from kvplan.transport.hccl.device import HcclDevice
    from kvplan.transport.protocol import Renewable

    # The kind of the local side's memory, and whether it is staged.
    Way = tuple[Literal["device", "host"], bool]

_TRIES = 3  # memory that is registered during a renewal needs another renewal


class HcclPeerMemory(PeerMemory):
    """Tensors in a peer."""

    _link: HcclLink

    def __init__(self, link: HcclLink, located: Located) -> None:
        super().__init__(link, located, on_device=located.ranges[0].on_device)
        self._newest = _newest_region(located)
        self._guards = link.guards(located.ranges)
        self._leases: Sequence[str] = ()  # names of the leases, which are the last guards
        # Keeps used connections open: a transfer over one may be in flight.
        self._backends: dict[tuple[Connection, Direction, Way], Backend] = {}
        self._seen: tuple[ref[TensorMemory], int, int | None] | None = None

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory, timeout_ms: float | None
    ) -> Backend:
        """See `TensorMemory.backend`: the backend of the current connection.

        If the memory of either side was registered after the connection was made, both ends renew
        the connection first.
        """
        started = perf_counter()
        for _ in range(_TRIES):
            connection = self._link.connection()
            way = self._way(other, connection)
            if way is not None and not self._link.needs_renewal(connection, self._newest):
                return self._backend(connection, direction, way)
            took_ms = (perf_counter() - started) * 1000
            self._link.renew(connection, None if timeout_ms is None else timeout_ms - took_ms)
        raise timed_out(
            f"the connection to {self._link.peer} was renewed {_TRIES} times, and each time more "
            "memory was registered meanwhile: try again"
        )

    def leased(self, leases: Sequence[BlockLease]) -> Self:
        """See `PeerMemory.leased`: transfers read the words of leases with those of the ranges.

        Pushes are announced, and also read all words before they write.
        """
        words = lease_words(leases, self._link.transport)
        for lease, word in zip(leases, words, strict=True):
            if word.slot >= self._link.metadata.generations.num_slots or not word.generation:
                raise not_exist(  # a lease that cannot exist
                    f"{lease} was released or moved by {self._link.peer}, or has expired"
                )
        made = self._copy()
        made._newest, made._seen = self._newest, self._seen
        made._guards = self._link.guards(self._ranges, words)
        made._leases, made._backends = [str(lease) for lease in leases], {}
        return made

    def _backend(self, connection: Connection, direction: Direction, way: Way) -> Backend:
        key = connection, direction, way
        if (known := self._backends.get(key)) is None:
            local, is_staged = way
            is_announced = direction == "put" and bool(self._leases)
            made = connection.communicator.backend(
                direction,
                self._guards,
                self._link.hccl.staging if is_staged else None,
                local,
                self._leases,
                self._link.hccl.generations.tickets if is_announced else None,
                tag_of(self._link.metadata.instance),
            )
            known = self._backends.setdefault(key, made)
        return known

    def _way(self, other: TensorMemory, connection: Connection) -> Way | None:
        """Return the way to `other`; None: only a newer connection reaches it."""
        hccl = self._link.hccl
        local: Literal["device", "host"] = "device" if other.on_device else "host"
        check_device_of_link(other, hccl.device, self._link.peer)
        kinds = hccl.product.local_kinds(is_hccs=self._link.is_hccs)
        newest = self._newest_region(other) if local in kinds else None
        if newest is not None:
            return (local, False) if newest <= connection.newest else None
        if hccl.staging is None:
            takes = " and ".join(sorted(kinds))
            raise unsupported(
                f"the local side is {local} memory that is not registered with HCCL, and the "
                "device has no staging memory (kvplan.staging_nbytes=0): on this product "
                f"({hccl.product.name}) register {takes} memory, or raise kvplan.staging_nbytes"
            )
        return local, True

    def _newest_region(self, other: TensorMemory) -> int | None:
        """Return the highest number of the local regions that hold `other`; None: none holds it."""
        regions, seen = self._link.hccl.regions, self._seen
        changes = regions.changes
        if seen is not None and seen[0]() is other and seen[1] == changes:
            return seen[2]
        newest = regions.newest_of(other.addresses, other.nbytes, on_device=other.on_device)
        self._seen = ref(other), changes, newest
        return newest


class HcclLink(TransportLink):
    """The link that `HcclTransport.connect` makes. It has no `death_fd`.

    Attributes:
        hccl: The device of this process.
        is_hccs: True if HCCL uses HCCS; False: RDMA.
    """

    transport = "hccl"
    detects_freed: Literal["after"] = "after"

    def __init__(
        self, hccl: HcclDevice, metadata: Metadata, connections: Connections, way: str = ""
    ) -> None:
        super().__init__(metadata)
        self.hccl = hccl
        self._connections = connections
        self.renewable: Renewable = connections
        self.is_hccs = connections.is_hccs
        self.way = way or f"one-sided over {'HCCS' if self.is_hccs else 'RoCE'}"

    @property
    def closed(self) -> bool:
        """True if the link or its transport was closed."""
        return self._connections.closed

    def _memory(self, located: Located) -> HcclPeerMemory:
        ranges: Sequence[Range] = located.ranges
        if len({found.on_device for found in ranges}) > 1:
            raise mixed_places(self.peer)
        takes = self.hccl.product.remote_kinds(is_hccs=self.is_hccs)
        if not ranges[0].on_device and "host" not in takes:
            raise unsupported(
                f"tensors of {self.peer} are in host memory, which HCCL does not reach over HCCS "
                "(between devices of one host or super pod): place the cache on the device, set "
                "HCCL_INTRA_ROCE_ENABLE=1 at both ends, or link over transport local"
            )
        return HcclPeerMemory(self, located)

    def guards(self, ranges: Sequence[Range], leases: Sequence[LeaseWord] = ()) -> Guards:
        """Return the words that transfers must find in the peer's generation table."""
        if len(ranges) + len(leases) > MAX_GUARDS:
            raise invalid(
                f"one transfer uses {len(ranges)} registrations and {len(leases)} leases of "
                f"{self.peer}; HCCL transfers check at most {MAX_GUARDS}: register larger pieces"
            )
        words = self.metadata.generations.address
        slots, generations = columns([*ranges, *leases], "slot", "generation")
        return Guards(slots * np.uint64(WORD_NBYTES) + np.uint64(words), generations)

    def connection(self) -> Connection:
        """Return the connection for new transfers."""
        return self._connections.current()

    def needs_renewal(self, connection: Connection, peer_newest: int) -> bool:
        """Return whether the connection lacks that region, or was disturbed and can be renewed."""
        if peer_newest > connection.peer_newest:
            return True
        # An error of HCCL may have broken the connection.
        return connection.communicator.disturbed and self._connections.request_renewal is not None

    def renew(self, connection: Connection, timeout_ms: float | None = None) -> None:
        """Wait until both ends have made a newer connection than `connection`."""
        if self._connections.current() is not connection:
            return
        if self._connections.request_renewal is None:
            raise unsupported(
                f"memory was registered after the link to {self.peer} was made, and without "
                "engines a connection cannot be renewed: register memory first, or link engines"
            )
        self._connections.request_renewal(timeout_ms)

    def _check_peer(self) -> None:
        self._connections.current()  # only transfers show whether the peer is alive

    def _disconnect(self, why: LLMException) -> None:
        self._connections.close(why)


def _newest_region(located: Located) -> int:
    """Return the highest number of the regions that hold the tensors, each in one region."""
    newest = 0
    found: Range
    for k, found in enumerate(located.ranges):
        if len(found.regions) == 1:
            newest = max(newest, found.regions[0].number)
            continue
        for i in np.flatnonzero(located.held_by == k).tolist():
            start, size = int(located.starts[i]), int(located.sizes[i])
            region = found.region_of(start, size)
            if region is None:
                raise unsupported(
                    f"tensor {i} at address {start:#x}, nbytes {size}, crosses the border of two "
                    "HCCL regions, since its peer registered a part of the memory before the "
                    "whole: register the whole first"
                )
            newest = max(newest, region.number)
    return newest
