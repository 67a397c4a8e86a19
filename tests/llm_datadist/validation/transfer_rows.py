"""CacheManager: pull, push, swap, layer-wise transfer and remapping."""

from __future__ import annotations

from kvplan.llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMStatusCode,
    MemInfo,
    Memtype,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests.llm_datadist.validation.environments import CLUSTER, Engine, Ready
from tests.llm_datadist.validation.row import INVALID, TYPE, Accepted, Raised, Row, status

NOT_YET_LINK = status(LLMStatusCode.LLM_NOT_YET_LINK)
BY_ID, BY_BLOCKS, BY_REQUEST = CacheKeyByIdAndIndex(1, 1), BlocksCacheKey(1), CacheKey(1, 1)


def row(case: str, official: Accepted | Raised, call: object) -> Row:
    return Row(case, official, call, "engine")  # type: ignore[arg-type]


def pull_blocks(
    engine: Engine, key: object, src: list[int], dst: list[int], **arguments: object
) -> None:
    engine.manager.pull_blocks(key, engine.blocks(), src, dst, **arguments)  # type: ignore[arg-type]


def transfer(engine: Engine, num_tensors: int, config: object) -> object:
    source = engine.cache(num_tensors)
    return engine.manager.transfer_cache_async(source, Ready(), [config])  # type: ignore[list-item]


PULL = [
    row(
        "pull_cache with CacheKey in remote mode",
        TYPE,
        lambda e: e.manager.pull_cache(BY_REQUEST, e.cache()),
    ),
    row(
        "pull_cache own cluster",
        INVALID,
        lambda e: e.manager.pull_cache(CacheKeyByIdAndIndex(CLUSTER, 1), e.cache()),
    ),
    row("pull_cache not linked", NOT_YET_LINK, lambda e: e.manager.pull_cache(BY_ID, e.cache())),
    row("pull_cache into blocks", INVALID, lambda e: e.manager.pull_cache(BY_ID, e.blocks())),
    row(
        "pull_blocks into cache",
        INVALID,
        lambda e: e.manager.pull_blocks(BY_BLOCKS, e.cache(), [0], [0]),
    ),
    row("pull_blocks dst []", INVALID, lambda e: pull_blocks(e, BY_BLOCKS, [0], [])),
    row(
        "pull_blocks src [] w/ BlocksCacheKey",
        INVALID,
        lambda e: pull_blocks(e, BY_BLOCKS, [], [0]),
    ),
    row(
        "pull_blocks src [0] w/ CacheKey",
        INVALID,
        lambda e: pull_blocks(e, BY_REQUEST, [0], [0]),
    ),
    row(
        "pull_blocks step range",
        INVALID,
        lambda e: pull_blocks(e, BY_BLOCKS, [0], [0], src_layer_range=range(0, 2, 2)),
    ),
    row(
        "pull_blocks unknown kwarg",
        NOT_YET_LINK,
        lambda e: pull_blocks(e, BY_BLOCKS, [0], [0], no_such_argument=1),
    ),
    row("pull_blocks neg idx", TYPE, lambda e: pull_blocks(e, BY_BLOCKS, [-1], [0])),
]

PUSH = [
    row("push_cache size 5", INVALID, lambda e: e.manager.push_cache(BY_ID, e.cache(), size=5)),
    row("push_cache(BlocksCacheKey)", TYPE, lambda e: e.manager.push_cache(BY_BLOCKS, e.cache())),
    row("push_cache blocks src", INVALID, lambda e: e.manager.push_cache(BY_ID, e.blocks())),
    row(
        "push_cache range mismatch",
        INVALID,
        lambda e: e.manager.push_cache(
            BY_ID, e.cache(), src_layer_range=range(1), dst_layer_range=range(2)
        ),
    ),
    row(
        "push_blocks src cache",
        INVALID,
        lambda e: e.manager.push_blocks(BY_BLOCKS, e.cache(), [0], [0]),
    ),
    row(
        "push_blocks dst []",
        INVALID,
        lambda e: e.manager.push_blocks(BY_BLOCKS, e.blocks(), [0], []),
    ),
    row(
        "push_blocks not linked",
        NOT_YET_LINK,
        lambda e: e.manager.push_blocks(BY_BLOCKS, e.blocks(), [0], [0]),
    ),
]

SWAP = [
    row("swap D->D", INVALID, lambda e: e.manager.swap_blocks(e.blocks(), e.blocks(), {0: 0})),
    row(
        "swap cache not blocks",
        INVALID,
        lambda e: e.manager.swap_blocks(e.cache(), e.cpu_blocks(), {0: 0}),
    ),
    row("swap oob", INVALID, lambda e: e.manager.swap_blocks(e.blocks(), e.cpu_blocks(), {9: 0})),
    row(
        "swap num_tensors mismatch",
        INVALID,
        lambda e: e.manager.swap_blocks(e.blocks(), e.cpu_blocks(num_tensors=1), {0: 0}),
    ),
    row(
        "swap block size mismatch",
        INVALID,
        lambda e: e.manager.swap_blocks(e.blocks(), e.cpu_blocks(shape=[2, 4]), {0: 0}),
    ),
]

LAYERWISE = [
    row(
        "transfer_cache_async TransferConfig in remote mode",
        TYPE,
        lambda e: transfer(e, 2, TransferConfig(1, [4096, 8192])),
    ),
    row(
        "transfer odd num_tensors",
        INVALID,
        lambda e: transfer(e, 3, TransferWithCacheKeyConfig(BY_ID, range(1), range(1))),
    ),
]

REMAP = [
    row(
        "remap no link",
        NOT_YET_LINK,
        lambda e: e.manager.remap_registered_memory(
            MemInfo(Memtype.MEM_TYPE_DEVICE, e.addresses(1)[0], 16)
        ),
    ),
    row("remap []", INVALID, lambda e: e.manager.remap_registered_memory([])),
]

ROWS = [*PULL, *PUSH, *SWAP, *LAYERWISE, *REMAP]
