"""The transport `local`: memory of processes on this host."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, ClassVar

from kvplan.device.device import Device
from kvplan.system.limits import system_error
from kvplan.transport.local.identity import Identity
from kvplan.transport.local.link import LocalLink
from kvplan.transport.local.memory import POPULATE
from kvplan.transport.local.metadata import Metadata
from kvplan.transport.local.registrations import LocalRegistrations
from kvplan.transport.transport import Transport
from kvplan.validation import check_one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.transport.protocol import Kind, Streams
    from kvplan.transport.registrations import AnyRegistration

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class LocalTransport(Transport):
    """The memory that this process offers to peers on this host, and its links to them.

    A peer needs `metadata()` and permission of the system: the same user, or CAP_SYS_PTRACE. Under
    Yama (`kernel.yama.ptrace_scope=1`, as on Ubuntu) the same user is not enough for memory outside
    of arenas: there `permit_any_peer=True` lets every process of this user trace this one.

    After `deregister` no peer writes the memory, which may be freed. A read that a peer has begun
    reports an error. The call waits until a peer that is writing has finished a piece (about
    0.1 ms); that peer reports an error too. If a peer does not stop within 1 s (a stopped process,
    for example), its later writes by address are refused. Memory that the peer has mapped (arenas,
    device memory) is then kept alive until the peer continues or dies. Memory of cuMemAlloc cannot
    be kept alive: its deregistration also waits for peers that read it, and after the warning the
    memory must not be freed.

    Close the transport (or leave its `with` block) before the memory is freed.
    """

    name: ClassVar[str] = LocalLink.transport

    def __init__(
        self,
        *,
        max_registrations: int = 65536,
        permit_any_peer: bool = False,
        populate: str = "background",
        device: Device | None = None,
    ) -> None:
        """Make this process reachable.

        Args:
            max_registrations: The maximum number at one time. Each takes 16 bytes, as does each
                possible lease.
            permit_any_peer: Let every process of this user trace this one, which Yama forbids
                otherwise.
            populate: When to map pages of peers' arenas here. "background": a thread maps the pages
                that the owner has filled, soon after the arena is mapped; "now": all pages with the
                arena, which allocates those that the owner has not touched; "off": each at its
                first use.
            device: The device of this process. If its kind shares memory with processes of this
                host (as CUDA does), peers reach its registered memory, and links reach theirs.

        Raises:
            LLMException: LLM_PARAM_INVALID: `max_registrations` is not in [1, 2**24], or `populate`
                has another value; LLM_OUT_OF_MEMORY: no memory, or no file descriptor is left;
                LLM_FAILED: /proc cannot be read.
            TypeError: an argument of another type.
        """
        super().__init__()
        check_one_of("populate", populate, POPULATE)
        self._populate = populate
        self._device = device
        try:
            self._identity = Identity.of_self()
            self._registrations: LocalRegistrations = LocalRegistrations(max_registrations, device)
        except (MemoryError, OSError) as error:
            raise system_error("a local transport", error) from error
        self._sharing = self._registrations.sharing
        self.reaches: frozenset[Kind] = self._registrations.reaches
        if permit_any_peer:
            # Fails with EINVAL without Yama, where it is not needed.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)

    def connect(
        self,
        metadata: bytes,
        *,
        timeout_ms: float | None = None,
        session: bytes = b"",
        streams: Streams | None = None,
    ) -> LocalLink:
        """Link to the process of `metadata`. The peer takes no part.

        Args:
            metadata: Metadata of the peer.
            session: The secret with which this link requests descriptors of device memory from the
                peer, if the system does not let this process duplicate them; empty: no requests.
            timeout_ms, streams: Not used: `connect` does not wait for the peer.

        Raises:
            LLMException: LLM_LINK_FAILED: the peer is on another host or in another PID namespace,
                has exited, or the system refuses access (the message says what to allow);
                LLM_PARAM_INVALID: bad metadata.
        """
        self._check_open()
        return self._link_to(metadata, session)

    def _link_to(self, metadata: bytes, session: bytes = b"") -> LocalLink:
        return LocalLink(
            Metadata.from_bytes(metadata),
            populate=self._populate,
            device=self._device,
            session=session,
            server=self._registrations.descriptors,
        )

    def shortfall(self, metadata: bytes) -> str | None:
        """See `Transport.shortfall`.

        The system may deny process_vm_readv or pidfd_getfd, this process may have no GPU, and two
        GPUs may lack peer access.

        Raises:
            LLMException: as `connect`.
        """
        with self._link_to(metadata) as link:
            return link.shortfall()

    def close(self) -> None:
        """See `Transport.close`; in a forked child, unmap the tables."""
        if os.getpid() != self._pid:
            self._closed = True
            self._registrations.close_in_child()
        super().close()

    def _metadata(self, registrations: Sequence[AnyRegistration]) -> Metadata:
        generations, writers = self._registrations.refs()
        ranges = tuple(registration.range for registration in registrations)
        device = "" if self._sharing is None else self._sharing.uuid
        server = self._registrations.descriptors
        name = "" if server is None else server.name
        return Metadata(self._identity, generations, writers, ranges, device, name)

    def _close(self) -> None:
        self._registrations.close()

    def _check_reachable(self, metadata: bytes) -> None:
        self._link_to(metadata).close()
