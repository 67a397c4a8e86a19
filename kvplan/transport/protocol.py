"""Types of memory to register, and protocols between transports and engines."""

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


# Not a NamedTuple: a tuple is an (address, nbytes) of the host.
@dataclass(frozen=True, slots=True)
class DeviceRange:
    """Memory [address, address + nbytes) of an accelerator.

    Attributes:
        address: The first byte, on the device.
        nbytes: The size in bytes.
        buffer: The allocation that contains it, kept alive while the range is registered. None:
            the caller keeps the memory alive.
    """

    address: int
    nbytes: int
    buffer: DeviceBuffer | None = None


if TYPE_CHECKING:
    Registrable = HostRange | DeviceRange
    """Memory that can be registered."""


def kind_of(memory: Registrable) -> Kind:
    """Return the kind of `memory`."""
    return "device" if isinstance(memory, DeviceRange) else "host"


class Streams(Protocol):
    """Connections of one link, authenticated by both ends. Thread-safe.

    Attributes:
        dials: True if this side opens the connections; exactly one end does.
        secret: 32 bytes that only the ends of this link know. Each key that is derived from them
            must encrypt only one connection.
        private: True if an eavesdropper cannot know the secret.
        way: The addresses, for display: "10.0.0.2:41234 -> 10.0.0.1:26000".
    """

    dials: bool
    secret: bytes
    private: bool
    way: str

    def open(self, indices: Sequence[int], timeout_s: float) -> list[socket]:
        """Open the connections of these indices: one end dials, the other waits.

        Args:
            indices: In [0, 255], the same at both ends; each can be opened once.
            timeout_s: Seconds that the call may take.

        Returns:
            Non-blocking sockets (TCP with TCP_NODELAY and keep-alive, or Unix), which the caller
            owns, in the order of `indices`. No data of the peer has been read from them.

        Raises:
            LLMException: LLM_LINK_FAILED, with the address, the phase that failed, and why.
        """

    def close(self) -> None:
        """End waiting calls of `open`, and close connections that no call returned. Idempotent."""


class Renewable(Protocol):
    """A connection that reaches only memory registered before the connection was made.

    For later memory both ends make another connection at the same time, with the next generation
    number; `connect` makes generation 0. The users of both links exchange the messages. Each side
    uses the new connection once both have it. Transfers in flight stay with the old one, which is
    closed when neither end uses it.

    Attributes:
        request_renewal: Set by the user of the link. A thread calls it if the connection does not
            reach memory, or was disturbed. It returns once another connection is in use, or raises
            LLMException. The argument is its limit in milliseconds; None: a default.
        notify_unused: Set by the user of the link. Called when this end does not use a generation
            any more. It must not block.
    """

    request_renewal: Callable[[float | None], None] | None
    notify_unused: Callable[[int], None]

    def open(self, generation: int) -> bytes:
        """Begin another connection; return the metadata that the peer needs to use it.

        Raises:
            LLMException: LLM_LINK_FAILED, with the reason; the status of `close` of the link, if it
                was closed.
        """

    def renew(self, generation: int, *, timeout_ms: float) -> None:
        """Connect what `open` began; block until the peer does so too.

        Meanwhile memory that is bound to the connection cannot be freed, and the wait cannot be
        cancelled. Call this when the peer has opened the connection and will call it too.

        Raises:
            LLMException: as `open`. What `open` began is closed.
        """

    def adopt(self, generation: int, metadata: bytes) -> None:
        """Use the connection from now on: the peer, which sent `metadata`, has it too.

        Raises:
            LLMException: LLM_PARAM_INVALID: bad metadata; LLM_LINK_FAILED: metadata of another
                peer; the status of `close` of the link, if it was closed.
        """

    def abandon(self, generation: int) -> None:
        """Abandon a connection in any state: the peer will not use it. Does not block."""

    def unused(self, generation: int) -> None:
        """Note that the peer does not use the connection any more. Does not block."""
