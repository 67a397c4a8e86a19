"""A link to a peer on this host, and tensors in its registered memory."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from kvnative._process import process_backend
from kvnative._signals import Mutex
from kvnative._writers import Writer
from kvplan.device.memory import check_device_of_link
from kvplan.status import LLMException, invalid, link_failed, message_of, not_exist, unsupported
from kvplan.system.limits import check_process
from kvplan.transport.link import Located, PeerMemory, TransportLink, mixed_places, no_leases
from kvplan.transport.local.descriptors import token_of
from kvplan.transport.local.identity import hold
from kvplan.transport.local.memory import Held, PeerAllocations, PeerArenas, refused
from kvplan.transport.local.metadata import Metadata, Range

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvnative._backend import Backend, ThreadPool
    from kvnative._host import Arena
    from kvnative._process import Peer
    from kvnative._writers import WriteGuard
    from kvplan.device.device import CopyDirection, Device
    from kvplan.device.sharing import Sharing
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.lease import BlockLease
    from kvplan.transport.local.descriptors import DescriptorServer
    from kvplan.transport.local.memory import Kind

    Column = NDArray[np.uint64]


class LocalPeerMemory(PeerMemory):
    """Tensors in a peer, either mapped here or at the peer's own addresses."""

    _link: LocalLink

    def __init__(
        self,
        link: LocalLink,
        located: Located,
        words: bytes,
        held: Sequence[object],
        writer: Writer | None,
        *,
        on_device: bool = False,
    ) -> None:
        is_here = bool(held) or link.is_to_self
        super().__init__(link, located, in_process=is_here, on_device=on_device)
        self._words = words  # of the ranges, then of the leases
        self._leases: Sequence[BlockLease] = ()
        # Keep the addresses mapped; empty for the peer's own addresses.
        self._held = held
        self._writer = writer  # announces writes; None: the memory needs no announcement
        self._write_guard: WriteGuard | None = None
        self._backends: dict[Direction, tuple[ThreadPool, Backend | None, Backend]] = {}

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory, timeout_ms: float | None
    ) -> Backend | None:
        """Return the backend of a transfer; None: the transfer reads memory that is mapped here.

        Every backend announces its writes to the owner. LLM_FEATURE_NOT_ENABLED: `other` is on a
        device, but the system copies memory that is not mapped here only from and to the host.
        """
        device = None  # backend of the device of `other`, which copies
        if other.on_device:
            if not self.in_process:
                raise self._link.unreached_from_device()
            if direction == "get":
                return None
            device = other.backend(pool, "get", self, timeout_ms)
        elif direction == "get" and self._held:
            return None
        known = self._backends.get(direction)
        if known is None or known[0] is not pool or known[1] is not device:
            made = self._writing(pool, device) if direction == "put" else self._link.reading(pool)
            known = self._backends[direction] = pool, device, made
        return known[2]

    def _writing(self, pool: ThreadPool, device: Backend | None) -> Backend:
        assert self._writer is not None, "memory that is not writable was refused before"
        if device is not None:
            return self._writer.around(device, self._words)
        if self._held:
            return self._writer.mapped(pool, self._words)
        return self._writer.by_address(pool, self._words)

    @property
    def reader(self) -> tuple[Peer, bytes, bool] | None:
        """See `PeerMemory.reader`."""
        return self._link.process, self._words, not self._held

    @property
    def write_guard(self) -> WriteGuard | None:
        """See `PeerMemory.write_guard`."""
        if self._write_guard is None and self._writer is not None and self._held:
            self._write_guard = self._writer.guarded(self._words)
        return self._write_guard

    def leased(self, leases: Sequence[BlockLease]) -> Self:
        """See `PeerMemory.leased`: each check finds a lease that ended before it."""
        words = self._words
        for lease in leases:
            word = lease.packed_word("local")
            if word is None:
                raise no_leases("local")
            words += word
        copy = self._copy()
        copy._words = words
        copy._leases = leases
        copy._held = self._held
        copy._writer = self._writer
        copy._write_guard = None
        copy._backends = {}
        return copy

    def check(self, tensors: range | None = None) -> None:
        """Check the peer, its ranges and the leases, before and after a transfer.

        All ranges are checked even for a part of the tensors, since this takes no system call.
        """
        link = self._link
        try:
            if os.getpid() == link.pid and link.process.check(self._words) < 0:
                return
        except (ValueError, OSError):
            pass
        held: list[Range | BlockLease] = [*self._ranges, *self._leases]
        link.check_ranges(held, self._words)  # raises the reason


