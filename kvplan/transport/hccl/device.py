"""The device of this process as HCCL has it: what of its memory is bound to each connection."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from kvnative._backend import NativeError
from kvnative._executor import KVN_OK, Executor
from kvnative._hccl import NUM_TICKETS, Communicator, Region, Staging
from kvnative._lower import Descriptors
from kvnative._signals import Mutex
from kvplan.device.device import device_error
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system_limits import start_thread
from kvplan.transport.base import link_failed
from kvplan.transport.hccl.advice import MAX_LINKS
from kvplan.transport.hccl.metadata import WORD_NBYTES
from kvplan.transport.hccl.regions import Regions
from kvplan.transport.hccl.registrations import whole_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvnative._hccl import HcclLibrary
    from kvplan.device.ascend import AscendDevice, Product
    from kvplan.device.device import PinnedMemory
    from kvplan.transport.hccl.addresses import RankTable
    from kvplan.transport.hccl.regions import HeldRegion
    from kvplan.transport.hccl.registrations import GenerationTable

_LOG = Log("kvplan")
_TICKETS_NBYTES = NUM_TICKETS * WORD_NBYTES
_LOOK_MS = 500.0  # that it may take to see what a peer writes; what takes longer is given up
_MAX_NBYTES = {True: 64 << 30, False: 1 << 40}  # of a region of a device, of the host


class BackgroundWorker:
    """A thread for what may block and nobody needs to wait for, such as taking connections down.

    It does one thing after the other. `do` may be called from anywhere, a finalizer that interrupts
    a holder of locks too.
    """

    def __init__(self, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._is_closed = False
        self._thread = start_thread(name, _run, self._todo)

    def do(self, job: Callable[[], object]) -> None:
        """Have `job()` called later, unless closed; what it raises is logged."""
        if not self._is_closed:  # else it would be held for ever
            self._todo.put(job)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was given so far is done; returns whether it was in time."""
        done = threading.Event()
        self._todo.put(done.set)
        return done.wait(timeout_s)

    def close(self) -> None:
        """End the thread once all is done; what comes later is not done any more."""
        self._is_closed = True
        self._todo.put(None)


def _run(todo: SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := todo.get()) is not None:
        try:
            job()
        except Exception:
            _LOG.exception("event=background_failed thread=%s", threading.current_thread().name)
        del job  # it holds what it was about


