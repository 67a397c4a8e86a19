"""What the original's Python part reaches its C++ part by: numbers of statuses, and functions.

Values cross as plain tuples (`v2.tuples`); a function returns the number of a status, or that and a
result. They work on the LLMDataDist that this process has initialized, by `initialize_v2` or by
itself. With these the original's own Python part runs on this engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import kvplan
from kvplan.llm_datadist.configs import LLMRole
from kvplan.llm_datadist.data_type import calc_tensor_size  # noqa: F401 one of its functions
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.v2 import link_codes, tuples
from kvplan.llm_datadist.v2.engine_options import CACHE_MANAGER, POOL, REMOTE_ACCESS, wait_time_ms
from kvplan.llm_datadist.v2.llm_datadist import LLMDataDist
from kvplan.llm_datadist.v2.move_arguments import each_once, last_wins
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvplan.engine.datadist import LlmDataDist

_P = ParamSpec("_P")
_T = TypeVar("_T")

kSuccess = int(LLMStatusCode.LLM_SUCCESS)
kFailed = int(LLMStatusCode.LLM_FAILED)
kParamInvalid = int(LLMStatusCode.LLM_PARAM_INVALID)
kLLMWaitProcessTimeOut = int(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
kLLMKVCacheNotExist = int(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
kLLMRepeatRequest = int(LLMStatusCode.LLM_REPEAT_REQUEST)
kLLMRequestAlreadyCompleted = int(LLMStatusCode.LLM_REQUEST_ALREADY_COMPLETED)
kLLMEngineFinalized = int(LLMStatusCode.LLM_ENGINE_FINALIZED)
kLLMNotYetLink = int(LLMStatusCode.LLM_NOT_YET_LINK)
kAlreadyLink = int(LLMStatusCode.LLM_ALREADY_LINK)
kLinKFailed = int(LLMStatusCode.LLM_LINK_FAILED)
kUnlinkFailed = int(LLMStatusCode.LLM_UNLINK_FAILED)
kNotifyPromptUnlinkFailed = int(LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED)
kLLMClusterNumExceedLimit = int(LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT)
kProcessingLink = int(LLMStatusCode.LLM_PROCESSING_LINK)
kDeviceOutOfMemory = int(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY)
kPrefixAlreadyExist = int(LLMStatusCode.LLM_PREFIX_ALREADY_EXIST)
kPrefixNotExist = int(LLMStatusCode.LLM_PREFIX_NOT_EXIST)
kLLMSeqLenOverLimit = int(LLMStatusCode.LLM_SEQ_LENOVERLIMIT)
kLLMNoFreeBlock = int(LLMStatusCode.LLM_NO_FREE_BLOCK)
kLLMBlocksOutOfMemory = int(LLMStatusCode.LLM_BLOCKS_OUT_OF_MEMORY)
kLLMExistLink = int(LLMStatusCode.LLM_EXIST_LINK)
kLLMFeatureNotEnabled = int(LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
kLLMTimeout = int(LLMStatusCode.LLM_TIMEOUT)
kLLMLinkBusy = int(LLMStatusCode.LLM_LINK_BUSY)
kLLMOutOfMemory = int(LLMStatusCode.LLM_OUT_OF_MEMORY)
kLLMDeviceMemError = int(LLMStatusCode.LLM_DEVICE_MEM_ERROR)
kLLMSuspectRemoteError = int(LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR)

_ROLE = "llm.Role"


def _as_status(call: Callable[_P, None]) -> Callable[_P, int]:
    """Decorate a call to return the number of the status that it raises."""

    @wraps(call)
    def returning(*args: _P.args, **kwargs: _P.kwargs) -> int:
        try:
            call(*args, **kwargs)
        except LLMException as error:
            log.error("%s: %s", call.__name__, error)
            return int(error.status_code)
        return kSuccess

    return returning


def _as_pair(nothing: _T) -> Callable[[Callable[_P, _T]], Callable[_P, tuple[int, _T]]]:
    """Decorate a call to return the status that it raises, and its result or `nothing`."""

    def decorated(call: Callable[_P, _T]) -> Callable[_P, tuple[int, _T]]:
        @wraps(call)
        def returning(*args: _P.args, **kwargs: _P.kwargs) -> tuple[int, _T]:
            try:
                return kSuccess, call(*args, **kwargs)
            except LLMException as error:
                log.error("%s: %s", call.__name__, error)
                return int(error.status_code), nothing

        return returning

    return decorated


def _datadist(otherwise: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID) -> LLMDataDist:
    """Return the LLMDataDist of this process; refuse with status `otherwise` if there is none."""
    if (found := LLMDataDist.llm_engine_instance) is None:
        raise LLMException("no LLMDataDist is initialized", status_code=otherwise)
    return found


def _engine(otherwise: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID) -> LlmDataDist:
    """Return its engine."""
    return _datadist(otherwise)._running()


def _is_remote_mode() -> bool:
    """Whether its peers reach caches by themselves."""
    return _datadist()._engine_options.get(REMOTE_ACCESS) == "1"


def dict_to_vector(py_dict: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the pairs of a mapping."""
    return list(py_dict.items())


