"""Memory of the host: new arenas, and what is to be registered: where it is, and what holds it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvnative._host import Arena, Pin, check_memory
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system_limits import memory_limit, system_error
from kvplan.transport.protocol import DeviceRange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.transport.protocol import Registrable
    from kvplan.transport.registrations import Releasable


def new_arena(
    nbytes: int,
    *,
    prefault: bool = False,
    allow_overcommit: bool = False,
    pages: str = "auto",
    numa_node: int | None = None,
) -> Arena:
    """New zeroed memory.

    Args:
        nbytes: its size.
        prefault: have all pages now; otherwise each comes at its first use.
        allow_overcommit: let it be larger than all memory and swap there is.
        pages: "auto": huge ones where `prefault` makes them; "small"; or "hugetlb": those that the
            administrator has reserved, all of which are taken now, in whole ones.
        numa_node: that its pages come from; None: as the system does.

    Raises:
        LLMException: LLM_PARAM_INVALID: a size that cannot be, or no such node; LLM_OUT_OF_MEMORY:
            there is not as much, or a limit of the system; LLM_FAILED.
    """
    limit = None if allow_overcommit else memory_limit()
    if limit is not None and nbytes > limit.nbytes:
        raise LLMException(
            f"{nbytes} bytes were asked for, and {limit.whose} has {limit.nbytes} of memory and "
            "swap; kvplan.allow_overcommit=1 permits more than can be written to",
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
    """The arena of this process that `memory` views: itself, a memoryview, or arrays over one."""
    while isinstance(memory, np.ndarray | memoryview):
        memory = memory.base if isinstance(memory, np.ndarray) else memory.obj
    return memory if isinstance(memory, Arena) and memory.fd >= 0 else None


class HostRange(NamedTuple):
    """Memory [address, address + nbytes) of this process.

    Attributes:
        address: of the first byte.
        nbytes: its size in bytes.
        pin: keeps it where it is; None: the caller does.
        arena: that it is a part of; None: of none.
    """

    address: int
    nbytes: int
    pin: Pin | None
    arena: Arena | None


@contextmanager
def released_if_refused(pin: Releasable | None) -> Iterator[None]:
    """Release the pin if an exception passes: whoever keeps that shall not keep the memory too."""
    try:
        yield
    except BaseException:
        if pin is not None:
            pin.release()
        raise


def host_range(memory: Registrable, *, writable: bool) -> HostRange:
    """Look at what is to be registered: a contiguous buffer, or (address, nbytes).

    Raises:
        LLMException: LLM_PARAM_INVALID: not mapped, not readable, not writable as asked, or not
            contiguous; LLM_OUT_OF_MEMORY: no descriptor is left; LLM_FAILED: /proc cannot be read.
        TypeError: neither of these, or memory of a device.
    """
    pin = arena = None
    if isinstance(memory, DeviceRange):
        raise TypeError("memory is of a device; this transport reaches host memory alone")
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
    except OSError as error:  # /proc is not there, or no descriptor is left to read it
        raise system_error("memory", error) from error
    # as_strided makes arrays that reach beyond what they are over.
    if arena is not None and not arena.address <= address <= arena.address + arena.nbytes - nbytes:
        arena = None
    return HostRange(address, nbytes, pin, arena)
