"""CacheManager: allocation, registration, release and copies, in this process."""

from __future__ import annotations

import re

from kvplan.llm_datadist import BlocksCacheKey, Cache, CacheKey, LLMStatusCode
from tests.llm_datadist.validation.environments import CACHE_MANAGER, HOST, POOL, Engine, Fresh
from tests.llm_datadist.validation.row import INVALID, TYPE, VALUE, Accepted, Raised, Row, status

PADDING = 2**64 - 1
PAGED = Accepted("Cache(cache_id = ID, device_tensor_addrs = 2, is_blocks_cache = True)")
CONTIGUOUS = Accepted("Cache(cache_id = ID, device_tensor_addrs = 2, is_blocks_cache = False)")


def shown(cache: Cache) -> str:
    """Return the text of a cache without its id, which depends on earlier attempts."""
    return re.sub(r"cache_id = \d+", "cache_id = ID", repr(cache))


def without_host_pool(fresh: Fresh) -> object:
    fresh.init({**CACHE_MANAGER, "llm.MemPoolConfig": POOL})
    return fresh.datadist.cache_manager.allocate_cache(Engine.desc(placement=HOST))


def same_key_twice(engine: Engine) -> object:
    engine.cache(keys=[CacheKey(1, 7)])
    return engine.cache(keys=[CacheKey(1, 7)])


def same_blocks_key_twice(engine: Engine) -> object:
    engine.blocks(BlocksCacheKey(1, 7))
    return engine.blocks(BlocksCacheKey(1, 7))


def registered_twice(engine: Engine) -> str:
    engine.register_blocks(engine.addresses(), BlocksCacheKey(1, 8))
    return shown(engine.register_blocks(engine.addresses(), BlocksCacheKey(1, 8)))


def copy(engine: Engine, **arguments: int) -> None:
    engine.manager.copy_cache(engine.cache(), engine.cache(), **arguments)


def copy_onto_itself(engine: Engine) -> None:
    cache = engine.cache()
    engine.manager.copy_cache(cache, cache)
    engine.manager.copy_cache(cache, cache, dst_batch_index=1)


def row(
    case: str,
    official: Accepted | Raised,
    call: object,
    ours: Accepted | Raised | None = None,
    why: str = "",
) -> Row:
    return Row(case, official, call, "engine", ours, why)  # type: ignore[arg-type]


ALLOCATE = [
    Row("allocate_cache HOST w/o host pool", INVALID, without_host_pool, "fresh"),
    row("allocate 0 tensors", INVALID, lambda e: e.cache(num_tensors=0)),
    row(
        "allocate OOM",
        status(LLMStatusCode.LLM_OUT_OF_MEMORY),
        lambda e: e.manager.allocate_cache(e.desc(shape=[2, 1 << 20])),
    ),
    row(
        "allocate keys > batch", INVALID, lambda e: e.cache(keys=[CacheKey(1, i) for i in range(3)])
    ),
    row("allocate dup keys", INVALID, lambda e: e.cache(keys=[CacheKey(1, 1), CacheKey(1, 1)])),
    row("allocate key ok", CONTIGUOUS, lambda e: shown(e.cache(keys=[CacheKey(1, 1)]))),
    row("allocate same key again", INVALID, same_key_twice),
    row(
        "allocate padding keys (req=2^64-1)",
        CONTIGUOUS,
        lambda e: shown(e.cache(keys=[CacheKey(1, PADDING), CacheKey(1, PADDING)])),
    ),
    row("allocate blocks same BlocksCacheKey twice", INVALID, same_blocks_key_twice),
]

REGISTER = [
    row(
        "register blocks same key twice",
        PAGED,
        registered_twice,
        ours=INVALID,
        why="peers would pull from one or the other, by chance (defect 7)",
    ),
    row("register addrs []", INVALID, lambda e: e.manager.register_cache(e.desc(), [])),
    row(
        "register addrs n!=num",
        INVALID,
        lambda e: e.manager.register_cache(e.desc(), e.addresses(1)),
    ),
    row(
        "register addr 0",
        INVALID,
        lambda e: e.manager.register_cache(e.desc(), [0, *e.addresses(1)]),
    ),
    row("register_blocks addr 0", INVALID, lambda e: e.register_blocks([0, *e.addresses(1)])),
    row("register_blocks n!=num", INVALID, lambda e: e.register_blocks(e.addresses(1))),
    row(
        "register addrs tuple",
        TYPE,
        lambda e: e.manager.register_cache(e.desc(), tuple(e.addresses())),
    ),
    row("register addrs None", TYPE, lambda e: e.manager.register_cache(e.desc(), None)),
    row("unregister 'a'", TYPE, lambda e: e.manager.unregister_cache("a")),
    row("unregister missing", Accepted(None), lambda e: e.manager.unregister_cache(1 << 20)),
    row("unregister -1", Accepted(None), lambda e: e.manager.unregister_cache(-1)),
    row("deallocate_cache(blocks)", INVALID, lambda e: e.manager.deallocate_cache(e.blocks())),
    row(
        "deallocate_blocks(cache)", INVALID, lambda e: e.manager.deallocate_blocks_cache(e.cache())
    ),
    row(
        "remove_cache_key missing",
        Accepted(None),
        lambda e: e.manager.remove_cache_key(CacheKey(1, 404)),
    ),
]

COPY = [
    row("copy src blocks", INVALID, lambda e: e.manager.copy_cache(e.cache(), e.blocks())),
    row("copy size 0", INVALID, lambda e: copy(e, size=0)),
    row("copy size -2", INVALID, lambda e: copy(e, size=-2)),
    row("copy offset -1", VALUE, lambda e: copy(e, offset=-1)),
    row("copy self ok", Accepted(None), copy_onto_itself),
    row("copy_blocks on cache", INVALID, lambda e: e.manager.copy_blocks(e.cache(), {0: [1]})),
    row("copy_blocks str", TYPE, lambda e: e.manager.copy_blocks(e.blocks(), {0: ["1"]})),
    row("copy_blocks {}", Accepted(None), lambda e: e.manager.copy_blocks(e.blocks(), {})),
]

ROWS = [*ALLOCATE, *REGISTER, *COPY]
