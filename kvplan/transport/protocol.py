"""Contract 3: the interface of every transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvplan.execution.memory import TensorMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from socket import socket

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvnative._acl import DeviceBuffer
    from kvnative._host import Arena
    from kvnative._process import Peer
    from kvnative._writers import WriteGuard
    from kvplan.lease import BlockLease
    from kvplan.status import LLMException

    # NumPy's arrays have a typed buffer only from Python 3.12 on.
    HostRange = Buffer | NDArray[Any] | tuple[int, int]
    """Host memory: a contiguous buffer, which is then held, or (address, nbytes)."""

Kind = Literal["host", "device"]
"""The place of memory: the host, or an accelerator."""


# Not a tuple, which would be taken for an address of the host.
@dataclass(frozen=True, slots=True)
class DeviceRange:
    """Memory [address, address + nbytes) of an accelerator.

    Attributes:
        address: The first byte, on the device.
        nbytes: The size in bytes.
        buffer: The allocation that it is a part of, held while the range is registered. None: the
            caller holds the memory.
    """

    address: int
    nbytes: int
    buffer: DeviceBuffer | None = None


if TYPE_CHECKING:
    Registrable = HostRange | DeviceRange
    """Memory that can be registered."""


def kind_of(memory: Registrable) -> Kind:
    """Return whether `memory` is on the host or on a device."""
    return "device" if isinstance(memory, DeviceRange) else "host"


class Registration(Protocol):
    """Memory [address, address + nbytes) of this process that peers may reach.

    Attributes:
        address: The first byte, in this process.
        nbytes: The size in bytes.
        writable: True if peers may write to it.
    """

    @property
    def address(self) -> int:
        """See above."""

    @property
    def nbytes(self) -> int:
        """See above."""

    @property
    def writable(self) -> bool:
        """See above."""


class Transport(Protocol):
    """The memory that this process offers to peers, and its links to them.

    Transfers are one-sided: the owner's Python takes no part. Any thread may call the methods. A
    transport belongs to the process that made it; in a forked child every method but `close` raises
    LLMException (LLM_FAILED).

    Attributes:
        name: Names the transport at both ends, such as "local".
        reaches: The kinds of memory that can be registered.
        maps_host: True if it maps host memory for a device, where memory can be mapped only once.
            Then the device's own runtime should allocate host memory, and nothing else should pin
            it.
    """

    @property
    def name(self) -> str:
        """See above."""

    @property
    def maps_host(self) -> bool:
        """See above."""

    @property
    def reaches(self) -> frozenset[Kind]:
        """See above."""

    def preregister_pool(self, memory: Registrable, keep: object = None) -> None:
        """Announce a pool before parts of it are registered, so that links can prepare for them.

        Peers do not reach the pool by this. It is held until the transport is closed.

        Args:
            memory: The whole pool.
            keep: An object to hold as well, such as the pin of the pool.

        Raises:
            LLMException: LLM_FAILED, or an error of the device.
        """

    def register(
        self, memory: Registrable, *, writable: bool = True, keep: object = None
    ) -> Registration:
        """Let peers reach `memory`, and write to it unless `writable` is False.

        A part of an arena (a slice of `memoryview(arena)`, or an array over one) is reached as fast
        as the arena. Registrations in one arena end independently.

        Args:
            memory: See `Registrable`.
            writable: True if peers may write to it.
            keep: An object to hold until no peer can write to the memory any more, such as the one
                that returns the memory to its pool.

        Raises:
            LLMException: LLM_PARAM_INVALID: memory that is not as asked; LLM_OUT_OF_MEMORY: no
                room for another registration; LLM_FEATURE_NOT_ENABLED: the transport does not reach
                this memory, and why.
            TypeError: neither a buffer nor (address, nbytes), or a kind that is not reached.
        """

    def deregister(self, registration: Registration) -> None:
        """End a registration: no peer reports a success for it any more.

        Peers that write to the memory are waited for if the transport sees them. A peer that cannot
        be kept from writing (a stopped process, for example) keeps the memory from being used
        again. A second call waits for the same peers.
        """

    def metadata(self, registrations: Iterable[Registration] | None = None) -> bytes:
        """Return the identity of this process, and where `registrations` are; None: all of them.

        Raises:
            LLMException: LLM_PARAM_INVALID: one is not, or no longer, registered here.
        """

    def begin_lease(self, deadline_ns: int = 0) -> tuple[int, int]:
        """Return a slot and a generation that peers check beside those of registrations.

        Args:
            deadline_ns: On CLOCK_MONOTONIC; from then on no transfer with the lease succeeds. 0:
                none.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: peers cannot check leases, or no deadlines;
                LLM_OUT_OF_MEMORY: no room for another lease.
        """

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """Set another deadline for a lease that was made with a deadline and has not ended."""

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """End leases: no transfer with one of them succeeds any more, and no peer writes with it.

        Peers that are writing are waited for, as by `deregister`, also if a lease has ended before.

        Raises:
            LLMException: LLM_TIMEOUT: a peer makes no progress, and may still write; call it again.
        """

    def refusal(self, metadata: bytes) -> str | None:
        """Return why the peer of `metadata` cannot be reached from here; None: it can."""

    def shortfall(self, metadata: bytes) -> str | None:
        """Return which memory of a reachable peer is not reached, and why; None: none is known.

        A transport without a shortfall is preferred.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata.
        """

    def num_streams(self, metadata: bytes) -> int:
        """Return how many connections, from index 0 on, `connect` to that peer opens first.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata.
        """

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
            metadata: The peer's, whichever registrations it names.
            timeout_ms: Milliseconds that the call may take.
            session: The same at both ends, and different for each attempt. It is kept secret.
            streams: Opens connections to the peer, for a transport that moves bytes over them. The
                caller closes it afterwards. None: no connections can be opened.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer cannot be reached, and why; LLM_TIMEOUT;
                LLM_PARAM_INVALID: bad metadata.
        """

    def close(self) -> None:
        """End every registration; idempotent. Links cannot be used afterwards."""


