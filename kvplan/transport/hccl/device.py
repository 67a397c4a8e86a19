"""The device of this process in HCCL: its connections, and the memory bound to them."""

from __future__ import annotations

import mmap
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np

from kvnative._backend import KVN_OK, NativeError
from kvnative._executor import Executor
from kvnative._hccl import NUM_TICKETS, Communicator, Tickets
from kvnative._hccl_memory import Region, Staging
from kvnative._lower import Descriptors
from kvnative._pinned import pinned_by
from kvnative._signals import Mutex
from kvplan.device.device import Device
from kvplan.execution.task import native_errors
from kvplan.status import LLMException, invalid, link_failed, unsupported
from kvplan.system.limits import start_thread
from kvplan.system.logs import Log
from kvplan.transport.hccl.metadata import MAX_SLOTS, WORD_NBYTES, GenerationTableRef
from kvplan.transport.hccl.regions import Regions
from kvplan.transport.registrations import MAX_LEASES, Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvnative._device import DeviceBuffer
    from kvnative._hccl_memory import HcclLibrary, Server
    from kvnative._pinned import Pinned
    from kvplan.device.ascend import AscendDevice, Product
    from kvplan.transport.hccl.addresses import RankTable
    from kvplan.transport.hccl.regions import HeldRegion

_LOG = Log("kvplan")
MAX_LINKS: Final = 512  # per device, as in the vendor's own engine
_TICKETS_NBYTES = NUM_TICKETS * WORD_NBYTES
_READ_TIMEOUT_MS = 500.0  # timeout of reading a peer's tickets
_MAX_NBYTES = {True: 64 << 30, False: 1 << 40}  # of a region, by on_device


