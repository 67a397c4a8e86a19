"""A link to a peer's device: its registered memory, reached over HCCL without its help."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvnative._hccl import MAX_GUARDS, Guards
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.columns import sized_tensors
from kvplan.transport.hccl.board import WORD_NBYTES
from kvplan.transport.hccl.memory import HcclPeerMemory
from kvplan.transport.hccl.metadata import Metadata
from kvplan.transport.ranges import RangeTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvplan.transport.hccl.connections import Connection, Connections
    from kvplan.transport.hccl.end import HcclEnd
    from kvplan.transport.hccl.metadata import Range
    from kvplan.transport.protocol import Renewable

    Column = NDArray[np.uint64]


class HcclLink:
    """Made by `HcclTransport.connect`; also a context manager.

    Attributes:
        end: this one.
        metadata: of the peer, when the link was made.
    """

    finds_freed: Literal["after"] = "after"
    death_fd = None
    """Who watches over the link must do so by other means: the peer may be on another host."""

    def __init__(self, end: HcclEnd, metadata: Metadata, connections: Connections) -> None:
        self._pid = os.getpid()
        self.end = end
        self.metadata = metadata
        self._connections = connections

    @property
    def renewable(self) -> Renewable:
        """See `TransportLink`."""
        return self._connections

    @property
    def peer(self) -> str:
        """The peer, for messages."""
        device = self.metadata.device
        return f"device {device.device_id} of host {device.server_id}"

    def memory(
        self,
        addresses: Sequence[int] | Column,
        nbytes: int | Sequence[int] | Column,
        *,
        writable: bool = False,
        metadata: bytes | None = None,
    ) -> HcclPeerMemory:
        """The peer's tensors, for use as the remote side of a transfer.

        Args:
            addresses: of each tensor, in the peer.
            nbytes: of each tensor, or one number for all.
            writable: whether the transfer writes to them.
            metadata: the peer's, naming the registrations that hold them; None: the one that the
                link was made with.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: a tensor does not lie inside one registration (one
                that has ended by now shows in the transfer); LLM_FEATURE_NOT_ENABLED: a tensor lies
                in memory that HCCL knows in parts, or is not reached over HCCS;
                LLM_PARAM_INVALID: bad sizes or metadata,
                another peer's metadata, memory of host and device at once, or a read-only
                registration to be written; LLM_NOT_YET_LINK: the link was closed.
            TypeError: not whole numbers.
        """
        self.check()
        starts, sizes = sized_tensors(addresses, nbytes)
        known = self.metadata if metadata is None else self._read(metadata)
        table = RangeTable(self.peer, known.ranges)
        ranges, held_by = table.locate(starts, sizes, writable=writable)
        if len({it.on_device for it in ranges}) > 1:
            raise invalid(
                f"tensors of {self.peer} are in its device's memory and its host's: a transfer has "
                "one way"
            )
        if not ranges[0].on_device and "host" not in self._remote_kinds():
            raise LLMException(
                f"tensors of {self.peer} are in its host's memory, which HCCL does not reach over "
                "HCCS, as devices of one host or super pod are connected: have that cache on the "
                "device, set HCCL_INTRA_ROCE_ENABLE=1 at both ends, or link over transport local",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        newest = _newest_region(ranges, starts, sizes, held_by)
        return HcclPeerMemory(self, starts, sizes, writable, ranges, newest)

    @property
    def way(self) -> str:
        """See `TransportLink`."""
        return "one-sided over HCCS" if self.is_hccs else "one-sided over RoCE"

    @property
    def is_hccs(self) -> bool:
        """Whether HCCL takes HCCS, and not RDMA."""
        return self._connections.is_hccs

    def _remote_kinds(self) -> frozenset[str]:
        return self.end.product.remote_kinds(is_hccs=self.is_hccs)

    def guards(self, ranges: Sequence[Range]) -> Guards:
        """What transfers must find on the peer's board after their bytes."""
        if len(ranges) > MAX_GUARDS:
            raise invalid(
                f"{len(ranges)} registrations of {self.peer} are used at once; HCCL transfers "
                f"check at most {MAX_GUARDS}: register larger pieces"
            )
        board = self.metadata.board.address
        return Guards(
            np.array([board + WORD_NBYTES * it.slot for it in ranges], dtype=np.uint64),
            np.array([it.generation for it in ranges], dtype=np.uint64),
        )

    def connection(self) -> Connection:
        """What transfers go over now.

        Raises:
            LLMException: as `check`.
        """
        return self._connections.current()

    def needs_renewal(self, connection: Connection, peer_newest: int) -> bool:
        """Whether it lacks the peer's region of that number, or had better not be used again."""
        if peer_newest > connection.peer_newest:
            return True
        # After an error of HCCL the connection may be good or not: a new one is.
        return connection.communicator.disturbed and self._connections.ask is not None

    def renew(self, connection: Connection) -> None:
        """Have both ends make a newer connection than that, and wait for it.

        Raises:
            LLMException: LLM_LINK_FAILED, LLM_TIMEOUT; LLM_FEATURE_NOT_ENABLED: nobody does that.
        """
        if self._connections.current() is not connection:
            return
        if self._connections.ask is None:
            raise LLMException(
                f"memory was registered after the link to {self.peer} was made, and nobody renews "
                "its connection: register before, or link engines",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        self._connections.ask()

    def check(self) -> None:
        """Raise LLMException unless the link is open; whether the peer lives shows in transfers.

        Raises:
            LLMException: LLM_NOT_YET_LINK, or what it was closed with; LLM_FAILED: this is a forked
                child, whose parent's link it is.
        """
        if os.getpid() != self._pid:
            raise LLMException(
                f"the link belongs to process {self._pid}; this is its forked child {os.getpid()}, "
                "which needs one of its own"
            )
        self._connections.current()

    def close(self, why: LLMException | None = None) -> None:
        """Let go of the peer, without waiting for anything; idempotent.

        Transfers in flight end, with the message and status of `why`.
        """
        if os.getpid() != self._pid:
            return
        self._connections.close(
            why
            or LLMException(
                f"the link to {self.peer} is closed",
                status_code=LLMStatusCode.LLM_NOT_YET_LINK,
            )
        )

    def __enter__(self) -> HcclLink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<HcclLink to {self.peer}{': closed' if self._connections.closed else ''}>"

    def _read(self, metadata: bytes) -> Metadata:
        newer, peer = Metadata.from_bytes(metadata), self.metadata
        if (newer.instance, newer.board) != (peer.instance, peer.board):
            raise invalid(
                f"metadata is of the transport {newer.instance}; this link is to another, "
                f"{peer.instance}"
            )
        return newer


def _newest_region(
    ranges: Sequence[Range], starts: Column, sizes: Column, held_by: NDArray[np.intp]
) -> int:
    """The highest number of the regions that hold the tensors.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: a tensor is in several.
    """
    newest = 0
    for k, it in enumerate(ranges):
        if len(it.regions) == 1:
            newest = max(newest, it.regions[0].number)
            continue
        for i in np.flatnonzero(held_by == k).tolist():
            region = it.region_of(int(starts[i]), int(sizes[i]))
            if region is None:
                raise LLMException(
                    f"tensor {i} at address {int(starts[i]):#x}, nbytes {sizes[i]}, lies in memory "
                    "that its peer registered in parts, first one and then more around it; HCCL "
                    "reaches one part at a time: register the whole first",
                    status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                )
            newest = max(newest, region.number)
    return newest
