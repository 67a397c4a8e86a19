"""A link to a peer over UCX: its registered memory, reached without its Python."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.columns import sized_tensors
from kvplan.transport.identity import link_failed
from kvplan.transport.ranges import RangeTable
from kvplan.transport.ucx.memory import UcxPeerMemory, columns
from kvplan.transport.ucx.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvnative._backend import Backend
    from kvnative._ucx import UcxNativeLink
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

    def __init__(self, native: UcxNativeLink, metadata: Metadata) -> None:
        self._pid = os.getpid()
        self._native = native
        self.metadata = metadata
        self._known = RangeTable(self.peer, metadata.ranges)
        self.way = native.way  # of a link that has failed it tells no more
        self._why: LLMException | None = None

    @property
    def finds_freed(self) -> Literal["check", "before", "after"]:
        """See `TransportLink`: who serves messages looks at each range before a byte moves."""
        return "before" if self.metadata.mode == "gathered" else "after"

    @property
    def closed_by_peer(self) -> bool:
        """See `TransportLink`."""
        failure = self._native.failure
        return failure is not None and failure[1].startswith(_CLOSED_BY_PEER)

    @property
    def peer(self) -> str:
        """The peer, for messages."""
        return str(self.metadata)

    @property
    def death_fd(self) -> int | None:
        """Polls readable once the link has failed: the peer has died, or has closed it.

        It is the link's: stop polling it before `close`.
        """
        return None if self._why is not None else self._native.death_fd

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
        table = self._known if metadata is None else self._read(metadata)
        ranges, _ = table.locate(starts, sizes, writable=writable)
        return UcxPeerMemory(self, starts, sizes, writable, ranges)

    def backend(self, direction: Direction, ranges: Sequence[Range]) -> Backend:
        """What moves bytes between `ranges` of the peer and this process.

        Raises:
            NativeError: the link has ended.
        """
        from kvnative._ucx_gathered import gathered_backend

        return gathered_backend(self._native, direction, *columns(ranges))

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
        if (failure := self._native.failure) is not None:
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
        self._native.close(str(self._why.args[0]))

    def __enter__(self) -> UcxLink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<UcxLink to {self.peer}: {'closed' if self._why else self.way}>"

    def _read(self, metadata: bytes) -> RangeTable[Range]:
        newer = Metadata.from_bytes(metadata)
        if newer.instance != self.metadata.instance:
            raise invalid(
                f"metadata is of the transport {newer.instance}; this link is to another, "
                f"{self.metadata.instance}"
            )
        return RangeTable(self.peer, newer.ranges)