class BackgroundWorker:
    """A thread that runs blocking jobs one after the other, such as closing connections.

    Finalizers may call `do` even if they interrupt a thread that holds locks.
    """

    def __init__(self, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._is_closed = False
        self._thread = start_thread(name, _run, self._todo)

    def do(self, job: Callable[[], object]) -> None:
        """Call `job()` in the thread, unless closed; log an exception that it raises."""
        if not self._is_closed:  # a closed queue would keep the job forever
            self._todo.put(job)

    def wait(self, timeout_s: float) -> bool:
        """Wait for all jobs so far; return False after `timeout_s`."""
        done = threading.Event()
        self._todo.put(done.set)
        return done.wait(timeout_s)

    def close(self) -> None:
        """End the thread after the jobs so far; ignore later ones."""
        self._is_closed = True
        self._todo.put(None)


def _run(todo: SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := todo.get()) is not None:
        try:
            job()
        except Exception:
            _LOG.exception("event=background_failed thread=%s", threading.current_thread().name)
        del job  # it keeps objects alive


class GenerationTable:
    """`Generations` in device memory: a word per slot, with its generation or 0.

    After the bytes of a transfer, a peer reads the words of the used ranges in its stream. If a
    word is not the published one, the transfer fails. After the words come the tickets of this
    process, then space into which tickets of peers are read.
    """

    def __init__(self, device: Device, num_slots: int) -> None:
        self._slots = Slots(num_slots, MAX_SLOTS, min(MAX_LEASES, MAX_SLOTS - num_slots))
        self._device = device
        self.nbytes = (self._slots.num_slots + 2 * NUM_TICKETS) * WORD_NBYTES
        self.buffer: DeviceBuffer | None = device.allocate(self.nbytes)
        self.ref = GenerationTableRef(self.buffer.address, self._slots.num_slots)
        device.write(self.ref.address, bytes(self.nbytes))
        self.tickets = Tickets(self.ref.tickets, self.buffer)
        self.seen = self.ref.tickets + NUM_TICKETS * WORD_NBYTES  # address for tickets of a peer

    def take(self, is_lease: bool = False, *, deadline_ns: int = 0) -> tuple[int, int]:
        """See `Generations.take`; an error of the device leaves the slot free."""
        slot, generation = self._slots.take(is_lease)
        try:
            self._write(slot, generation)
        except LLMException:
            self._slots.release(slot, generation)
            raise
        return slot, generation

    def release(self, slot: int, generation: int) -> None:
        """See `Generations.release`; after an error of the device the slot is not used again."""
        if self._slots.holds(slot, generation):
            self._write(slot, 0)
        self._slots.release(slot, generation)

    def close(self) -> None:
        """Release the memory, which no connection reaches any more."""
        self.buffer = None
        del self.tickets

    def _write(self, slot: int, generation: int) -> None:
        address = self.ref.address + WORD_NBYTES * slot
        self._device.write(address, generation.to_bytes(WORD_NBYTES, "little"))


class HcclDevice:
    """The device of this process in HCCL. Thread-safe."""

    def __init__(
        self,
        library: HcclLibrary,
        device: AscendDevice,
        product: Product,
        generations: GenerationTable,
        staging: Staging | None,
        background: BackgroundWorker,
        traffic_class: int | None,
        service_level: int | None,
        server: Server | None = None,
    ) -> None:
        self.library = library
        self.device = device
        self.product = product
        self.generations = generations
        self.staging = staging  # None: local memory must be registered with HCCL
        self.background = background
        self.server = server  # HIXL's; None: HCCL is used
        self.notify_disturbed: Callable[[], None] = _ignore
        self.regions = Regions(self._make_region, self._forget)
        self._traffic_class = traffic_class
        self._service_level = service_level
        address, nbytes = whole_pages(device, generations.ref.address, generations.nbytes)
        self._table_region = Region(
            library,
            device.native,
            address,
            nbytes,
            on_device=True,
            owner=generations.buffer,
        )
        self._open: set[Communicator] = set()
        self._deferred: dict[HeldRegion, None] = {}  # deregistered, but still bound
        self._mutex = Mutex()  # for `_open` and `_deferred`
        # For the space into which tickets are read; not reentrant, so a signal handler gets None.
        self._reading = threading.Lock()
        self._is_shutting = self._is_shut = False

    def open(self, table: RankTable, name: str, *, is_hccs: bool) -> tuple[Communicator, int]:
        """Return a connection that binds all memory, and the number up to which regions are bound.

        Over HCCS the connection binds no host memory if the product does not transfer it. The
        caller must prepare and close the connection.
        """
        if (num_open := self.num_open) >= MAX_LINKS:
            raise link_failed(
                f"device {self.device.id} has {num_open} connections of this engine, of at most "
                f"{MAX_LINKS} (one for each link, and one more while it is renewed): unlink peers "
                "first"
            )
        communicator = Communicator(
            self.library,
            self.device.native,
            table.text,
            table.rank,
            table.remote_rank,
            name,
            traffic_class=self._traffic_class,
            service_level=self._service_level,
            max_batch=self.product.max_batch,
            peer=table.hixl,
        )
        try:
            # A thread that ends a region removes it from `regions` first, then looks at `_open`.
            with self.regions.mutex:
                with self._mutex:
                    self._open.add(communicator)
                newest = self.regions.newest
                communicator.bind(self._table_region)
                if self.staging is not None:
                    communicator.bind(self.staging.region)
                kinds = self.product.local_kinds(is_hccs=is_hccs)
                for region in self.regions.all():
                    if region.on_device or "host" in kinds:
                        communicator.bind(region.native)
        except BaseException:
            self.close(communicator)
            raise
        return communicator, newest

    def close(self, communicator: Communicator) -> None:
        """Close a connection after its transfers. Idempotent.

        HCCL may refuse to close a connection that is being prepared: the preparing thread must then
        call this again.
        """
        self._give_back(communicator.close)
        with self._mutex:
            if communicator.state == "closed":
                self._open.discard(communicator)
            deferred, self._deferred = self._deferred, {}
        for held in deferred:
            self._forget(held)
        self._finish()

    @property
    def num_open(self) -> int:
        """The number of connections that are not closed."""
        with self._mutex:
            return len(self._open)

    def read_tickets(self, communicator: Communicator, address: int) -> list[int] | None:
        """Read the tickets of a peer at `address`; None: they cannot be read now."""
        seen = self.generations.seen
        columns = (np.array([number], np.uint64) for number in (seen, address, _TICKETS_NBYTES))
        words = bytearray(_TICKETS_NBYTES)
        # Another thread may be reading: wait for it as long as for a read.
        if not self._reading.acquire(timeout=_READ_TIMEOUT_MS / 1000):
            return None
        try:
            with Executor(communicator.backend("get")) as executor:
                report = executor.run(Descriptors.from_columns(*columns), _READ_TIMEOUT_MS)
            if report.status != KVN_OK:
                return None
            self.device.read(seen, words)
        except (NativeError, LLMException):
            return None
        finally:
            self._reading.release()
        return memoryview(words).cast("Q").tolist()

    def forget(self, held: HeldRegion) -> None:
        """Deregister memory from HCCL; on return the caller may free it, if no owner keeps it.

        HIXL keeps it until all connections that bind it are closed.
        """
        # Not in the background for host memory, since the caller may unpin it next.
        if held.is_kept and held.on_device:
            self.background.do(lambda: self._forget(held))
        else:
            self._forget(held)

    def shut(self) -> None:
        """Close all connections, and release the device's resources after the last one."""
        with self._mutex:
            communicators = list(self._open)
            self._is_shutting = True
        for communicator in communicators:
            self.close(communicator)
        self._finish()

    def _finish(self) -> None:
        with self._mutex:
            if not self._is_shutting or self._open or self._is_shut:
                return
            self._is_shut = True
        self._give_back(self._table_region.close)
        self.generations.close()
        if self.staging is not None:
            self._give_back(self.staging.close)
        if self.server is not None:
            self._give_back(self.server.close)

    def _forget(self, held: HeldRegion) -> None:
        with self._mutex:
            communicators = [
                communicator for communicator in self._open if held.native in communicator.regions
            ]
            if communicators and self.server is not None:
                # HIXL wants its clients to be disconnected first: renew the connections.
                self._deferred[held] = None
                for communicator in communicators:
                    communicator.disturb()
        if communicators and self.server is not None:
            self.notify_disturbed()
            return
        for communicator in communicators:
            try:
                communicator.unbind(held.native)
            except NativeError as error:
                if held.native in communicator.regions:  # otherwise the connection was closed
                    self._warn(error)
        self._give_back(held.close)

    def _give_back(self, close: Callable[[], None]) -> None:
        """Call `close`. If that fails, log the error: HCCL then keeps the resource."""
        try:
            close()
        except NativeError as error:
            self._warn(error)

    def _warn(self, error: NativeError) -> None:
        _LOG.warning("event=hccl_keeps device=%d reason=%s", self.device.id, error)

    def _pin(self, address: int, nbytes: int) -> tuple[Pinned, ...]:
        """Pin host pages that HCCL maps when it connects, unless they are pinned already."""
        native, notes = self.device.native, self.device.notes_pins
        whose = pinned_by(native, address, nbytes)
        if whose == "runtime" or (whose and notes):
            return ()
        try:
            self.library.check_host(native, address, nbytes)
            if not notes or native.locate(address)[0] == "host":
                return ()
            return (self.device.pin(address, nbytes),)
        except (NativeError, LLMException) as error:
            raise unsupported(
                "HCCL maps host memory for its device, and cannot map "
                f"[{address:#x}, {address + nbytes:#x}): {error}. Do not register memory that "
                "was registered with ACL (aclrtHostRegister): it is mapped already"
            ) from error

    def _make_region(
        self, address: int, nbytes: int, *, on_device: bool, owner: object
    ) -> tuple[Region, tuple[Pinned, ...]]:
        limit = _MAX_NBYTES[on_device]
        if self.library.generation == "per_comm" and nbytes > limit:
            raise invalid(
                f"{nbytes} bytes at {address:#x} are too many for one HCCL region; on this product "
                f"at most {limit} are allowed: make pools and allocations smaller"
            )
        native = self.device.native
        try:
            pinned = () if on_device else self._pin(address, nbytes)
            with native_errors(f"{nbytes} bytes at {address:#x}"):
                region = Region(
                    *(self.library, native, address, nbytes),
                    on_device=on_device,
                    owner=(owner, pinned),
                )
        except ValueError as error:
            raise invalid(f"{nbytes} bytes at {address:#x}: {error}") from error
        return region, pinned


def _ignore() -> None: ...


def whole_pages(device: Device | None, address: int, nbytes: int) -> tuple[int, int]:
    """Return (address, nbytes) of the whole pages that hold a range, of a device or the host.

    HCCS and the host map whole pages. A region that HCCL refuses would make every connection fail.
    """
    page = mmap.PAGESIZE if device is None else device.native.page_nbytes(address) or 1
    start = address - address % page
    return start, -((start - address - nbytes) // page) * page
