"""Contract 3: what a way of reaching the memory of another process offers."""

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

    # NumPy's arrays have a typed buffer from Python 3.12 on only.
    HostRange = Buffer | NDArray[Any] | tuple[int, int]
    """Host memory: a contiguous buffer, which is then held, or (address, nbytes)."""

Kind = Literal["host", "device"]
"""Of memory: of the host, or of an accelerator."""


# No tuple, which would be taken for an address of the host.
@dataclass(frozen=True, slots=True)
class DeviceRange:
    """Memory [address, address + nbytes) of an accelerator.

    Attributes:
        address: on the device.
        nbytes: its size in bytes.
        buffer: what was allocated, that this is a part of: it is held while this is registered.
            None: the caller holds the memory.
    """

    address: int
    nbytes: int
    buffer: DeviceBuffer | None = None


if TYPE_CHECKING:
    Registrable = HostRange | DeviceRange
    """What can be registered."""


def kind_of(memory: Registrable) -> Kind:
    """Whether `memory` is of the host or of a device."""
    return "device" if isinstance(memory, DeviceRange) else "host"


class Registration(Protocol):
    """Memory [address, address + nbytes) of this process that peers may reach.

    Attributes:
        address: of the first byte, in this process.
        nbytes: its size in bytes.
        writable: whether peers may write to it.
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
    """What this process lets its peers reach, and its links to them.

    One-sided: while a peer transfers, the owner's Python takes no part. All methods may be called
    from several threads. It belongs to the process that made it; in a forked child every method
    but `close` raises LLMException (LLM_FAILED).

    Attributes:
        name: by which two processes agree on a transport, such as "local".
        reaches: the kinds of memory that can be registered with it.
        maps_host: whether it maps memory of the host for a device, in which that can be mapped
            once: it is best if the device's own runtime allocates that, and nobody else pins it.
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
        """Hear of a pool, before parts of it are registered: links can be made ready for those.

        Nobody reaches it for that. It is held until the transport is closed.

        Args:
            memory: all of it.
            keep: what else must not go before, such as what pins it.

        Raises:
            LLMException: LLM_FAILED, or what the device says.
        """

    def register(
        self, memory: Registrable, *, writable: bool = True, keep: object = None
    ) -> Registration:
        """Let peers reach `memory`, and write to it unless `writable` is False.

        A part of an arena (a slice of `memoryview(arena)`, or an array over one) is reached as well
        as the arena; each registration ends by itself, however many share one arena.

        Args:
            memory: see `Registrable`.
            writable: whether peers may write to it.
            keep: what must not go before no peer can write to it any more: what the memory goes
                back to its pool with, say.

        Raises:
            LLMException: LLM_PARAM_INVALID: memory that is not as asked; LLM_OUT_OF_MEMORY: no
                room for another registration; LLM_FEATURE_NOT_ENABLED: it does not reach this
                memory, and why.
            TypeError: neither a buffer nor (address, nbytes), or of a kind that is not reached.
        """

    def deregister(self, registration: Registration) -> None:
        """End it: from here on no peer reports a success for it.

        Peers that write to it are waited for, where the transport sees them; what cannot be kept
        from writing (it is stopped, say) keeps the memory from being used again. A second time is
        fine, and waits for the same.
        """

    def metadata(self, registrations: Iterable[Registration] | None = None) -> bytes:
        """Who this process is, and where `registrations` are; None: all of them.

        Raises:
            LLMException: LLM_PARAM_INVALID: one is not, or no longer, registered here.
        """

    def begin_lease(self, deadline_ns: int = 0) -> tuple[int, int]:
        """A slot and a generation that peers check beside those of registrations.

        Args:
            deadline_ns: of CLOCK_MONOTONIC: no transfer with it succeeds from then on; 0: none.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: its peers cannot, or not with a deadline;
                LLM_OUT_OF_MEMORY: no room for another lease.
        """

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """Give a lease that was made with a deadline, and has not ended, another one."""

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """From here on no transfer with one of them succeeds, and no peer writes with it.

        Peers that are writing are waited for, as by `deregister`. Those that have ended before are
        fine; they are waited for again.

        Raises:
            LLMException: LLM_TIMEOUT: a peer does not get on, and may still write; call it again.
        """

    def refusal(self, metadata: bytes) -> str | None:
        """Why the peer of `metadata` cannot be reached from here; None: it can."""

    def shortfall(self, metadata: bytes) -> str | None:
        """What memory of that peer is not reached, and why, where it can; None: none is known.

        Another transport that has none is preferred.

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
            metadata: the peer's, whichever registrations it names.
            timeout_ms: milliseconds that this may take.
            session: the same at both ends, and no other attempt's. It is kept to itself.
            streams: opens connections to the peer, for a transport that moves bytes over them; its
                owner closes it when this has returned. None: there are none.

        Raises:
            LLMException: LLM_LINK_FAILED: it cannot be reached, and why; LLM_TIMEOUT;
                LLM_PARAM_INVALID: bad metadata.
        """

    def close(self) -> None:
        """End every registration; idempotent. No link is of use afterwards."""