@_as_status
def initialize_v2(cluster_id: int, options: dict[str, str]) -> None:
    """Initialize an LLMDataDist of the role that option llm.Role names."""
    if LLMDataDist.llm_engine_instance is not None:
        raise LLMException("an LLMDataDist is initialized already")
    LLMDataDist(_role_of(options.get(_ROLE)), cluster_id).init({CACHE_MANAGER: "1", **options})


def finalize_v2() -> None:
    """Finalize it, if there is one."""
    if LLMDataDist.llm_engine_instance is not None:
        LLMDataDist.llm_engine_instance.finalize()


@_as_status
def switch_role_v2(role: str, options: dict[str, str]) -> None:
    """Change the role, and where it listens."""
    _datadist().switch_role(_role_of(role), options)


def _role_of(name: str | None) -> LLMRole:
    try:
        return LLMRole[str(name).upper()]
    except KeyError:
        raise invalid(f"role {shown(name)} must be Prompt, Decoder or Mix") from None


@_as_pair(0)
def link(comm_name: str, cluster2rank: Mapping[int, int], rank_table: str) -> int:
    """Begin to link; return the id of the communicator."""
    return _engine(LLMStatusCode.LLM_FAILED).link(comm_name, dict(cluster2rank), rank_table)


@_as_status
def unlink(comm_id: int) -> None:
    """End a communicator that `link` has made."""
    _engine(LLMStatusCode.LLM_FAILED).unlink(comm_id)


@_as_pair(0)
def query_register_mem_status(comm_id: int) -> int:
    """Return how far `link` is: the number of a RegisterMemStatus."""
    status = _engine(LLMStatusCode.LLM_FAILED).query_register_mem_status(comm_id)
    return int(status.value)


def link_clusters_v2(clusters: Sequence[tuples.Cluster], timeout: int) -> tuple[int, list[int]]:
    """Link with clusters that listen; a status for each."""
    return _codes(
        lambda datadist: link_codes.link(
            datadist._running(), tuples.clusters_of(clusters), timeout, datadist._own_links
        )
    )


def unlink_clusters_v2(
    clusters: Sequence[tuples.Cluster], timeout: int, force_flag: bool = False
) -> tuple[int, list[int]]:
    """End links; a status for each."""
    return _codes(
        lambda datadist: link_codes.unlink(
            datadist._running(),
            tuples.clusters_of(clusters),
            timeout,
            force=force_flag,
            own=datadist._own_links,
        )
    )


def _codes(call: Callable[[LLMDataDist], link_codes.Codes]) -> tuple[int, list[int]]:
    try:
        code, codes = call(_datadist(LLMStatusCode.LLM_FAILED))
    except LLMException as error:
        return int(error.status_code), []
    return int(code), [int(it) for it in codes]


@_as_pair(tuples.NO_CACHE)
def allocate_cache_v2(
    cache_desc: tuples.CacheDesc, cache_keys: Sequence[tuples.CacheKey]
) -> tuples.Cache:
    """Make a cache in the pool of its placement."""
    engine = _engine(LLMStatusCode.LLM_FAILED)
    desc, is_blocks = tuples.desc_of(cache_desc)
    if is_blocks:
        made = engine.allocate_blocks_cache(desc, tuples.blocks_key_of(cache_keys))
    else:
        made = engine.allocate_cache(desc, tuples.request_keys_of(cache_keys))
    return made.cache_id, [list(made.tensor_addrs)]


@_as_pair(tuples.NO_CACHE)
def register_cache(
    cache_desc: tuples.CacheDesc,
    addrs: Sequence[int],
    cache_keys: Sequence[tuples.CacheKey],
    remote_accessible: bool = True,
) -> tuples.Cache:
    """Make a cache of memory that the caller keeps."""
    engine = _engine(LLMStatusCode.LLM_FAILED)
    desc, is_blocks = tuples.desc_of(cache_desc)
    # In request mode the original's peers pull from any cache, through its buffers.
    accessible = remote_accessible or not _is_remote_mode()
    if is_blocks:
        key = tuples.blocks_key_of(cache_keys)
        made = engine.register_blocks_cache(desc, addrs, key, remote_accessible=accessible)
    else:
        keys = tuples.request_keys_of(cache_keys)
        made = engine.register_cache(desc, addrs, keys, remote_accessible=accessible)
    return made.cache_id, [list(made.tensor_addrs)]


@_as_status
def unregister_cache(cache_id: int) -> None:
    """End a registered cache; an unknown one is fine."""
    _engine(LLMStatusCode.LLM_FAILED).unregister_cache(cache_id)


