"""Two engines that link over tcp, with options for its connections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LlmRole,
    LLMStatusCode,
    Options,
    RegisterMemStatus,
    Rows,
    Transfer,
)
from tests.support.refusals import refused

PREPARING = RegisterMemStatus.PREPARING

DESC = CacheDesc(num_tensors=4, shape=(16, 4096), data_type=DataType.DT_UINT8)


class MakeEngine(Protocol):
    def __call__(self, number: int, listen: str = "", **fields: Any) -> LlmDataDist: ...


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    with ExitStack() as held:

        def make(number: int, listen: str = "", **fields: Any) -> LlmDataDist:
            engine = LlmDataDist(number, LlmRole.MIX)
            engine.initialize(Options(transport="tcp", listen_ip_info=listen, **fields))
            held.callback(engine.finalize)
            return engine

        yield make


def check_that_blocks_move(owner: LlmDataDist, user: LlmDataDist) -> None:
    theirs, mine = (
        owner.allocate_blocks_cache(DESC, BlocksCacheKey(1)),
        user.allocate_blocks_cache(DESC),
    )
    for number, tensor in enumerate(owner.arrays(theirs)):
        tensor[:] = number + 1
    user.pull_blocks(BlocksCacheKey(1), mine, [4, 5, 9], [7, 8, 2])
    for number, tensor in enumerate(user.arrays(mine)):
        moved = np.isin(np.arange(16), [7, 8, 2])
        assert (tensor[moved] == number + 1).all()
        assert not tensor[~moved].any()
    owner.deallocate_cache(theirs)
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        user.pull_blocks(BlocksCacheKey(1), mine, [4], [7])


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
@pytest.mark.parametrize("listening", ["the owner", "the user"])
def test_the_end_that_listens_is_dialled(
    make_engine: MakeEngine, address: str, listening: str
) -> None:
    at_owner, at_user = (address, "") if listening == "the owner" else ("", address)
    owner, user = make_engine(1, at_owner), make_engine(2, at_user)
    here, there = (user, owner) if at_owner else (owner, user)
    info = ClusterInfo(there.cluster_id, str(there.listen_address))
    here.link_clusters([info]).raise_for_status()
    for engine in (owner, user):
        (link,) = engine.links()
        assert link.transport == "tcp"
        assert str(there.listen_address) in link.way
    check_that_blocks_move(owner, user)


@pytest.mark.parametrize("linking", ["one", "many"])
def test_many_links_of_many_connections_come_up_at_once(
    make_engine: MakeEngine, linking: str
) -> None:
    count, connections, here = 16, 8, "127.0.0.1:0"
    one = make_engine(1, here if linking == "many" else "", tcp_connections=connections)
    many = [
        make_engine(number, here if linking == "one" else "", tcp_connections=connections)
        for number in range(2, 2 + count)
    ]

    def link(engine: LlmDataDist, *peers: LlmDataDist) -> None:
        clusters = [ClusterInfo(peer.cluster_id, str(peer.listen_address)) for peer in peers]
        engine.link_clusters(clusters, timeout_ms=60_000).raise_for_status()

    if linking == "one":
        link(one, *many)
    else:
        with ThreadPoolExecutor(count) as threads:
            for done in [threads.submit(link, item, one) for item in many]:
                done.result()
    ways = [link.way for link in one.links()]
    assert len(ways) == count
    assert all(f"{connections} connections" in way for way in ways)


def test_engines_that_do_not_listen_link_over_unix_sockets(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Unix sockets have no congestion control, so `tcp_congestion` does not apply to them."""
    owner, user = (
        make_engine(number, comm_dir=str(tmp_path), tcp_connections=2, tcp_congestion="reno")
        for number in (1, 2)
    )
    begun = [(engine, engine.link("both", {1: 0, 2: 1})) for engine in (owner, user)]
    deadline = time.monotonic() + 60
    while any(item.query_register_mem_status(comm) is PREPARING for item, comm in begun):
        assert time.monotonic() < deadline
    for engine, _ in begun:
        (link,) = engine.links()
        assert link.way.startswith(f"ipc://{tmp_path}/")
    check_that_blocks_move(owner, user)


def test_each_end_uses_its_own_options_for_connections(make_engine: MakeEngine) -> None:
    owner = make_engine(1, "127.0.0.1:0", tcp_connections=3, tcp_congestion="reno")
    user = make_engine(2, tcp_connections=5)
    user.link_clusters([ClusterInfo(1, str(owner.listen_address))]).raise_for_status()
    assert [engine.links()[0].way.rpartition(", ")[2] for engine in (owner, user)] == [
        "3 connections"
    ] * 2
    check_that_blocks_move(owner, user)


@pytest.mark.parametrize("demands", [(True, False), (False, True)], ids=["owner", "user"])
def test_one_engine_that_demands_encryption_is_enough(
    make_engine: MakeEngine, demands: tuple[bool, bool]
) -> None:
    owner = make_engine(1, "127.0.0.1:0", encrypt=demands[0])
    user = make_engine(2, encrypt=demands[1])
    user.link_clusters([ClusterInfo(1, str(owner.listen_address))]).raise_for_status()
    assert [engine.links()[0].way.endswith(", encrypted") for engine in (owner, user)] == [True] * 2
    check_that_blocks_move(owner, user)


def test_an_unknown_congestion_control_is_refused(make_engine: MakeEngine) -> None:
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "tcp: congestion='none7' is not available"):
        make_engine(1, tcp_congestion="none7")


def test_more_leases_than_a_request_has_room_for_are_refused(make_engine: MakeEngine) -> None:
    owner, user = make_engine(1, "127.0.0.1:0"), make_engine(2)
    user.link_clusters([ClusterInfo(1, owner.listen_address)]).raise_for_status()
    theirs = owner.allocate_blocks_cache(DESC)
    mine = [user.allocate_blocks_cache(DESC) for _ in range(33)]
    transfers = {
        str(number): Transfer(Rows(owner.lease_blocks(theirs, [number % 16])), Rows(cache, [0]))
        for number, cache in enumerate(mine)
    }
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "33 leases and .*; tcp checks at most 32"):
        user.run(transfers)
    del transfers["0"]
    for _ in range(2):  # the second pull uses no planner
        user.run(transfers)
