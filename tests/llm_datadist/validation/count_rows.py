"""Every operation on caches of 1, 3, 5 and 27 tensors, with default arguments.

The official outcomes were read in the sources, not measured. Without layer ranges, a pull ignores
tensor_num_per_layer, and a push moves only complete layers of two tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvplan.llm_datadist import BlocksCacheKey, Cache, CacheKeyByIdAndIndex
from tests.llm_datadist.validation.environments import HOST, Linked, Ready
from tests.llm_datadist.validation.other_transfers import to
from tests.llm_datadist.validation.row import INVALID, Accepted, Raised, Row

COUNTS = (1, 3, 5, 27)
ALLOCATE = """
cache = (datadist.allocate_blocks_cache if paged else datadist.allocate_cache)(
    CacheDesc(num_tensors=num_tensors, shape=(2, 8), data_type=DataType.DT_INT8),
    *([BlocksCacheKey(1)] if paged else []),
)
for number, tensor in enumerate(datadist.arrays(cache)):
    tensor[0] = number + 1 if filled else 0
result = cache.cache_id
"""
ROW_1 = "result = [int(tensor[1, 0]) for tensor in datadist.arrays(cache)]"
FREE = "datadist.deallocate_cache(cache)"

Key = BlocksCacheKey | CacheKeyByIdAndIndex


def peer_cache(linked: Linked, count: int, *, paged: bool, filled: bool, row: int = 0) -> Key:
    """Return the key of a cache of the peer; if filled, row 0 of tensor i has bytes i + 1."""
    cache_id = linked.peer.run(ALLOCATE, num_tensors=count, paged=paged, filled=filled)
    linked.row.callback(linked.peer.run, FREE)
    if paged:
        return BlocksCacheKey(linked.peer.cluster_id)
    return CacheKeyByIdAndIndex(linked.peer.cluster_id, cache_id, row)


def own_cache(linked: Linked, count: int, *, paged: bool, filled: bool = False) -> Cache:
    """Return a cache of this engine, with the content of `peer_cache`."""
    if not paged:
        cache = linked.cache(count)
    else:
        cache = linked.manager.allocate_blocks_cache(linked.desc(count))
        linked.row.callback(linked.manager.deallocate_blocks_cache, cache)
    for number, tensor in enumerate(linked.contents(cache)):
        tensor[:] = 0
        tensor[0] = number + 1 if filled else 0
    return cache


def bytes_of_row_1(linked: Linked, cache: Cache) -> list[int]:
    return [int(tensor[1, 0]) for tensor in linked.contents(cache)]


def pull_cache(linked: Linked, count: int) -> list[int]:
    mine = own_cache(linked, count, paged=False)
    linked.manager.pull_cache(peer_cache(linked, count, paged=False, filled=True), mine, 1)  # type: ignore[arg-type]
    return bytes_of_row_1(linked, mine)


def pull_blocks(linked: Linked, count: int, *, from_slot: bool) -> list[int]:
    mine = own_cache(linked, count, paged=True)
    key = peer_cache(linked, count, paged=not from_slot, filled=True)
    linked.manager.pull_blocks(key, mine, [] if from_slot else [0], [1])
    return bytes_of_row_1(linked, mine)


def push_cache(linked: Linked, count: int, *, beyond: int = 0) -> list[int]:
    key = peer_cache(linked, count + beyond, paged=False, filled=False, row=1)
    linked.manager.push_cache(key, own_cache(linked, count, paged=False, filled=True))  # type: ignore[arg-type]
    result: list[int] = linked.peer.run(ROW_1)
    return result


def push_blocks(linked: Linked, count: int) -> list[int]:
    key = peer_cache(linked, count, paged=True, filled=False)
    linked.manager.push_blocks(key, own_cache(linked, count, paged=True, filled=True), [0], [1])  # type: ignore[arg-type]
    result: list[int] = linked.peer.run(ROW_1)
    return result


def copy_cache(linked: Linked, count: int) -> list[int]:
    mine = own_cache(linked, count, paged=False, filled=True)
    linked.manager.copy_cache(mine, mine, dst_batch_index=1)
    return bytes_of_row_1(linked, mine)


def copy_blocks(linked: Linked, count: int) -> list[int]:
    mine = own_cache(linked, count, paged=True, filled=True)
    linked.manager.copy_blocks(mine, {0: [1]})
    return bytes_of_row_1(linked, mine)


def swap_blocks(linked: Linked, count: int) -> list[int]:
    host = linked.manager.allocate_blocks_cache(linked.desc(count, placement=HOST))
    linked.row.callback(linked.manager.deallocate_blocks_cache, host)
    mine = own_cache(linked, count, paged=True, filled=True)
    linked.manager.swap_blocks(mine, host, {0: 1})
    return bytes_of_row_1(linked, host)


def transfer_cache_async(linked: Linked, count: int) -> object:
    key = CacheKeyByIdAndIndex(linked.peer.cluster_id, 1)
    mine = own_cache(linked, count, paged=False)
    return linked.manager.transfer_cache_async(mine, Ready(), [to(key, 1)])


def rows(
    name: str,
    call: Callable[..., object],
    official: Callable[[int], Accepted | Raised],
    ours: Callable[[int], Accepted | Raised] | None = None,
) -> list[Row]:
    return [
        Row(
            f"{name} of {count} tensors",
            official(count),
            partial(call, count=count),
            "linked",
            None if ours is None else ours(count),
            "" if ours is None else "no tensor is left out in silence",
        )
        for count in COUNTS
    ]


def all_of(count: int, beyond: int = 0) -> Accepted:
    return Accepted([*range(1, count + 1)] + [0] * beyond)


def whole_layers_of(count: int, beyond: int = 0) -> Accepted:
    return Accepted([*range(1, count)] + [0] * (1 + beyond))


ROWS = [
    *rows("pull_cache", pull_cache, all_of),
    *rows("pull_blocks", partial(pull_blocks, from_slot=False), all_of),
    *rows("pull_blocks from a slot", partial(pull_blocks, from_slot=True), all_of),
    *rows("push_cache", push_cache, whole_layers_of, all_of),
    *rows("push_blocks", push_blocks, whole_layers_of, all_of),
    *rows(
        "push_cache to more tensors",
        partial(push_cache, beyond=3),
        partial(whole_layers_of, beyond=3),
        partial(all_of, beyond=3),
    ),
    *rows("copy_cache", copy_cache, all_of),
    *rows("copy_blocks", copy_blocks, all_of),
    *rows("swap_blocks", swap_blocks, all_of),
    *rows("transfer_cache_async", transfer_cache_async, lambda _: INVALID),
]
