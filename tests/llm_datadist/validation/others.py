"""Other differences from the official package, which no measured case shows."""

from __future__ import annotations

from collections.abc import Callable

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
from tests.llm_datadist.validation.defects import theirs
from tests.llm_datadist.validation.environments import (
    CACHE_MANAGER,
    DEVICE,
    HOST,
    POOLS,
    REMOTE,
    Engine,
    Fresh,
    Linked,
    Ready,
)
from tests.llm_datadist.validation.init_rows import config, managed
from tests.llm_datadist.validation.other_transfers import TRANSFERS
from tests.llm_datadist.validation.row import (
    INVALID,
    TYPE,
    Accepted,
    Difference,
    Raised,
    Row,
    observe,
)

SUCCESS, NOT_EXIST = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def unmapped(engine: Engine) -> object:
    return engine.manager.register_cache(engine.desc(), [4096, 8192])


def no_cache(engine: Engine) -> None:
    engine.manager.deallocate_cache(None)  # type: ignore[arg-type]


def one_description_for_both(engine: Engine) -> tuple[bool, bool]:
    desc = engine.desc()
    paged = engine.manager.allocate_blocks_cache(desc)
    contiguous = engine.manager.allocate_cache(desc)
    engine.manager.copy_cache(contiguous, contiguous, dst_batch_index=1)
    engine.manager.deallocate_blocks_cache(paged)
    engine.manager.deallocate_cache(contiguous)
    return paged.is_blocks_cache, contiguous.is_blocks_cache


def two_slots_of_one_cluster(linked: Linked) -> object:
    there = theirs(linked)
    missing = CacheKeyByIdAndIndex(there.cluster_id, there.cache_id + 1000)
    configs = [TransferWithCacheKeyConfig(key, range(1), range(1)) for key in (there, missing)]
    return linked.manager.transfer_cache_async(linked.cache(), Ready(), configs).get_results(5000)


def config_afterwards(fresh: Fresh) -> range | None:
    fresh.init({**CACHE_MANAGER, **POOLS})
    manager = fresh.datadist.cache_manager
    given = TransferConfig(1, [4096, 8192])
    manager.transfer_cache_async(
        manager.allocate_cache(Engine.desc()), Ready(), [given]
    ).get_results(5000)
    return given.src_layer_range


def chain_of_blocks(engine: Engine) -> None:
    cache = engine.manager.allocate_blocks_cache(engine.desc(shape=(4, 8)))
    engine.row.callback(engine.manager.deallocate_blocks_cache, cache)
    engine.manager.copy_blocks(cache, {1: [3], 3: [2]})


def true_as_option() -> str:
    return config(link_retry_count=True)["llm.LinkRetryCount"]


def version_1(fresh: Fresh) -> None:
    fresh.datadist.init({})


def finalized_manager(fresh: Fresh) -> list[str]:
    """Return the distinct outcomes of all operations of a manager whose engine is finalized."""
    fresh.init({**REMOTE, **POOLS})
    manager = fresh.datadist.cache_manager
    slots = manager.allocate_cache(Engine.desc())
    blocks, host = (
        manager.allocate_blocks_cache(Engine.desc(placement=value)) for value in (DEVICE, HOST)
    )
    slot, paged = CacheKeyByIdAndIndex(1, 1), BlocksCacheKey(1)
    layer = TransferWithCacheKeyConfig(slot, range(1), range(1))
    addresses = slots.tensor_addrs
    fresh.datadist.finalize()
    calls: list[Callable[[], object]] = [
        lambda: manager.allocate_cache(Engine.desc()),
        lambda: manager.allocate_blocks_cache(Engine.desc()),
        lambda: manager.deallocate_cache(slots),
        lambda: manager.deallocate_blocks_cache(blocks),
        lambda: manager.remove_cache_key(CacheKey(1, 1)),
        lambda: manager.register_cache(Engine.desc(), addresses),
        lambda: manager.register_blocks_cache(Engine.desc(), addresses),
        lambda: manager.unregister_cache(1),
        lambda: manager.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_DEVICE, addresses[0], 1)),
        lambda: manager.pull_cache(slot, slots),
        lambda: manager.pull_blocks(paged, blocks, [0], [0]),
        lambda: manager.push_cache(slot, slots),
        lambda: manager.push_blocks(paged, blocks, [0], [0]),
        lambda: manager.transfer_cache_async(slots, Ready(), [layer]),
        lambda: manager.copy_cache(slots, slots, 1),
        lambda: manager.copy_blocks(blocks, {0: [1]}),
        lambda: manager.swap_blocks(blocks, host, {0: 1}),
    ]
    return sorted({str(observe(call)) for call in calls})


OTHERS = [
    Difference(
        "a CacheManager of a finalized engine answers LLM_PARAM_INVALID",
        "LLM_ENGINE_FINALIZED, from each of its 17 operations",
        (
            Row(
                "operations after finalize",
                Accepted(["LLM_ENGINE_FINALIZED"]),
                finalized_manager,
                "fresh",
            ),
        ),
    ),
    Difference(
        "any address except zero can be registered (observed with its stub engine)",
        "unmapped memory is refused: LLM_PARAM_INVALID",
        (Row("register memory that is not mapped", INVALID, unmapped, "engine"),),
    ),
    Difference(
        "a CacheDesc that was used for a paged cache makes the next contiguous one paged",
        "a CacheDesc remembers nothing",
        (
            Row(
                "one CacheDesc for a paged and a contiguous cache",
                Accepted((True, False)),
                one_description_for_both,
                "engine",
            ),
        ),
    ),
    Difference(
        "results of transfer_cache_async are stored by cluster: two configs of one cluster "
        "share one",
        "each config has its own",
        (
            Row(
                "two configs of one cluster, one of a cache that is not there",
                Accepted([SUCCESS, NOT_EXIST]),
                two_slots_of_one_cluster,
                "linked",
            ),
        ),
    ),
    Difference(
        "copy_blocks with a block that is both read and written, as in {1: [3], 3: [2]}, copies in "
        "an undefined order: blocks below 2 MiB are copied by four threads at once",
        "refused: LLM_PARAM_INVALID; make two calls to define the order",
        (Row("copy_blocks of a chain", INVALID, chain_of_blocks, "engine"),),
    ),
    Difference(
        "transfer_cache_async writes the selected layers into the caller's TransferConfig",
        "the caller's objects are not changed",
        (Row("TransferConfig after a transfer", Accepted(None), config_afterwards, "fresh"),),
    ),
    Difference(
        "a brace in a refused value turns the error into KeyError or IndexError",
        "the error is that of the broken rule",
        (managed("init listen '{ip}'", INVALID, {"llm.listenIpInfo": "{ip}"}),),
    ),
    Difference(
        "until 7bf37005 a bool is accepted wherever an int is",
        "TypeError",
        (Row("options of link_retry_count = True", TYPE, true_as_option),),
        ("LLMConfig.device_id = True",),
    ),
    Difference(
        "None instead of an object passes the checks, and fails later with an AttributeError",
        "TypeError, with the name of the argument; init(None) is an AttributeError, as measured",
        (Row("deallocate_cache(None)", TYPE, no_cache, "engine"),),
    ),
    Difference(
        "without llm.EnableCacheManager another package is needed, llm_datadist_v1",
        "kvplan does not have it: ModuleNotFoundError, also where it is installed",
        (Row("init without options", Raised(ModuleNotFoundError), version_1, "fresh"),),
    ),
    *TRANSFERS,
]
