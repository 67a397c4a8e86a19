"""Host memory: new arenas, and the location and holder of memory that is about to be registered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kvnative._host import Arena, Pin, check_memory
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.limits import memory_limit, system_error
from kvplan.transport.protocol import DeviceRange

if TYPE_CHECKING:
    from kvplan.transport.protocol import Registrable


class Releasable(Protocol):
    """An object that keeps memory in place until it is released."""

    def release(self) -> None:
        """Release the memory. Idempotent."""


def new_arena(
    nbytes: int,
    *,
    prefault: bool = False,
    allow_overcommit: bool = False,
    pages: str = "auto",
    numa_node: int | None = None,
) -> Arena:
    """Return new zeroed memory.

    Args:
        nbytes: The size in bytes.
        prefault: Allocate all pages now, instead of each at its first use.
        allow_overcommit: Permit more than the limit of memory and swap.
        pages: "auto" (huge pages if prefaulted), "small", or "hugetlb": pages that the
            administrator has reserved.
        numa_node: The node of the memory; None: the system chooses.
    """
    limit = None if allow_overcommit else memory_limit()
    if limit is not None and nbytes > limit.nbytes:
        raise LLMException(
            f"nbytes={nbytes} is more than the {limit.nbytes} bytes of memory and swap of "
            f"{limit.whose}; kvplan.allow_overcommit=1 permits more than can be written to",
            status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
        )
    try:
        node = -1 if numa_node is None else numa_node
        return Arena(nbytes, prefault=prefault, pages=pages, node=node)
    except ValueError as error:
        raise invalid(str(error)) from error
    except (MemoryError, OSError) as error:
        raise system_error("allocating", error) from error


def arena_of(memory: object) -> Arena | None:
    """Return the arena of this process that `memory` is, or is a view of, or None."""
    while isinstance(memory, np.ndarray | memoryview):
        memory = memory.base if isinstance(memory, np.ndarray) else memory.obj
    return memory if isinstance(memory, Arena) and memory.fd >= 0 else None


class HostRange(NamedTuple):
    """Memory [address, address + nbytes) of this process.

    Attributes:
        pin: Keeps the memory in place; None: the caller does.
        arena: The arena that the memory is a part of, if any.
    """

    address: int
    nbytes: int
    pin: Pin | None
    arena: Arena | None


@contextmanager
def released_if_refused(pin: Releasable | None) -> Iterator[None]:
    """Release the pin if an exception passes: its traceback must not keep the memory alive."""
    try:
        yield
    except BaseException:
        if pin is not None:
            pin.release()
        raise


def host_range(memory: Registrable, *, writable: bool) -> HostRange:
    """Locate and pin memory to be registered: a contiguous buffer, or (address, nbytes)."""
    pin = arena = None
    if isinstance(memory, DeviceRange):
        raise TypeError("memory is on a device; this transport reaches only host memory")
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
        arena = arena_of(memory)
    try:
        with released_if_refused(pin):
            check_memory(address, nbytes, writable)
    except ValueError as error:
        raise invalid(f"memory: {error}") from error
    except OSError as error:  # /proc is not mounted, or no descriptor is left to read it
        raise system_error("memory", error) from error
    # NumPy lets `strides` be set so that an array extends beyond its base.
    if arena is not None and not arena.address <= address <= arena.address + arena.nbytes - nbytes:
        arena = None
    return HostRange(address, nbytes, pin, arena)
