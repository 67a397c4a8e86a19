"""Base classes of transports: the transport itself, a link, and tensors in the memory of a peer.

This module must not depend on a particular transport.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar, cast

import numpy as np

from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.host_memory import new_arena
from kvplan.transport.metadata import PeerMetadata, Range
from kvplan.transport.ranges import RangeTable, sized_tensors
from kvplan.transport.registrations import Registration, Registrations, transport_closed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from kvnative._host import Arena
    from kvnative._process import Peer
    from kvnative._writers import WriteGuard
    from kvplan.lease import BlockLease, LeaseWord
    from kvplan.transport import protocol
    from kvplan.transport.protocol import Registrable, Renewable

    Column = NDArray[np.uint64]


def link_failed(message: str) -> LLMException:
    """Return the error of a peer that cannot be reached, or not any more: LLM_LINK_FAILED."""
    return LLMException(message, status_code=LLMStatusCode.LLM_LINK_FAILED)


def no_leases(where: str) -> LLMException:
    """Return the error of a lease that this transport cannot check: LLM_FEATURE_NOT_ENABLED."""
    return LLMException(
        f"{where}: leases are not checked by this transport, or not those with ttl_ms; "
        "docs/how-to/leases.md says which are",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    )


def lease_words(leases: Sequence[BlockLease], transport: str) -> list[LeaseWord]:
    """Return the words that a transport checks for these leases; refuse others as `no_leases`."""
    words = []
    for lease in leases:
        if (word := lease.word(transport)) is None:
            raise no_leases(transport)
        words.append(word)
    return words


def check_process(pid: int, what: str) -> None:
    """Raise LLMException (LLM_FAILED) in a forked child of process `pid`, the owner of `what`."""
    if os.getpid() != pid:
        raise LLMException(
            f"the {what} belongs to process {pid}; this is its forked child {os.getpid()}, "
            "which needs one of its own"
        )


_Registration = TypeVar("_Registration", bound=Registration[Any, Any])


class BaseTransport(ABC, Generic[_Registration]):
    """The common part of all transports. Subclasses set `_registrations`; see `Transport`."""

    name: ClassVar[str]
    maps_host = False
    _registrations: Registrations[Any, Any]

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False

    def allocate(
        self, nbytes: int, *, prefault: bool = False, allow_overcommit: bool = False
    ) -> Arena:
        """Return new zeroed host memory, parts of which can be registered.

        The memory is freed with its last user here and in the peers.

        Args:
            nbytes: The size in bytes.
            prefault: Allocate every page now. Otherwise pages are allocated at their first use, and
                a process that finds no free page then is killed.
            allow_overcommit: Permit more than all memory and swap.

        Raises:
            LLMException: LLM_PARAM_INVALID: a size that is not possible; LLM_OUT_OF_MEMORY: not
                enough memory; LLM_FAILED: for example, no file descriptor is left.
        """
        self._check_open()
        return new_arena(nbytes, prefault=prefault, allow_overcommit=allow_overcommit)

    def preregister_pool(self, memory: Registrable, keep: object = None) -> None:
        """See `Transport.preregister_pool`.

        Raises:
            LLMException: as `Transport.preregister_pool`; LLM_FAILED: the transport is closed, or a
                parent process's.
        """
        self._check_open()
        self._registrations.preregister_pool(memory, keep)

    def register(
        self, memory: Registrable, *, writable: bool = True, keep: object = None
    ) -> _Registration:
        """See `Transport.register`.

        Raises:
            TypeError, LLMException: as `Transport.register`; LLM_FAILED: the transport is closed,
                or a parent process's.
        """
        self._check_open()
        made = self._registrations.add(memory, writable=writable, keep=keep)
        return cast(_Registration, made)

    def deregister(self, registration: protocol.Registration) -> None:
        """See `Transport.deregister`.

        Raises:
            TypeError, LLMException: as `Transport.deregister`; LLM_FAILED: the transport is closed,
                or a parent process's.
        """
        self._check_open()
        self._registrations.end(registration)

    def begin_lease(self, deadline_ns: int = 0) -> tuple[int, int]:
        """See `Transport.begin_lease`.

        Raises:
            LLMException: as `Transport.begin_lease`; LLM_FAILED: the transport is closed, or a
                parent process's.
        """
        self._check_open()
        return self._registrations.begin_lease(deadline_ns)

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """See `Transport.renew_lease`.

        Raises:
            LLMException: as `Transport.renew_lease`; LLM_FAILED: the transport is closed, or a
                parent process's.
        """
        self._check_open()
        self._registrations.renew_lease(slot, generation, deadline_ns)

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """See `Transport.end_leases`.

        Raises:
            LLMException: as `Transport.end_leases`; LLM_FAILED: the transport is closed, or a
                parent process's.
        """
        self._check_open()
        self._registrations.end_leases(leases)

    def refusal(self, metadata: bytes) -> str | None:
        """See `Transport.refusal`.

        Raises:
            LLMException: LLM_FAILED: the transport is closed, or a parent process's.
        """
        self._check_open()
        try:
            self._check_reachable(metadata)
        except LLMException as error:
            return str(error.args[0])
        return None

    def shortfall(self, metadata: bytes) -> str | None:
        """See `Transport.shortfall`: none is known before a transfer."""
        return None

    def num_streams(self, metadata: bytes) -> int:
        """See `Transport.num_streams`: none."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """See `Transport.close`."""

    @abstractmethod
    def _check_reachable(self, metadata: bytes) -> None:
        """Raise LLMException if the process of `metadata` cannot be reached; does not block."""

    def _check_open(self) -> None:
        if self._closed:
            raise transport_closed()
        check_process(self._pid, "transport")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._registrations)} registrations"
        return f"<{type(self).__name__} of process {self._pid}: {state}>"


_Range = TypeVar("_Range", bound=Range)
_Metadata = TypeVar("_Metadata", bound=PeerMetadata)
_Memory = TypeVar("_Memory", bound="BasePeerMemory[Any, Any]")
_Link = TypeVar("_Link", bound="BaseLink[Any, Any, Any]")


class BaseLink(ABC, Generic[_Metadata, _Range, _Memory]):
    """The common part of all links; see `TransportLink`. Also a context manager.

    Attributes:
        transport: The name of the transport, such as "local".
        metadata: The metadata of the peer when the link was made.
        peer: The peer, for messages.
        pid: The process that the link belongs to.
        checks_every_range: True if a transfer checks all ranges of its memory; False: it checks
            each byte by its address.
    """

    transport: ClassVar[str]
    detects_freed: Literal["check", "before", "after"]
    way: str
    checks_every_range = True
    renewable: Renewable | None = None

    def __init__(self, metadata: _Metadata) -> None:
        self.pid: int = os.getpid()
        self.metadata = metadata
        self.peer: str = str(metadata)
        self._table: RangeTable[_Range] = RangeTable(self.peer, metadata.ranges)
        self._why_closed: LLMException | None = None

    @property
    def death_fd(self) -> int | None:
        """See `TransportLink.death_fd`."""
        return None

    def unreached(self, metadata: bytes) -> str | None:
        """See `TransportLink.unreached`: all that the peer has registered is reached."""
        return None

    def prepare(self, job: Callable[[], object]) -> None:
        """See `TransportLink.prepare`: the first transfer needs no preparation."""

    def mapped(self) -> list[Arena]:
        """See `TransportLink.mapped`."""
        return []

    def memory(
        self,
        addresses: Sequence[int] | Column,
        nbytes: int | Sequence[int] | Column,
        *,
        writable: bool = False,
        metadata: bytes | Sequence[bytes] | None = None,
        any_holder: bool = False,
    ) -> _Memory:
        """See `TransportLink.memory`: only here is it decided which registration holds a tensor.

        `detects_freed` tells whether this method or the transfer detects an ended one.
        """
        self.check()
        starts, sizes = sized_tensors(addresses, nbytes)
        if metadata is None or isinstance(metadata, bytes):
            known, table = (
                (self.metadata, self._table) if metadata is None else self._read(metadata)
            )
            ranges, held_by = table.locate(starts, sizes, writable=writable)
            return self._memory(starts, sizes, ranges, held_by, [known], writable=writable)
        several, ranges, held_by = self._locate_each(starts, sizes, metadata, writable, any_holder)
        return self._memory(starts, sizes, ranges, held_by, several, writable=writable)

    def check(self) -> None:
        """Raise LLMException unless the peer lives and the link is open."""
        check_process(self.pid, "link")
        if self._why_closed is not None:
            raise self._closed_error()
        self._check_peer()

    def close(self, why: LLMException | None = None) -> None:
        """Let go of the peer, without waiting for it; idempotent. Does nothing in a forked child.

        Transfers in flight fail their next check with the message and status of `why`; None:
        LLM_NOT_YET_LINK.
        """
        if os.getpid() != self.pid:
            return
        if not self.closed and self._why_closed is None:
            self._why_closed = why or self._closed_error()
        if self._why_closed is not None:  # None: its transport has closed it
            # Also the second time: an interrupt may have ended the first call before this.
            self._disconnect(self._why_closed)

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._why_closed is not None

    @abstractmethod
    def _memory(
        self,
        starts: Column,
        sizes: Column,
        ranges: Sequence[_Range],
        held_by: NDArray[np.intp],
        known: Sequence[_Metadata],
        *,
        writable: bool,
    ) -> _Memory:
        """Return the tensors, each of which lies in the range that `held_by` gives."""

    @abstractmethod
    def _check_peer(self) -> None:
        """Raise LLMException if the peer is gone."""

    @abstractmethod
    def _disconnect(self, why: LLMException) -> None:
        """Let go of the peer; transfers in flight end with `why`. Idempotent."""

    def _closed_error(self) -> LLMException:
        """Return why the link was closed, as a new exception: each is raised once."""
        if (why := self._why_closed) is None:
            return LLMException(
                f"the link to {self.peer} is closed", status_code=LLMStatusCode.LLM_NOT_YET_LINK
            )
        return LLMException(why.args[0], status_code=why.status_code)

    def _read(self, metadata: bytes) -> tuple[_Metadata, RangeTable[_Range]]:
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
        any_holder: bool,
    ) -> tuple[list[_Metadata], list[_Range], NDArray[np.intp]]:
        """Locate each tensor only in its own metadata: other ranges may be freed first."""
        if len(metadata) != len(starts):
            raise invalid(f"metadata is of {len(metadata)} tensors; there are {len(starts)}")
        known: list[_Metadata] = []
        places: dict[_Range, int] = {}
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
        if not (self.checks_every_range or any_holder):
            for i, j in pairwise(ordered):
                if ranges[j].address < ranges[i].address + ranges[i].nbytes:
                    raise LLMException(
                        f"{self.peer} has registered memory twice, {ranges[i]} and {ranges[j]}, "
                        "and one transfer would use both: register it once, or transfer them apart",
                        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                    )
        return known, [ranges[i] for i in ordered], np.argsort(ordered)[held_by]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.peer}: {'closed' if self.closed else self.way}>"


_new = object.__new__


class BasePeerMemory(Generic[_Link, _Range]):
    """The common part of tensors of a peer; see `TensorMemory`.

    Attributes:
        addresses: The address of each tensor, as the backend reaches it.
        nbytes: The size of each tensor.
        writable: True if a transfer may write to them.
        in_process: True if the addresses are of this process.
        on_device: True if they are in the memory of the peer's device.
    """

    def __init__(
        self,
        link: _Link,
        addresses: Column,
        nbytes: Column,
        ranges: Sequence[_Range],
        *,
        writable: bool,
        in_process: bool = False,
        on_device: bool = False,
    ) -> None:
        for column in (addresses, nbytes):
            column.flags.writeable = False
        self.addresses = addresses
        self.nbytes = nbytes
        self.writable = writable
        self.in_process = in_process
        self.on_device = on_device
        self._link = link
        self._ranges = ranges

    @property
    def guard(self) -> tuple[Peer, bytes] | None:
        """See `PeerMemory.guard`."""
        return None

    @property
    def write_guard(self) -> WriteGuard | None:
        """See `PeerMemory.write_guard`."""
        return None

    def leased(self, leases: Sequence[BlockLease]) -> Self:
        """See `PeerMemory.leased`; refused here."""
        raise no_leases(self._link.transport)

    def _copy(self) -> Self:
        """Return the same memory as another object, without what its subclass adds.

        It copies field by field: a copy of `__dict__` takes three times as long, and slows each
        access.
        """
        copy: Self = _new(type(self))
        copy.addresses = self.addresses
        copy.nbytes = self.nbytes
        copy.writable = self.writable
        copy.in_process = self.in_process
        copy.on_device = self.on_device
        copy._link = self._link
        copy._ranges = self._ranges
        return copy

    def check(self) -> None:
        """Check the link. Each transfer finds out whether the ranges still stand."""
        self._link.check()

    def check_tensors(self, tensors: range) -> None:
        """See `check`."""
        self.check()

    def __repr__(self) -> str:
        total = int(self.nbytes.sum())
        name = type(self).__name__
        return f"<{name} {len(self.addresses)} tensors, {total} bytes: {self._link!r}>"


def columns(ranges: Sequence[Range | LeaseWord], *names: str) -> tuple[Column, ...]:
    """Return the attributes `names` of all ranges, a column for each name."""
    return tuple(
        np.fromiter((getattr(item, name) for item in ranges), dtype=np.uint64) for name in names
    )
