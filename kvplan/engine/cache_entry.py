"""A cache of an engine as a value, and the memory that it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvplan.control.messages import MAX_NBYTES
from kvplan.execution.memory import HostMemory
from kvplan.planning.layout import Side, side
from kvplan.status import LLMException, invalid
from kvplan.types import BlocksCacheKey, Cache, CacheDesc
from kvplan.validation import UINT64_MAX, check_width

if TYPE_CHECKING:
    from kvplan.transport.protocol import Registrable, Transport

# Vouches for registered addresses. To look each up again would cost microseconds a tensor, before
# and after every transfer.
_USER: Final = "the user, until it is unregistered"

MAX_TOLD_NBYTES: Final = MAX_NBYTES // 2
"""Of one cache, and of all in one message, by the estimate of `told_nbytes`."""

_TOLD_NBYTES: Final = 512  # with a shape of many dimensions
_ADDRESS_NBYTES: Final = 9


@dataclass(frozen=True, eq=False, slots=True)
class CacheEntry:
    """A cache of this engine.

    Attributes:
        cache: its id, description and addresses.
        paged: whether it is addressed by blocks; None: ad-hoc memory, which is used either way.
        memory: its tensors; whoever uses them holds this, and so they stay.
        blocks_key: of a paged cache, if it has one.
        remote_accessible: whether peers may reach it.
        owned: whether it was allocated here; False: registered, the memory is the user's.
        metadata: what a peer needs to reach it, by the name of the transport.
        created: seconds since the epoch.
        side: as a plan sees it; None: `paged` is not known.
    """

    cache: Cache
    paged: bool | None
    memory: HostMemory
    blocks_key: BlocksCacheKey | None
    remote_accessible: bool
    owned: bool
    metadata: Mapping[str, bytes] = field(repr=False)
    created: float
    side: Side | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        known = None if self.paged is None else side("cache", self.cache, paged=self.paged)
        object.__setattr__(self, "side", known)


def check_tellable(entry: CacheEntry) -> None:
    """Refuse a cache that no message can describe to a peer, which would never see it.

    Raises:
        LLMException: LLM_PARAM_INVALID: too many tensors.
    """
    desc = entry.cache.cache_desc
    for transport in entry.metadata:
        nbytes = told_nbytes(entry, transport)
        if nbytes > MAX_TOLD_NBYTES:
            most = desc.num_tensors * MAX_TOLD_NBYTES // nbytes
            raise invalid(
                f"num_tensors={desc.num_tensors} take {nbytes} bytes to tell a peer of them; it "
                f"can be told {MAX_TOLD_NBYTES}, which about {most} such tensors take"
            )


def told_nbytes(entry: CacheEntry, transport: str) -> int:
    """About how many bytes it takes to tell a peer of the cache, which uses `transport`."""
    desc = entry.cache.cache_desc
    own = _TOLD_NBYTES + 4 * len(desc.kv_tensor_format or "")
    return own + len(entry.metadata[transport]) + _ADDRESS_NBYTES * desc.num_tensors


@dataclass(frozen=True, eq=False, slots=True)
class HeldCache:
    """A cache that lives, by its id, a key or a claim.

    Attributes:
        entry: the cache.
        withdraw: ends its registrations.
    """

    entry: CacheEntry
    withdraw: ExitStack

    def renewed(self, transports: Sequence[Transport]) -> HeldCache:
        """The same cache of the user's memory, in registrations of its own.

        Raises:
            LLMException: LLM_PARAM_INVALID: its memory is not mapped any more; or the transport's.
        """
        entry = self.entry
        cache, memory = entry.cache, entry.memory
        try:
            HostMemory.from_addresses(
                cache.cache_desc, cache.tensor_addrs, writable=memory.writable
            )
        except LLMException as error:
            raise LLMException(
                f"cache {cache.cache_id}: {error.args[0]}", status_code=error.status_code
            ) from None
        ranges = merged_ranges(memory) if entry.remote_accessible else ()
        with ExitStack() as undo:
            metadata = offer(transports, ranges, memory.writable, undo)
            # Peers are told of it because it is another Cache.
            again = replace(entry, cache=replace(cache), metadata=metadata)
            return HeldCache(again, undo.pop_all())


def renew_all(held: Iterable[HeldCache], transports: Sequence[Transport]) -> list[HeldCache]:
    """All of them `renewed`, or none."""
    with ExitStack() as undo:
        renewed = []
        for it in held:
            renewed.append(it.renewed(transports))
            undo.callback(renewed[-1].withdraw.close)
        undo.pop_all()
    return renewed


def end_all(held: Iterable[HeldCache]) -> None:
    """End the registrations of caches that nothing names any more.

    The caller still holds them: memory goes back to its pool after no peer can reach it.
    """
    with ExitStack() as all_of_them:
        for it in held:
            all_of_them.callback(it.withdraw.close)


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to pull by a key; ended by `CacheRegistry.release`."""

    claim_id: int
    entry: CacheEntry
    batch_index: int