class LocalDeviceMemory(LocalPeerMemory):
    """Tensors in the memory of a peer's device, mapped here."""

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory, timeout_ms: float | None
    ) -> Backend:
        """Return the backend of this process's device, between the peer's device and `other`.

        The backend announces writes to the owner, and also reads if only the announcement prevents
        the owner from freeing the memory.
        """
        device = self._link.device
        assert device is not None, "without a device nothing is mapped"
        if not other.in_process or isinstance(other, LocalPeerMemory):
            raise invalid(
                "src and dst are both memory of other processes; one of them must be of this one"
            )
        check_device_of_link(other, device, self._link.peer)
        way: CopyDirection = (
            "device_to_device"
            if other.on_device
            else "device_to_host"
            if direction == "get"
            else "host_to_device"
        )
        inner = device.backend(way)
        if direction == "get" and not any(memory.announces_reads for memory in self._ranges):
            return inner
        known = self._backends.get(direction)
        if known is None or known[1] is not inner:
            assert self._writer is not None, "memory that is not writable is refused before"
            made = self._writer.around(inner, self._words)
            known = self._backends[direction] = pool, inner, made
        return known[2]

    @property
    def reader(self) -> None:
        """None: a copy by the CPU does not reach the memory."""

    @property
    def write_guard(self) -> None:
        """None: a copy by the CPU does not reach the memory."""