@_as_status
def deallocate_cache_v2(cache_id: int) -> None:
    """Free an allocated cache; an unknown one is fine."""
    _engine().deallocate_cache(tuples.cache_called(_engine(), cache_id))


@_as_status
def check_capacity_v2(seq_len: int) -> None:
    """Whether the pool of Placement.DEVICE has `seq_len` bytes in one piece."""
    if POOL not in _datadist()._engine_options:
        raise LLMException(
            f"without {POOL} there is no pool", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        )
    _engine()._running().registry.pools.take(kvplan.Placement.DEVICE, seq_len)


@_as_status
def remove_cache_key_v2(cache_key: tuples.CacheKey) -> None:
    """Forget a key; an unknown one is fine."""
    for key in tuples.request_keys_of([cache_key]):
        _engine().remove_cache_key(key)


@_as_status
def remap_registered_memory(mem_infos: Sequence[tuple[int, int, int]]) -> None:
    """Check again how registered memory (type, address, bytes) is mapped."""
    _engine().remap_registered_memory([(addr, nbytes) for _, addr, nbytes in mem_infos])


@_as_status
def pull_cache_v2(cache_id: int, cache_key: tuples.CacheKey, pull_param: tuples.PullParam) -> None:
    """Pull a slot or blocks into a cache."""
    size, slot, src_blocks, dst_blocks, src_tensors, dst_tensors, *rest = pull_param
    src_offset, dst_offset, tensors_per_layer = rest
    key, dst = tuples.key_of(cache_key), tuples.cache_called(_engine(), cache_id)
    layers = tuples.layers_of(src_tensors, dst_tensors, tensors_per_layer)
    if isinstance(key, kvplan.CacheKey) and _is_remote_mode():
        raise LLMException(
            f"{key}: in remote mode there are no keys of requests",
            status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )
    if isinstance(key, kvplan.BlocksCacheKey) or dst_blocks:
        src, dst_table = last_wins(list(src_blocks), list(dst_blocks))
        _engine().pull_blocks(key, dst, src, dst_table, layers)
    else:
        _engine().pull_cache(
            key,
            dst,
            slot,
            size,
            layers,
            src_offset=max(0, src_offset),
            dst_offset=max(0, dst_offset),
        )


@_as_status
def copy_cache_v2(copy_param: tuples.CopyParam) -> None:
    """Copy a slot, or blocks where there are pairs of them."""
    dst_id, src_id, dst_slot, src_slot, offset, size, _, pairs = copy_param
    src, dst = tuples.cache_called(_engine(), src_id), tuples.cache_called(_engine(), dst_id)
    if pairs:
        _engine().copy_blocks(dst, each_once(pairs))
    elif (dst_id, dst_slot) != (src_id, src_slot):  # else there is nothing to copy
        _engine().copy_cache(src, dst, src_slot, dst_slot, offset, size)


@_as_status
def swap_blocks_v2(
    src: tuples.Cache,
    dst: tuples.Cache,
    block_size: int,
    swap_type: int,
    block_mapping: Sequence[tuple[int, int]],
) -> None:
    """Copy blocks of `block_size` bytes in (swap_type 0: host to device) or out (1)."""
    if not block_mapping:
        return
    placements = [kvplan.Placement.HOST, kvplan.Placement.DEVICE]
    src_at, dst_at = placements if swap_type == 0 else reversed(placements)
    src_blocks, dst_blocks = last_wins([s for s, _ in block_mapping], [d for _, d in block_mapping])
    _engine().swap_blocks(
        tuples.blocks_at(src, max(src_blocks) + 1, block_size, src_at),
        tuples.blocks_at(dst, max(dst_blocks) + 1, block_size, dst_at),
        dict(zip(src_blocks, dst_blocks, strict=True)),
    )


@_as_status
def transfer_cache_v2(
    task_id: int, transfer_config: tuples.TransferConfig, block_config: tuples.BlockConfig
) -> None:
    """Push one layer, and wait until it has arrived; `task_id` is not used."""
    del task_id
    engine = _engine()
    cache_id, slot, layer, *_ = transfer_config
    block_nbytes, src_blocks, dst_blocks = block_config
    src, dst = last_wins(list(src_blocks), list(dst_blocks))
    to, layers = tuples.destination_of(transfer_config, block_nbytes)
    is_blocks = any(it.paged for it in engine.caches() if it.cache_id == cache_id)
    if is_blocks and not src:  # a row to a row, whatever they are
        src, dst = [slot], [to.batch_index if isinstance(to, kvplan.CacheIndex) else 0]
    transfer = kvplan.Transfer(
        kvplan.Rows(
            tuples.cache_called(_engine(), cache_id), src or None, None if is_blocks else slot
        ),
        kvplan.Rows(to, dst or None),
        layers=layers,
    )
    task = engine.layered(transfer)
    task.ready(layer)
    task.wait(wait_time_ms(_datadist()._engine_options))
