"""A third engine with the cluster id and instance of a peer does not get the peer's transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvplan import (
    BlockLease,
    Cache,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    LinkState,
    LlmDataDist,
    LLMStatusCode,
)
from tests.datadist.peer import Peer
from tests.support.refusals import refused

pytestmark = pytest.mark.over_tcp

MakeEngine = Callable[..., LlmDataDist]
DESC = CacheDesc(2, (4, 16), DataType.DT_INT32)
OFFER = """
cache = datadist.allocate_blocks_cache(CacheDesc(2, (4, 16), DataType.DT_INT32))
arrays = datadist.arrays(cache)
for array in arrays:
    array[:] = value
lease = datadist.lease_blocks(cache, [2, 0])
result = datadist._engine.links.instance.hex(), cache.cache_id, lease.to_bytes()
"""
TAKE_PLACE = """
if instance:
    links = datadist._engine.links
    object.__setattr__(links._engine, "instance", bytes.fromhex(instance))
(it,) = datadist.link_clusters([cluster], 20_000)
result = it.status.name
"""


def cluster_of(engine: LlmDataDist) -> ClusterInfo:
    assert engine.listen_address is not None
    return ClusterInfo(engine.cluster_id, engine.listen_address)


@pytest.fixture
def here(make_engine: MakeEngine) -> tuple[LlmDataDist, Cache]:
    engine = make_engine(2, listen=True)
    cache = engine.allocate_blocks_cache(DESC)
    for array in engine.arrays(cache):
        array[:] = 7
    return engine, cache


def test_transfers_continue_with_the_original_peer(
    here: tuple[LlmDataDist, Cache], make_peer: Callable[[], Peer]
) -> None:
    (engine, cache), peer, impostor = here, make_peer(), make_peer()
    instance, cache_id, _ = peer.run(OFFER, value=1)
    _, its_cache_id, its_lease = impostor.run(OFFER, value=2)
    assert cache_id == its_cache_id
    link_with_me: dict[str, Any] = {"cluster": cluster_of(engine), "instance": ""}
    assert peer.run(TAKE_PLACE, **link_with_me) == "LLM_SUCCESS"
    link_with_me["instance"] = instance
    assert impostor.run(TAKE_PLACE, **link_with_me) == "LLM_ALREADY_LINK"

    engine.pull_blocks(CacheIndex(1, cache_id), cache, [0], [0])
    assert {int(array[0, 0]) for array in engine.arrays(cache)} == {1}
    engine.push_blocks(cache, CacheIndex(1, cache_id), [1], [3])
    first_values = "result = {int(array[3, 0]) for array in arrays}"
    assert (peer.run(first_values), impostor.run(first_values)) == ({7}, {2})
    forged = BlockLease.from_bytes(its_lease)
    object.__setattr__(forged, "instance", bytes.fromhex(instance))
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "was released or moved by"):
        engine.pull_blocks(forged, cache, None, [2, 3])


def test_a_successor_refuses_leases_of_an_ended_engine(
    here: tuple[LlmDataDist, Cache], make_peer: Callable[[], Peer]
) -> None:
    (engine, cache), peer, successor = here, make_peer(), make_peer()
    instance, _, lease = peer.run(OFFER, value=1)
    successor.run(OFFER, value=2)
    link_with_me: dict[str, Any] = {"cluster": cluster_of(engine), "instance": ""}
    assert peer.run(TAKE_PLACE, **link_with_me) == "LLM_SUCCESS"
    engine.pull_blocks(BlockLease.from_bytes(lease), cache, None, [0, 1])
    peer.run("datadist.finalize()")
    link_with_me["instance"] = instance
    assert successor.run(TAKE_PLACE, **link_with_me) == "LLM_SUCCESS"
    assert [link.state for link in engine.links()] == [LinkState.LINKED]
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "was released or moved by"):
        engine.pull_blocks(BlockLease.from_bytes(lease), cache, None, [2, 3])