def memory_of_span(desc: CacheDesc, address: int, owner: object) -> HostMemory:
    """The tensors of a cache, one behind the other from `address` on, in memory of `owner`."""
    sizes = np.full(desc.num_tensors, desc.tensor_nbytes, dtype=np.uint64)
    offsets = np.arange(desc.num_tensors, dtype=np.uint64) * np.uint64(desc.tensor_nbytes)
    return HostMemory(np.uint64(address) + offsets, sizes, writable=True, owner=owner)


def memory_of_tensors(
    desc: CacheDesc, tensors: Sequence[Any], *, writable: bool | None
) -> HostMemory:
    """The user's tensors: an address or an array for each.

    Raises:
        TypeError, ValueError, LLMException: as `CacheRegistry.register`.
    """
    if isinstance(tensors, str | bytes) or not isinstance(tensors, Sequence):
        raise TypeError(
            f"tensors must be a sequence of addresses or arrays, not {type(tensors).__name__}"
        )
    if len(tensors) != desc.num_tensors:
        raise invalid(
            f"tensors has {len(tensors)} elements; num_tensors={desc.num_tensors} are needed"
        )
    if all(isinstance(it, int | np.integer) for it in tensors):
        addresses = [it if isinstance(it, int) else int(it) for it in tensors]
        for position, address in enumerate(addresses):
            if check_width(f"tensors[{position}]", address, 0, UINT64_MAX) == 0:
                raise invalid(f"tensors[{position}]=0 is no address of memory")
        return HostMemory.from_addresses(
            desc, addresses, writable=writable is not False, owner=_USER
        )
    memory = HostMemory.from_arrays(tensors, "tensors")
    other = np.flatnonzero(memory.nbytes != np.uint64(desc.tensor_nbytes))
    if len(other):
        raise invalid(
            f"tensors[{other[0]}] has {memory.nbytes[other[0]]} bytes; a tensor of the cache has "
            f"{desc.tensor_nbytes}"
        )
    if writable and not memory.writable:
        raise invalid("writable=True, but one of the tensors is a read-only array")
    if writable is False and memory.writable:
        return HostMemory(memory.addresses, memory.nbytes, writable=False, owner=memory)
    return memory


def merged_ranges(memory: HostMemory) -> list[tuple[int, int]]:
    """The (address, nbytes) that the tensors fill: adjacent ones are one range."""
    ranges: list[tuple[int, int]] = []
    for address, nbytes in sorted(
        zip(memory.addresses.tolist(), memory.nbytes.tolist(), strict=True)
    ):
        start, before = ranges[-1] if ranges else (0, -1)
        if address <= start + before:
            ranges[-1] = (start, max(before, address + nbytes - start))
        else:
            ranges.append((address, nbytes))
    return ranges


def offer(
    transports: Sequence[Transport],
    ranges: Sequence[Registrable],
    writable: bool,
    undo: ExitStack,
) -> Mapping[str, bytes]:
    """Let peers reach `ranges` until `undo` is closed; return what they need for that.

    No ranges: nothing is offered, and nobody needs anything.

    Raises:
        LLMException: the transport's, that cannot offer them.
    """
    metadata = {}
    for transport in transports if ranges else ():
        registrations = []
        for memory_range in ranges:
            registration = transport.register(memory_range, writable=writable)
            undo.callback(transport.deregister, registration)
            registrations.append(registration)
        metadata[transport.name] = transport.metadata(registrations)
    return MappingProxyType(metadata)
