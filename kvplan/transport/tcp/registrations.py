"""Memory of this process that peers may reach over TCP, mirrored in the native service."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvnative._backend import NativeError
from kvnative._signals import Mutex
from kvplan.device.device import Device
from kvplan.status import unsupported
from kvplan.transport.host_memory import Releasable, host_range
from kvplan.transport.metadata import Range
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registrations import (
    MAX_LEASES,
    Found,
    Registration,
    Registrations,
    Slots,
    lease_ended,
)
from kvplan.transport.tcp.metadata import MAX_SLOTS

if TYPE_CHECKING:
    from kvnative._device import DeviceBuffer
    from kvnative._tcp import TcpService
    from kvplan.transport.protocol import Registrable

_NOWHERE: Final = 2**64 - 1


@dataclass(eq=False, slots=True)
class Held:
    """The objects that keep registered memory in place.

    Attributes:
        pin: The pin of host memory; None: the caller keeps the memory in place.
        buffer: The device allocation that contains the memory; None: as for `pin`.
        on_device: True if the memory is on the device.
        ending: A lock that is held while the registration ends; taken before the mutex of the
            registrations. Re-entrant, since a signal handler may end the registration as well.
    """

    pin: Releasable | None = None
    buffer: DeviceBuffer | None = None
    on_device: bool = False
    ending: Mutex = field(default_factory=Mutex, init=False)

    def release(self) -> None:
        """Release the memory. Idempotent."""
        if self.pin is not None:
            self.pin.release()
        self.buffer = None


TcpRegistration = Registration[Range, Held]


class TcpRegistrations(Registrations[Range, Held]):
    """See `Registrations`. The native service gets them when the first link is made."""

    transport = "a tcp transport"

    def __init__(self, max_registrations: int, device: Device | None) -> None:
        self._rows = Slots(max_registrations, MAX_SLOTS, MAX_LEASES)
        super().__init__(Range, self._rows, MAX_SLOTS)
        self._deadlines: dict[int, int] = {}  # of leases, by slot
        # Held while leases end; taken before `mutex`. Re-entrant, for signal handlers.
        self._ending = Mutex()
        self._device = device
        self._service: TcpService | None = None

    @property
    def num_rows(self) -> int:
        """The maximum number of registrations and leases."""
        return self._rows.num_slots

    def attach(self, service: TcpService) -> None:
        """Let peers reach all present and later registrations and leases through `service`."""
        with self.mutex:
            self._service = service  # first, since a finalizer may deregister some meanwhile
            for registration in self.select():
                if self.holds(registration):
                    self._serve(registration)
            for slot, generation in self._rows.leases():
                _serve_lease(service, slot, generation, self._deadlines.get(slot, 0))

    def begin_lease(self, deadline_ns: int) -> tuple[int, int]:
        """See `Transport.begin_lease`."""
        with self.mutex:
            slot, generation = super().begin_lease(deadline_ns)
            if deadline_ns:
                self._deadlines[slot] = deadline_ns
            if self._service is not None:
                _serve_lease(self._service, slot, generation, deadline_ns)
            return slot, generation

    def renew_lease(self, slot: int, generation: int, deadline_ns: int) -> None:
        """See `Transport.renew_lease`."""
        with self.mutex:
            if not self._rows.holds(slot, generation):
                raise lease_ended()
            self._deadlines[slot] = deadline_ns
            if self._service is not None:
                with suppress(NativeError):
                    self._service.renew_range(slot, deadline_ns)

    def end_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """See `Transport.end_leases`: on return no byte moves with the leases."""
        for slot, generation in leases:
            with self.mutex:
                if (service := self._service) is None:  # no link exists
                    self._forget_lease(slot, generation)
                    continue
            with self._ending:  # waits for another thread that is ending the same lease
                if self._rows.holds(slot, generation):
                    with suppress(ValueError, NativeError):
                        service.remove_range(slot)  # waits
                    with self.mutex:
                        self._forget_lease(slot, generation)

    def close(self) -> None:
        """See `Registrations.close`; the service was closed before."""
        with self.mutex:
            self._closed = True
            ended, self._by_slot = tuple(self._by_slot.values()), {}
        self._release(ended)

    def _forget_lease(self, slot: int, generation: int) -> None:
        with suppress(ValueError):  # it has ended before
            self._rows.release(slot, generation)
            self._deadlines.pop(slot, None)

    def _find(self, memory: Registrable, *, writable: bool) -> Found[Held]:
        if not isinstance(memory, DeviceRange):
            address, nbytes, pin, _ = host_range(memory, writable=writable)
            return Found(address, nbytes, Held(pin))
        if self._device is None:
            raise unsupported(
                f"memory at {memory.address:#x} is on a device, and this transport has no device: "
                "place the cache on the host (Placement.HOST)"
            )
        if memory.buffer is None:
            self._device.check_range("memory", memory.address, memory.nbytes)
        held = Held(buffer=memory.buffer, on_device=True)
        return Found(memory.address, memory.nbytes, held)

    def _serve(self, registration: TcpRegistration) -> None:
        if self._service is None:
            return
        known = registration.range
        with suppress(NativeError):  # the service is closed, and the registration ends soon
            self._service.add_range(
                *(known.slot, known.address, known.nbytes, known.writable, known.generation),
                on_device=registration.holder.on_device,
            )

    def _withdraw(self, registration: TcpRegistration) -> None:
        with registration.holder.ending:  # waits for another thread that is ending it
            with self.mutex:
                if (service := self._service) is None or not self.holds(registration):
                    super()._withdraw(registration)
                    return
            # An interrupted call, a signal handler or `close` may have come first.
            with suppress(ValueError, NativeError):
                service.remove_range(registration.range.slot)  # waits
            super()._withdraw(registration)


def _serve_lease(service: TcpService, slot: int, generation: int, deadline_ns: int) -> None:
    """Add a row for a lease: its only byte is at an address where no memory can be."""
    with suppress(NativeError):
        service.add_range(slot, _NOWHERE, 1, False, generation, deadline_ns=deadline_ns)