class Streams(Protocol):
    """Connections of one link, authenticated by both ends. Any thread may use them.

    Attributes:
        dials: True if this side opens the connections; exactly one end does.
        secret: 32 bytes that only both ends of this link know. Each key that is derived from it
            must encrypt only one connection.
        private: True if an eavesdropper cannot know the secret.
        way: The addresses, for people: "10.0.0.2:41234 -> 10.0.0.1:26000".
    """

    @property
    def dials(self) -> bool:
        """See above."""

    @property
    def secret(self) -> bytes:
        """See above."""

    @property
    def private(self) -> bool:
        """See above."""

    @property
    def way(self) -> str:
        """See above."""

    def open(self, indices: Sequence[int], timeout_s: float) -> list[socket]:
        """Open the connections of these indices: the end that dials makes them, the other waits.

        Args:
            indices: In [0, 255], the same at both ends; each can be opened once.
            timeout_s: Seconds that the call may take.

        Returns:
            Non-blocking sockets (TCP with TCP_NODELAY and keep-alive, or Unix), in the order of
            `indices`, which the caller owns. No data of the peer has been read from them.

        Raises:
            LLMException: LLM_LINK_FAILED, with the address, the phase that failed, and why.
        """

    def close(self) -> None:
        """End waiting calls of `open`, and close connections that were not taken; idempotent."""


class PeerMemory(TensorMemory, Protocol):
    """Tensors of a peer, as the remote side of a transfer."""

    @property
    def guard(self) -> tuple[Peer, bytes] | None:
        """The check of a peer that needs no Python, and its words.

        None: the memory is not mapped.
        """

    @property
    def write_guard(self) -> WriteGuard | None:
        """The announcement of writes to mapped memory; None: it is not mapped, or read-only."""

    def leased(self, leases: Sequence[BlockLease]) -> PeerMemory:
        """Return the same memory; transfers with it fail once one of `leases` has ended.

        A lease is checked wherever the registrations of the memory are checked. If it has ended,
        LLM_KV_CACHE_NOT_EXIST names it.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: this transport cannot check one of them.
        """