class HcclDevice:
    """The device of this process as HCCL has it; may be used from several threads.

    Args:
        library: HCCL.
        device: of this process.
        product: of the device.
        generations: of registrations.
        staging: for local memory that HCCL does not take as it is; None: that is refused.
        background: takes connections down.
        traffic_class, service_level: for RDMA; None: the system's.

    Raises:
        NativeError: HCCL does not take the generation table.
    """

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
    ) -> None:
        self.library = library
        self.device = device
        self.product = product
        self.generations = generations
        self.staging = staging
        self.background = background
        self.regions = Regions(self._make_region)
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
        self._mutex = Mutex()  # of what is open
        self._reading = Mutex()  # tickets, into words that there are once
        self._is_shutting = self._is_shut = False

    def open(self, table: RankTable, name: str, *, is_hccs: bool) -> tuple[Communicator, int]:
        """A connection with all memory of now bound, and the highest number of its regions.

        Of HCCS without the host's where the product does not take that.

        Its prepare must follow, and `close`.

        Raises:
            LLMException: LLM_LINK_FAILED: there are as many as there can be.
            NativeError: what HCCL says.
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
        )
        try:
            # Whoever ends a region takes it out of `regions` first, and looks then at what is open.
            with self.regions.mutex:
                with self._mutex:
                    self._open.add(communicator)
                newest = self.regions.newest
                communicator.bind(self._table_region)
                if self.staging is not None:
                    communicator.bind(self.staging.region)
                kinds = self.product.local_kinds(is_hccs=is_hccs)
                for it in self.regions.all():
                    if it.on_device or "host" in kinds:
                        communicator.bind(it.native)
        except BaseException:
            self.close(communicator)
            raise
        return communicator, newest

    def close(self, communicator: Communicator) -> None:
        """Take a connection down; waits for what it transfers. Idempotent.

        One that is being prepared ends when HCCL lets it: who prepares it must call this then.
        """
        self._give_back(communicator.close)
        with self._mutex:
            if communicator.state == "closed":
                self._open.discard(communicator)
        self._finish()

    @property
    def num_open(self) -> int:
        """Connections that are not taken down."""
        with self._mutex:
            return len(self._open)

    def read_tickets(self, communicator: Communicator, address: int) -> list[int] | None:
        """The words of a peer's tickets; None: they cannot be read now."""
        seen = self.generations.seen
        columns = (np.array([it], np.uint64) for it in (seen, address, _TICKETS_NBYTES))
        words = bytearray(_TICKETS_NBYTES)
        # A signal handler may come back here: then it does not see them.
        if not self._reading.acquire(timeout=_LOOK_MS / 1000):
            return None
        try:
            with Executor(communicator.backend("get")) as executor:
                report = executor.run(Descriptors.from_columns(*columns), _LOOK_MS)
            if report.status != KVN_OK:
                return None
            self.device.read(seen, words)
        except (NativeError, LLMException):
            return None
        finally:
            self._reading.release()
        return memoryview(words).cast("Q").tolist()

    def forget(self, held: HeldRegion) -> None:
        """Let HCCL forget memory; on return the caller may free it, if nothing else keeps it."""
        # Pinned memory of the host may be unpinned next, by whoever pinned it.
        if held.is_kept and held.on_device:
            self.background.do(lambda: self._forget(held))
        else:
            self._forget(held)

    def shut(self) -> None:
        """Take all connections down, and when the last is, let HCCL forget all of this device."""
        with self._mutex:
            communicators = list(self._open)
            self._is_shutting = True
        for it in communicators:
            self.close(it)
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

    def _forget(self, held: HeldRegion) -> None:
        with self._mutex:
            communicators = [it for it in self._open if held.native in it.regions]
        for it in communicators:
            try:
                it.unbind(held.native)
            except NativeError as error:
                if held.native in it.regions:  # else it was closed meanwhile
                    self._warn(error)
        self._give_back(held.close)

    def _give_back(self, close: Callable[[], None]) -> None:
        """What HCCL does not take back is lost; whoever gives it back has to go on."""
        try:
            close()
        except NativeError as error:
            self._warn(error)

    def _warn(self, error: NativeError) -> None:
        _LOG.warning("event=hccl_keeps device=%d reason=%s", self.device.id, error)

    def _pin(self, address: int, nbytes: int) -> tuple[PinnedMemory, ...]:
        """Pin whole pages of the host, as far as HCCL does not: it maps them when it connects.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: HCCL could not, with which all that is bound to
                the connection would fail; and why.
        """
        native, notes = self.device.native, self.device.notes_pins
        whose = native.pinned_by(address, nbytes)
        if whose == "runtime" or (whose and notes):
            return ()
        try:
            self.library.check_host(native, address, nbytes)
            if not notes or native.locate(address)[0] == "host":
                return ()
            return (self.device.pin(address, nbytes),)
        except (NativeError, LLMException) as error:
            raise LLMException(
                "HCCL maps host memory for its device, and cannot map "
                f"[{address:#x}, {address + nbytes:#x}): {error}. Memory that was registered with "
                "ACL (aclrtHostRegister) is mapped already",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            ) from error

    def _make_region(
        self, address: int, nbytes: int, *, on_device: bool, owner: object
    ) -> tuple[Region, tuple[PinnedMemory, ...]]:
        limit = _MAX_NBYTES[on_device]
        if self.library.generation == "per_comm" and nbytes > limit:
            raise invalid(
                f"{nbytes} bytes at {address:#x} are to be registered with HCCL at once; on this "
                f"product it takes at most {limit}: make pools and allocations smaller"
            )
        native = self.device.native
        try:
            pinned = () if on_device else self._pin(address, nbytes)
            region = Region(
                self.library, native, address, nbytes, on_device=on_device, owner=(owner, pinned)
            )
        except ValueError as error:
            raise invalid(f"{nbytes} bytes at {address:#x}: {error}") from error
        except NativeError as error:
            raise device_error(error, f"{nbytes} bytes at {address:#x}") from error
        return region, pinned
