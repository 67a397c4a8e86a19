"""The values: descriptions, keys, transfer configurations, cluster addresses."""

from __future__ import annotations

from kvplan.llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests.llm_datadist.validation.row import (
    ACCEPTED,
    INVALID,
    TYPE,
    VALUE,
    Accepted,
    Raised,
    Row,
    status,
)

INT8, HOST, DEVICE = DataType.DT_INT8, Placement.HOST, Placement.DEVICE
UNPARSED = Raised(RuntimeError)
SIZE_UNKNOWN = {
    "official": status(LLMStatusCode.LLM_SUCCESS),
    "ours": INVALID,
    "why": "an error never carries the status of a success (defect 6)",
}


def desc(
    num_tensors: int = 2, shape: object = (4,), data_type: object = INT8, *rest: object
) -> CacheDesc:
    return CacheDesc(num_tensors, shape, data_type, *rest)  # type: ignore[arg-type]


def keyed(*arguments: object) -> TransferWithCacheKeyConfig:
    return TransferWithCacheKeyConfig(*arguments)  # type: ignore[arg-type]


def cluster(ip: object, port: object = 1) -> LLMClusterInfo:
    given = LLMClusterInfo()
    given.append_remote_ip_info(ip, port)  # type: ignore[arg-type]
    return given


def remote(ip: str) -> list[tuple[int, int]]:
    return cluster(ip).remote_ip_info_list


def cpu_cache(placement: Placement, addresses: list[int]) -> Cache:
    return Cache.create_cpu_cache(desc(2, (4,), INT8, placement), addresses)


DATADISTS = [
    Row("LLMDataDist('p',1)", TYPE, lambda: LLMDataDist("p", 1)),  # type: ignore[arg-type]
    Row("LLMDataDist(PROMPT,-1)", VALUE, lambda: LLMDataDist(LLMRole.PROMPT, -1)),
    Row("LLMDataDist(PROMPT,2**64)", VALUE, lambda: LLMDataDist(LLMRole.PROMPT, 2**64)),
    Row(
        "LLMDataDist(None,1)",
        ACCEPTED,
        lambda: LLMDataDist(None, 1),  # type: ignore[arg-type]
        ours=TYPE,
        why="None is not a role; the official engine fails later, with a KeyError (defect 8)",
    ),
]

DESCRIPTIONS = [
    Row("CacheDesc num_tensors -1", VALUE, lambda: desc(-1)),
    Row("CacheDesc num_tensors 2**32", VALUE, lambda: desc(2**32)),
    Row("CacheDesc shape []", INVALID, lambda: desc(2, [])),
    Row("CacheDesc shape str elem", TYPE, lambda: desc(2, ["4"])),
    Row("CacheDesc shape dim 0", ACCEPTED, lambda: desc(2, [0])),
    Row("CacheDesc shape dim -1", ACCEPTED, lambda: desc(2, [-1])),
    Row("CacheDesc dtype int", TYPE, lambda: desc(2, [4], 2)),
    Row("CacheDesc placement int", TYPE, lambda: desc(2, [4], INT8, 1)),
    Row("CacheDesc batch_dim 1 of 1", INVALID, lambda: desc(2, [4], INT8, DEVICE, 1)),
    Row("CacheDesc batch_dim -1", INVALID, lambda: desc(2, [4], INT8, DEVICE, -1)),
    Row("CacheDesc seq_len_dim 5", INVALID, lambda: desc(2, [4], INT8, DEVICE, 0, 5)),
    Row("CacheDesc seq_len_dim -2", INVALID, lambda: desc(2, [4], INT8, DEVICE, 0, -2)),
    Row("CacheDesc shape tuple", Accepted((4,)), lambda: desc(2, (4,)).shape),
    Row("CacheDesc num_tensors 0", Accepted(0), lambda: desc(0).num_tensors),
    Row("CacheDesc 33 dims", Accepted([1] * 33), lambda: desc(2, [1] * 33).shape),
    Row("CacheDesc DT_STRING", ACCEPTED, lambda: desc(2, [2], DataType.DT_STRING)),
    Row("CacheDesc([0]).size", call=lambda: desc(2, [0]).size, **SIZE_UNKNOWN),
    Row("CacheDesc([-1]).size", call=lambda: desc(2, [-1]).size, **SIZE_UNKNOWN),
    Row(
        "CacheDesc([2,3],DT_FLOAT16).size",
        Accepted(12),
        lambda: desc(2, [2, 3], DataType.DT_FLOAT16).size,
    ),
    Row("CacheDesc DT_STRING size", Accepted(32), lambda: desc(2, [2], DataType.DT_STRING).size),
    Row(
        "CacheDesc huge overflow size",
        call=lambda: desc(2, [2**40, 2**40]).size,
        **SIZE_UNKNOWN,
    ),
]

