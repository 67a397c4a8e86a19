"""Memory of the host that is to be registered: where it is, checked, and what keeps it there."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from kvnative._host import Arena, Pin, check_memory
from kvplan.status import LLMException, invalid
from kvplan.transport.arenas import arena_of
from kvplan.transport.protocol import DeviceRange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.transport.protocol import Registrable


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
def released_if_refused(pin: Pin | None) -> Iterator[None]:
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
            contiguous; LLM_FAILED: /proc cannot be read.
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
        raise LLMException(f"memory: {error}") from error
    # as_strided makes arrays that reach beyond what they are over.
    if arena is not None and not arena.address <= address <= arena.address + arena.nbytes - nbytes:
        arena = None
    return HostRange(address, nbytes, pin, arena)
