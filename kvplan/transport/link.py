"""A link to a peer on this host: its registered memory, reached without its help."""

from __future__ import annotations

import os
import threading
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from kvnative._host import Arena
from kvnative._process import process_backend
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.identity import advice, hold, link_failed
from kvplan.transport.metadata import ArenaRef, Metadata, Range
from kvplan.transport.peer_memory import PeerMemory, columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvnative._backend import Backend, ThreadPool
    from kvplan.execution.memory import Direction

    Column = NDArray[np.uint64]

_SHOWN_RANGES = 8


class Link:
    """Made by `LocalTransport.connect`; also a context manager.

    The peer's Python takes no part in anything here. Each check finds the peer dead, or a range
    deregistered, that was so before it: a transfer between two passed checks moved what it should.
    """

    def __init__(self, metadata: Metadata, *, prefault: bool) -> None:
        self._metadata = metadata
        self._prefault = prefault
        self._arenas: dict[tuple[ArenaRef, int], Arena] = {}
        self._mutex = threading.Lock()
        self._can_reach_registered = False
        self._peer = hold(metadata.identity)
        board = metadata.board
        try:
            self._peer.attach(board.fd, board.inode, board.num_slots)
            if any(it.arena is None for it in metadata.ranges):
                self._probe()
        except (OSError, ValueError, MemoryError) as error:
            self._peer.close()
            raise self._refusal(error, "cannot be reached") from error
        except LLMException:
            self._peer.close()
            raise

    @property
    def metadata(self) -> Metadata:
        """Who the peer is and what it had registered when it last said so."""
        return self._metadata

    @property
    def is_to_self(self) -> bool:
        """Whether the peer is this process: good for a try; its memory is never mapped anew."""
        return self._metadata.identity.pid == os.getpid()

    def update(self, metadata: bytes) -> None:
        """Take newer metadata of the same peer: it may have registered more by now.

        Memory that was had from the link before stays as valid as it was.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata, or another process's.
        """
        newer = Metadata.from_bytes(metadata)
        if (newer.identity, newer.board) != (self._metadata.identity, self._metadata.board):
            raise invalid(
                f"metadata is of process {newer.identity.pid}, started at "
                f"{newer.identity.start_time}; this link is to another transport: process "
                f"{self._metadata.identity.pid}, started at {self._metadata.identity.start_time}"
            )
        with self._mutex:
            self._metadata = newer
            offered = {(it.arena, it.nbytes) for it in newer.ranges}
            self._arenas = {key: arena for key, arena in self._arenas.items() if key in offered}

    def memory(
        self,
        addresses: Sequence[int] | Column,
        nbytes: int | Sequence[int] | Column,
        *,
        writable: bool = False,
    ) -> PeerMemory:
        """The peer's tensors, for use as the remote side of a transfer.

        Args:
            addresses: of each tensor, in the peer.
            nbytes: of each tensor, or one number for all.
            writable: whether the transfer writes to them.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: a tensor does not lie inside one range that the
                peer has registered, or no longer; LLM_PARAM_INVALID: bad sizes, or a read-only
                range to be written; LLM_LINK_FAILED: the peer is gone, or the system refuses
                access.
            TypeError: not whole numbers.
        """
        starts = _uint64("addresses", addresses)
        sizes = _uint64("nbytes", [nbytes] if isinstance(nbytes, int) else nbytes)
        if not starts.size or sizes.size not in (1, starts.size):
            raise invalid(
                f"addresses are {starts.size} and nbytes {sizes.size}; at least one address is "
                "needed, and one nbytes for each or one for all"
            )
        sizes = np.broadcast_to(sizes, starts.shape).copy()
        ranges = self._locate(starts, sizes, writable=writable)
        memory = PeerMemory(self, starts, sizes, writable, ranges)
        memory.check()
        # Mapped a second time, this process's own arena would have two addresses for one byte, and
        # no overlap with its first would show.
        if all(it.arena is not None for it in ranges) and not self.is_to_self:
            memory.translate([self._map(it) for it in ranges])
        else:
            self._probe()
        return memory

    def check(self) -> None:
        """Raise LLMException (LLM_LINK_FAILED) unless the peer lives and the link is open."""
        none = np.empty(0, np.uint64)
        self.check_ranges((), none, none)

    def check_ranges(
        self,
        ranges: Sequence[Range],
        slots: Column,
        generations: Column,
    ) -> None:
        """As `check`, and LLM_KV_CACHE_NOT_EXIST for a range that is deregistered by now."""
        pid = self._metadata.identity.pid
        if self._peer.closed:
            raise LLMException(
                f"the link to peer {pid} is closed", status_code=LLMStatusCode.LLM_NOT_YET_LINK
            )
        try:
            stale = self._peer.check(slots, generations)
        except OSError as error:
            raise self._refusal(error, "is lost") from error
        if stale >= 0:
            raise _not_exist(f"peer {pid} has deregistered {ranges[stale]}")

    def backend(self, pool: ThreadPool, direction: Direction) -> Backend:
        """The backend that reaches this peer's own addresses."""
        return process_backend(pool, self._metadata.identity.pid, direction)

    def close(self) -> None:
        """Let go of the peer; idempotent.

        Arenas that `PeerMemory` objects still use stay mapped until those are gone, but their
        checks fail from here on.
        """
        with self._mutex:
            self._arenas = {}
            self._peer.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._peer.closed else f"{len(self._metadata.ranges)} ranges"
        return f"<Link to process {self._metadata.identity.pid}: {state}>"

    def _locate(self, starts: Column, sizes: Column, *, writable: bool) -> list[Range]:
        """The registered range that each tensor lies in; an arena where there is a choice."""
        ranges = sorted(self._metadata.ranges, key=lambda it: it.arena is None)
        firsts = np.array([it.address for it in ranges], dtype=np.uint64)
        # Last bytes, not ends: a range may end at 2**64.
        lasts = np.array([it.address + it.nbytes - 1 for it in ranges], dtype=np.uint64)
        found = []
        for i, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            if size < 1 or start + size > 2**64:
                raise invalid(
                    f"tensor {i} has address {start:#x} and nbytes {size}; nbytes must be at "
                    "least 1, and end by 2**64"
                )
            inside = np.flatnonzero((firsts <= start) & (start + size - 1 <= lasts))
            if not inside.size:
                raise _not_exist(
                    f"tensor {i} at address {start:#x}, nbytes {size}, is not inside one range "
                    f"that peer {self._metadata.identity.pid} has registered: {_listed(ranges)}"
                )
            fitting = [k for k in inside.tolist() if ranges[k].writable or not writable]
            if not fitting:
                raise invalid(
                    f"tensor {i} at address {start:#x} is to be written, but its peer registered "
                    f"{ranges[inside[0]]} with writable=False"
                )
            found.append(ranges[fitting[0]])
        return found

    def _map(self, it: Range) -> tuple[Range, Arena]:
        assert it.arena is not None
        key = (it.arena, it.nbytes)  # a hostile peer may give one descriptor two sizes
        with self._mutex:
            arena = self._arenas.get(key)
            if arena is None or (it.writable and not arena.writable):
                try:
                    arena = Arena.of_peer(
                        self._metadata.identity.pid,
                        it.arena.fd,
                        it.arena.inode,
                        it.nbytes,
                        writable=it.writable,
                    )
                    if self._prefault:
                        arena.populate()
                except (OSError, ValueError, MemoryError) as error:
                    # It may have ended just now: then that is the true reason.
                    self.check_ranges([it], *columns([it]))
                    raise self._refusal(error, f"has {it}, which cannot be mapped") from error
                self._arenas[key] = arena
        return it, arena

    def _probe(self) -> None:
        """Find out once, and not at the first transfer, if the system refuses process_vm_readv."""
        if self._can_reach_registered:
            return
        try:
            self._peer.probe(self._metadata.board.address)
        except (OSError, ValueError) as error:
            self.check()
            raise self._refusal(error, "has registered memory, which cannot be reached") from error
        self._can_reach_registered = True

    def _refusal(self, error: Exception, what: str) -> LLMException:
        identity = self._metadata.identity
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if isinstance(error, PermissionError):
            reason += f"; {advice(identity)}"
        return link_failed(f"peer {identity.pid} {what}: {reason}")


def _uint64(name: str, values: Sequence[int] | Column) -> Column:
    """A fresh column; what is no whole number of 64 bits is refused and not rounded."""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {values.dtype}; it must be of whole numbers")
    numbers = values.ravel().tolist() if isinstance(values, np.ndarray) else list(values)
    for number in numbers:
        if not 0 <= index(number) < 2**64:
            raise invalid(f"{name} holds {number}; it must be in [0, 2**64)")
    return np.array(numbers, dtype=np.uint64)


def _listed(ranges: Sequence[Range]) -> str:
    shown = ", ".join(str(it) for it in ranges[:_SHOWN_RANGES])
    more = f" and {len(ranges) - _SHOWN_RANGES} more" if len(ranges) > _SHOWN_RANGES else ""
    return f"{shown}{more}" if ranges else "none at all"


def _not_exist(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
