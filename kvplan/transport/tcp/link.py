"""A link to a peer over TCP, and tensors in its registered memory, reached without its Python."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from kvnative._backend import NativeError, striped
from kvnative._tcp import tcp_backend
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.columns import sized_tensors
from kvplan.transport.identity import link_failed
from kvplan.transport.ranges import RangeTable
from kvplan.transport.tcp.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvnative._backend import Backend, ThreadPool
    from kvnative._tcp import TcpNativeLink
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.transport.tcp.metadata import Range

    Column = NDArray[np.uint64]

_STRIPE_NBYTES: Final = 1 << 20  # that another connection moves at least: 0.3 ms of its time


class TcpLink:
    """Made by `TcpTransport.connect`; see `TransportLink`."""

    # The owner looks at each range before a byte of it moves; what comes later is reached as well.
    finds_freed: Literal["before"] = "before"
    renewable = None

    def __init__(self, native: TcpNativeLink, metadata: Metadata, way: str) -> None:
        self._pid = os.getpid()
        self.native = native
        self._instance = metadata.instance
        self._table = RangeTable(str(metadata), metadata.ranges)
        self._why: LLMException | None = None  # it was closed
        self.peer = str(metadata)  # for messages
        self.way = way

    @property
    def death_fd(self) -> int | None:
        """See `TransportLink.death_fd`."""
        return file if (file := self.native.death_fd) >= 0 else None

    def memory(
        self,
        addresses: Sequence[int] | Column,
        nbytes: int | Sequence[int] | Column,
        *,
        writable: bool = False,
        metadata: bytes | None = None,
    ) -> TcpPeerMemory:
        """See `TransportLink.memory`; a registration that has ended shows in the transfer."""
        self.check()
        starts, sizes = sized_tensors(addresses, nbytes)
        table = self._table if metadata is None else self._read(metadata)
        ranges, _ = table.locate(starts, sizes, writable=writable)
        return TcpPeerMemory(self, starts, sizes, writable, ranges)

    def check(self) -> None:
        """See `TransportLink.check`; LLM_FAILED: this is a forked child of the link's process."""
        if os.getpid() != self._pid:
            raise LLMException(
                f"the link belongs to process {self._pid}; this is its forked child {os.getpid()}, "
                "which needs one of its own"
            )
        if (why := self._why) is not None:
            raise LLMException(why.args[0], status_code=why.status_code)
        if (failure := self.native.failure) is not None:
            raise link_failed(f"{self.peer}: {failure[1]}")
        if self.native.death_fd < 0:
            raise LLMException("the transport is closed")

    def close(self, why: LLMException | None = None) -> None:
        """See `TransportLink.close`; on return nothing here is read or written for the peer.

        In a forked child nothing happens: all of it is the parent's.
        """
        if self._why is not None:
            return
        self._why = why or LLMException(
            f"the link to {self.peer} is closed", status_code=LLMStatusCode.LLM_NOT_YET_LINK
        )
        self.native.close(str(self._why.args[0]))

    def __repr__(self) -> str:
        return f"<TcpLink to {self.peer}: {'closed' if self._why else self.way}>"

    def _read(self, metadata: bytes) -> RangeTable[Range]:
        newer = Metadata.from_bytes(metadata)
        if newer.instance != self._instance:
            raise invalid(
                f"metadata is of the transport {newer.instance}; this link is to another, "
                f"{self._instance}"
            )
        return RangeTable(self.peer, newer.ranges)


class TcpPeerMemory:
    """Tensors in a peer, as `TcpLink.memory` found them; see `TensorMemory`."""

    in_process = False
    on_device = False

    def __init__(
        self,
        link: TcpLink,
        addresses: Column,
        nbytes: Column,
        writable: bool,
        ranges: Sequence[Range],
    ) -> None:
        for column in (addresses, nbytes):
            column.flags.writeable = False
        self.addresses = addresses
        self.nbytes = nbytes
        self.writable = writable
        self._link = link
        self._ranges = ranges
        # As `TcpLink.check`: whether the ranges are still registered each transfer finds.
        self.check = link.check
        self._backends: dict[Direction, Backend] = {}

    def backend(self, pool: ThreadPool, direction: Direction, other: TensorMemory) -> Backend:
        """See `TensorMemory.backend`; LLM_FEATURE_NOT_ENABLED: `other` is on a device."""
        if other.on_device:
            raise LLMException(
                f"the local side is in device memory; over tcp {self._link.peer} and host memory "
                "are the sides of a transfer: pull to, or push from, a cache with Placement.HOST, "
                "and copy between that and the device",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        if (known := self._backends.get(direction)) is not None:
            return known
        self.check()
        slots, generations, addresses, nbytes = (
            np.array([getattr(it, name) for it in self._ranges], dtype=np.uint64)
            for name in ("slot", "generation", "address", "nbytes")
        )
        native = self._link.native
        try:
            each = [
                tcp_backend(native, it, direction, slots, generations, addresses, nbytes)
                for it in range(native.connections)
            ]
        except NativeError as error:
            self.check()  # it may have ended just now: then that is the reason
            raise link_failed(f"{self._link.peer} cannot be reached: {error}") from error
        made = each[0] if len(each) == 1 else striped(each, min_nbytes=_STRIPE_NBYTES)
        return self._backends.setdefault(direction, made)

    def check_tensors(self, tensors: range) -> None:
        """As `check`."""
        self._link.check()
