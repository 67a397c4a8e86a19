"""What peers may reach of this process over TCP, before the threads that serve it and after."""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvnative._backend import NativeError
from kvnative._signals import Mutex
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.host_memory import host_range, released_if_refused
from kvplan.transport.metadata import Range
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registrations import (
    MAX_LEASES,
    Registration,
    RegistrationTable,
    Slots,
    leases_taken,
)
from kvplan.transport.tcp.metadata import MAX_SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvnative._acl import DeviceBuffer
    from kvnative._host import Pin
    from kvnative._tcp import TcpService
    from kvplan.device.device import Device
    from kvplan.transport import protocol
    from kvplan.transport.protocol import Registrable

_NOWHERE: Final = 2**64 - 1


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class TcpRegistration(Registration[Range]):
    """Memory that peers may reach over TCP; `keep` is the buffer of a device that it lies in."""

    on_device: bool
    # Held while it ends, taken before the table's. Re-entrant: a signal handler may end it as well.
    ending: Mutex = field(default_factory=Mutex, init=False)


class Registrations:
    """Those of one transport; may be used from several threads.

    Until there is a native service, and a link that peers could ask by, they are kept here alone.

    Args:
        num_slots: how many there can be at once.
        device: whose memory can be registered, besides that of the host; None: none.
    """

    def __init__(self, num_slots: int, device: Device | None) -> None:
        self._slots = Slots(num_slots, MAX_SLOTS)
        self.num_slots = num_slots
        self._lease_slots = Slots(MAX_LEASES, MAX_LEASES)  # those behind the registrations'
        # Generation and deadline of each that has not ended, by its number; no generation: of none.
        self._lease_generations, self._lease_deadlines = array("Q"), array("Q")
        # Held while leases end, taken before the table's. Re-entrant: of a signal handler as well.
        self._ending = Mutex()
        self.device = device
        self._table = RegistrationTable(TcpRegistration, "a tcp transport")
        self._service: TcpService | None = None

    def attach(self, service: TcpService) -> None:
        """Let peers reach all of them through `service`, and those that come."""
        with self._table.mutex:
            self._service = service  # first: a finalizer may deregister some meanwhile
            for it in self._table.select():
                if self._table.holds(it):
                    _serve(service, it)
            known = zip(self._lease_generations, self._lease_deadlines, strict=True)
            for number, (generation, deadline_ns) in enumerate(known):
                if generation:
                    _serve_lease(service, self.num_slots + number, generation, deadline_ns)

    def add(self, memory: Registrable, *, writable: bool) -> TcpRegistration:
        """See `TcpTransport.register`."""
        address, nbytes, pin, buffer = self._find(memory, writable)
        with self._table.mutex:
            with released_if_refused(pin):
                self._table.check_open()
                slot, generation = self._slots.take()
            known = Range(address, nbytes, slot, generation, writable)
            it = TcpRegistration(known, pin, buffer, isinstance(memory, DeviceRange))
            # Before it is served: an interrupt in between must not leave memory that is not held.
            self._table.add(it)
            if self._service is not None:
                _serve(self._service, it)
            return it

    def remove(self, registration: protocol.Registration) -> None:
        """See `TcpTransport.deregister`."""
        it = self._table.own(registration)
        with it.ending:  # until nothing of it moves any more, whoever began to end it
            with self._table.mutex:
                if not self._table.holds(it):
                    return
                if (service := self._service) is None:
                    self._forget(it)
            if service is not None:
                # A call that was interrupted, a signal handler or `close` may have come first.
                with suppress(ValueError, NativeError):
                    service.remove_range(it.range.slot)  # waits
                if not self._forget(it):
                    return
        it.release()

    @property
    def num_rows(self) -> int:
        """Of registrations and leases, at most."""
        return self.num_slots + MAX_LEASES

    def begin_lease(self, deadline_ns: int) -> tuple[int, int]:
        """See `Transport.begin_lease`."""
        with self._table.mutex:
            self._table.check_open()
            try:
                number, generation = self._lease_slots.take()
            except LLMException as error:
                raise leases_taken(MAX_LEASES) from error
            slot = self.num_slots + number
            if number == len(self._lease_generations):
                self._lease_generations.append(0)
                self._lease_deadlines.append(0)
            self._lease_generations[number] = generation
            self._lease_deadlines[number] = deadline_ns
            if self._service is not None:
                _serve_lease(self._service, slot, generation, deadline_ns)
            return slot, generation

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """See `Transport.renew_lease`."""
        with self._table.mutex:
            self._lease_deadlines[slot - self.num_slots] = deadline_ns
            if self._service is not None:
                with suppress(NativeError):
                    self._service.renew_range(slot, deadline_ns)

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """See `Transport.end_leases`."""
        for slot, generation in leases:
            number = slot - self.num_slots
            with self._table.mutex:
                if (service := self._service) is None:  # nothing moves
                    self._forget_lease(number, generation)
                    continue
            with self._ending:  # until nothing moves with it any more, whoever began to end it
                if self._lease_generations[number] == generation:
                    with suppress(ValueError, NativeError):
                        service.remove_range(slot)  # waits
                    with self._table.mutex:
                        self._forget_lease(number, generation)

    def _forget_lease(self, number: int, generation: int) -> None:
        if self._lease_generations[number] == generation:  # else it has ended before
            self._lease_generations[number] = 0
            self._lease_slots.release(number)

    def ranges(self, registrations: Iterable[protocol.Registration] | None) -> tuple[Range, ...]:
        """What peers must know of `registrations`; None: all."""
        return tuple(it.range for it in self._table.select(registrations))

    def close(self) -> None:
        """Forget all, and take no more; the service has been closed."""
        for it in self._table.close():
            it.release()

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

    def _forget(self, it: TcpRegistration) -> bool:
        with self._table.mutex:
            held = self._table.remove(it)
            if held:
                self._slots.release(it.range.slot)
            return held


def _serve(service: TcpService, registration: TcpRegistration) -> None:
    it = registration.range
    with suppress(NativeError):  # it is closed, as the registration will be
        service.add_range(
            *(it.slot, it.address, it.nbytes, it.writable, it.generation),
            on_device=registration.on_device,
        )


def _serve_lease(service: TcpService, slot: int, generation: int, deadline_ns: int) -> None:
    """Let requests name it: a row without memory, as its one byte is where none can be."""
    with suppress(NativeError):
        service.add_range(slot, _NOWHERE, 1, False, generation, deadline_ns=deadline_ns)
