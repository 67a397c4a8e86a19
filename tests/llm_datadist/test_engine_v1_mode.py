"""LLMDataDist without llm.EnableCacheManager, as version 1 of the original."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplan.llm_datadist import (
    CacheKey,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    permit_several_engines,
)
from tests.llm_datadist.descs import desc
from tests.llm_datadist.peer import cluster_info
from tests.support.refusals import refused

SUCCESS = LLMStatusCode.LLM_SUCCESS
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
LISTEN = {"llm.listenIpInfo": "127.0.0.1:0"}


@pytest.fixture(params=[2, 1], ids=["two ids", "one id"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[LLMDataDist, LLMDataDist]]:
    """A prompt of cluster 1, and a decoder, which may have the same id; not linked."""
    permit_several_engines()
    prompt = LLMDataDist(LLMRole.PROMPT, 1)
    decoder = LLMDataDist(LLMRole.DECODER, request.param)
    prompt.init({"ge.exec.deviceId": "0", "llm.SyncKvCacheWaitTime": "5000", **LISTEN})
    decoder.init({"ge.exec.deviceId": "1", "llm.EnableCacheManager": "0"})
    yield prompt, decoder
    decoder.finalize()
    prompt.finalize()
    permit_several_engines(False)


def info_of(datadist: LLMDataDist) -> LLMClusterInfo:
    assert datadist._llm_datadist is not None
    return cluster_info(1, str(datadist._llm_datadist.listen_address))


def test_a_decoder_pulls_by_key(pair: tuple[LLMDataDist, LLMDataDist]) -> None:
    prompt, decoder = pair
    with refused(NOT_YET_LINK):
        decoder.check_link_status(1)
    info = LLMClusterInfo()  # no local address: version 1 needs none
    info.remote_cluster_id = 1
    info.append_remote_ip_info(*info_of(prompt).remote_ip_info_list[0])
    for _ in range(2):
        assert decoder.link_clusters([info], 5000) == (SUCCESS, [SUCCESS])
        assert decoder.check_link_status(remote_cluster_id=1) is None
        key = CacheKey(1, 7)
        theirs = prompt.kv_cache_manager.allocate_cache(desc(), [key])
        given = prompt.kv_cache_manager.get_cache_tensors(theirs, 1)[0].numpy()
        given[:] = 5
        ours = decoder.kv_cache_manager.allocate_cache(desc())
        decoder.kv_cache_manager.pull_cache(key, ours, 0)
        found = decoder.kv_cache_manager.get_cache_tensors(ours, 1)[0].numpy()
        assert (found[0] == 5).all()
        assert decoder.cluster_id in (1, 2)
        assert decoder.unlink_clusters([info], 5000) == (SUCCESS, [SUCCESS])
    with refused(NOT_YET_LINK):
        decoder.check_link_status(1)


def test_one_id_is_refused_where_others_know_the_engine_by_it(
    pair: tuple[LLMDataDist, LLMDataDist],
) -> None:
    prompt, decoder = pair
    held = decoder.kv_cache_manager.allocate_cache(desc())
    code = decoder.link_clusters([info_of(prompt)])[0]
    same = decoder.cluster_id == prompt.cluster_id
    assert held.per_device_tensor_addrs[0]
    assert code == (LLMStatusCode.LLM_PARAM_INVALID if same else SUCCESS)


def test_what_version_1_has_not(pair: tuple[LLMDataDist, LLMDataDist]) -> None:
    for datadist in pair:
        with refused("LLM_PARAM_INVALID"):
            _ = datadist.cache_manager
        with refused("LLM_PARAM_INVALID"):
            datadist.link("x", {1: 0, 2: 1}, "")
        with refused("LLM_PARAM_INVALID"):
            datadist.unlink(1)
        with refused("LLM_PARAM_INVALID"):
            datadist.query_register_mem_status(1)
        with pytest.raises(TypeError):
            datadist.check_link_status("1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="remote_cluster_id"):
            datadist.check_link_status(-1)


def test_a_role_is_switched_to_another(pair: tuple[LLMDataDist, LLMDataDist]) -> None:
    prompt, decoder = pair
    with refused("LLM_PARAM_INVALID"):
        prompt.switch_role(LLMRole.PROMPT, LISTEN)
    with refused("LLM_PARAM_INVALID"):
        decoder.switch_role(LLMRole.PROMPT)
    assert decoder.link_clusters([info_of(prompt)])[0] == SUCCESS
    with refused(LLMStatusCode.LLM_EXIST_LINK):
        decoder.switch_role(LLMRole.PROMPT, LISTEN)
    decoder.unlink_clusters([info_of(prompt)])
    prompt.switch_role(LLMRole.DECODER)
    decoder.switch_role(LLMRole.PROMPT, LISTEN)
    info = info_of(decoder)
    info.remote_cluster_id = decoder.cluster_id
    codes = prompt.link_clusters([info])[1]
    same = decoder.cluster_id == prompt.cluster_id
    assert same or codes == [SUCCESS]
    prompt.kv_cache_manager.allocate_cache(desc())
    with refused("LLM_PARAM_INVALID"):
        prompt.kv_cache_manager.allocate_cache(desc(), [CacheKey(1, 1)])