class TransportLink(Protocol):
    """A way to one peer. Any thread may call the methods.

    Attributes:
        way: How bytes move, for people: "rc_mlx5/mlx5_0:1".
        detects_freed: When it is detected that the peer has deregistered memory. "check": in
            `check` of that memory; "before": in a transfer, before it moves a byte; "after": in a
            transfer, after its bytes, so that a writer asks the peer first.
    """

    @property
    def way(self) -> str:
        """See above."""

    @property
    def detects_freed(self) -> Literal["check", "before", "after"]:
        """See above."""

    @property
    def renewable(self) -> Renewable | None:
        """The connection that both ends must renew at times; None: none."""

    def memory(
        self,
        addresses: Sequence[int] | NDArray[np.uint64],
        nbytes: int | Sequence[int] | NDArray[np.uint64],
        *,
        writable: bool = False,
        metadata: bytes | Sequence[bytes] | None = None,
        any_holder: bool = False,
    ) -> PeerMemory:
        """Return tensors of the peer, for use as the remote side of a transfer.

        Args:
            addresses: The address of each tensor, in the peer.
            nbytes: The size of each tensor, or one number for all.
            writable: True if the transfer writes to them.
            metadata: The peer's, with the registrations that hold the tensors, or one for each
                tensor; None: the metadata that the link was made with.
            any_holder: True if bytes that several registrations hold may move by any of them.
                Otherwise they are refused if the transport cannot tell the registrations apart.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: a tensor does not lie inside one registration, or
                that has ended; LLM_PARAM_INVALID: bad sizes or metadata, another peer's metadata,
                or a write to a read-only registration; LLM_LINK_FAILED: the peer is gone or refuses
                access; LLM_NOT_YET_LINK: the link was closed.
            TypeError: an address or size is not a whole number.
        """

    def unreached(self, metadata: bytes) -> str | None:
        """Return why this link does not reach the memory of `metadata`; None: it does.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata, or another peer's.
        """

    def prepare(self, job: Callable[[], object]) -> None:
        """Call `job`, which asks for `memory`, in the background, if that helps first transfers.

        It is called at most once, and not after `close`; it may raise LLMException. Does not block.
        """

    def mapped(self) -> list[Arena]:
        """Return the memory of the peer that is mapped here now."""

    def check(self) -> None:
        """Raise LLMException unless the peer lives and the link is open.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer is gone; LLM_NOT_YET_LINK: the link was closed.
        """

    @property
    def death_fd(self) -> int | None:
        """A descriptor that polls readable once the peer has died or let go; None: none exists.

        It belongs to the link: stop polling it before `close`.
        """

    def close(self, why: LLMException | None = None) -> None:
        """Let go of the peer; idempotent.

        Transfers in flight keep their memory mapped, but fail their next check with the message and
        status of `why`; None: LLM_NOT_YET_LINK.
        """


class Renewable(Protocol):
    """The connection of a link that reaches only memory which was registered before it.

    For later memory both ends make another connection at the same time, with the next generation
    number; that of `connect` is 0. Each side notifies the other by means of its user, and uses the
    new connection once both have it. Transfers in flight stay with the old one, which is closed
    when neither end uses it.

    Attributes:
        request_renewal: Set by the user of the link. A thread that transfers calls it if the
            connection does not reach something. It returns once another connection is in use, or
            raises LLMException.
        notify_unused: Set by the user of the link. Called when a generation is unused here. It must
            not block.
    """

    request_renewal: Callable[[], None] | None
    notify_unused: Callable[[int], None]

    def open(self, generation: int) -> bytes:
        """Begin another connection; return what the peer must know to use it.

        Raises:
            LLMException: LLM_LINK_FAILED, and why. Everything stays as it was.
        """

    def renew(self, generation: int, *, timeout_ms: float) -> None:
        """Make the connection that was opened; block until the peer does so too.

        Memory that is bound to it cannot be returned meanwhile, and nothing can end the wait. Call
        it when the peer has opened the connection and will make it too.

        Raises:
            LLMException: LLM_LINK_FAILED, and why. Everything stays as it was.
        """

    def adopt(self, generation: int, metadata: bytes) -> None:
        """Use the connection from now on: the peer, whose `metadata` this is, has it too.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata; LLM_NOT_YET_LINK: the link was closed.
        """

    def abandon(self, generation: int) -> None:
        """Give up a connection that the peer will not have, in any state. Does not block."""

    def unused(self, generation: int) -> None:
        """Note that the peer does not use the connection any more. Does not block."""
