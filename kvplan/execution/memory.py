"""The memory of a cache: a checked address for each tensor, and the owner that keeps it alive."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from kvnative._host import check_ranges
from kvnative._signals import Condition
from kvnative._task import Revocable, revoke
from kvplan.status import LLMException, invalid, not_exist
from kvplan.system.limits import system_error
from kvplan.tensors.description import check_contiguous
from kvplan.tensors.form import TensorForm, read_form
from kvplan.types import Cache, CacheDesc

if TYPE_CHECKING:
    from kvnative._backend import Backend, ThreadPool

Direction = Literal["get", "put"]
Addresses = NDArray[np.uint64]


class TensorMemory(Protocol):
    """Memory that a side of a plan can be bound to.

    Attributes:
        addresses: contiguous, of shape (num_tensors,), as the backend reaches them.
        nbytes: the usable bytes from each address on, in the same shape.
        writable: True if the memory can be a destination.
        in_process: True for addresses of this process: copies here reach them, and overlaps with
            other memory of this process are visible.
        on_device: True for memory of an accelerator, which a plain copy does not reach.
    """

    @property
    def addresses(self) -> Addresses:
        """See above."""

    @property
    def nbytes(self) -> NDArray[np.uint64]:
        """See above."""

    @property
    def writable(self) -> bool:
        """See above."""

    @property
    def in_process(self) -> bool:
        """See above."""

    @property
    def on_device(self) -> bool:
        """See above."""

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory, timeout_ms: float | None
    ) -> Backend | None:
        """Return the backend that moves bytes between this memory and `other`.

        Sides other than `HostMemory` are asked before each transfer. Wrappers of the result are
        kept with this memory, so equal calls must return the same object.

        Args:
            pool: the threads to copy with, if threads of the host copy.
            direction: "get": from this memory; "put": to it.
            other: the other side.
            timeout_ms: time for a connection that reaches the memory; None: the link's default.

        Returns:
            The backend. None lets the other side decide; if both return None, a plain copy moves
            the bytes. Both may return one only if the source is on a device; then `dst` decides.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: bytes cannot move between the two; LLM_TIMEOUT.
            NativeError: the backend no longer exists.
        """

    def check(self, tensors: range | None = None) -> None:
        """Refuse memory that has changed since it was registered.

        Called before a transfer is submitted and again after its bytes have moved.

        Args:
            tensors: consecutive tensors that are about to move as a part of the transfer. This
                check delays a computing thread, so harmless changes may be left to the check after
                the transfer. None: all.

        Raises:
            LLMException: the memory has changed; gives the reason.
        """


class HostMemory(Revocable):
    """Memory of this process: arrays, pieces of pools, or addresses.

    Args:
        parts: the memories of which it consists; revoking one of them revokes the whole.

    Attributes:
        held: True if an owner guarantees that the memory stays in place.
    """

    # Slots: looking up other attributes takes longer in a class with a native base.
    __slots__ = ("__weakref__", "_owner", "addresses", "held", "nbytes", "writable")
    in_process = True
    on_device = False

    def __init__(
        self,
        addresses: Addresses,
        nbytes: NDArray[np.uint64],
        *,
        writable: bool,
        owner: object,
        parts: tuple[Revocable, ...] = (),
    ) -> None:
        super().__init__(parts)
        for column in (addresses, nbytes):
            column.flags.writeable = False
        self.addresses = addresses
        self.nbytes = nbytes
        self.writable = writable
        # Keeps the memory in place; None: nothing does, so the addresses are checked again.
        self._owner = owner
        self.held: bool = owner is not None

    @classmethod
    def from_arrays(cls, arrays: Sequence[Any], name: str = "arrays") -> HostMemory:
        """Return the memory of `arrays`: NumPy, torch, DLPack, or the buffer protocol.

        This object and every transfer that uses it hold the arrays. An array over a mapped file
        raises SIGBUS, here as in NumPy, if the file is truncated.

        Args:
            arrays: one for each tensor.
            name: name of the arrays in messages.

        Raises:
            TypeError: an element that is not an array, or an array of Python objects.
            LLMException: LLM_PARAM_INVALID: an array that is not C-contiguous, empty, or not in
                host memory.
        """
        forms = [read_form(f"{name}[{position}]", array) for position, array in enumerate(arrays)]
        for form in forms:
            check_contiguous(form)
        return cls.from_forms(forms)

    @classmethod
    def from_forms(cls, forms: Sequence[TensorForm]) -> HostMemory:
        """Return the memory of tensors that were checked to fit and to be in host memory."""
        return cls(
            np.array([form.address for form in forms], dtype=np.uint64),
            np.array([form.span_nbytes for form in forms], dtype=np.uint64),
            writable=not any(form.read_only for form in forms),
            owner=tuple(form.owner for form in forms),
        )

    @classmethod
    def from_addresses(
        cls,
        desc: CacheDesc,
        addresses: Sequence[int],
        *,
        writable: bool = True,
        owner: object = None,
    ) -> HostMemory:
        """Return the memory at `addresses`, one for each tensor of `desc`.

        Each range is checked to be mapped, readable and (if `writable`) writable. The check is
        repeated before every transfer unless an `owner` keeps the memory.

        Raises:
            TypeError, ValueError: an address that is not in [1, 2**64).
            LLMException: LLM_PARAM_INVALID: the wrong number of addresses, or a range that is not
                mapped with this access; names the address and the hole.
        """
        cache = Cache(desc, tensor_addrs=tuple(addresses))
        if not cache.tensor_addrs:
            raise invalid(f"addresses is empty; num_tensors={desc.num_tensors} are needed")
        memory = cls(
            np.array(cache.tensor_addrs, dtype=np.uint64),
            np.full(desc.num_tensors, desc.tensor_nbytes, dtype=np.uint64),
            writable=writable,
            owner=owner,
        )
        memory.check_mapped()
        return memory

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory, timeout_ms: float | None
    ) -> None:
        """Return None: any backend reaches plain memory."""

    def check(self, tensors: range | None = None) -> None:
        """Check raw addresses again. Arrays are held: only a call such as `resize_` frees them.

        Raises:
            LLMException: see `check_mapped`.
        """
        if self._owner is None:
            self.check_mapped(tensors)

    def check_mapped(self, tensors: range | None = None) -> None:
        """Refuse tensors that are not mapped, or not readable or writable as needed.

        Raises:
            LLMException: LLM_PARAM_INVALID; LLM_OUT_OF_MEMORY or LLM_FAILED: /proc is unreadable.
        """
        part = slice(0, None) if tensors is None else slice(tensors.start, tensors.stop)
        try:
            check_ranges(
                self.addresses[part],
                self.nbytes[part],
                self.writable,
                name="tensor",
                first=part.start,
            )
        except ValueError as error:
            raise invalid(str(error)) from None
        except OSError as error:  # /proc is not mounted, or no descriptor is left to read it
            raise system_error("could not check memory", error) from error

    def __reduce__(self) -> NoReturn:
        # The addresses of a copy would point to the arrays of the original.
        raise TypeError("HostMemory cannot be copied or pickled: it has addresses of this process")

    def __repr__(self) -> str:
        return f"<HostMemory {len(self.addresses)} tensors, {int(self.nbytes.sum())} bytes>"


@dataclass(frozen=True, eq=False, slots=True)
class _Use:
    """Memory that a thread reads or writes itself, without a task."""

    thread: int
    memories: tuple[TensorMemory, ...]


class _Uses:
    """The current uses of memory in this process."""

    def __init__(self) -> None:
        self.begin()
        # In a forked child the threads do not exist, and the lock may be held forever.
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Forget all uses."""
        self.changed = Condition()  # a signal handler may take memory back
        self.now: set[_Use] = set()


