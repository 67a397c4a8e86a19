"""Links by both styles, between processes: codes, and the rights of each role."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from kvplan.llm_datadist import (
    CacheKeyByIdAndIndex,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    RegisterMemStatus,
)
from tests.llm_datadist.conftest import MakeDataDist, MakePeer
from tests.llm_datadist.contents import clear
from tests.llm_datadist.descs import desc
from tests.llm_datadist.peer import REMOTE, REQUEST, Peer, cluster_info, link
from tests.support.ports import free_port
from tests.support.refusals import refused

SUCCESS = LLMStatusCode.LLM_SUCCESS
PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED
ALREADY_LINK = LLMStatusCode.LLM_ALREADY_LINK
UNLINK_FAILED = LLMStatusCode.LLM_UNLINK_FAILED
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
LISTEN = "llm.listenIpInfo"
HIXL = {"llm.TransferBackend": "hixl", LISTEN: "127.0.0.1:0"}


def unreachable(cluster_id: int = 9) -> LLMClusterInfo:
    """Return the info of a cluster where no engine listens."""
    return cluster_info(cluster_id, f"127.0.0.1:{free_port()}")


def test_codes_of_linking_and_unlinking(make_peer: MakePeer, datadist: LLMDataDist) -> None:
    one, two = make_peer(1, **REMOTE), make_peer(3, **REMOTE)
    assert datadist.link_clusters([one.info]) == (SUCCESS, [SUCCESS])
    both = datadist.link_clusters(clusters=(one.info, two.info), timeout=5000)
    assert both == (ALREADY_LINK, [ALREADY_LINK, SUCCESS])
    with refused(LLMStatusCode.LLM_EXIST_LINK):
        datadist.switch_role(LLMRole.DECODER)
    assert datadist.unlink_clusters([one.info]) == (SUCCESS, [SUCCESS])
    assert datadist.unlink_clusters([one.info, two.info], 5000, False) == (
        UNLINK_FAILED,
        [UNLINK_FAILED, SUCCESS],
    )
    assert datadist.unlink_clusters([one.info, two.info], force=True) == (
        SUCCESS,
        [SUCCESS, SUCCESS],
    )
    datadist.switch_role(LLMRole.DECODER)
    link(datadist, one, two)


def test_results_name_unreachable_clusters_and_the_others_are_linked(
    make_peer: MakePeer, datadist: LLMDataDist
) -> None:
    peer = make_peer(1, **REMOTE)
    own = cluster_info(2, peer.address)
    no_address, two_addresses = LLMClusterInfo(), cluster_info(5, "127.0.0.1:1")
    no_address.remote_cluster_id = 4
    no_address.append_local_ip_info("127.0.0.1", 0)
    two_addresses.append_remote_ip_info("127.0.0.1", 2)
    refusing = unreachable()
    clusters = [own, no_address, refusing, peer.info, two_addresses]
    assert datadist.link_clusters(clusters) == (
        PARAM_INVALID,  # the code of the last failure
        [PARAM_INVALID, PARAM_INVALID, LINK_FAILED, SUCCESS, PARAM_INVALID],
    )
    assert datadist.link_clusters([own, refusing]) == (LINK_FAILED, [PARAM_INVALID, LINK_FAILED])
    assert datadist.link_clusters([]) == datadist.unlink_clusters([]) == (PARAM_INVALID, [])
    never = datadist.unlink_clusters([refusing], 500)
    assert never == (UNLINK_FAILED, [UNLINK_FAILED])


def test_unlinking_needs_no_address(remote_pair: tuple[Peer, LLMDataDist]) -> None:
    _, datadist = remote_pair
    info = LLMClusterInfo()
    info.remote_cluster_id = 1
    assert datadist.unlink_clusters([info], force=True) == (SUCCESS, [SUCCESS])


def test_the_log_names_the_cluster_once(
    remote_pair: tuple[Peer, LLMDataDist], caplog: pytest.LogCaptureFixture
) -> None:
    peer, datadist = remote_pair
    caplog.set_level("ERROR")
    assert datadist.link_clusters([peer.info]) == (ALREADY_LINK, [ALREADY_LINK])
    assert "cluster 1 is linked already" in caplog.text
    assert "cluster 1: cluster 1" not in caplog.text


def test_a_local_address_is_needed_without_local_comm_res(
    make_peer: MakePeer, make_datadist: MakeDataDist
) -> None:
    peer = make_peer(1, **REMOTE)
    info = LLMClusterInfo()
    info.remote_cluster_id = 1
    ip, _, port = peer.address.partition(":")
    info.append_remote_ip_info(ip, int(port))
    for comm_res in ({}, {"llm.LocalCommRes": ""}):
        datadist = make_datadist(**comm_res)
        with refused("LLM_PARAM_INVALID") as error:
            datadist.link_clusters([info])
        assert "llm.LocalCommRes is not given; give the cluster an address" in str(error.value)
        assert "append_local_ip_info(ip, port)" in str(error.value)
        datadist.finalize()
    datadist = make_datadist(**{"llm.LocalCommRes": '{"version": "1.3"}'})
    assert datadist.link_clusters([info]) == (SUCCESS, [SUCCESS])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None,), TypeError),
        (([1],), TypeError),
        (([], "1"), TypeError),
        (([], 2**31), ValueError),
    ],
)
def test_arguments_of_another_type(
    datadist: LLMDataDist, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    for call in (datadist.link_clusters, datadist.unlink_clusters):
        with pytest.raises(error):
            call(*arguments)
    empty_info = [LLMClusterInfo()]
    with refused("LLM_PARAM_INVALID"):  # no local address
        datadist.link_clusters(empty_info)
    with pytest.raises(TypeError):
        datadist.unlink_clusters(empty_info)  # no cluster id
    for timeout in (0, -1):
        with refused("LLM_PARAM_INVALID"):
            datadist.link_clusters([], timeout)
        with refused("LLM_PARAM_INVALID"):
            datadist.unlink_clusters([], timeout)
    with pytest.raises(TypeError):
        datadist.unlink_clusters([], 1, force="x")  # type: ignore[arg-type]


def test_both_ends_link_and_unlink_with_the_hixl_backend(
    make_peer: MakePeer, make_datadist: MakeDataDist
) -> None:
    peer = make_peer(1, **HIXL)
    datadist = make_datadist(2, **HIXL)
    assert datadist._llm_datadist is not None
    link(datadist, peer)
    assert datadist.link_clusters([peer.info]) == (ALREADY_LINK, [ALREADY_LINK])
    code = """
        info = LLMClusterInfo()
        info.remote_cluster_id = 2
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info("127.0.0.1", port)
        result = datadist.%s([info])
    """
    port = int(str(datadist._llm_datadist.listen_address).partition(":")[2])
    assert peer.run(code % "link_clusters", port=port) == (SUCCESS, [SUCCESS])
    assert peer.run(code % "link_clusters", port=port) == (ALREADY_LINK, [ALREADY_LINK])
    assert datadist.unlink_clusters([peer.info]) == (SUCCESS, [SUCCESS])
    assert peer.run(code % "unlink_clusters", port=port) == (SUCCESS, [SUCCESS])
    assert peer.run(code % "unlink_clusters", port=port) == (UNLINK_FAILED, [UNLINK_FAILED])
    for call in (
        lambda: datadist.link("x", {1: 0, 2: 1}, ""),
        lambda: datadist.unlink(1),
        lambda: datadist.query_register_mem_status(1),
    ):
        with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED):
            call()


@pytest.mark.parametrize("options", [REMOTE, HIXL])
def test_an_unlink_that_the_peer_does_not_confirm_is_reported(
    make_peer: MakePeer, make_datadist: MakeDataDist, options: dict[str, str]
) -> None:
    peer, datadist = make_peer(1, **options), make_datadist(2, **options)
    link(datadist, peer)
    peer.stop()
    try:
        for _ in range(2):  # at the second call the link has already ended
            assert datadist.unlink_clusters([peer.info], 300) == (UNLINK_FAILED, [UNLINK_FAILED])
    finally:
        peer.resume()


def rank_table() -> str:
    """Return a table of two ranks on this host, as the official documents show it."""
    device = [{"device_id": str(index), "rank_id": str(index)} for index in range(2)]
    server = {"server_id": "127.0.0.1", "device": device}
    return json.dumps(
        {"version": "1.0", "server_count": "1", "status": "completed", "server_list": [server]}
    )


def final_status(datadist: LLMDataDist, comm_id: int) -> RegisterMemStatus:
    """Return the final status of linking by name."""
    deadline = time.monotonic() + 30
    while (now := datadist.query_register_mem_status(comm_id)) is RegisterMemStatus.PREPARING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return now


LINK = """
result = datadist.link(name, {1: 0, 2: 1}, table)
"""


@pytest.mark.parametrize("table", ["", rank_table()])
def test_link_by_name(make_peer: MakePeer, make_datadist: MakeDataDist, table: str) -> None:
    peer = make_peer(1, **REQUEST)
    datadist = make_datadist(2, **REQUEST, **{"ge.exec.deviceId": "1"})
    theirs = "cache = manager.allocate_cache(desc(4, 4)); fill(cache, 1); result = cache.cache_id"
    cache_id = peer.run(theirs)
    name = f"pair-{os.getpid()}"
    comm_id = datadist.link(comm_name=name, cluster_rank_info={1: 0, 2: 1}, rank_table=table)
    assert comm_id == 1
    assert datadist.query_register_mem_status(comm_id) is RegisterMemStatus.PREPARING
    assert peer.run(LINK, name=name, table=table) == 1
    assert final_status(datadist, comm_id) is RegisterMemStatus.OK
    cache = datadist.cache_manager.allocate_cache(desc())
    found = clear(cache)
    datadist.cache_manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, 3), cache)
    assert (found[1][0] == peer.bytes_of("cache")[1, 3]).all()
    with refused("LLM_PARAM_INVALID"):
        (datadist.cache_manager.register_cache(desc(), cache.tensor_addrs, remote_accessible=True))
    with refused(LLMStatusCode.LLM_EXIST_LINK):
        datadist.switch_role(LLMRole.MIX)
    datadist.unlink(comm_id)
    with refused(NOT_YET_LINK):
        datadist.unlink(comm_id)
    with refused(NOT_YET_LINK):
        datadist.query_register_mem_status(comm_id)
    assert datadist.link(name + "-again", {1: 0, 2: 1}, table) == 2
    datadist.unlink(2)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None, {2: 0, 1: 1}, ""), TypeError),
        ((1, {2: 0, 1: 1}, ""), TypeError),
        (("x", None, ""), TypeError),
        (("x", {2: "0", 1: 1}, ""), TypeError),
        (("x", {2: 0, 1: 1}, None), TypeError),
        (("x", {2: 0, -1: 1}, ""), ValueError),
        (("x", {2: 0, 1: 2**32}, ""), ValueError),
        (("", {2: 0, 1: 1}, ""), None),
        (("x" * 128, {2: 0, 1: 1}, ""), None),
        (("x", {2: 1, 1: 0}, ""), None),
        (("x", {2: 0}, ""), None),
        (("x", dict.fromkeys(range(5), 0), ""), None),
        (("x", {1: 0, 3: 1}, ""), None),
        (("x", {2: 0, 1: 1}, "no JSON"), None),
    ],
)
def test_invalid_links_by_name_are_refused(
    datadist: LLMDataDist, arguments: tuple[Any, ...], error: type[Exception] | None
) -> None:
    if error is None:
        with refused("LLM_PARAM_INVALID"):
            datadist.link(*arguments)
    else:
        with pytest.raises(error):
            datadist.link(*arguments)
    # `link` was not called, so caches are still registered for peers.
    assert not datadist.cache_manager._is_call_linked


def test_ranks_may_be_equal_and_ids_must_be_uint64(datadist: LLMDataDist) -> None:
    comm_id = datadist.link(f"equal-{os.getpid()}", {2: 0, 1: 0}, "")
    datadist.unlink(comm_id)
    for call in (datadist.unlink, datadist.query_register_mem_status):
        with refused(NOT_YET_LINK):
            call(comm_id=77)
        with pytest.raises(ValueError, match="comm_id"):
            call(-1)
        with pytest.raises(TypeError):
            call("1")  # type: ignore[arg-type]


def test_a_peer_that_is_started_again_is_linked_again(
    make_peer: MakePeer, datadist: LLMDataDist
) -> None:
    peer = make_peer(1, **REMOTE)
    link(datadist, peer)
    peer.kill()
    second = make_peer(1, **REMOTE)
    link(datadist, second)
    assert datadist.unlink_clusters([second.info]) == (SUCCESS, [SUCCESS])
