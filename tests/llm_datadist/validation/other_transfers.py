"""Other differences in transfers and links, which no measured case shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

from kvplan import Options
from kvplan.llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from kvplan.llm_datadist.v2.config import wait_time_ms
from tests.datadist.peer import Peer
from tests.llm_datadist.validation.defects import FIRST_SLOT, theirs
from tests.llm_datadist.validation.environments import (
    CACHE_MANAGER,
    CLUSTER,
    HOST,
    POOLS,
    Engine,
    Fresh,
    Linked,
    Ready,
    cluster,
)
from tests.llm_datadist.validation.init_rows import LOCAL_MODE, managed
from tests.llm_datadist.validation.row import INVALID, TYPE, Accepted, Difference, Row, observe

SUCCESS, TIMEOUT = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_TIMEOUT
NOT_EXIST, NOT_LINKED = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_NOT_YET_LINK
PARAM_INVALID, FAILED = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FAILED
MISSING = 1000
BACKEND = {"llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:0"}
PAGED = """
paged = datadist.allocate_blocks_cache(
    CacheDesc(num_tensors=2, shape=(4, 8), data_type=DataType.DT_INT8), BlocksCacheKey(1)
)
result = paged.cache_id
"""
BLOCKS = "result = [int(block[0]) for block in datadist.arrays(paged)[0]]"
PULL_FROM_US = """
mine = datadist.allocate_cache(CacheDesc(2, (2, 8), DataType.DT_INT8))
datadist.pull_cache(CacheIndex(cluster_id, cache_id, 0), mine)
result = int(datadist.arrays(mine)[1][0, 0])
"""
TWO_CACHES = """
caches = [datadist.allocate_cache(CacheDesc(1, (2, 8), DataType.DT_INT8)) for _ in range(2)]
result = [it.tensor_addrs[0] for it in caches]
"""


class ScriptedSynchronizer(LayerSynchronizer):
    """A synchronizer that calls `at[layer]`, or returns that the layer is ready.

    `asked` has the layers.
    """

    def __init__(self, at: dict[int, object]) -> None:
        self.asked: list[int] = []
        self._at = at

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked.append(layer_index)
        answer = self._at.get(layer_index, True)
        if isinstance(answer, Exception):
            raise answer
        return answer.wait() if isinstance(answer, Event) else bool(answer)


@contextmanager
def linked_with_peer(fresh: Fresh, options: dict[str, str]) -> Iterator[Peer]:
    fresh.init({**CACHE_MANAGER, **POOLS, **options})
    peer = Peer()
    try:
        code, _ = fresh.datadist.link_clusters([cluster(Peer.cluster_id, peer.address)])
        assert code == SUCCESS
        yield peer
    finally:
        fresh.datadist.finalize()
        peer.close()


def to(key: BlocksCacheKey | CacheKeyByIdAndIndex, *layers: int) -> TransferWithCacheKeyConfig:
    return TransferWithCacheKeyConfig(key, range(*layers), range(*layers))


def block_without_tables(linked: Linked) -> tuple[object, ...]:
    cache_id = linked.peer.run(PAGED)
    source = linked.blocks()
    for number, block in enumerate(linked.contents(source)[0]):
        block[:] = 7 + number
    config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, cache_id, 3), range(1), range(1), 1)
    task = linked.manager.transfer_cache_async(source, Ready(), [config])
    return task.get_results(5000), linked.peer.run(BLOCKS)


def host_memory_in_request_mode(fresh: Fresh) -> int:
    with linked_with_peer(fresh, {}) as peer:
        manager = fresh.datadist.cache_manager
        manager.set_is_call_linked()
        held = manager.allocate_cache(Engine.desc())
        offered = manager.register_cache(Engine.desc(placement=HOST), held.tensor_addrs)
        answer: int = peer.run(
            "datadist.allocate_cache(CacheDesc(2, (2, 8), DataType.DT_INT8))" + PULL_FROM_US,
            cluster_id=CLUSTER,
            cache_id=offered.cache_id,
        )
        return answer


def unlinked_by_the_peer(fresh: Fresh) -> tuple[object, ...]:
    with linked_with_peer(fresh, BACKEND) as peer:
        peer.run("datadist.unlink_clusters([cluster_id])", cluster_id=CLUSTER)
        manager = fresh.datadist.cache_manager
        cache = manager.allocate_cache(Engine.desc())
        pulled = observe(lambda: manager.pull_cache(CacheKeyByIdAndIndex(1, 1), cache))
        code, _ = fresh.datadist.unlink_clusters([cluster(Peer.cluster_id, peer.address)])
        return str(pulled), code


def two_caches_and_none(fresh: Fresh) -> object:
    with linked_with_peer(fresh, {}) as peer:
        manager = fresh.datadist.cache_manager
        source = manager.allocate_cache(Engine.desc())
        places = [peer.run(TWO_CACHES), [4096, 8192]]
        configs = [TransferConfig(Peer.cluster_id, place) for place in places]
        return manager.transfer_cache_async(source, Ready(), configs).get_results(5000)


def odd_tensor(linked: Linked) -> list[int]:
    key = theirs(linked, num_tensors=3)
    linked.manager.push_cache(key, linked.cache(num_tensors=3))
    result: list[int] = linked.peer.run(FIRST_SLOT)
    return result


def results_so_far(linked: Linked) -> tuple[object, ...]:
    key, more = theirs(linked, num_tensors=4), Event()
    task = linked.manager.transfer_cache_async(
        linked.cache(num_tensors=4), ScriptedSynchronizer({1: more}), [to(key, 2), to(key, 1)]
    )
    while (so_far := task.get_results(0))[1] is TIMEOUT:
        pass
    more.set()
    return so_far, task.get_results(5000)


def one_destination_fails(linked: Linked) -> object:
    there = theirs(linked, num_tensors=4)
    missing = CacheKeyByIdAndIndex(there.cluster_id, there.cache_id + MISSING)
    configs = [to(missing, 2), to(there, 2)]
    task = linked.manager.transfer_cache_async(linked.cache(num_tensors=4), Ready(), configs)
    return task.get_results(5000)


def asked_after_the_end(linked: Linked) -> list[object]:
    found: list[object] = []
    for end in (False, ZeroDivisionError()):
        synchronizer = ScriptedSynchronizer({0: end})
        key = theirs(linked, num_tensors=4)
        task = linked.manager.transfer_cache_async(
            linked.cache(num_tensors=4), synchronizer, [to(key, 2), to(key, 1, 2)]
        )
        found.append((task.get_results(5000), synchronizer.asked))
    return found


def chunks_into_one_block(linked: Linked) -> None:
    linked.manager.pull_blocks(theirs(linked), linked.blocks(), [], [0, 0])


def no_layers(linked: Linked) -> None:
    linked.manager.pull_cache(theirs(linked), linked.cache(), src_layer_range=range(0))


def key_is_none(linked: Linked) -> None:
    config = to(theirs(linked), 1)
    config.cache_key = None  # type: ignore[assignment]
    linked.manager.transfer_cache_async(linked.cache(), Ready(), [config])


TRANSFERS = [
    Difference(
        "transfer_cache_async of a paged cache without block tables moves row src_batch_index to "
        "row batch_index of the key (0 of a BlocksCacheKey): one block",
        "the same, with a warning in the log",
        (
            Row(
                "block 1 to block 3 without block tables",
                Accepted(([SUCCESS], [0, 0, 0, 8])),
                block_without_tables,
                "linked",
            ),
        ),
    ),
    Difference(
        "dst_addrs of a TransferConfig are written wherever they point",
        "they must all be in one cache of the peer: else LLM_PARAM_INVALID, or "
        "LLM_KV_CACHE_NOT_EXIST if they are in none",
        (
            Row(
                "dst_addrs in two caches, and in none",
                Accepted([PARAM_INVALID, NOT_EXIST]),
                two_caches_and_none,
                "fresh",
            ),
        ),
    ),
    Difference(
        "get_results while transfer_cache_async is in progress: LLM_TIMEOUT for all destinations",
        "LLM_TIMEOUT only for those in progress; the others have their status",
        (
            Row(
                "get_results while one of two goes on",
                Accepted(([TIMEOUT, SUCCESS], [SUCCESS, SUCCESS])),
                results_so_far,
                "linked",
            ),
        ),
    ),
    Difference(
        "if one destination of transfer_cache_async fails, the others end, with the result None",
        "each destination fails independently",
        (
            Row(
                "one of two destinations fails",
                Accepted([NOT_EXIST, SUCCESS]),
                one_destination_fails,
                "linked",
            ),
        ),
    ),
    Difference(
        "after synchronize_layer has returned False or raised it is not called again; destinations "
        "that needed only later layers have the result None",
        "it is not called again either; all destinations that needed that layer or a later one "
        "have LLM_PARAM_INVALID, or LLM_FAILED",
        (
            Row(
                "synchronize_layer that ends at layer 0",
                Accepted([([PARAM_INVALID] * 2, [0]), ([FAILED] * 2, [0])]),
                asked_after_the_end,
                "linked",
            ),
        ),
    ),
    Difference(
        "the cache_key of a TransferWithCacheKeyConfig can be set to None; the transfer then moves "
        "nothing",
        "TypeError from transfer_cache_async",
        (Row("transfer_cache_async to key None", TYPE, key_is_none, "linked"),),
    ),
    Difference(
        "a push without layer ranges moves only complete layers",
        "it also moves a last layer that has fewer tensors",
        (Row("push of 3 tensors", Accepted([0, 0, 0]), odd_tensor, "linked"),),
    ),
    Difference(
        "an empty layer range of a pull is treated as not given",
        "LLM_PARAM_INVALID",
        (Row("pull_cache of no layer", INVALID, no_layers, "linked"),),
    ),
    Difference(
        "a slot that is cut into blocks may name one block twice: the last chunk counts",
        "LLM_PARAM_INVALID; if several blocks are copied to one block, the last counts, as in the "
        "official package",
        (Row("two chunks into block 0", INVALID, chunks_into_one_block, "linked"),),
    ),
    Difference(
        "in request mode a registered cache is remote_accessible by default if it is of "
        "Placement.DEVICE and link was not called; peers can pull any cache through buffers",
        "it is always remote_accessible; peers can pull any cache",
        (
            Row(
                "pull of host memory that was registered after link",
                Accepted(0),
                host_memory_in_request_mode,
                "fresh",
            ),
        ),
    ),
    Difference(
        "with llm.TransferBackend each end has its own link, and ends only that",
        "there is one: the first end that unlinks ends it, and the other also gets LLM_SUCCESS",
        (
            Row(
                "pull and unlink after the peer has unlinked",
                Accepted((NOT_LINKED.name, SUCCESS)),
                unlinked_by_the_peer,
                "fresh",
            ),
        ),
    ),
    Difference(
        'llm.SyncKvCacheWaitTime "0" is accepted, as it is',
        "it is the default, 1000 ms",
        (
            Row(
                "wait time 0",
                # tests have more than the default of 1000
                Accepted(Options().sync_kv_cache_wait_time),
                lambda: wait_time_ms({"llm.SyncKvCacheWaitTime": "0"}),
            ),
        ),
    ),
    Difference(
        "an unknown option is ignored, even one like `listen_ip_info`",
        "also ignored, with a warning in the log that names the nearest; one that is almost "
        "llm.listenIpInfo is LLM_PARAM_INVALID, because the engine would not listen",
        (managed("init listen_ip_info", INVALID, {"listen_ip_info": "127.0.0.1:0"}),),
    ),
    Difference(
        "RDMA numbers that no adapter accepts are accepted, and fail when linking over one",
        "they are logged and not used, because there is no adapter",
        (
            managed(
                "init with RDMA numbers out of range",
                LOCAL_MODE,
                {"llm.RdmaTrafficClass": "300", "llm.RdmaServiceLevel": "100"},
            ),
        ),
    ),
    Difference(
        "an engine can be linked with itself",
        "LLM_PARAM_INVALID as the code for that cluster",
        (
            Row(
                "link_clusters with the own cluster",
                Accepted((PARAM_INVALID, [PARAM_INVALID])),
                lambda engine: engine.datadist.link_clusters([cluster(CLUSTER, "127.0.0.1:1")]),
                "engine",
            ),
        ),
    ),
]
