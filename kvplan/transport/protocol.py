"""Memory that can be registered, and what links need of their users: streams, renewals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from socket import socket

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvnative._device import DeviceBuffer

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


class Streams(Protocol):
    """Connections of one link, authenticated by both ends. Any thread may use them.

    Attributes:
        dials: True if this side opens the connections; exactly one end does.
        secret: 32 bytes that only both ends of this link know. Each key that is derived from it
            must encrypt only one connection.
        private: True if an eavesdropper cannot know the secret.
        way: The addresses, for people: "10.0.0.2:41234 -> 10.0.0.1:26000".
    """

    dials: bool
    secret: bytes
    private: bool
    way: str

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
