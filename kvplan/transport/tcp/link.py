"""A link to a peer over TCP, and tensors in its registered memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Self

from kvnative._backend import NativeError, striped
from kvnative._tcp import MAX_TRANSFER_LEASES, tcp_backend
from kvplan.device.memory import DeviceMemory
from kvplan.execution.task import native_error
from kvplan.status import LLMException, invalid, link_failed, message_of, unsupported
from kvplan.transport.link import Located, PeerMemory, TransportLink, columns
from kvplan.transport.registrations import transport_closed
from kvplan.transport.tcp.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvnative._backend import Backend, ThreadPool
    from kvnative._tcp import TcpNativeLink
    from kvplan.device.device import Device
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.lease import BlockLease

_STRIPE_NBYTES: Final = 1 << 20  # minimum per connection


class TcpPeerMemory(PeerMemory):
    """Tensors in a peer."""

    _link: TcpLink

    def __init__(self, link: TcpLink, located: Located) -> None:
        super().__init__(link, located)
        self._backends: dict[tuple[Direction, bool], Backend] = {}

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory, timeout_ms: float | None
    ) -> Backend:
        """See `TensorMemory.backend`; LLM_FEATURE_NOT_ENABLED: `other` is on another device."""
        if other.on_device:
            self._check_device(other)
        if (known := self._backends.get((direction, other.on_device))) is not None:
            return known
        self.check()
        slots, generations, addresses, nbytes = columns(
            self._ranges, "slot", "generation", "address", "nbytes"
        )
        native = self._link.native
        try:
            each = [
                tcp_backend(
                    *(native, word, direction, slots, generations, addresses, nbytes),
                    on_device=other.on_device,
                    leases=[(slot, generation) for slot, generation, _ in self._extra_checks],
                    leases_name=" or ".join(name for *_, name in self._extra_checks),
                )
                for word in range(native.connections)
            ]
        except NativeError as error:
            self.check()  # raises if the link has just ended
            raise native_error(error, f"transfers over the link to {self._link.peer}") from error
        made = each[0] if len(each) == 1 else striped(each, min_nbytes=_STRIPE_NBYTES)
        return self._backends.setdefault((direction, other.on_device), made)

    def leased(self, leases: Sequence[BlockLease]) -> Self:
        """See `PeerMemory.leased`: the owner checks the leases with each request."""
        made = self._copy()
        made._extra_checks, made._backends = self._extra_checks_with(leases), {}
        if (num_checks := len(made._extra_checks)) > MAX_TRANSFER_LEASES:
            raise invalid(
                f"one transfer uses {num_checks} leases and overlapping registrations of "
                f"{self._link.peer}; tcp checks at most {MAX_TRANSFER_LEASES}: use several "
                "transfers"
            )
        return made

    def check(self, tensors: range | None = None) -> None:
        """See `PeerMemory.check`."""
        if not self._link.native.is_up:
            self._link.check()  # raises, unless the link is just being closed

    def _check_device(self, local: TensorMemory) -> None:
        """Refuse memory of a device other than the link's."""
        ours = self._link.device
        theirs = local.device.native if isinstance(local, DeviceMemory) else None
        if ours is not None and ours.native is theirs:
            return
        which = "no device" if ours is None else f"device {ours.id}"
        raise unsupported(
            f"the local side is {local!r}, but the engine of the link to {self._link.peer} has "
            f"{which}: use the engine of that device, or a cache with Placement.HOST"
        )


class TcpLink(TransportLink):
    """The link that `TcpTransport.connect` makes."""

    transport = "tcp"
    # The owner checks each range before a byte of it moves.
    detects_freed: Literal["before"] = "before"
    checks_every_range = False

    def __init__(
        self, native: TcpNativeLink, metadata: Metadata, way: str, device: Device | None
    ) -> None:
        super().__init__(metadata)
        self.native, self.way, self.device = native, way, device

    @property
    def death_fd(self) -> int | None:
        """See `TransportLink.death_fd`."""
        return fd if (fd := self.native.death_fd) >= 0 else None

    def _memory(self, located: Located) -> TcpPeerMemory:
        return TcpPeerMemory(self, located)

    def _check_peer(self) -> None:
        if (failure := self.native.failure) is not None:
            raise link_failed(f"{self.peer}: {failure[1]}")
        if self.native.death_fd < 0:
            raise transport_closed()

    def _disconnect(self, why: LLMException) -> None:
        self.native.close(message_of(why))  # waits: on return no byte moves for the peer
