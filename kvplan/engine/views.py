"""Read-only arrays over the blocks of a peer's lease, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from kvplan.engine.memory import tensor_arrays
from kvplan.status import LLMException, LLMStatusCode, invalid, unsupported

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan.engine.engine import Engine
    from kvplan.lease import BlockLease
    from kvplan.transport.link import PeerMemory
    from kvplan.types import CacheDesc

    Rows = tuple[NDArray[Any], ...]


class LeaseView(Sequence["Rows"]):
    """The blocks of a lease in the memory of its owner, as read-only arrays of this process.

    `view[tensor]` has an array for each block, in the order of the lease; a leased slot has one.
    The arrays are the owner's memory. Data read before is valid if `check` returns, or the `with`
    block ends, without an error: the lease was live until then.

    Attributes:
        lease: the lease.
    """

    def __init__(self, lease: BlockLease, desc: CacheDesc, memory: PeerMemory) -> None:
        self.lease = lease
        self._desc = desc
        self._memory = memory
        self._rows = lease.blocks
        self._made: dict[int, Rows] = {}
        self._is_open = True

    def __len__(self) -> int:
        return self._desc.num_tensors

    @overload
    def __getitem__(self, tensor: int) -> Rows: ...
    @overload
    def __getitem__(self, tensor: slice) -> list[Rows]: ...
    def __getitem__(self, tensor: int | slice) -> Rows | list[Rows]:
        if isinstance(tensor, slice):
            return [self[one] for one in range(len(self))[tensor]]
        made = self._made.get(tensor)
        if made is not None:
            return made
        if not self._is_open:
            raise LLMException(
                f"the view of {self.lease} was closed; arrays(lease) makes another",
                status_code=LLMStatusCode.LLM_FAILED,
            )
        place = range(len(self))[tensor]
        (array,) = tensor_arrays(self._desc, self._memory, slice(place, place + 1))
        rows = np.moveaxis(array, self._desc.batch_dim_index, 0)
        made = self._made[tensor] = tuple([rows[row] for row in self._rows])
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"<LeaseView of {self.lease}: {len(self)} tensors, {len(self._rows)} blocks>"

    def check(self) -> None:
        """Confirm the data read so far: the lease has not ended, and the owner lives.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: the lease was released or moved or has expired,
                or its cache was freed: blocks may have been those of another request while they
                were read; LLM_LINK_FAILED: the owner has exited; LLM_NOT_YET_LINK: this engine
                has ended the link.
        """
        self._memory.check()

    def close(self) -> None:
        """Make no further arrays. Existing arrays stay readable, but are not confirmed."""
        self._is_open = False
        self._made = {}


def view_lease(engine: Engine, lease: BlockLease) -> LeaseView:
    """Return the view of a lease of a peer whose memory is mapped here; see `CacheOperations`."""
    if lease.instance == engine.links.instance:
        raise invalid(
            f"cache={lease} is a lease of this engine: arrays(cache) shows its own memory"
        )
    link = engine.links.get(lease.cluster_id)
    lease = link.latest(lease)
    cache = link.leased(lease)
    memory = link.memory(cache, writable=False)
    if memory.reader is None or memory.reader[2]:  # reached by the peer's own addresses
        raise unsupported(
            f"cache={lease} is in memory of {link} that is not mapped here, so it cannot be read "
            "without a copy: only host memory that an engine on this host has allocated is mapped, "
            "over transport local; pull the blocks"
        )
    last, count = max(lease.blocks, default=0), link.side(cache).count
    if last >= count:
        raise invalid(
            f"cache={lease} names block {last}; cache {lease.cache_id} of {link} has {count}"
        )
    memory = memory.leased([lease])
    memory.check()
    return LeaseView(lease, cache.desc, memory)