KEYS = [
    Row("CacheKey()", INVALID, CacheKey),
    Row("CacheKey(1)", INVALID, lambda: CacheKey(1)),
    Row("CacheKey(1,-1)", VALUE, lambda: CacheKey(1, -1)),
    Row("CacheKey 5 args", INVALID, lambda: CacheKey(1, 2, 3, 4, 5)),
    Row(
        "CacheKey(cluster_id=1,req_id=1,foo=1)",
        INVALID,
        lambda: CacheKey(cluster_id=1, req_id=1, foo=1),
    ),
    Row("CacheKey(1,2,cluster_id=9)", Accepted(1), lambda: CacheKey(1, 2, cluster_id=9).cluster_id),
    Row(
        "CacheKey prompt_cluster_id+cluster_id",
        Accepted(2),
        lambda: CacheKey(prompt_cluster_id=1, cluster_id=2, req_id=3).cluster_id,
    ),
    Row("BlocksCacheKey()", INVALID, BlocksCacheKey),
    Row("BlocksCacheKey('a')", TYPE, lambda: BlocksCacheKey("a")),
    Row("BlocksCacheKey(-1)", Accepted(-1), lambda: BlocksCacheKey(-1).cluster_id),
    Row("BlocksCacheKey(2**70)", Accepted(2**70), lambda: BlocksCacheKey(2**70).cluster_id),
    Row("BlocksCacheKey(None)", Accepted(None), lambda: BlocksCacheKey(None).cluster_id),
    Row(
        "CacheKeyByIdAndIndex(1,-5)",
        Accepted(-5),
        lambda: CacheKeyByIdAndIndex(1, -5).cache_id,
    ),
    Row("CacheKeyByIdAndIndex(1,1,-1)", VALUE, lambda: CacheKeyByIdAndIndex(1, 1, -1)),
]

TRANSFERS = [
    Row(
        "TransferConfig(1,[1],range(2,1))",
        INVALID,
        lambda: TransferConfig(1, [1], range(2, 1)),
    ),
    Row(
        "TransferConfig(1,[1],range(0,4,2))",
        INVALID,
        lambda: TransferConfig(1, [1], range(0, 4, 2)),
    ),
    Row("TransferConfig(1,None)", TYPE, lambda: TransferConfig(1, None)),  # type: ignore[arg-type]
    Row("TransferConfig(1,[-1])", VALUE, lambda: TransferConfig(1, [-1])),
    Row("TWCK(key,None,..)", TYPE, lambda: keyed(BlocksCacheKey(1), None, range(1))),
    Row(
        "TWCK len mismatch", INVALID, lambda: keyed(CacheKeyByIdAndIndex(1, 1), range(2), range(1))
    ),
    Row(
        "TWCK blocks key batch 1", INVALID, lambda: keyed(BlocksCacheKey(1), range(1), range(1), 1)
    ),
    Row("TWCK CacheKey", TYPE, lambda: keyed(CacheKey(1, 1), range(1), range(1))),
    Row("MemInfo(int)", TYPE, lambda: MemInfo(0, 4096, 4096)),  # type: ignore[arg-type]
    Row("create_cpu_cache DEVICE", INVALID, lambda: cpu_cache(DEVICE, [4096, 8192])),
    Row("create_cpu_cache wrong n", INVALID, lambda: cpu_cache(HOST, [4096])),
    Row(
        "create_cpu_cache ok",
        Accepted([4096, 8192]),
        lambda: cpu_cache(HOST, [4096, 8192]).tensor_addrs,
    ),
]

CLUSTERS = [
    Row("ClusterInfo ip bad", UNPARSED, lambda: cluster("a.b")),
    Row("ClusterInfo ip short '1'", Accepted([(0x01000000, 1)]), lambda: remote("1")),
    Row("ClusterInfo ipv6", UNPARSED, lambda: cluster("::1")),
    Row("ClusterInfo port 65536", VALUE, lambda: cluster("127.0.0.1", 65536)),
    Row("ClusterInfo port str", TYPE, lambda: cluster("127.0.0.1", "1")),
]

ROWS = [*DATADISTS, *DESCRIPTIONS, *KEYS, *TRANSFERS, *CLUSTERS]
