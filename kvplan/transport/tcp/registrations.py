"""What peers may reach of this process over TCP, before the threads that serve it and after."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvnative._backend import NativeError
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.transport.host_range import host_range, released_if_refused
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registration import RegisteredMemory, ranges_of
from kvplan.transport.tcp.metadata import MAX_SLOTS, Range
from kvplan.validation import check_type

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvnative._acl import DeviceBuffer
    from kvnative._host import Pin
    from kvnative._tcp import TcpService
    from kvplan.ascend.device import AscendDevice
    from kvplan.transport import protocol
    from kvplan.transport.protocol import Registrable


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Registration(RegisteredMemory[Range]):
    """Memory [address, address + nbytes) that peers may reach; given back by `deregister`."""

    range: Range
    pin: Pin | None  # keeps the memory where it is; None: the caller does
    on_device: bool
    buffer: DeviceBuffer | None  # the same, of a device
    # Held while it ends, taken before the table's. Re-entrant: a signal handler may end it as well.
    ending: threading.RLock = field(default_factory=threading.RLock, init=False)


_own = partial(Registration.own, transport="a tcp transport")


class Registrations:
    """Those of one transport; may be used from several threads.

    Until there is a native service, and a link that peers could ask by, they are kept here alone.

    Args:
        num_slots: how many there can be at once.
        device: whose memory can be registered, besides that of the host; None: none.
    """

    def __init__(self, num_slots: int, device: AscendDevice | None) -> None:
        if not 1 <= check_type("max_registrations", num_slots, int) <= MAX_SLOTS:
            raise invalid(f"max_registrations={num_slots} is out of range [1, {MAX_SLOTS}]")
        self.num_slots = num_slots
        self.device = device
        # Re-entrant: the end of a pin may run finalizers, which may deregister more.
        self._mutex = threading.RLock()
        self._by_slot: dict[int, Registration] = {}
        self._free: list[int] = []
        self._unused = iter(range(num_slots))  # those that were never taken
        self._generation = 0
        self._service: TcpService | None = None
        self._closed = False

    def attach(self, service: TcpService) -> None:
        """Let peers reach all of them through `service`, and those that come."""
        with self._mutex:
            self._service = service  # first: a finalizer may deregister some meanwhile
            for it in tuple(self._by_slot.values()):
                if self._by_slot.get(it.range.slot) is it:
                    _serve(service, it)

    def add(self, memory: Registrable, *, writable: bool) -> Registration:
        """See `TcpTransport.register`."""
        address, nbytes, pin, buffer = self._find(memory, writable)
        with self._mutex:
            with released_if_refused(pin):
                if self._closed:
                    raise LLMException("the transport is closed")
                slot = self._take()
            self._generation += 1
            known = Range(address, nbytes, slot, self._generation, writable)
            # Before it is served: an interrupt in between must not leave memory that is not held.
            on_device = isinstance(memory, DeviceRange)
            it = self._by_slot[slot] = Registration(known, pin, on_device, buffer)
            if self._service is not None:
                _serve(self._service, it)
            return it

    def remove(self, registration: protocol.Registration) -> None:
        """See `TcpTransport.deregister`."""
        it = _own(registration)
        with it.ending:  # until nothing of it moves any more, whoever began to end it
            with self._mutex:
                if self._by_slot.get(it.range.slot) is not it:
                    return
                if (service := self._service) is None:
                    self._forget(it)
            if service is not None:
                # A call that was interrupted, a signal handler or `close` may have come first.
                with suppress(ValueError, NativeError):
                    service.remove_range(it.range.slot)  # waits
                with self._mutex:
                    if self._by_slot.get(it.range.slot) is not it:
                        return
                    self._forget(it)
        if it.pin is not None:
            it.pin.release()

    def ranges(self, registrations: Iterable[protocol.Registration] | None) -> tuple[Range, ...]:
        """What peers must know of `registrations`; None: all."""
        given = None if registrations is None else [_own(it) for it in registrations]
        with self._mutex:
            return ranges_of(given, self._by_slot)

    def close(self) -> None:
        """Forget all, and take no more; the service has been closed."""
        with self._mutex:
            self._closed = True
            ended, self._by_slot = list(self._by_slot.values()), {}
        for it in ended:
            if it.pin is not None:
                it.pin.release()

    def _find(
        self, memory: Registrable, writable: bool
    ) -> tuple[int, int, Pin | None, DeviceBuffer | None]:
        """Where it is, and what holds it."""
        if not isinstance(memory, DeviceRange):
            address, nbytes, pin, _ = host_range(memory, writable=writable)
            return address, nbytes, pin, None
        if self.device is None:
            raise LLMException(
                f"memory at {memory.address:#x} is of a device, which this transport was made "
                "without: have that cache on the host (Placement.HOST)",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        if memory.buffer is None:
            self.device.check_range("memory", memory.address, memory.nbytes)
        return memory.address, memory.nbytes, None, memory.buffer

    def _forget(self, it: Registration) -> None:
        del self._by_slot[it.range.slot]
        self._free.append(it.range.slot)

    def _take(self) -> int:
        if (slot := self._free.pop() if self._free else next(self._unused, None)) is None:
            raise LLMException(
                f"all {self.num_slots} registrations are taken: deregister memory, or make the "
                f"transport with more max_registrations ({MAX_SLOTS} at most)",
                status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
            )
        return slot


def _serve(service: TcpService, registration: Registration) -> None:
    it = registration.range
    with suppress(NativeError):  # it is closed, as the registration will be
        service.add_range(
            *(it.slot, it.address, it.nbytes, it.writable, it.generation),
            on_device=registration.on_device,
        )
