"""A link to a peer over UCX: its registered memory, reached without its Python."""

from __future__ import annotations

import os
import select
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

    Args:
        natives: its lanes, one at least: it has failed when one of them has.
        metadata: of the peer.
        regions: of this process, in the mode one_sided.
    """

    renewable = None

    def __init__(
        self,
        natives: Sequence[UcxNativeLink],
        metadata: Metadata,
        regions: UcxRegions | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._natives = tuple(natives)  # empty: closed
        self._regions = regions  # None: the peer serves messages
        self.metadata = metadata
        self._table = RangeTable(self.peer, metadata.ranges)
        # Of a link that has failed it tells no more.
        lanes = f", {len(natives)} lanes" if len(natives) > 1 else ""
        self.way = f"{natives[0].way}{lanes}"
        self._why: LLMException | None = None
        self._deaths = _any_of([it.death_fd for it in natives]) if lanes else None

    @property
    def finds_freed(self) -> Literal["check", "before", "after"]:
        """See `TransportLink`: who serves messages looks at each range before a byte moves."""
        return "before" if self.metadata.mode == "gathered" else "after"

    @property
    def closed_by_peer(self) -> bool:
        """See `TransportLink`."""
        failure = self._failure
        return failure is not None and failure[1].startswith(_CLOSED_BY_PEER)

    @property
    def _failure(self) -> tuple[int, str] | None:
        """Status and message of why a native link has ended by itself."""
        return next((why for it in self._natives if (why := it.failure) is not None), None)

    @property
    def peer(self) -> str:
        """The peer, for messages."""
        return str(self.metadata)

    @property
    def death_fd(self) -> int | None:
        """Polls readable once the link has failed: the peer has died, or has closed it.

        It is the link's: stop polling it before `close`.
        """
        natives, deaths = self._natives, self._deaths
        if not natives or (deaths is not None and deaths.closed):
            return None
        return natives[0].death_fd if deaths is None else deaths.fileno()

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
            NativeError: the link has ended.
        """
        if not (natives := self._natives):
            raise NativeError(f"the link to {self.peer} is closed")
        if self._regions is None:
            return backends.gathered(natives, direction, ranges)
        local: backends.Local = "cuda" if on_device else "host"
        return backends.one_sided(natives[0], direction, ranges, known, self._regions, local)

    @property
    def takes_device(self) -> bool:
        """Whether memory of a device may be this process's side of a transfer."""
        return self._regions is not None and "cuda" in self._regions.end.transports

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
        if (failure := self._failure) is not None:
            raise link_failed(f"{self.peer}: {failure[1]}")

    def close(self, why: LLMException | None = None) -> None:
        """Let go of the peer, without waiting for anything; idempotent.

        Transfers in flight end, with the message and status of `why`.
        """
        if os.getpid() != self._pid or self._why is not None:
            return
        self._why = why or LLMException(
            f"the link to {self.peer} is closed", status_code=LLMStatusCode.LLM_NOT_YET_LINK
        )
        natives, self._natives = self._natives, ()  # their descriptors go with their last users
        if self._deaths is not None:
            self._deaths.close()
        for native in natives:
            native.close(str(self._why.args[0]))

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


def _any_of(files: Sequence[int]) -> select.epoll:
    """What polls readable once one of the files does."""
    found = select.epoll(len(files))
    for file in files:
        found.register(file, select.EPOLLIN)
    return found
