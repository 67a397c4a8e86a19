"""Base classes of links, and of tensors in the memory of a peer."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Self

import numpy as np

from kvplan.status import LLMException, invalid, message_of, not_linked, unsupported
from kvplan.system.limits import check_process
from kvplan.transport.ranges import RangeTable, sized_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvnative._backend import Backend, ThreadPool
    from kvnative._host import Arena
    from kvnative._process import Peer
    from kvnative._writers import WriteGuard
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.lease import BlockLease, LeaseWord
    from kvplan.transport.metadata import PeerMetadata, Range
    from kvplan.transport.protocol import Renewable

    Column = NDArray[np.uint64]


def no_leases(transport: str) -> LLMException:
    """Return the error of a lease without a word of this transport: LLM_FEATURE_NOT_ENABLED."""
    return unsupported(
        f"the lease cannot be checked over transport {transport}, which its owner's engine lacks"
    )


def mixed_places(peer: str) -> LLMException:
    """Return the refusal of tensors that are partly on a device and partly on the host."""
    return invalid(
        f"tensors of {peer} are partly in device memory and partly in host memory; transfer them "
        "separately"
    )


def lease_words(leases: Sequence[BlockLease], transport: str) -> list[LeaseWord]:
    """Return the words that a transport checks for these leases; raise if a lease has no word."""
    words = []
    for lease in leases:
        if (word := lease.word(transport)) is None:
            raise no_leases(transport)
        words.append(word)
    return words


_MAX_OVERLAPPING: Final = 16  # ranges of one transfer that share bytes with others


class Located(NamedTuple):
    """Tensors of a peer, and the registrations that hold them.

    Attributes:
        starts, sizes: The address and the size of each tensor.
        ranges: The registrations that hold tensors, sorted by address.
        held_by: For each tensor, the index of the range that holds it.
        known: The metadata that names the ranges.
        writable: True if a transfer may write to the tensors.
        overlapping: Ranges that share bytes with others. A transport that checks each byte by its
            address also checks these ranges, whichever bytes move.
    """

    starts: Column
    sizes: Column
    ranges: Sequence[Any]
    held_by: NDArray[np.intp]
    known: Sequence[Any]
    writable: bool
    overlapping: Sequence[Any] = ()


class TransportLink(ABC):
    """A link to one peer over one transport, and a context manager. Methods are thread-safe.

    Attributes:
        transport: The name of the transport, such as "local".
        way: How bytes move, for display: "rc_mlx5/mlx5_0:1".
        detects_freed: The time at which memory that the peer has deregistered is detected.
            "check": in `check` of that memory; "before": in a transfer, before it moves a byte;
            "after": in a transfer, after its bytes.
        checks_every_range: True if a transfer checks all ranges of its memory; False: it checks
            each byte by its address.
        renewable: The connection, if both ends can renew it; otherwise None.
        metadata: The metadata of the peer when the link was made.
        peer: The peer, for messages.
        pid: The process that the link belongs to.
    """

    transport: ClassVar[str]
    way: str
    detects_freed: Literal["check", "before", "after"]
    checks_every_range = True
    renewable: Renewable | None = None

    def __init__(self, metadata: PeerMetadata) -> None:
        self.pid: int = os.getpid()
        self.metadata: Any = metadata  # subclasses use fields of their own metadata
        self.peer: str = str(metadata)
        self._table: RangeTable[Any] = RangeTable(self.peer, metadata.ranges)
        self._why_closed: LLMException | None = None

    @property
    def death_fd(self) -> int | None:
        """A file descriptor that becomes readable when the peer dies; None: it does not exist.

        The link owns the descriptor: stop polling before `close`.
        """
        return None

    def unreached(self, metadata: bytes) -> str | None:
        """Return why this link does not reach the memory of `metadata`, or None if it does.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata, or another peer's.
        """
        return None

    def prepare(self, job: Callable[[], object]) -> None:
        """Call `job`, which calls `memory`, in a thread if that makes first transfers faster.

        `job` is called at most once, not after `close`, and may raise LLMException. Does not block.
        """
        del job  # by default nothing becomes faster

    def mapped(self) -> list[Arena]:
        """Return the arenas of the peer that are mapped here now."""
        return []

    def memory(
        self,
        addresses: Sequence[int] | Column,
        nbytes: int | Sequence[int] | Column,
        *,
        writable: bool = False,
        metadata: bytes | Sequence[bytes] | None = None,
        any_holder: bool = False,
    ) -> PeerMemory:
        """Return tensors of the peer as the remote side of a transfer.

        This method assigns each tensor to the registration that holds it. See `detects_freed` for
        when an ended registration is detected.

        Args:
            addresses: The address of each tensor, in the peer.
            nbytes: The size of each tensor, or one number for all.
            writable: True if the transfer writes to the tensors.
            metadata: Metadata of the peer with the registrations that hold the tensors, or one for
                each tensor; None: the metadata that the link was made with.
            any_holder: True if bytes that several registrations hold may move by any of them.
                False: a transfer fails once the registration of one of its tensors has ended.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: a tensor does not lie inside one registration, or
                the registration has ended; LLM_PARAM_INVALID: bad sizes or metadata, metadata of
                another peer, or a write to a read-only registration; LLM_LINK_FAILED: the peer has
                died or refuses access; LLM_NOT_YET_LINK: the link was closed;
                LLM_FEATURE_NOT_ENABLED: memory that this link does not reach, or too many
                registrations that overlap.
            TypeError: an address or size is not an integer.
        """
        self.check()
        starts, sizes = sized_tensors(addresses, nbytes)
        if metadata is None or isinstance(metadata, bytes):
            known, table = (
                (self.metadata, self._table) if metadata is None else self._read(metadata)
            )
            ranges, held_by = table.locate(starts, sizes, writable=writable)
            return self._memory(Located(starts, sizes, ranges, held_by, [known], writable))
        several, ranges, held_by = self._locate_each(starts, sizes, metadata, writable)
        shared = () if self.checks_every_range or any_holder else _overlapping(ranges)
        if len(shared) > _MAX_OVERLAPPING:
            raise unsupported(
                f"{self.peer} has {len(shared)} overlapping registrations ({shared[0]} and "
                f"others), and one transfer would use all of them; at most {_MAX_OVERLAPPING} are "
                "allowed: register the memory once, or use several transfers"
            )
        return self._memory(Located(starts, sizes, ranges, held_by, several, writable, shared))

    def check(self) -> None:
        """Raise unless the peer lives and the link is open.

        Raises:
            LLMException: LLM_LINK_FAILED: peer died; LLM_NOT_YET_LINK: closed; LLM_FAILED: a fork.
        """
        check_process(self.pid, "the link")
        if self._why_closed is not None:
            raise self._closed_error()
        self._check_peer()

    def close(self, why: LLMException | None = None) -> None:
        """Close the link without waiting for the peer; idempotent. Does nothing in a forked child.

        Transfers in flight keep their memory mapped, but fail their next check with the message and
        status of `why`; None: LLM_NOT_YET_LINK.
        """
        if os.getpid() != self.pid:
            return
        if not self.closed and self._why_closed is None:
            self._why_closed = why or self._closed_error()
        if self._why_closed is not None:  # None: the transport has closed the link
            # Also in a second call: an interrupt may have ended the first one before this line.
            self._disconnect(self._why_closed)

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._why_closed is not None

    @abstractmethod
    def _memory(self, located: Located) -> PeerMemory:
        """Return located tensors as the remote side of a transfer."""

    @abstractmethod
    def _check_peer(self) -> None:
        """Raise LLMException if the peer has died or closed its end."""

    @abstractmethod
    def _disconnect(self, why: LLMException) -> None:
        """Release the peer; transfers in flight end with `why`. Idempotent."""

    def _closed_error(self) -> LLMException:
        """Return the reason of `close` as a new exception, because many threads may raise it."""
        if (why := self._why_closed) is None:
            return not_linked(f"the link to {self.peer} is closed")
        return LLMException(message_of(why), status_code=why.status_code)

    def _read(self, metadata: bytes) -> tuple[Any, RangeTable[Any]]:
        newer = self.metadata.from_bytes(metadata)
        if not newer.is_of_owner(self.metadata):
            raise invalid(
                f"metadata is of {newer.owner}; this link is to another transport, "
                f"{self.metadata.owner}"
            )
        return newer, RangeTable(self.peer, newer.ranges)

    def _locate_each(
        self,
        starts: Column,
        sizes: Column,
        metadata: Sequence[bytes],
        writable: bool,
    ) -> tuple[list[Any], list[Range], NDArray[np.intp]]:
        """Locate each tensor only in its own metadata: other ranges may be deregistered earlier."""
        if len(metadata) != len(starts):
            raise invalid(f"metadata is of {len(metadata)} tensors; there are {len(starts)}")
        known: list[Any] = []
        places: dict[Range, int] = {}
        held_by = np.empty(len(starts), dtype=np.intp)
        for blob in dict.fromkeys(metadata):
            own = [i for i, other in enumerate(metadata) if other == blob]
            newer, table = self._read(blob)
            found, holding = table.locate(starts[own], sizes[own], writable=writable)
            known.append(newer)
            numbers = [places.setdefault(item, len(places)) for item in found]
            held_by[own] = np.array(numbers, dtype=np.intp)[holding]
        ranges = [*places]
        ordered = sorted(range(len(ranges)), key=lambda i: ranges[i].address)
        return known, [ranges[i] for i in ordered], np.argsort(ordered)[held_by]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.peer}: {'closed' if self.closed else self.way}>"


def _overlapping(ranges: Sequence[Range]) -> Sequence[Range]:
    """Return the ranges that share bytes with another one; `ranges` are sorted by address."""
    found: dict[Range, None] = {}
    furthest = ranges[0]
    for item in ranges[1:]:
        if item.address < furthest.address + furthest.nbytes:
            found[furthest] = found[item] = None
        furthest = max(furthest, item, key=lambda each: each.address + each.nbytes)
    return [*found]


_new = object.__new__


class PeerMemory:
    """Tensors of a peer, as the remote side of a transfer; see `TensorMemory`.

    Attributes:
        addresses: The address of each tensor, as the backend reaches it.
        nbytes: The size of each tensor.
        writable: True if a transfer may write to the tensors.
        in_process: True if the addresses are valid in this process.
        on_device: True if the tensors are in device memory of the peer.
    """

    def __init__(
        self,
        link: TransportLink,
        located: Located,
        *,
        in_process: bool = False,
        on_device: bool = False,
    ) -> None:
        self.addresses, self.nbytes, self._ranges, _, _, self.writable, overlapping = located
        # Slot, generation and name of ranges and leases that each transfer also checks.
        self._extra_checks: Sequence[tuple[int, int, str]] = [
            (item.slot, item.generation, f"the registration of {item}") for item in overlapping
        ]
        for column in (self.addresses, self.nbytes):
            column.flags.writeable = False
        self.in_process = in_process
        self.on_device = on_device
        self._link = link

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory, timeout_ms: float | None
    ) -> Backend | None:
        """See `TensorMemory.backend`."""
        raise NotImplementedError

    @property
    def reader(self) -> tuple[Peer, bytes, bool] | None:
        """Arguments of `Peer.copy`, a small read in the calling thread; None: not possible.

        They are the peer, the words to check, and True for the peer's own addresses, False for
        memory that is mapped here.
        """
        return None

    @property
    def write_guard(self) -> WriteGuard | None:
        """The native announcement of writes; None: the memory is not mapped, or read-only."""
        return None

    def leased(self, leases: Sequence[BlockLease]) -> Self:
        """Return the same memory; transfers with it fail once one of `leases` has ended.

        The error LLM_KV_CACHE_NOT_EXIST of a transfer names the lease that has ended.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: one without a word of this transport;
                LLM_PARAM_INVALID: too many; LLM_KV_CACHE_NOT_EXIST: one that cannot exist.
        """
        raise NotImplementedError

    def _extra_checks_with(self, leases: Sequence[BlockLease]) -> Sequence[tuple[int, int, str]]:
        """Return the extra checks with those of `leases`."""
        words = lease_words(leases, self._link.transport)
        named = [(w.slot, w.generation, str(lease)) for w, lease in zip(words, leases, strict=True)]
        return [*self._extra_checks, *named]

    def _copy(self) -> Self:
        """Return the same memory as another object, without the fields of subclasses."""
        copy: Self = _new(type(self))  # faster than a copy of `__dict__`
        copy.addresses = self.addresses
        copy.nbytes = self.nbytes
        copy.writable = self.writable
        copy.in_process = self.in_process
        copy.on_device = self.on_device
        copy._link = self._link
        copy._ranges = self._ranges
        copy._extra_checks = self._extra_checks
        return copy

    def check(self, tensors: range | None = None) -> None:
        """Check only the link: each transfer checks the ranges itself."""
        self._link.check()

    def __repr__(self) -> str:
        total = int(self.nbytes.sum())
        name = type(self).__name__
        return f"<{name} {len(self.addresses)} tensors, {total} bytes: {self._link!r}>"


def columns(ranges: Sequence[Range | LeaseWord], *names: str) -> tuple[Column, ...]:
    """Return the attributes `names` of ranges or lease words, a column for each name."""
    return tuple(
        np.fromiter((getattr(item, name) for item in ranges), dtype=np.uint64) for name in names
    )
