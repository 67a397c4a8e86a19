"""Memory of other processes on this host: arenas that both map, and any memory by address."""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvnative._host import Arena, Board, Pin, check_memory
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.identity import Identity
from kvplan.transport.link import Link
from kvplan.transport.metadata import ArenaRef, BoardRef, Metadata, Range

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    # NumPy's arrays have a typed buffer from Python 3.12 on only.
    AnyBuffer = Buffer | NDArray[Any]

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Registration:
    """Memory [address, address + nbytes) that peers may reach; given back by `deregister`."""

    range: Range
    pin: Pin | None  # keeps the memory where it is; None: the caller does

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return self.range.address

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.range.nbytes

    @property
    def writable(self) -> bool:
        """Whether peers may write to it."""
        return self.range.writable

    def __repr__(self) -> str:
        return f"<Registration of {self.range}>"


class LocalTransport:
    """What this process lets its peers on this host reach, and its links to them.

    A peer needs `metadata()`, and the system's leave: the same user, or CAP_SYS_PTRACE. Under
    Yama (`kernel.yama.ptrace_scope=1`, as on Ubuntu) that is not enough for registered memory, and
    `permit_any_peer=True` lets every process of this user trace this one. Arenas do not need that.

    Close it (or leave its `with` block) before the memory goes. In a forked child it is of no use:
    make another there.
    """

    def __init__(self, *, max_registrations: int = 65536, permit_any_peer: bool = False) -> None:
        self._board = Board(max_registrations)
        self._identity = Identity.of_self()
        self._registrations: dict[int, Registration] = {}  # by slot
        self._arenas: dict[Arena, Registration] = {}
        self._mutex = threading.Lock()
        if permit_any_peer:
            # EINVAL where there is no Yama: then nobody asks for it either.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)

    def allocate(self, nbytes: int, *, prefault: bool = False) -> Arena:
        """New zeroed memory of `nbytes` bytes, registered, which peers reach by a plain copy.

        With `prefault` every page is present on return; otherwise pages come at first use.
        `deregister` it before closing it.

        Raises:
            LLMException: LLM_PARAM_INVALID: a size that cannot be; LLM_OUT_OF_MEMORY; LLM_FAILED:
                no file descriptor is left, say.
        """
        try:
            arena = Arena(nbytes, prefault=prefault)
        except ValueError as error:
            raise invalid(str(error)) from error
        except MemoryError as error:
            raise _out_of_memory(error) from error
        except OSError as error:
            raise LLMException(str(error)) from error
        with self._mutex:
            self._arenas[arena] = self._add(Pin(arena), arena.address, nbytes, True, arena)
        return arena

    def register(
        self, memory: AnyBuffer | tuple[int, int], *, writable: bool = True
    ) -> Registration:
        """Let peers reach `memory`, and write to it unless `writable` is False.

        Args:
            memory: anything with a contiguous buffer (NumPy array, bytearray, mmap), which is held
                until deregistered; or (address, nbytes), as of `tensor.data_ptr()`, which the
                caller holds.

        Raises:
            LLMException: LLM_PARAM_INVALID: not mapped, not readable, not writable as asked, or
                not contiguous; LLM_OUT_OF_MEMORY: `max_registrations` are registered already.
            TypeError: neither of these.
        """
        pin = None
        if isinstance(memory, tuple):
            if len(memory) != 2:
                raise invalid(f"memory is {memory!r}; a tuple must be (address, nbytes)")
            address, nbytes = memory
        elif getattr(getattr(memory, "dtype", None), "hasobject", False):
            raise TypeError("memory holds references to Python objects, which no peer may write")
        else:
            try:
                pin = Pin(memory, writable=writable)
            except (BufferError, ValueError) as error:
                raise invalid(f"memory of type {type(memory).__name__}: {error}") from error
            address, nbytes = pin.address, pin.nbytes
        try:
            check_memory(address, nbytes, writable)
        except ValueError as error:
            raise invalid(f"memory: {error}") from error
        except OSError as error:  # /proc is not there, or no descriptor is left to read it
            raise LLMException(f"memory: {error}") from error
        arena = memory if isinstance(memory, Arena) and memory.fd >= 0 else None
        with self._mutex:
            return self._add(pin, address, nbytes, writable, arena)

    def deregister(self, memory: Registration | Arena) -> None:
        """End it: from here on no peer reports a success for it. It may be freed afterwards.

        A peer's `put` that is in flight at this moment may still write to it; agree on the end of
        transfers first. A second time is fine.
        """
        self._check_process()
        if not isinstance(memory, Registration | Arena):
            raise TypeError(
                f"memory is a {type(memory).__name__}; it must be a Registration or an Arena"
            )
        with self._mutex:
            it = self._arenas.pop(memory, None) if isinstance(memory, Arena) else memory
            if it is not None and self._registrations.get(it.range.slot) is it:
                self._remove(it)

    def metadata(self) -> bytes:
        """What a peer needs to `connect` to this process: its identity and registered memory."""
        self._check_process()
        with self._mutex:
            board = self._board
            ref = BoardRef(board.fd, board.inode, board.num_slots, board.address)
            ranges = tuple(it.range for it in self._registrations.values())
        return Metadata(self._identity, ref, ranges).to_bytes()

    def connect(self, metadata: bytes, *, prefault: bool = False) -> Link:
        """Link to the process whose `metadata` this is; it takes no part in that.

        With `prefault` the pages of an arena are mapped with it, which costs time and page tables,
        instead of one fault a page at first use.

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
            self._arenas.clear()
            self._board.close()

    def __enter__(self) -> LocalTransport:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._board.closed else f"{len(self._registrations)} registrations"
        return f"<LocalTransport of process {self._identity.pid}: {state}>"

    def _add(
        self, pin: Pin | None, address: int, nbytes: int, writable: bool, arena: Arena | None
    ) -> Registration:
        self._check_process()
        try:
            slot, generation = self._board.take()
        except MemoryError as error:
            raise _out_of_memory(error) from error
        ref = None if arena is None else ArenaRef(arena.fd, arena.inode)
        it = Registration(Range(address, nbytes, slot, generation, writable, ref), pin)
        self._registrations[slot] = it
        return it

    def _remove(self, it: Registration) -> None:
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


def _out_of_memory(error: MemoryError) -> LLMException:
    return LLMException(str(error), status_code=LLMStatusCode.LLM_OUT_OF_MEMORY)
