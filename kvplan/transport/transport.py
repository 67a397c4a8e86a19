"""The base class of transports; offers of caches, and lease words, over several transports."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvnative._signals import Mutex
from kvplan.lease import BlockLease, LeaseWord
from kvplan.status import LLMException, LLMStatusCode, message_of
from kvplan.system.limits import check_process
from kvplan.system.logs import Log
from kvplan.transport.host_memory import new_arena
from kvplan.transport.protocol import kind_of
from kvplan.transport.registrations import transport_closed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvnative._host import Arena
    from kvplan.transport.link import TransportLink
    from kvplan.transport.metadata import PeerMetadata
    from kvplan.transport.protocol import Kind, Registrable, Streams
    from kvplan.transport.registrations import AnyRegistration, Registrations

_LOG = Log("kvplan")


class Transport(ABC):
    """The memory that this process offers to peers, and its links to them.

    Transfers are one-sided: the owner's Python takes no part. Methods are thread-safe. A transport
    belongs to the process that made it: in a forked child, as after `close`, its methods raise
    LLMException (LLM_FAILED), except `close`, `num_streams` and `shortfall`. Subclasses set
    `_registrations`.

    Attributes:
        name: The name of the transport at both ends, such as "local".
        reaches: The kinds of memory that can be registered.
        maps_host: True if the transport maps host memory for a device that can map it only once.
            Then the device's own runtime should allocate host memory, and nothing else should pin
            it.
    """

    name: ClassVar[str]
    maps_host: bool = False
    reaches: frozenset[Kind]
    _registrations: Registrations[Any, Any]

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._mutex = Mutex()  # re-entrant: a signal handler may close, a finalizer deregister
        self._closed = False

    def allocate(
        self, nbytes: int, *, prefault: bool = False, allow_overcommit: bool = False
    ) -> Arena:
        """Return new zeroed host memory, parts of which can be registered.

        The last user, here or in a peer, frees the memory.

        Args:
            nbytes: The size in bytes.
            prefault: Allocate every page now. Otherwise pages are allocated at their first use, and
                the system kills a process for which it has no free page.
            allow_overcommit: Permit more than the memory and swap of the machine or cgroup.

        Raises:
            LLMException: LLM_PARAM_INVALID: a size that is not possible; LLM_OUT_OF_MEMORY: not
                enough memory, or no file descriptor is left.
        """
        self._check_open()
        return new_arena(nbytes, prefault=prefault, allow_overcommit=allow_overcommit)

    def preregister_pool(self, memory: Registrable, keep: object = None) -> None:
        """Announce a pool before parts of it are registered, so that links can prepare for them.

        Peers cannot reach the pool yet. Some transports keep it alive until they are closed.

        Args:
            memory: The whole pool.
            keep: An object to keep alive with the pool, such as its pin.

        Raises:
            LLMException: as `register`, or an error of the device.
        """
        self._check_open()
        self._registrations.preregister_pool(memory, keep)

    def register(
        self, memory: Registrable, *, writable: bool = True, keep: object = None
    ) -> AnyRegistration:
        """Let peers reach `memory`, and write to it unless `writable` is False.

        A part of an arena (a slice of `memoryview(arena)`, or an array over one) is as fast as the
        whole, whichever transport has allocated the arena. Registrations in one arena end
        independently.

        Args:
            memory: An object with a contiguous buffer (NumPy array, bytearray, mmap), which is kept
                alive until it is deregistered; or (address, nbytes) of memory that the caller keeps
                alive, such as `(tensor.data_ptr(), tensor.nbytes)`; or a `DeviceRange`.
            writable: True if peers may write to it.
            keep: An object to keep alive until no peer can write to the memory, such as the one
                that returns the memory to its pool.

        Raises:
            LLMException: LLM_PARAM_INVALID: memory that is not mapped, not readable, not
                contiguous, or not writable although `writable` is True; LLM_OUT_OF_MEMORY: no room
                for another registration; LLM_FEATURE_NOT_ENABLED: the transport does not reach this
                memory, with the reason.
            TypeError: neither a buffer nor (address, nbytes), an array of Python objects, or a kind
                of memory that this transport does not reach.
        """
        self._check_open()
        return self._registrations.add(memory, writable=writable, keep=keep)

    def deregister(self, registration: AnyRegistration) -> None:
        """End a registration: from now on no transfer with it succeeds.

        Waits for peers that are writing, if the transport can detect them. If a peer does not stop
        (a stopped process, for example), the memory is quarantined, with a warning. A second call
        waits for the same peers. Each transport's class documents what its peers may still do.

        Raises:
            TypeError: A transport of another kind made `registration`.
            LLMException: LLM_FAILED: the transport is closed, or belongs to a parent process.
        """
        self._check_open()
        self._registrations.end(registration)

    def metadata(self, registrations: Iterable[AnyRegistration] | None = None) -> bytes:
        """Return the identity of this process and the ranges of `registrations`; None means all.

        Raises:
            TypeError: A transport of another kind made one of them.
            LLMException: LLM_PARAM_INVALID: one is not registered with this transport, or has
                ended; LLM_FAILED: the transport is closed.
        """
        self._check_open()
        with self._registrations.mutex:
            self._registrations.check_open()
            published = self._metadata(self._registrations.select(registrations))
        return published.to_bytes()

    def begin_lease(self, deadline_ns: int = 0) -> tuple[int, int]:
        """Return a slot and a generation, which peers check like those of registrations.

        Args:
            deadline_ns: The time on CLOCK_MONOTONIC after which no transfer with the lease
                succeeds; 0: none.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY: no room for another lease.
        """
        self._check_open()
        return self._registrations.begin_lease(deadline_ns)

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """Change the deadline of a lease that was made with a deadline and has not ended.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: the lease has ended.
        """
        self._check_open()
        self._registrations.renew_lease(slot, generation, deadline_ns)

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """End leases: from now on no transfer with one succeeds, and no peer writes with it.

        Waits for peers that are writing, even if a lease has ended before.

        Raises:
            LLMException: LLM_TIMEOUT: a peer made no progress and may still write; call this again.
        """
        self._check_open()
        self._registrations.end_leases(leases)

    def refusal(self, metadata: bytes) -> str | None:
        """Return why the peer of `metadata` cannot be reached from here, or None if it can.

        Raises:
            LLMException: LLM_FAILED: the transport is closed, or belongs to a parent process.
        """
        self._check_open()
        try:
            self._check_reachable(metadata)
        except LLMException as error:
            return message_of(error)
        return None

    def shortfall(self, metadata: bytes) -> str | None:
        """Return which memory of a reachable peer is not reached and why, or None.

        An engine prefers a transport without a shortfall.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata; LLM_LINK_FAILED: the peer has died.
        """
        return None

    def num_streams(self, metadata: bytes) -> int:
        """Return the number of connections, from index 0 on, that `connect` to that peer opens.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata.
        """
        return 0

    @property
    def connects_at_once(self) -> bool:
        """True if the next `connect` waits only for its `streams`, and does little else."""
        return False

    @abstractmethod
    def connect(
        self,
        metadata: bytes,
        *,
        timeout_ms: float,
        session: bytes = b"",
        streams: Streams | None = None,
    ) -> TransportLink:
        """Link to the peer of `metadata`; both ends must do so, in any order.

        Args:
            metadata: Metadata of the peer, with any of its registrations.
            timeout_ms: Milliseconds that the call may take.
            session: A secret, the same at both ends and different for each attempt.
            streams: Opens connections to the peer, for a transport that moves bytes over them. The
                caller closes it afterwards. None: no connections can be opened.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer cannot be reached, with the reason;
                LLM_TIMEOUT; LLM_PARAM_INVALID: bad metadata.
        """

    def close(self) -> None:
        """Deregister all memory, as `deregister` does, and end the threads; idempotent.

        Do not use its links afterwards. Does nothing in a forked child.
        """
        if os.getpid() != self._pid:
            return
        with self._mutex:
            if self._closed:
                return
            self._closed = True
        self._close()

    @abstractmethod
    def _metadata(self, registrations: Sequence[AnyRegistration]) -> PeerMetadata:
        """Return the metadata that names these registrations; called with their mutex."""

    @abstractmethod
    def _check_reachable(self, metadata: bytes) -> None:
        """Raise LLMException if the process of `metadata` cannot be reached; does not block."""

    @abstractmethod
    def _close(self) -> None:
        """Close the transport. `close` calls this once."""

    def _check_open(self) -> None:
        if self._closed:
            raise transport_closed()
        if os.getpid() != self._pid:  # each call of Python costs a release 2 percent
            check_process(self._pid, "the transport")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._registrations)} registrations"
        return f"<{type(self).__name__} of process {self._pid}: {state}>"


@dataclass(frozen=True, slots=True)
class Offered:
    """A cache that peers may reach over the transports of this process.

    Attributes:
        metadata: The metadata that a peer needs, by the name of the transport; empty if the
            transport does not reach such memory.
        registrations: Each registration with its transport.
    """

    metadata: Mapping[str, bytes]
    registrations: tuple[tuple[Transport, AnyRegistration], ...]

    def deregister(self) -> None:
        """End the registrations. A second call waits for the same peers as the first."""
        with ExitStack() as all_of_them:
            for transport, registration in self.registrations:
                all_of_them.callback(transport.deregister, registration)


def offer(
    transports: Sequence[Transport],
    ranges: Sequence[Registrable],
    writable: bool,
    keep: object = None,
) -> Offered:
    """Let peers reach `ranges`, and keep `keep` alive until no peer can write to them any more.

    Without ranges nothing is offered. A transport that does not reach such memory offers the cache
    with empty metadata.
    """
    metadata = {}
    made: list[tuple[Transport, AnyRegistration]] = []
    with ExitStack() as undo:
        for transport in transports if ranges else ():
            metadata[transport.name] = b""
            if kind_of(ranges[0]) not in transport.reaches:
                continue
            try:
                offered = _offer_by(transport, ranges, writable, keep)
            except LLMException as error:
                if error.status_code is not LLMStatusCode.LLM_FEATURE_NOT_ENABLED:
                    raise
                _LOG.info("peers do not reach a cache over transport %s: %s", transport.name, error)
            else:
                undo.callback(offered.deregister)
                metadata |= offered.metadata
                made += offered.registrations
        undo.pop_all()
    return Offered(MappingProxyType(metadata), tuple(made))


def _offer_by(
    transport: Transport,
    ranges: Sequence[Registrable],
    writable: bool,
    keep: object,
) -> Offered:
    registrations = []
    with ExitStack() as unless_all:
        for memory_range in ranges:
            registrations.append(transport.register(memory_range, writable=writable, keep=keep))
            unless_all.callback(transport.deregister, registrations[-1])
        metadata = transport.metadata(registrations)
        unless_all.pop_all()
    return Offered(
        {transport.name: metadata},
        tuple((transport, registration) for registration in registrations),
    )


class LeaseWords:
    """The lease words of one engine, on all of its transports. Thread-safe."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = {transport.name: transport for transport in transports}

    def begin(self, deadline_ns: int) -> tuple[LeaseWord, ...]:
        """Begin a lease with each transport; `deadline_ns` 0: no deadline."""
        words: list[LeaseWord] = []
        try:
            for name, transport in self._transports.items():
                words.append(LeaseWord(name, *transport.begin_lease(deadline_ns)))
        except BaseException:
            self.drop(words)
            raise
        return tuple(words)

    def renew(self, lease: BlockLease, deadline_ns: int) -> None:
        """Change the deadline of all words of a lease."""
        for transport, (slot, generation) in lease.places():
            self._transports[transport].renew_lease(slot, generation, deadline_ns)

    def drop(self, words: Iterable[LeaseWord]) -> None:
        """End words that no peer has received."""
        self._end((transport, (slot, generation)) for transport, slot, generation in words)

    def end(self, lease: BlockLease) -> None:
        """End the words of a lease; on return no peer writes with them. Idempotent.

        If a peer delays one transport, the words of the others end nevertheless.
        """
        self._end(lease.places())

    def end_together(self, leases: Iterable[BlockLease]) -> None:
        """End the words of several leases, as `end` does; each transport waits once."""
        words: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for lease in leases:
            for name, word in lease.places():
                words[name].append(word)
        with ExitStack() as ends:
            for name, of_transport in words.items():
                ends.callback(self._transports[name].end_leases, of_transport)

    def _end(self, words: Iterable[tuple[str, tuple[int, int]]]) -> None:
        left = iter(words)
        for transport, word in left:
            try:
                self._transports[transport].end_leases((word,))
            except BaseException:  # a peer delays this transport; the others still end
                self._end(left)
                raise
