"""The measured defects of the official engine, in their order, and the behaviour of kvplan.

Defects without a row in the table are cases of their own, in an engine linked with a peer.
"""

from __future__ import annotations

from kvplan.llm_datadist import (
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMException,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from tests.llm_datadist.validation.environments import Linked, Ready
from tests.llm_datadist.validation.row import INVALID, Accepted, Difference, Raised, Row, status

SUCCESS, FAILED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED
NOT_EXIST = status(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)

ALLOCATE = """
cache = datadist.allocate_cache(
    CacheDesc(num_tensors=num_tensors, shape=(2, 8), data_type=DataType.DT_INT8)
)
for number, tensor in enumerate(datadist.arrays(cache)):
    tensor[:] = 10 * (number + 1)
result = cache.cache_id
"""
FREE = "datadist.deallocate_cache(cache)"
FIRST_SLOT = "result = [int(tensor[0].min()) for tensor in datadist.arrays(cache)]"


class Broken(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        raise ZeroDivisionError


def theirs(linked: Linked, num_tensors: int = 2, slot: int = 0) -> CacheKeyByIdAndIndex:
    """Return the key of a slot of a new cache of the peer with 2 slots.

    Bytes of tensor i are 10 * (i + 1).
    """
    cache_id = linked.peer.run(ALLOCATE, num_tensors=num_tensors)
    return CacheKeyByIdAndIndex(linked.peer.cluster_id, cache_id, slot)


def slot_beyond(linked: Linked) -> None:
    linked.manager.pull_cache(theirs(linked, slot=2), linked.cache())


def layer_beyond(linked: Linked) -> None:
    linked.manager.pull_cache(
        theirs(linked), linked.cache(), src_layer_range=range(1, 2), dst_layer_range=range(1)
    )


def later_caches(linked: Linked) -> list[int]:
    """Return the first bytes of a cache that was made after the first pull."""
    mine = linked.cache()
    linked.manager.pull_cache(theirs(linked), mine)
    linked.manager.pull_cache(theirs(linked), mine)
    return [int(tensor[0].min()) for tensor in linked.contents(mine)]


def freed_cache(linked: Linked) -> None:
    mine, key = linked.cache(), theirs(linked)
    linked.manager.pull_cache(key, mine)
    linked.peer.run(FREE)
    linked.manager.pull_cache(key, mine)


def later_layers(linked: Linked) -> tuple[object, ...]:
    """Move source layer 1 into layer 0, and return the outcomes and then the bytes of the peer."""
    source = linked.cache(num_tensors=4)
    for number, tensor in enumerate(linked.contents(source)):
        tensor[:] = number
    key = theirs(linked, num_tensors=4)
    config = TransferWithCacheKeyConfig(key, range(1, 2), range(1))
    task = linked.manager.transfer_cache_async(source, Ready(), [config])
    return task.synchronize(5000), task.get_results(), linked.peer.run(FIRST_SLOT)


def broken_synchronizer(linked: Linked) -> tuple[object, ...]:
    config = TransferWithCacheKeyConfig(theirs(linked), range(1), range(1))
    task = linked.manager.transfer_cache_async(linked.cache(), Broken(), [config])
    return task.synchronize(5000), task.get_results()


def status_by_default() -> LLMStatusCode:
    return LLMException("no status").status_code


def case(name: str, call: object, ours: Accepted | Raised) -> Row:
    return Row(name, ours, call, "linked")  # type: ignore[arg-type]


DEFECTS = [
    Difference(
        "a source slot beyond the remote cache is not checked: the pull succeeds, with bytes from "
        "outside the cache",
        "LLM_KV_CACHE_NOT_EXIST",
        (case("slot beyond the remote cache", slot_beyond, NOT_EXIST),),
    ),
    Difference(
        "a source layer beyond the remote cache crashes the process",
        "LLM_PARAM_INVALID",
        (case("layer beyond the remote cache", layer_beyond, INVALID),),
    ),
    Difference(
        "the peer's caches are read once, at the first pull: caches made later do not exist "
        "for it, and freed ones are still pulled as if they existed",
        "caches made later are found; freed ones give LLM_KV_CACHE_NOT_EXIST",
        (
            case("cache made after the first pull", later_caches, Accepted([10, 20])),
            case("cache freed after the first pull", freed_cache, NOT_EXIST),
        ),
    ),
    Difference(
        "transfer_cache_async of layers that do not begin at 0 moves nothing and reports a success",
        "the layers are transferred",
        (
            case(
                "transfer_cache_async of layer 1 into layer 0",
                later_layers,
                Accepted((SUCCESS, [SUCCESS], [2, 3, 30, 40])),
            ),
        ),
    ),
    Difference(
        "an exception in synchronize_layer ends the transfer and reports a success",
        "LLM_FAILED for each destination that needed the layer; the traceback is logged",
        (
            case(
                "exception in synchronize_layer",
                broken_synchronizer,
                Accepted((FAILED, [FAILED])),
            ),
        ),
    ),
    Difference(
        "the error of CacheDesc.size carries the status LLM_SUCCESS",
        "LLM_PARAM_INVALID; an LLMException without a status has LLM_FAILED",
        (Row("LLMException without a status", Accepted(FAILED), status_by_default),),
        rows=("CacheDesc([0]).size", "CacheDesc([-1]).size", "CacheDesc huge overflow size"),
    ),
    Difference(
        "register_blocks_cache twice with one key silently replaces; allocate_blocks_cache refuses",
        "both refuse: LLM_PARAM_INVALID",
        rows=("register blocks same key twice",),
    ),
    Difference(
        "role None, a port that is not a number and a cluster_info that is not JSON give KeyError, "
        "ValueError and JSONDecodeError",
        "TypeError for the role, LLM_PARAM_INVALID for the others",
        rows=(
            "LLMDataDist(None,1)",
            "switch_role None",
            "init listen '127.0.0.1:abc'",
            "LLMConfig.cluster_info = 'notjson'",
        ),
    ),
]