class Streams(Protocol):
    """Connections of one link, authenticated by both ends. For any thread.

    Attributes:
        dials: whether this side opens them; exactly one of both ends does.
        secret: 32 bytes that only the two ends of this link know, and no other link has: keys come
            from it, each of which must encrypt one connection alone.
        private: whether that secret was agreed on where nobody could listen.
        way: their addresses, for people: "10.0.0.2:41234 -> 10.0.0.1:26000".
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
        """Have the connections of these indices: the end that dials makes them, the other waits.

        Args:
            indices: in [0, 255], the same at both ends; each can be had once.
            timeout_s: seconds that all of this may take.

        Returns:
            Non-blocking sockets (TCP with TCP_NODELAY and keep-alive, or Unix), in the order of
            `indices`; they are the caller's from here on. Nothing has been read of what the peer
            sends over them.

        Raises:
            LLMException: LLM_LINK_FAILED, with the address, the phase that failed, and why.
        """

    def close(self) -> None:
        """End the calls of `open` that wait, and connections not taken; idempotent."""


class PeerMemory(TensorMemory, Protocol):
    """Tensors of a peer, as the remote side of a transfer."""

    @property
    def guard(self) -> tuple[Peer, bytes] | None:
        """What checks, without Python, that all is as it was; None: it is not mapped here."""

    @property
    def write_guard(self) -> WriteGuard | None:
        """What announces what is written where it is mapped; None: it is not, or read-only."""

    def leased(self, leases: Sequence[BlockLease]) -> PeerMemory:
        """The same memory; a transfer with it fails once one of `leases` has ended.

        A lease is checked wherever the registrations of the memory are: it has ended means
        LLM_KV_CACHE_NOT_EXIST, and its name is in the message.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: this transport cannot, or not for one of them.
        """


class TransportLink(Protocol):
    """A way to one peer. All methods may be called from several threads.

    Attributes:
        way: by what means bytes move, for people: "rc_mlx5/mlx5_0:1".
        detects_freed: when it shows that the peer has deregistered memory. "check": in `check` of
            that memory; "before": in a transfer, before it moves a byte; "after": in a transfer,
            when its bytes have moved, so that who would write asks the peer first.
    """

    @property
    def way(self) -> str:
        """See above."""

    @property
    def detects_freed(self) -> Literal["check", "before", "after"]:
        """See above."""

    @property
    def renewable(self) -> Renewable | None:
        """What both ends must renew at times; None: nothing, memory is reached as it comes."""

    def memory(
        self,
        addresses: Sequence[int] | NDArray[np.uint64],
        nbytes: int | Sequence[int] | NDArray[np.uint64],
        *,
        writable: bool = False,
        metadata: bytes | Sequence[bytes] | None = None,
        any_holder: bool = False,
    ) -> PeerMemory:
        """The peer's tensors, for use as the remote side of a transfer.

        Args:
            addresses: of each tensor, in the peer.
            nbytes: of each tensor, or one number for all.
            writable: whether the transfer writes to them.
            metadata: the peer's, naming the registrations that hold them, or one for each tensor;
                None: the one that the link was made with.
            any_holder: whether bytes that several of these registrations hold may be moved by any
                of them; else such ones are refused where the transport cannot tell them apart.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: a tensor does not lie inside one registration, or
                that has ended; LLM_PARAM_INVALID: bad sizes or metadata, another peer's metadata,
                or a read-only registration to be written; LLM_LINK_FAILED: the peer is gone or
                refuses access; LLM_NOT_YET_LINK: the link was closed.
            TypeError: not whole numbers.
        """

    def prepare(self, job: Callable[[], object]) -> None:
        """Call `job`, which asks for `memory`, in the background, if that helps first transfers.

        At most once, and not after `close`; it may raise LLMException. Does not block.
        """

    def mapped(self) -> list[Arena]:
        """Memory of the peer that is mapped here now."""

    def check(self) -> None:
        """Raise LLMException unless the peer lives and the link is open.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer is gone; LLM_NOT_YET_LINK: the link was closed.
        """

    @property
    def death_fd(self) -> int | None:
        """Polls readable once the peer has died, or has let go of it; None: nothing shows it.

        It is the link's: stop polling it before `close`.
        """

    def close(self, why: LLMException | None = None) -> None:
        """Let go of the peer; idempotent.

        Transfers in flight keep what they need mapped, but fail their check from here on, with the
        message and status of `why`; None: LLM_NOT_YET_LINK.
        """


class Renewable(Protocol):
    """The connection behind a link that reaches only memory which was registered before it.

    For what came later both ends make another, at once, which has a number of its own: a
    generation; that of `connect` is 0. Each side notifies the other of it, by whatever means
    its user gives it, and takes the new one into use when both have it. Transfers in flight stay
    with the one before, which goes when neither end uses it any more.

    Attributes:
        request_renewal: set by the user of the link; called, by any thread that transfers, where
            the connection does not reach something. Returns once another is in use here, else
            raises LLMException.
        notify_unused: set likewise; called when a generation is unused here. Must not block.
    """

    request_renewal: Callable[[], None] | None
    notify_unused: Callable[[int], None]

    def open(self, generation: int) -> bytes:
        """Begin another connection; returns what the peer must know to take it into use.

        Raises:
            LLMException: LLM_LINK_FAILED: it cannot be had, and why. All is as before.
        """

    def renew(self, generation: int, *, timeout_ms: float) -> None:
        """Make the connection that was opened; blocks until the peer does so too.

        What is bound to it cannot be given back meanwhile, and nothing can end the wait: call it
        when the peer has opened it, and will come.

        Raises:
            LLMException: LLM_LINK_FAILED: it cannot be had, and why. All is as before.
        """

    def adopt(self, generation: int, metadata: bytes) -> None:
        """Use it from here on: the peer, whose `metadata` this is, has it too.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata; LLM_NOT_YET_LINK: the link was closed.
        """

    def abandon(self, generation: int) -> None:
        """The peer will not have it; one that is open or being made, too, ends. Does not block."""

    def unused(self, generation: int) -> None:
        """The peer uses it no more. Does not block."""
