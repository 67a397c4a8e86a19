"""Tensors in a peer's memory, as a side of a transfer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvnative._backend import Backend, ThreadPool
    from kvnative._host import Arena, Pin
    from kvnative._writers import Writer
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.transport.link import Link
    from kvplan.transport.metadata import Range

    Column = NDArray[np.uint64]


class PeerMemory:
    """Tensors in a peer, as `Link.memory` found them.

    Attributes:
        addresses: of each tensor, as this process reaches it: in a mapped arena, or the peer's own.
        nbytes: of each tensor.
        writable: whether a transfer may write to them.
        in_process: whether the addresses are of this process: mapped here, or the peer is this one.
    """

    on_device = False

    def __init__(
        self,
        link: Link,
        addresses: Column,
        nbytes: Column,
        writable: bool,
        ranges: Sequence[Range],
        arenas: Sequence[Arena | Pin],
        writer: Writer | None,
    ) -> None:
        for column in (addresses, nbytes):
            column.flags.writeable = False
        self.addresses = addresses
        self.nbytes = nbytes
        self.writable = writable
        self._link = link
        self._ranges = ranges
        self._slots, self._generations = columns(ranges)
        # What the addresses point into, held open; empty where they are the peer's own.
        self._arenas = arenas
        self.in_process = bool(arenas) or link.is_to_self
        self._writer = writer  # that announces what is written; None: not writable
        self._backends: dict[Direction, tuple[ThreadPool, Backend | None, Backend]] = {}

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory
    ) -> Backend | None:
        """What reaches the addresses; None: they are mapped here, so whatever copies here does.

        What writes to them announces that to their owner, whatever copies.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: addresses of the peer's own, which the system
                copies from and to host memory alone, and `other` is on a device.
        """
        device = None  # what copies, where `other` is on one
        if other.on_device:
            if not self.in_process:
                raise self._link.unreached_from_device()
            if direction == "get":
                return None
            device = other.backend(pool, "get", self)
        elif direction == "get" and self._arenas:
            return None
        known = self._backends.get(direction)
        if known is None or known[0] is not pool or known[1] is not device:
            made = self._writing(pool, device) if direction == "put" else self._link.reading(pool)
            known = self._backends[direction] = pool, device, made
        return known[2]

    def _writing(self, pool: ThreadPool, device: Backend | None) -> Backend:
        assert self._writer is not None, "memory that is not writable is refused before"
        registered = self._slots, self._generations
        if device is not None:
            return self._writer.around(device, *registered)
        if self._arenas:
            return self._writer.mapped(pool, *registered)
        return self._writer.by_address(pool, *registered)

    def check(self) -> None:
        """Call before a transfer and after it; only if both pass, it moved what it should.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer has exited, executes another program, or has
                closed its transport; LLM_KV_CACHE_NOT_EXIST: it has deregistered a range;
                LLM_NOT_YET_LINK: the link was closed.
        """
        link = self._link
        try:
            if os.getpid() == link.pid and link.peer.check(self._slots, self._generations) < 0:
                return
        except (ValueError, OSError):
            pass
        link.check_ranges(self._ranges, self._slots, self._generations)  # says what is wrong

    def check_tensors(self, tensors: range) -> None:
        """Call before a part of a transfer moves; all ranges are looked at, whatever the part.

        What is mapped here stays the same memory, whatever becomes of the peer: an arena lives as
        long as its last mapping, and no reused pid leads elsewhere. So it is enough that the peer
        still has it registered, which its board says without a system call; that it has exited, or
        executes another program, is for `check` to find after the last part. Addresses of the
        peer's own are reached by its pid, so they are checked wholly each time.

        Raises:
            LLMException: as `check`; of memory that is mapped here LLM_LINK_FAILED is left to it,
                and a forked child to the task, which has refused it by then.
        """
        self._link.check_ranges(
            self._ranges, self._slots, self._generations, alive=not self._arenas
        )

    def __repr__(self) -> str:
        return (
            f"<PeerMemory {len(self.addresses)} tensors, {self.nbytes.sum()} bytes: {self._link}>"
        )


def columns(ranges: Sequence[Range]) -> tuple[Column, Column]:
    """Return the slots and generations of `ranges`, as `Peer.check` takes them."""
    return (
        np.array([it.slot for it in ranges], dtype=np.uint64),
        np.array([it.generation for it in ranges], dtype=np.uint64),
    )