class LocalLink(TransportLink):
    """The link that `LocalTransport.connect` makes.

    A check detects everything that happened before it: the peer's death, and ended ranges and
    leases. So a transfer between two passed checks moved the right bytes.

    Attributes:
        is_to_self: True if the peer is this process, whose host memory is not mapped again.
        lacks: The reasons why kinds of memory are not reached: "registered", host memory outside of
            arenas; "device", memory of the peer's device; "pieces", device memory in pieces.
        device: The device of this process for which device memory of the peer is mapped.
    """

    transport = "local"
    way = "mapped arenas, process_vm"
    detects_freed: Literal["check"] = "check"

    def __init__(
        self,
        metadata: Metadata,
        *,
        populate: str,
        device: Device | None = None,
        session: bytes = b"",
        server: DescriptorServer | None = None,
    ) -> None:
        super().__init__(metadata)
        self.device = device
        self._peer_pid = metadata.identity.pid
        self.is_to_self: bool = self._peer_pid == self.pid
        self._arenas = PeerArenas(self._peer_pid, populate=populate, is_self=self.is_to_self)
        self._can_reach_registered = False
        self.lacks: dict[Kind, str] = {}
        self._server = server
        self._token = token_of(session) if session else b""
        self._mutex = Mutex()  # for `_writer`, which all written memory shares
        self._writer: Writer | None = None
        self.process = hold(metadata.identity)
        sharing = None if device is None else device.sharing
        self._allocations = (
            None
            if device is None or sharing is None
            else PeerAllocations(metadata, self.process, self._token, device, sharing, self.check)
        )
        if sharing is not None:
            self.way = f"mapped arenas and GPU memory{_between(sharing, metadata)}, process_vm"
        generations = metadata.generations
        try:
            self.process.attach(generations.fd, generations.inode, generations.num_slots)
            if metadata.device:
                known = self._allocations
                self.lacks |= (
                    {"device": self._no_device("a GPU")} if known is None else known.lacks()
                )
            try:
                self._probe()
            except LLMException as error:
                if any(not found.is_mapped for found in metadata.ranges):
                    raise
                self.lacks["registered"] = message_of(error)
            if server is not None and self._token:
                server.admit(self._token)
        except (OSError, ValueError, MemoryError) as error:
            self.process.close()
            raise link_failed(refused(metadata, "cannot be reached", error).args[0]) from error
        except LLMException:
            self.process.close()
            raise

    @property
    def death_fd(self) -> int | None:
        """See `TransportLink.death_fd`: a pidfd; None: the link is closed."""
        pidfd = self.process.pidfd
        return pidfd if pidfd >= 0 else None

    def _memory(self, located: Located) -> LocalPeerMemory:
        starts, ranges = located.starts, located.ranges
        words = words_of(ranges)
        self.check_ranges(ranges, words)
        on_device = any(found.allocation is not None for found in ranges)
        held = self._hold(ranges, on_device=on_device)
        if held:
            shifts = np.array([found.shift % 2**64 for found in held], dtype=np.uint64)
            starts += shifts[located.held_by]  # uint64 wraps around, so a shift may be negative
        else:
            self._probe()
        is_announced = located.writable or any(found.announces_reads for found in ranges)
        writer = self._peer_writer() if is_announced else None
        kind = LocalDeviceMemory if on_device else LocalPeerMemory
        return kind(self, located, words, held, writer, on_device=on_device)

    def _check_peer(self) -> None:
        self._find_stale(b"")

    def check_ranges(self, ranges: Sequence[Range | BlockLease], words: bytes) -> None:
        """Check the link; LLM_KV_CACHE_NOT_EXIST: a range or lease has ended.

        `words` are the generation words of `ranges`, in that order.
        """
        check_process(self.pid, "the link")
        stale = self._find_stale(words)
        if stale >= 0:
            ended = ranges[stale]
            raise not_exist(
                f"{self.peer} has deregistered {ended}"
                if isinstance(ended, Range)
                else f"{ended} was released or moved by {self.peer}, or has expired"
            )

    def _find_stale(self, words: bytes) -> int:
        """Return the index of the first word that has changed; -1: none has."""
        try:
            return self.process.check(words)
        except ValueError:
            raise self._closed_error() from None
        except OSError as error:
            raise refused(self.metadata, "is lost", error) from error

    def reading(self, pool: ThreadPool) -> Backend:
        """Return the backend that reads from the peer's own addresses."""
        return process_backend(pool, self._peer_pid, "get")

    def unreached(self, metadata: bytes) -> str | None:
        """See `TransportLink.unreached`."""
        ranges = self._read(metadata)[0].ranges if self.lacks else ()
        kinds = set().union(*map(_kinds_of, ranges))
        return next((why for kind, why in self.lacks.items() if kind in kinds), None)

    def shortfall(self) -> str | None:
        """See `Transport.shortfall`; memory in pieces counts only if the peer has some."""
        lacks = dict(self.lacks)
        if not any("pieces" in _kinds_of(memory) for memory in self.metadata.ranges):
            lacks.pop("pieces", None)
        return "; ".join(lacks.values()) or None

    def prepare(self, job: Callable[[], object]) -> None:
        """See `TransportLink.prepare`: arenas are mapped, and their pages populated."""
        if not self.is_to_self:
            self._arenas.prepare(job)

    def mapped(self) -> list[Arena]:
        """See `TransportLink.mapped`."""
        return self._arenas.mapped()

    def unreached_from_device(self) -> LLMException:
        """Return the error of a transfer between host memory that is not mapped and a device."""
        return unsupported(
            f"{self.peer} has registered host memory outside of arenas, which the system copies "
            "only to and from host memory of this process: use a cache that its engine has "
            "allocated, or one on a device"
        )

    def close(self, why: LLMException | None = None) -> None:
        """See `TransportLink.close`; memory that `LocalPeerMemory` objects use stays mapped."""
        super().close(why)
        self.process.close()  # also in a forked child, which has descriptors of its own

    def _disconnect(self, why: LLMException) -> None:
        self._arenas.close()
        if self._allocations is not None:
            self._allocations.close()
        if self._server is not None:
            self._server.dismiss(self._token)
        self._writer = None  # memory that is in use keeps its reference

    def _hold(self, ranges: Sequence[Range], *, on_device: bool) -> list[Held]:
        """Return the mappings of the ranges; empty: all are reached by the peer's own addresses."""
        if not on_device and any(memory.arena is None for memory in ranges):
            return []
        held = []
        for memory in ranges:
            try:
                found = self._hold_allocation(memory) if on_device else self._arenas.hold(memory)
            except (LLMException, OSError, ValueError, MemoryError) as error:
                self._check_range(memory)  # raises if the range has just ended
                if isinstance(error, LLMException):
                    raise
                raise refused(
                    self.metadata, f"has {memory}, which cannot be mapped", error
                ) from error
            if found is None:
                return []
            held.append(found)
        return held

    def _hold_allocation(self, memory: Range) -> Held:
        if memory.allocation is None:
            raise mixed_places(self.peer)
        if self._allocations is None:
            raise unsupported(self._no_device(str(memory)))
        return self._allocations.hold(memory, lambda: self._check_range(memory))

    def _no_device(self, what: str) -> str:
        return (
            f"{self.peer} has {what}, and this process has no device that could reach it "
            "(kvplan.accelerator)"
        )

    def _check_range(self, memory: Range) -> None:
        self.check_ranges([memory], words_of([memory]))

    def _probe(self) -> None:
        """Raise LLMException if the system refuses process_vm_readv."""
        if self._can_reach_registered:
            return
        try:
            self.process.probe(self.metadata.generations.address)
        except (OSError, ValueError) as error:
            self.check()
            raise refused(
                self.metadata, "has registered memory, which cannot be reached", error
            ) from error
        self._can_reach_registered = True
        self.lacks.pop("registered", None)

    def _peer_writer(self) -> Writer:
        """Return the writer that announces this process's writes to the peer."""
        peer = self.metadata
        generations, table = peer.generations, peer.writers
        with self._mutex:
            if self._writer is None:
                try:
                    self._writer = Writer(
                        peer.identity.pid,
                        generations_fd=generations.fd,
                        generations_inode=generations.inode,
                        num_slots=generations.num_slots,
                        table_fd=table.fd,
                        table_inode=table.inode,
                        num_entries=table.num_entries,
                        address=table.address,
                    )
                except (OSError, ValueError, MemoryError) as error:
                    self.check()
                    raise refused(self.metadata, "cannot be written to", error) from error
            return self._writer


def _kinds_of(memory: Range) -> set[Kind]:
    """Return the kinds of memory (see `LocalLink.lacks`) that a link must reach to use a range."""
    if memory.allocation is not None:
        return {"device", "pieces"} if memory.allocation.is_in_pieces else {"device"}
    return {"registered"} if memory.arena is None else set()


def _between(sharing: Sharing, peer: Metadata) -> str:
    """Return the part of `way` that tells how memory of another GPU is reached."""
    if peer.device in ("", sharing.uuid):
        return ""
    if sharing.shortfall(peer.device) is None:
        return " (of another GPU, by peer access)"
    return " (only of the same GPU: no peer access)"


def words_of(ranges: Sequence[Range]) -> bytes:
    """Return slot and generation of each range, packed for `Peer.check`."""
    return array(
        "Q", [number for found in ranges for number in (found.slot, found.generation)]
    ).tobytes()
