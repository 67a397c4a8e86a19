"""Pools of memory for caches, in whole pages; the last user of a span returns it."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvnative._device import DeviceBuffer
from kvnative._signals import Mutex
from kvplan.planning.texts import plural
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.logs import Log
from kvplan.transport.host_memory import new_arena
from kvplan.transport.pages import background_pages
from kvplan.transport.protocol import DeviceRange, kind_of
from kvplan.types import Placement
from kvplan.validation import check_type

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvnative._host import Arena
    from kvnative._pinned import HostBuffer, Pinned
    from kvplan.device.device import Device
    from kvplan.transport.protocol import Registrable
    from kvplan.transport.transport import Transport

    Allocation = Arena | DeviceBuffer | HostBuffer
    """Memory that was allocated in one piece; freed after its last user."""

_LOG = Log("kvplan")
DEFAULT_PAGE_SHIFT: Final = 16
PAGES: Final = ("auto", "collapse", "small", "hugetlb")
_PAGE_SHIFTS = (10, 30)
_MAX_MEMORY_SIZE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """A pool of memory that caches are allocated from.

    Attributes:
        memory_size: bytes, at least one page; a remainder below one page is not used.
        page_shift: a page has 2**page_shift bytes.

    Raises:
        TypeError: not an int.
        LLMException: LLM_PARAM_INVALID: out of range.
    """

    memory_size: int
    page_shift: int = DEFAULT_PAGE_SHIFT

    def __post_init__(self) -> None:
        low, high = _PAGE_SHIFTS
        if not low <= check_type("page_shift", self.page_shift, int) <= high:
            raise invalid(f"page_shift={self.page_shift} is out of range [{low}, {high}]")
        page = 1 << self.page_shift
        if not page <= check_type("memory_size", self.memory_size, int) <= _MAX_MEMORY_SIZE:
            raise invalid(
                f"memory_size={self.memory_size} is out of range [{page}, {_MAX_MEMORY_SIZE}]: "
                f"at least one page of page_shift={self.page_shift}"
            )


class Span:
    """Memory [address, address + nbytes), which returns to its pool when this object is collected.

    Each user of the memory (a cache, a transfer, an array) holds this object, so another
    cache gets the memory only after the last user.

    Args:
        allocation: the memory that contains the span.
        offset, nbytes: the span in the allocation, in bytes.
        returned: the queue of the pool that gets the span back; None: no pool.
        device: the device that has the memory; None: the host.
        pinned: pins the allocation for a device as long as the span lives.
    """

    __slots__ = ("_offset", "_pinned", "_returned", "address", "allocation", "device", "nbytes")

    def __init__(
        self,
        allocation: Allocation,
        offset: int,
        nbytes: int,
        returned: deque[tuple[int, int]] | None,
        device: Device | None = None,
        pinned: Pinned | None = None,
    ) -> None:
        self.allocation = allocation
        self.address = allocation.address + offset
        self.nbytes = nbytes
        self.device = device
        self._offset = offset
        self._returned = returned
        self._pinned = pinned

    def view(self, nbytes: int) -> Registrable:
        """Return the first `nbytes` bytes, as transports register them."""
        if isinstance(self.allocation, DeviceBuffer):
            return DeviceRange(self.address, nbytes, self.allocation)
        return memoryview(self.allocation)[self._offset : self._offset + nbytes]

    def __del__(self) -> None:
        # No lock: the garbage collector may run in a thread that holds the lock of the pool.
        if self._returned is not None:
            self._returned.append((self._offset, self.nbytes))

    def __repr__(self) -> str:
        return f"<Span {self.address:#x}+{self.nbytes}>"


class Pool:
    """Spans of whole pages of one allocation: best fit, and neighbouring holes merge.

    Thread-safe. Memory that was used before is not cleared.

    Args:
        allocation: the memory.
        page_shift: a page has 2**page_shift bytes.
        device, pinned: as for `Span`.
    """

    def __init__(
        self,
        allocation: Allocation,
        page_shift: int = DEFAULT_PAGE_SHIFT,
        device: Device | None = None,
        pinned: Pinned | None = None,
    ) -> None:
        self._allocation = allocation
        self._device = device
        self._pinned = pinned
        self._page_shift = page_shift
        self._nbytes = allocation.nbytes >> page_shift << page_shift
        self._holes: list[tuple[int, int]] = [(0, self._nbytes)]  # (offset, nbytes), in order
        self._returned: deque[tuple[int, int]] = deque()
        self._mutex = Mutex()

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self._nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes of the free pages."""
        with self._mutex:
            self._reclaim()
            return sum(size for _, size in self._holes)

    def take(self, nbytes: int) -> Span:
        """Return a span of at least `nbytes` bytes, in whole pages."""
        size = -(-nbytes >> self._page_shift) << self._page_shift
        with self._mutex:
            self._reclaim()
            fitting = [(hole, offset) for offset, hole in self._holes if hole >= size]
            if not fitting:
                raise self._out_of_memory(nbytes)
            hole, offset = min(fitting)
            at = bisect(self._holes, (offset, 0))
            self._holes[at : at + 1] = [(offset + size, hole - size)] if hole > size else []
        return Span(self._allocation, offset, size, self._returned, self._device, self._pinned)

    def _reclaim(self) -> None:
        while True:
            try:
                offset, size = self._returned.popleft()
            except IndexError:
                return
            at = bisect(self._holes, (offset, 0))
            if at < len(self._holes) and self._holes[at][0] == offset + size:
                size += self._holes.pop(at)[1]
            if at and sum(self._holes[at - 1]) == offset:
                at -= 1
                offset, before = self._holes.pop(at)
                size += before
            self._holes.insert(at, (offset, size))

    def _out_of_memory(self, nbytes: int) -> LLMException:
        sizes = [size for _, size in self._holes]
        return LLMException(
            f"{nbytes} bytes requested; the pool of {self._nbytes} bytes has {sum(sizes)} free in "
            f"{plural(len(sizes), 'span')}, the largest of {max(sizes, default=0)}",
            status_code=LLMStatusCode.LLM_OUT_OF_MEMORY,
        )


