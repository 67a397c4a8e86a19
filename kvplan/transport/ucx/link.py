"""A link to a peer over UCX: its registered memory, reached without its Python."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from kvnative._backend import NativeError
from kvnative._ucx import ucx_backend
from kvplan.execution.task import status_code_of
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.columns import sized_tensors
from kvplan.transport.identity import link_failed
from kvplan.transport.ranges import RangeTable
from kvplan.transport.ucx.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvnative._backend import Backend, ThreadPool
    from kvnative._ucx import UcxEndpoint
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.transport.ucx.metadata import Range

    Column = NDArray[np.uint64]


class UcxLink:
    """Made by `UcxTransport.connect`; also a context manager.

    Attributes:
        metadata: of the peer, when the link was made.
        renewable: nothing, as memory is reached as it comes.
        way: what of UCX reads and writes the peer's memory, such as "rc_mlx5/mlx5_0:1".
        takes_device: whether memory of a device may be this process's side of a transfer.
        finds_freed: see `TransportLink`.

    Args:
        endpoint: connected.
        metadata: of the peer.
    """

    renewable = None
    finds_freed: Final[Literal["after"]] = "after"

    def __init__(self, endpoint: UcxEndpoint, metadata: Metadata) -> None:
        self._pid = os.getpid()
        self._endpoint: UcxEndpoint | None = endpoint  # None: closed
        self.metadata = metadata
        self._table = RangeTable(self.peer, metadata.ranges)
        self.way = endpoint.transport
        self.takes_device = "cuda" in endpoint.worker.transports
        self._why: LLMException | None = None

    @property
    def peer(self) -> str:
        """The peer, for messages."""
        return str(self.metadata)

    @property
    def death_fd(self) -> int | None:
        """Polls readable once UCX has lost the peer, where it watches over it.

        It is the link's: stop polling it before `close`.
        """
        return None if self._endpoint is None else self._endpoint.death_fd

    def memory(
        self,
        addresses: Sequence[int] | Column,
        nbytes: int | Sequence[int] | Column,
        *,
        writable: bool = False,
        metadata: bytes | None = None,
    ) -> UcxPeerMemory:
        """The peer's tensors, for use as the remote side of a transfer.

        Args:
            addresses: of each tensor, in the peer.
            nbytes: of each tensor, or one number for all.
            writable: whether the transfer writes to them.
            metadata: the peer's, naming the registrations that hold them; None: the one that the
                link was made with.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: a tensor does not lie inside one registration (one
                that has ended by now shows in the transfer); LLM_PARAM_INVALID: bad sizes or
                metadata, another peer's metadata, or a read-only registration to be written;
                LLM_LINK_FAILED: the peer is gone; LLM_NOT_YET_LINK: the link was closed.
            TypeError: not whole numbers.
        """
        self.check()
        starts, sizes = sized_tensors(addresses, nbytes)
        table, known = (self._table, self.metadata) if metadata is None else self._read(metadata)
        ranges, _ = table.locate(starts, sizes, writable=writable)
        return UcxPeerMemory(self, starts, sizes, writable, ranges, known)

    def backend(
        self, direction: Direction, ranges: Sequence[Range], known: Metadata, *, on_device: bool
    ) -> Backend:
        """What moves bytes between `ranges` of the peer, as `known` names them, and this process.

        Raises:
            NativeError: the link has ended, or UCX takes a key for none.
        """
        if (endpoint := self._endpoint) is None:
            raise NativeError(f"the link to {self.peer} is closed")
        keys = {it.number: it.key for it in known.regions}
        places = {number: i for i, number in enumerate({it.region for it in ranges})}
        return ucx_backend(
            endpoint,
            direction,
            addresses=_column(it.address for it in ranges),
            nbytes=_column(it.nbytes for it in ranges),
            slots=_column(it.slot for it in ranges),
            generations=_column(it.generation for it in ranges),
            keys=_column(places[it.region] for it in ranges),
            rkeys=[keys[number] for number in places],
            local="cuda" if on_device else "host",
        )

    def check(self) -> None:
        """Raise LLMException unless the peer is there and the link is open.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer is gone, and how that shows; LLM_NOT_YET_LINK,
                or what it was closed with; LLM_FAILED: this is a forked child, whose parent's link
                it is.
        """
        if os.getpid() != self._pid:
            raise LLMException(
                f"the link belongs to process {self._pid}; this is its forked child {os.getpid()}, "
                "which needs one of its own"
            )
        if (why := self._why) is not None:
            raise LLMException(why.args[0], status_code=why.status_code)
        if (endpoint := self._endpoint) is not None and (failure := endpoint.failure) is not None:
            raise link_failed(f"{self.peer}: {failure[1]}")

    def close(self, why: LLMException | None = None) -> None:
        """Let go of the peer, without waiting for anything; idempotent.

        Transfers in flight end, with the message and status of `why`.
        """
        endpoint = self._endpoint
        if os.getpid() != self._pid or endpoint is None:
            return
        self._why = why or LLMException(
            f"the link to {self.peer} is closed", status_code=LLMStatusCode.LLM_NOT_YET_LINK
        )
        self._endpoint = None  # its descriptor goes with its last user
        endpoint.close(str(self._why.args[0]))

    def __enter__(self) -> UcxLink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<UcxLink to {self.peer}: {'closed' if self._why else self.way}>"

    def _read(self, metadata: bytes) -> tuple[RangeTable[Range], Metadata]:
        newer = Metadata.from_bytes(metadata)
        if newer.instance != self.metadata.instance:
            raise invalid(
                f"metadata is of the transport {newer.instance}; this link is to another, "
                f"{self.metadata.instance}"
            )
        return RangeTable(self.peer, newer.ranges), newer


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
            LLMException: LLM_FEATURE_NOT_ENABLED: `other` is on a device that UCX does not reach;
                or as `check`.
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
                raise LLMException(
                    f"{self._link.peer} cannot be reached: {error}",
                    status_code=status_code_of(getattr(error, "status", None)),
                ) from error
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


def _column(numbers: Iterable[int]) -> Column:
    return np.fromiter(numbers, dtype=np.uint64)
