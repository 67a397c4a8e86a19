"""Memory of other processes on this host: arenas that both map, and any memory by address."""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvnative._host import Arena, Board, Pin
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.arenas import offer
from kvplan.transport.host_range import host_range
from kvplan.transport.identity import Identity
from kvplan.transport.link import Link
from kvplan.transport.metadata import BoardRef, Metadata, Range
from kvplan.transport.registration import RegisteredMemory, ranges_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvplan.transport import protocol
    from kvplan.transport.protocol import Kind, Registrable

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Registration(RegisteredMemory[Range]):
    """Memory [address, address + nbytes) that peers may reach; given back by `deregister`."""

    range: Range
    pin: Pin | None  # keeps the memory where it is; None: the caller does


class LocalTransport:
    """What this process lets its peers on this host reach, and its links to them.

    A peer needs `metadata()`, and the system's leave: the same user, or CAP_SYS_PTRACE. Under
    Yama (`kernel.yama.ptrace_scope=1`, as on Ubuntu) that is not enough for registered memory, and
    `permit_any_peer=True` lets every process of this user trace this one. Arenas do not need that.

    Close it (or leave its `with` block) before the memory goes. In a forked child it is of no use:
    make another there.
    """

    name = "local"
    reaches: frozenset[Kind] = frozenset({"host"})

    def __init__(self, *, max_registrations: int = 65536, permit_any_peer: bool = False) -> None:
        """Show this process to its peers.

        Args:
            max_registrations: how many there can be at once; each takes 8 bytes.
            permit_any_peer: let every process of this user trace this one, as Yama demands.

        Raises:
            LLMException: LLM_PARAM_INVALID: `max_registrations` is not in [1, 2**24];
                LLM_OUT_OF_MEMORY; LLM_FAILED: /proc cannot be read, or no descriptor is left.
        """
        try:
            self._identity = Identity.of_self()
            self._board = Board(max_registrations)
        except (ValueError, MemoryError, OSError) as error:
            raise _refused(error) from error
        self._registrations: dict[int, Registration] = {}  # by slot
        # Re-entrant: letting go of memory may run finalizers, which may deregister more.
        self._mutex = threading.RLock()
        if permit_any_peer:
            # EINVAL where there is no Yama: then nobody asks for it either.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)

    def allocate(self, nbytes: int, *, prefault: bool = False) -> Arena:
        """New zeroed memory of `nbytes` bytes, which peers reach by a plain copy.

        They reach what of it is registered. With `prefault` every page is present on return;
        otherwise pages come at first use. It goes with its last user here and in the peers.

        Raises:
            LLMException: LLM_PARAM_INVALID: a size that cannot be; LLM_OUT_OF_MEMORY; LLM_FAILED:
                no file descriptor is left, say.
        """
        self._check_process()
        try:
            return Arena(nbytes, prefault=prefault)
        except (ValueError, MemoryError, OSError) as error:
            raise _refused(error) from error

    def expect(self, memory: Registrable, keep: object = None) -> None:
        """Do nothing: parts are registered when they are, whatever links there are."""

    def register(self, memory: Registrable, *, writable: bool = True) -> Registration:
        """Let peers reach `memory`, and write to it unless `writable` is False.

        Args:
            memory: anything with a contiguous buffer (NumPy array, bytearray, mmap), which is held
                until deregistered; or (address, nbytes), as of `tensor.data_ptr()`, which the
                caller holds. An arena, a slice of its memoryview or an array over one is reached
                by a plain copy, whichever transport has allocated it.

        Raises:
            LLMException: LLM_PARAM_INVALID: not mapped, not readable, not writable as asked, or
                not contiguous; LLM_OUT_OF_MEMORY: `max_registrations` are registered already.
            TypeError: neither of these.
        """
        address, nbytes, pin, arena = host_range(memory, writable=writable)
        ref = None if arena is None else offer(arena)
        with self._mutex:
            self._check_process()
            try:
                slot, generation = self._board.take()
            except MemoryError as error:
                raise LLMException(
                    f"{error}: deregister memory, or make the transport with more "
                    "max_registrations",
                    status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
                ) from error
            it = Registration(Range(address, nbytes, slot, generation, writable, ref), pin)
            self._registrations[slot] = it
        return it

    def deregister(self, registration: protocol.Registration) -> None:
        """End it: from here on no peer reports a success for it. It may be freed afterwards.

        A peer's `put` that is in flight at this moment may still write to it; agree on the end of
        transfers first. A second time is fine.
        """
        self._check_process()
        it = _own(registration)
        with self._mutex:
            self._remove(it)

    def metadata(self, registrations: Iterable[protocol.Registration] | None = None) -> bytes:
        """What a peer needs to reach this process: its identity and `registrations` (None: all).

        Raises:
            LLMException: LLM_PARAM_INVALID: one of them is not registered here, or no longer.
            TypeError: one of them is no `Registration`.
        """
        self._check_process()
        given = None if registrations is None else [_own(it) for it in registrations]
        with self._mutex:
            self._check_process()
            board = self._board
            ref = BoardRef(board.fd, board.inode, board.num_slots, board.address)
            ranges = ranges_of(given, self._registrations)
        return Metadata(self._identity, ref, ranges).to_bytes()

    def ready(self) -> None:
        """Do nothing: links need nothing."""

    def refusal(self, metadata: bytes) -> str | None:
        """Why the process of `metadata` cannot be reached from here; None: it can.

        Found out by linking to it, which takes some 0.1 ms.
        """
        self._check_process()
        try:
            self.connect(metadata).close()
        except LLMException as error:
            return str(error.args[0])
        return None

    def connect(
        self,
        metadata: bytes,
        *,
        timeout_ms: float | None = None,
        session: bytes = b"",
        prefault: bool = False,
    ) -> Link:
        """Link to the process whose `metadata` this is; it takes no part in that.

        Args:
            metadata: the peer's.
            timeout_ms, session: of no account, since nobody is waited for.
            prefault: map the pages of an arena with it, which costs time and page tables, instead
                of one fault a page at first use.

        Raises:
            LLMException: LLM_LINK_FAILED: another host or PID namespace, exited, or the system
                refuses access: the message says what to allow; LLM_PARAM_INVALID: bad metadata.
        """
        self._check_process()
        return Link(Metadata.from_bytes(metadata), prefault=prefault)

    def close(self) -> None:
        """Deregister everything, and take the board down; idempotent. Links live on."""
        if os.getpid() != self._identity.pid:
            self._board.close()  # only the child's own mapping: the slots are the parent's
            return
        with self._mutex:
            for it in tuple(self._registrations.values()):
                self._remove(it)
            self._board.close()

    def __enter__(self) -> LocalTransport:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._board.closed else f"{len(self._registrations)} registrations"
        return f"<LocalTransport of process {self._identity.pid}: {state}>"

    def _remove(self, it: Registration) -> None:
        if self._registrations.get(it.range.slot) is not it:
            return
        del self._registrations[it.range.slot]
        self._board.release(it.range.slot, it.range.generation)
        if it.pin is not None:
            it.pin.release()

    def _check_process(self) -> None:
        if self._board.closed:
            raise LLMException("the transport is closed")
        if os.getpid() != self._identity.pid:
            raise LLMException(
                f"the transport belongs to process {self._identity.pid}; this is its forked child "
                f"{os.getpid()}, which needs one of its own"
            )


def _own(registration: protocol.Registration) -> Registration:
    return Registration.own(registration, "a local transport")


def _refused(error: Exception) -> LLMException:
    """What the system, or the native layer, refuses, as an error of the interface."""
    if isinstance(error, ValueError):
        return invalid(str(error))
    if isinstance(error, MemoryError):
        return LLMException(str(error), status_code=LLMStatusCode.LLM_OUT_OF_MEMORY)
    return LLMException(str(error))