class Pools:
    """Memory of the caches: from the pool of their placement, or in an allocation of their own.

    Args:
        transports: register the pools.
        configs: configurations of the pools, by placement.
        device: the device of Placement.DEVICE, for which host memory is pinned. None: placement is
            a label, and all memory is host memory.
        prefault, allow_overcommit, numa_node: of host memory, as for `new_arena`.
        pages: as for `new_arena`. "collapse" is "auto", and pages that are not prefaulted become
            huge pages in the background: each 2 MiB as soon as all its small pages are in use.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        configs: Mapping[Placement, PoolConfig | None],
        device: Device | None = None,
        *,
        prefault: bool = False,
        allow_overcommit: bool = False,
        pages: str = "auto",
        numa_node: int | None = None,
    ) -> None:
        self._device = device
        self._maps_host = any(each.maps_host for each in transports)
        self._collapse = pages == "collapse"
        self._new_arena = partial(
            new_arena,
            prefault=prefault,
            allow_overcommit=allow_overcommit,
            pages="auto" if self._collapse else pages,
            numa_node=numa_node,
        )
        self._pools = {}
        for placement, config in configs.items():
            if config is None:
                continue
            allocation, home, pinned = self._allocate(placement, config.memory_size)
            self._pools[placement] = Pool(allocation, config.page_shift, home, pinned)
            whole = Span(allocation, 0, allocation.nbytes, None, home).view(allocation.nbytes)
            for transport in transports:
                if kind_of(whole) in transport.reaches:
                    transport.preregister_pool(whole, keep=pinned)

    def take(self, placement: Placement, nbytes: int) -> Span:
        """Return a span of at least `nbytes` bytes."""
        if (pool := self._pools.get(placement)) is not None:
            return pool.take(nbytes)
        allocation, device, pinned = self._allocate(placement, nbytes)
        return Span(allocation, 0, nbytes, None, device, pinned)

    def free_nbytes(self) -> dict[Placement, int]:
        """Return the free bytes of each pool."""
        return {placement: pool.free_nbytes for placement, pool in self._pools.items()}

    def close(self) -> None:
        """Drop the pools; memory stays until its last user is gone."""
        self._pools = {}
        if self._collapse:
            background_pages().cancel(self)

    def _allocate(
        self, placement: Placement, nbytes: int
    ) -> tuple[Allocation, Device | None, Pinned | None]:
        """Return new memory, its device if it has one, and its pin if it is pinned."""
        device = self._device
        if device is not None and placement is Placement.DEVICE:
            return device.allocate(nbytes), device, None
        if device is not None and self._maps_host:
            return device.allocate_host(nbytes), None, None
        arena = self._new_arena(nbytes)
        if self._collapse:
            background_pages().add(arena, self, collapse=True)
        if device is None:
            return arena, None, None
        try:
            return arena, None, device.pin(arena.address, arena.nbytes, keep=arena)
        except LLMException as error:  # copies work without a pin, only slower
            # Only the text: a handler that keeps the error would keep the device alive.
            why = str(error)
            _LOG.warning(
                "host caches are not pinned, so copies to and from devices are slow: %s", why
            )
            return arena, None, None
