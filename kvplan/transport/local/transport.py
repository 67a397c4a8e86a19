"""Memory of processes on this host: arenas that both ends map, and any memory by its address."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from kvplan.device.device import Device
from kvplan.status import LLMException, invalid
from kvplan.system.limits import system_error
from kvplan.transport import protocol
from kvplan.transport.base import BaseTransport
from kvplan.transport.local.identity import Identity
from kvplan.transport.local.link import LocalLink
from kvplan.transport.local.memory import POPULATE
from kvplan.transport.local.metadata import Metadata
from kvplan.transport.local.registrations import LocalRegistration, LocalRegistrations
from kvplan.validation import check_one_of

if TYPE_CHECKING:
    from kvplan.transport.protocol import Kind, Registrable

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class LocalTransport(BaseTransport[LocalRegistration]):
    """The memory that this process offers to peers on this host, and its links to them.

    A peer needs `metadata()` and permission of the system: the same user, or CAP_SYS_PTRACE. Under
    Yama (`kernel.yama.ptrace_scope=1`, as on Ubuntu) that is not enough for registered memory, and
    `permit_any_peer=True` lets every process of this user trace this one. Arenas do not need that.

    Close it (or leave its `with` block) before the memory is freed. A forked child cannot use it,
    and makes its own.
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
            permit_any_peer: Let every process of this user trace this one, as Yama demands.
            populate: When to map pages of peers' arenas here. "background": a thread maps the pages
                that the owner has filled, soon after the arena is mapped; "now": all pages with the
                arena, which allocates those that the owner has not touched; "off": each at its
                first use.
            device: The device of this process. If its kind shares memory with processes of this
                host (as CUDA does), peers reach its registered memory, and links reach theirs.

        Raises:
            LLMException: LLM_PARAM_INVALID: `max_registrations` is not in [1, 2**24], or `populate`
                is another word; LLM_OUT_OF_MEMORY; LLM_FAILED: /proc cannot be read, or no
                descriptor is left.
        """
        super().__init__()
        check_one_of("populate", populate, POPULATE)
        self._populate = populate
        self._device = device
        try:
            self._identity = Identity.of_self()
            self._registrations: LocalRegistrations = LocalRegistrations(max_registrations, device)
        except (ValueError, MemoryError, OSError) as error:
            raise _refused(error) from error
        self._sharing = self._registrations.sharing
        self.reaches: frozenset[Kind] = self._registrations.reaches
        if permit_any_peer:
            # EINVAL without Yama, which then does not ask for it either.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)

    def register(
        self, memory: Registrable, *, writable: bool = True, keep: object = None
    ) -> LocalRegistration:
        """Let peers reach `memory`, and write to it unless `writable` is False.

        Args:
            memory: An object with a contiguous buffer (NumPy array, bytearray, mmap), which is held
                until it is deregistered; or (address, nbytes), as of `tensor.data_ptr()`, which the
                caller holds. An arena, a slice of its memoryview, or an array over one is reached
                by a plain copy, whichever transport has allocated it. Or a `DeviceRange` of the
                transport's device, which must lie in one allocation.
            writable: True if peers may write to the memory.
            keep: An object to hold as long as a peer may write to the memory.

        Raises:
            LLMException: LLM_PARAM_INVALID: memory that is not mapped, readable, writable as asked,
                or contiguous; LLM_OUT_OF_MEMORY: `max_registrations` are registered already;
                LLM_FEATURE_NOT_ENABLED: memory of a device that no other process can map.
            TypeError: `memory` is none of these.
        """
        return super().register(memory, writable=writable, keep=keep)

    def deregister(self, registration: protocol.Registration) -> None:
        """End a registration: on return no peer reads or writes the memory, which may be freed.

        A peer that is writing to the memory is waited for until it has finished a piece (about 0.1
        ms), and reports an error. A peer that does not stop within 1 s (a stopped process, for
        example) is waited for once. Its later writes by address are refused. Memory of an arena or
        a device, which the peer has mapped, is held until the peer goes on or dies, and a warning
        names the peer. Memory of a device that the user has allocated is not kvplan's to hold:
        peers that read it are waited for as well, and after the warning it must not be freed. A
        second call waits for the same peers.

        Raises:
            TypeError: `registration` is not of such a transport.
            LLMException: LLM_FAILED: the transport is closed, or a parent process's.
        """
        super().deregister(registration)

    def metadata(self, registrations: Iterable[protocol.Registration] | None = None) -> bytes:
        """See `Transport.metadata`.

        Raises:
            TypeError, LLMException: as `Transport.metadata`; LLM_FAILED: the transport is closed,
                or a parent process's.
        """
        self._check_open()
        with self._registrations.mutex:
            self._check_open()
            generations, writers = self._registrations.refs()
            ranges = tuple(
                registration.range for registration in self._registrations.select(registrations)
            )
        device = "" if self._sharing is None else self._sharing.uuid
        server = self._registrations.descriptors
        name = "" if server is None else server.name
        return Metadata(self._identity, generations, writers, ranges, device, name).to_bytes()

    def connect(
        self,
        metadata: bytes,
        *,
        timeout_ms: float | None = None,
        session: bytes = b"",
        streams: protocol.Streams | None = None,
    ) -> LocalLink:
        """Link to the process of `metadata`, which takes no part in it.

        Args:
            metadata: The peer's.
            session: The secret with which this link asks the peer for descriptors of device
                memory, if the system does not let this process duplicate them; empty: it does not.
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

        The system may deny process_vm_readv or pidfd_getfd, and two GPUs may lack peer access.
        """
        with self._link_to(metadata) as link:
            return "; ".join(link.lacks.values()) or None

    def close(self) -> None:
        """Deregister everything, as `deregister`, and close the tables; idempotent. Links stay."""
        if os.getpid() != self._pid:
            self._closed = True
            self._registrations.close_in_child()
            return
        self._registrations.close()
        self._closed = True

    def _check_reachable(self, metadata: bytes) -> None:
        self._link_to(metadata).close()  # about 0.1 ms


def _refused(error: Exception) -> LLMException:
    """Return a refusal of the system or the native layer as an error of the interface."""
    if isinstance(error, ValueError):
        return invalid(str(error))
    return system_error("a local transport", error)