_USES: Final = _Uses()
_LOOK_S: Final = 0.1


@contextmanager
def using(*memories: TensorMemory) -> Iterator[None]:
    """Mark memory that this thread reads or writes in the block, so that `take_back` waits."""
    use = _Use(get_ident(), memories)
    try:
        _USES.now.add(use)
        check_lent(*memories)  # after adding the use: `take_back` revokes before it looks
        yield
    finally:
        _USES.now.discard(use)  # first, in one call that an interrupt cannot split
        with _USES.changed:
            _USES.changed.notify_all()


def take_back(memory: Revocable, why: str) -> None:
    """Return memory to its owner: afterwards this process does not read or write it.

    Transfers that use it end with LLM_KV_CACHE_NOT_EXIST and the message `why`; this call waits for
    them, as `cancel` does. A use of the calling thread (under a signal handler) ends at its next
    check.
    """
    revoke(memory, why)
    mine = get_ident()
    others = {use for use in list(_USES.now) if use.thread != mine and revocation(use.memories)}
    with _USES.changed:
        # With a timeout, because an interrupt may keep a thread from notifying.
        while not _USES.changed.wait_for(lambda: others.isdisjoint(list(_USES.now)), _LOOK_S):
            pass


def check_lent(*memories: TensorMemory) -> None:
    """Refuse memory that was taken back: LLM_KV_CACHE_NOT_EXIST."""
    if (why := revocation(memories)) is not None:
        raise why


def revocation(memories: Sequence[TensorMemory]) -> LLMException | None:
    """Return the error of memory that was taken back; None: none of it was."""
    for memory in memories:
        if isinstance(memory, Revocable) and (why := memory.revoked) is not None:
            return not_exist(why)
    return None


Memory = TensorMemory | Cache | Sequence[Any]
"""A side of a transfer: memory, a `Cache` with addresses, or a sequence of arrays."""


def memory_of(name: str, memory: Memory) -> HostMemory:
    """Return the memory of a `Cache`, or of arrays; `name` is the argument, for messages."""
    if isinstance(memory, Cache):
        return HostMemory.from_addresses(memory.cache_desc, memory.tensor_addrs)
    if isinstance(memory, str | bytes) or not isinstance(memory, Sequence):
        raise TypeError(
            f"{name} must be TensorMemory, a Cache or a sequence of arrays (one for each tensor), "
            f"not {type(memory).__name__}"
        )
    return HostMemory.from_arrays(memory, name)
