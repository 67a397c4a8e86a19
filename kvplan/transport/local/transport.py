"""What a process lets its peers on this host reach: arenas that both map, and any memory."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvnative._host import GenerationTable
from kvnative._writers import WriterTable
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system_limits import system_error
from kvplan.transport.base import BaseTransport
from kvplan.transport.host_memory import host_range, released_if_refused
from kvplan.transport.local.identity import Identity
from kvplan.transport.local.link import LocalLink
from kvplan.transport.local.memory import POPULATE, offer
from kvplan.transport.local.metadata import (
    GenerationTableRef,
    Metadata,
    Range,
    WritersRef,
)
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registrations import (
    MAX_LEASES,
    PATIENCE_S,
    QUARANTINE,
    Registration,
    RegistrationTable,
    leases_taken,
)
from kvplan.validation import check_one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvnative._writers import Ticket
    from kvplan.device.device import Device
    from kvplan.device.sharing import AllocationRef, Exported
    from kvplan.transport import protocol
    from kvplan.transport.local.metadata import ArenaRef
    from kvplan.transport.protocol import Kind, Registrable
    from kvplan.transport.registrations import Releasable

_LOG = Log("kvplan")
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class LocalRegistration(Registration[Range]):
    """Memory that peers on this host may reach."""

    __slots__ = ()


class _Found(NamedTuple):
    address: int
    nbytes: int
    pin: Releasable | None
    arena: ArenaRef | None
    allocation: AllocationRef | None


class _ExportPin:
    """Holds what is exported until it is released."""

    __slots__ = ("_exported",)

    def __init__(self, exported: Exported) -> None:
        self._exported: Exported | None = exported

    def release(self) -> None:
        """Let go of it; idempotent."""
        self._exported = None


class LocalTransport(BaseTransport):
    """What this process lets its peers on this host reach, and its links to them.

    A peer needs `metadata()`, and the system's leave: the same user, or CAP_SYS_PTRACE. Under
    Yama (`kernel.yama.ptrace_scope=1`, as on Ubuntu) that is not enough for registered memory, and
    `permit_any_peer=True` lets every process of this user trace this one. Arenas do not need that.

    Close it (or leave its `with` block) before the memory goes. In a forked child it is of no use:
    make another there.
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
        """Show this process to its peers.

        Args:
            max_registrations: how many there can be at once; each takes 16 bytes, as do the leases
                that there can be besides.
            permit_any_peer: let every process of this user trace this one, as Yama demands.
            populate: when pages of peers' arenas are mapped here. "background": those that their
                owners have filled, soon after the arena is mapped, by a thread; "now": all of them
                with the arena, which allocates what its owner has not touched; "off": each at its
                first use.
            device: of this process. If its kind shares memory with processes of this host (CUDA
                does), peers reach what of it is registered, and links reach theirs.

        Raises:
            LLMException: LLM_PARAM_INVALID: `max_registrations` is not in [1, 2**24], or `populate`
                is none of these; LLM_OUT_OF_MEMORY; LLM_FAILED: /proc cannot be read, or no
                descriptor is left.
        """
        super().__init__()
        check_one_of("populate", populate, POPULATE)
        self._populate = populate
        self._device = device
        self._sharing = None if device is None else device.sharing
        kinds: set[Kind] = {"host"} if self._sharing is None else {"host", "device"}
        self.reaches: frozenset[Kind] = frozenset(kinds)
        try:
            self._identity = Identity.of_self()
            self._generations = GenerationTable(max_registrations, MAX_LEASES)
            self._writers = WriterTable()
        except (ValueError, MemoryError, OSError) as error:
            raise _refused(error) from error
        self._pools: list[Exported] = []
        self._registrations = RegistrationTable(LocalRegistration, "a local transport")
        if permit_any_peer:
            # EINVAL where there is no Yama: then nobody asks for it either.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)

    def register(
        self, memory: Registrable, *, writable: bool = True, keep: object = None
    ) -> LocalRegistration:
        """Let peers reach `memory`, and write to it unless `writable` is False.

        Args:
            memory: anything with a contiguous buffer (NumPy array, bytearray, mmap), which is held
                until deregistered; or (address, nbytes), as of `tensor.data_ptr()`, which the
                caller holds. An arena, a slice of its memoryview or an array over one is reached
                by a plain copy, whichever transport has allocated it. Or a `DeviceRange` of the
                transport's device; it must lie in one allocation.
            keep: held as long as a peer may write to it.

        Raises:
            LLMException: LLM_PARAM_INVALID: not mapped, not readable, not writable as asked, or
                not contiguous; LLM_OUT_OF_MEMORY: `max_registrations` are registered already;
                LLM_FEATURE_NOT_ENABLED: memory of a device that no other process can map.
            TypeError: neither of these.
        """
        address, nbytes, pin, arena, allocation = self._find(memory, writable=writable)
        with self._registrations.mutex:
            try:
                with released_if_refused(pin):
                    self._check_open()
                    slot, generation = self._generations.take()
            except MemoryError as error:
                raise LLMException(
                    f"{error}: deregister memory, or make the transport with more "
                    "max_registrations",
                    status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
                ) from error
            known = Range(address, nbytes, slot, generation, writable, arena, allocation)
            it = LocalRegistration(known, pin, keep)
            self._registrations.add(it)
        return it

    def deregister(self, registration: protocol.Registration) -> None:
        """End it: on return no peer reads or writes it any more, and it may be freed.

        A peer that is writing to it at this moment is waited for until it has finished a piece,
        some 0.1 ms, and reports an error; one that has died is not. One that does not get on (it is
        stopped, say) is waited for 1 s, once. What it then writes by address is refused; memory of
        an arena or a device, which it has mapped, is kept until it goes on or dies, and a warning
        names it. Memory of a device that the user has allocated is not kvplan's to keep: peers that
        read it are waited for as well, and where the warning is logged it must not be freed. A
        second time is fine, and waits for the same.

        Raises:
            TypeError: no registration of such a transport.
            LLMException: LLM_FAILED: the transport is closed, or a parent process's.
        """
        self._check_open()
        it = self._registrations.own(registration)
        self._remove(it)
        self._wait_for_writers([it])

    def preregister_pool(self, memory: Registrable, keep: object = None) -> None:
        """See `Transport.preregister_pool`: peers map a pool of a device once for all its parts.

        Raises:
            LLMException: LLM_FAILED: the transport is closed; what the device says.
        """
        if self._sharing is None or not isinstance(memory, DeviceRange):
            return
        try:
            pool = self._sharing.export(memory.address, memory.nbytes, memory.buffer, is_pool=True)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_FEATURE_NOT_ENABLED:
                raise
            return  # `register` will say so of each part
        with self._registrations.mutex:
            self._check_open()
            self._pools.append(pool)

    def begin_lease(self, deadline_ns: int = 0) -> tuple[int, int]:
        """See `Transport.begin_lease`.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY: no room for another lease; LLM_FAILED: the
                transport is closed, or a parent process's.
        """
        with self._registrations.mutex:
            self._check_open()
            try:
                return self._generations.take(is_lease=True, deadline_ns=deadline_ns)
            except MemoryError as error:
                raise leases_taken(MAX_LEASES) from error

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """See `Transport.renew_lease`.

        Raises:
            LLMException: LLM_FAILED: the transport is closed, or a parent process's.
        """
        with self._registrations.mutex:
            self._check_open()
            self._generations.renew(slot, generation, deadline_ns)

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """See `Transport.end_leases`.

        Raises:
            LLMException: LLM_TIMEOUT: a peer does not get on, and may still write; LLM_FAILED:
                the transport is closed, or a parent process's.
        """
        if self._closed or os.getpid() != self._pid:
            self._check_open()
        try:
            late = self._writers.end_leases(self._generations, leases, PATIENCE_S)
        except ValueError:
            self._check_open()  # closed just now?
            raise
        if late:
            raise LLMException(
                f"{_processes(late)} was writing to this one's memory and has not moved for "
                f"{PATIENCE_S:g} s (is it stopped, or does its GPU copy that much?): use the "
                "blocks again when it goes on or ends",
                status_code=LLMStatusCode.LLM_TIMEOUT,
            )

    def metadata(self, registrations: Iterable[protocol.Registration] | None = None) -> bytes:
        """What a peer needs to reach this process: its identity and `registrations` (None: all).

        Raises:
            LLMException: LLM_PARAM_INVALID: one of them is not registered here, or no longer.
            TypeError: one of them is no `Registration`.
        """
        self._check_open()
        with self._registrations.mutex:
            self._check_open()
            generations, table = self._generations, self._writers
            ref = GenerationTableRef(
                generations.fd, generations.inode, generations.num_slots, generations.address
            )
            ranges = tuple(it.range for it in self._registrations.select(registrations))
        writers = WritersRef(table.fd, table.inode, table.num_entries, table.address)
        device = "" if self._sharing is None else self._sharing.uuid
        return Metadata(self._identity, ref, writers, ranges, device).to_bytes()

    def connect(
        self,
        metadata: bytes,
        *,
        timeout_ms: float | None = None,
        session: bytes = b"",
        streams: protocol.Streams | None = None,
    ) -> LocalLink:
        """Link to the process whose `metadata` this is; it takes no part in that.

        Args:
            metadata: the peer's.
            timeout_ms, session, streams: not used, since nobody is waited for.

        Raises:
            LLMException: LLM_LINK_FAILED: another host or PID namespace, exited, or the system
                refuses access: the message says what to allow; LLM_PARAM_INVALID: bad metadata.
        """
        self._check_open()
        return LocalLink(
            Metadata.from_bytes(metadata), populate=self._populate, device=self._device
        )

    def shortfall(self, metadata: bytes) -> str | None:
        """See `Transport.shortfall`: two GPUs without peer access."""
        peer = Metadata.from_bytes(metadata)
        if self._sharing is None or not peer.device:
            return None
        return self._sharing.shortfall(peer.device)

    def close(self) -> None:
        """Deregister everything, as `deregister`, and take the generation table down; idempotent.

        Links live on.
        """
        self._writers.close()
        if os.getpid() != self._pid:
            self._closed = True
            self._generations.close()  # only the child's own mapping: the slots are the parent's
            return
        with self._registrations.mutex:
            ended = self._registrations.select()
            for it in ended:
                self._remove(it)
            self._closed = True
            self._pools = []
            self._generations.close()
        self._wait_for_writers(ended)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._registrations)} registrations"
        return f"<LocalTransport of process {self._pid}: {state}>"

    def _check_reachable(self, metadata: bytes) -> None:
        self.connect(metadata).close()  # some 0.1 ms

    def _find(self, memory: Registrable, *, writable: bool) -> _Found:
        if self._device is None or self._sharing is None or not isinstance(memory, DeviceRange):
            address, nbytes, pin, arena = host_range(memory, writable=writable)
            return _Found(address, nbytes, pin, None if arena is None else offer(arena), None)
        if memory.buffer is None:
            self._device.check_range("memory", memory.address, memory.nbytes)
        exported = self._sharing.export(memory.address, memory.nbytes, memory.buffer)
        return _Found(memory.address, memory.nbytes, _ExportPin(exported), None, exported.ref)

    def _remove(self, it: LocalRegistration) -> None:
        with self._registrations.mutex:
            if self._registrations.remove(it):
                self._generations.release(it.range.slot, it.range.generation)

    def _wait_for_writers(self, ended: Sequence[LocalRegistration]) -> None:
        """Wait for the peers that write, and let go of what they cannot write to any more."""
        writers = self._writers
        late = writers.drain(PATIENCE_S) if any(it.range.is_announced for it in ended) else []
        for it in ended:
            if late and it.range.is_announced and it.range.is_mapped:
                _warn(late, it)
                QUARANTINE.add(lambda: any(map(writers.stands, late)), it)
            else:
                it.release()


def _warn(late: Sequence[Ticket], memory: LocalRegistration) -> None:
    what = "the memory is not used again"
    if memory.range.announces_reads:
        what = "do not free the memory, which is not kvplan's,"
    on_device = memory.range.allocation is not None
    why = "is it stopped, or does its GPU copy that much?" if on_device else "is it stopped?"
    _LOG.warning(
        "%s is deregistered, but %s was using this one's memory and has not moved for %g s (%s): "
        "%s before that goes on or ends",
        memory.range,
        _processes(late),
        PATIENCE_S,
        why,
        what,
    )


def _processes(late: Sequence[Ticket]) -> str:
    return f"process {', '.join(str(pid) for pid in sorted({it.pid for it in late}))}"


def _refused(error: Exception) -> LLMException:
    """What the system, or the native layer, refuses, as an error of the interface."""
    if isinstance(error, ValueError):
        return invalid(str(error))
    return system_error("a local transport", error)
