"""A link to a peer on this host: its registered memory, reached without its help."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvnative._host import Pin
from kvnative._process import process_backend
from kvnative._writers import Writer
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.arenas import PeerArenas, offered
from kvplan.transport.columns import sized_tensors
from kvplan.transport.identity import advice, hold, link_failed
from kvplan.transport.metadata import Metadata
from kvplan.transport.peer_memory import PeerMemory, columns
from kvplan.transport.ranges import RangeTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvnative._backend import Backend, ThreadPool
    from kvnative._host import Arena
    from kvplan.transport.metadata import Range

    Column = NDArray[np.uint64]


class Link:
    """Made by `LocalTransport.connect`; also a context manager.

    The peer's Python takes no part in anything here. Each check finds the peer dead, or a range
    deregistered, that was so before it: a transfer between two passed checks moved what it should.

    Attributes:
        is_to_self: whether the peer is this process: its memory is never mapped anew.
        pid: of the process that the link belongs to.
        peer: what the system says of the peer, and of its ranges.
        renewable: nothing, as memory is reached as it comes.
    """

    renewable = None
    way = "mapped arenas, process_vm"
    finds_freed: Literal["check"] = "check"

    def __init__(self, metadata: Metadata, *, prefault: bool) -> None:
        self.pid = os.getpid()
        self.is_to_self = metadata.identity.pid == self.pid
        self._known = metadata, RangeTable(metadata.identity.pid, metadata.ranges)
        self._arenas = PeerArenas(metadata.identity.pid, prefault=prefault)
        self._can_reach_registered = False
        self._mutex = threading.RLock()  # of the writer: one for all memory that is written to
        self._writer: Writer | None = None
        self._why_closed = (
            f"the link to peer {metadata.identity.pid} is closed",
            LLMStatusCode.LLM_NOT_YET_LINK,
        )
        self.peer = hold(metadata.identity)
        board = metadata.board
        try:
            self.peer.attach(board.fd, board.inode, board.num_slots)
            if any(it.arena is None for it in metadata.ranges):
                self._probe()
        except (OSError, ValueError, MemoryError) as error:
            self.peer.close()
            raise self._refusal(error, "cannot be reached") from error
        except LLMException:
            self.peer.close()
            raise

    @property
    def metadata(self) -> Metadata:
        """Who the peer is and what it had registered when it last said so."""
        return self._known[0]

    @property
    def death_fd(self) -> int | None:
        """A pidfd: polls readable once the peer has died; None when the link is closed.

        It is the link's: stop polling it before `close`.
        """
        pidfd = self.peer.pidfd
        return pidfd if pidfd >= 0 else None

    def update(self, metadata: bytes) -> None:
        """Take newer metadata of the same peer: it may have registered more by now.

        Memory that was had from the link before stays as valid as it was.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata, or another process's.
        """
        self._known = self._read(metadata)

    def memory(
        self,
        addresses: Sequence[int] | Column,
        nbytes: int | Sequence[int] | Column,
        *,
        writable: bool = False,
        metadata: bytes | None = None,
    ) -> PeerMemory:
        """The peer's tensors, for use as the remote side of a transfer.

        Args:
            addresses: of each tensor, in the peer.
            nbytes: of each tensor, or one number for all.
            writable: whether the transfer writes to them.
            metadata: the peer's, naming the registrations that hold them; None: what the link was
                made with, or last updated to.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: a tensor does not lie inside one range that the
                peer has registered, or no longer; LLM_PARAM_INVALID: bad sizes or metadata, or a
                read-only range to be written; LLM_LINK_FAILED: the peer is gone, or the system
                refuses access; LLM_NOT_YET_LINK: the link was closed.
            TypeError: not whole numbers.
        """
        starts, sizes = sized_tensors(addresses, nbytes)
        _, table = self._known if metadata is None else self._read(metadata)
        ranges, held_by = table.locate(starts, sizes, writable=writable)
        self.check_ranges(ranges, *columns(ranges))
        arenas, shifts = self._mapped(ranges)
        if arenas:
            starts += shifts[held_by]  # uint64 wraps around, so a shift may be negative
        else:
            self._probe()
        writer = self._writer_there() if writable else None
        return PeerMemory(self, starts, sizes, writable, ranges, arenas, writer)

    def check(self) -> None:
        """Raise LLMException unless the peer lives and the link is open.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer is gone; LLM_NOT_YET_LINK: the link was closed;
                LLM_FAILED: this is a forked child, whose parent's link it is.
        """
        self.check_ranges((), *columns(()))

    def check_ranges(
        self,
        ranges: Sequence[Range],
        slots: Column,
        generations: Column,
        *,
        alive: bool = True,
    ) -> None:
        """As `check`, and LLM_KV_CACHE_NOT_EXIST for a range that is deregistered by now.

        Args:
            alive: whether to ask the system if the peer lives, and if this is no forked child:
                5 us, or 50 where something else was computed in between. False: it is not asked.
        """
        if alive and os.getpid() != self.pid:
            raise LLMException(
                f"the link belongs to process {self.pid}; this is its forked child {os.getpid()}, "
                "which needs one of its own"
            )
        try:
            look = self.peer.check if alive else self.peer.stale
            stale = look(slots, generations)
        except ValueError:
            message, status = self._why_closed
            raise LLMException(message, status_code=status) from None
        except OSError as error:
            raise self._refusal(error, "is lost") from error
        if stale >= 0:
            raise LLMException(
                f"peer {self.metadata.identity.pid} has deregistered {ranges[stale]}",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )

    def reading(self, pool: ThreadPool) -> Backend:
        """The backend that reads from this peer's own addresses."""
        return process_backend(pool, self.metadata.identity.pid, "get")

    def unreached_from_device(self) -> LLMException:
        """Why its own addresses and a device's memory are no two sides of one transfer."""
        return LLMException(
            f"peer {self.metadata.identity.pid} has registered this memory itself, and of another "
            "process the system copies it to and from host memory alone; a cache that its engine "
            "allocates is reached, and so are caches on devices (transport hccl)",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )

    def close(self, why: LLMException | None = None) -> None:
        """Let go of the peer; idempotent.

        Arenas that `PeerMemory` objects still use stay mapped until those are gone, but their
        checks fail from here on, with the message and status of `why`.
        """
        if why is not None and not self.peer.closed:
            self._why_closed = why.args[0], why.status_code
        if os.getpid() == self.pid:  # else the lock may be held for ever, by a thread of the parent
            self._arenas.close()
        self._writer = None  # memory that is in use keeps it
        self.peer.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.peer.closed else f"{len(self.metadata.ranges)} ranges"
        return f"<Link to process {self.metadata.identity.pid}: {state}>"

    def _read(self, metadata: bytes) -> tuple[Metadata, RangeTable[Range]]:
        newer, peer = Metadata.from_bytes(metadata), self.metadata
        if (newer.identity, newer.board) != (peer.identity, peer.board):
            raise invalid(
                f"metadata is of process {newer.identity.pid}, started at "
                f"{newer.identity.start_time}; this link is to another transport: process "
                f"{peer.identity.pid}, started at {peer.identity.start_time}"
            )
        return newer, RangeTable(newer.identity.pid, newer.ranges)

    def _mapped(self, ranges: Sequence[Range]) -> tuple[list[Arena | Pin], Column]:
        """What holds the arena of each range open here, and by how much addresses shift.

        Nothing if one of them is in no arena: then all are reached by the peer's own addresses,
        since a transfer has one way.
        """
        refs = [it.arena for it in ranges if it.arena is not None]
        arenas: list[Arena | Pin] = []
        if len(refs) == len(ranges):
            arenas = [arena for it in ranges if (arena := self._hold(it)) is not None]
        if len(arenas) < len(ranges):
            return [], np.empty(0, np.uint64)
        pairs = zip(arenas, refs, strict=True)
        shifts = [(arena.address - ref.address) % 2**64 for arena, ref in pairs]
        return arenas, np.array(shifts, dtype=np.uint64)

    def _hold(self, it: Range) -> Arena | Pin | None:
        """Of a peer a mapping; of this process its own arena, None where the like was not offered.

        Mapped a second time, one byte would have two addresses here, and no overlap would show.
        """
        assert it.arena is not None
        try:
            if not self.is_to_self:
                return self._arenas.map(it)
            arena = offered(it.arena)
            return None if arena is None else Pin(arena, writable=it.writable)
        except (OSError, ValueError, MemoryError) as error:
            # It may have ended just now: then that is the true reason.
            self.check_ranges([it], *columns([it]))
            raise self._refusal(error, f"has {it}, which cannot be mapped") from error

    def _probe(self) -> None:
        """Find out once, and not at the first transfer, if the system refuses process_vm_readv."""
        if self._can_reach_registered:
            return
        try:
            self.peer.probe(self.metadata.board.address)
        except (OSError, ValueError) as error:
            self.check()
            raise self._refusal(error, "has registered memory, which cannot be reached") from error
        self._can_reach_registered = True

    def _writer_there(self) -> Writer:
        """What announces to the peer what this process writes to its memory."""
        peer = self.metadata
        board, table = peer.board, peer.writers
        with self._mutex:
            if self._writer is None:
                try:
                    self._writer = Writer(
                        peer.identity.pid,
                        board_fd=board.fd,
                        board_inode=board.inode,
                        num_slots=board.num_slots,
                        table_fd=table.fd,
                        table_inode=table.inode,
                        num_entries=table.num_entries,
                        address=table.address,
                    )
                except (OSError, ValueError, MemoryError) as error:
                    self.check()
                    raise self._refusal(error, "cannot be written to") from error
            return self._writer

    def _refusal(self, error: Exception, what: str) -> LLMException:
        identity = self.metadata.identity
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if isinstance(error, PermissionError):
            reason += f"; {advice(identity)}"
        return link_failed(f"peer {identity.pid} {what}: {reason}")
