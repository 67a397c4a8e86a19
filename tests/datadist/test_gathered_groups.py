"""Several caches of a request, gathered from several engines at once."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from random import Random

import numpy as np
import pytest
from msgspec import structs

from kvplan import (
    CacheDesc,
    CacheIndex,
    DataType,
    GatherError,
    LlmDataDist,
    LLMException,
    LLMStatusCode,
    PlanEvent,
    Rows,
    Shard,
    Transfer,
)
from kvplan.engine.gather import Several
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.machine import Machine
from tests.support.lines import interrupted
from tests.support.refusals import refused

pytestmark = pytest.mark.over_cuda

INVALID = "LLM_PARAM_INVALID"
STATE = CacheDesc(1, (5, 32), DataType.DT_INT32, kv_tensor_format="block state")


def scales_and_values(heads: range) -> dict[str, CacheDesc]:
    """Return quantized values of some of four heads, with a scale for each token and head."""
    shard = Shard(range(2), heads, 2, 4)
    number = len(heads)
    return {
        "values": CacheDesc(
            4, (6, 4, number, 8), DataType.DT_INT8, kv_tensor_format="NHD", shard=shard
        ),
        "scales": CacheDesc(
            4, (6, number, 4, 1), DataType.DT_FLOAT, kv_tensor_format="HND", shard=shard
        ),
    }


@pytest.mark.parametrize("unlike", ["refuse", "warn"])
def test_groups_are_gathered_from_several_engines(make_engine: MakeEngine, unlike: str) -> None:
    """Each engine has two of the four heads, and one engine also has the state.

    A gather needs the meaning of its rows, also in an engine that copies bytes of unlike caches.
    """
    sources = [make_engine(item, listen=True) for item in (1, 3)]
    user = make_engine(2, **{"kvplan.unlike_caches": unlike})
    seen: list[PlanEvent] = []
    keys: dict[str, list[CacheIndex]] = {"values": [], "scales": []}
    for rank, source in enumerate(sources):
        link(user, source)
        for name, desc in scales_and_values(range(2 * rank, 2 * rank + 2)).items():
            cache = source.allocate_blocks_cache(desc)
            dtype = np.int8 if name == "values" else np.float32
            source.write_cache(
                cache, [np.full(desc.shape, 10 * rank + index + 1, dtype) for index in range(4)]
            )
            keys[name].append(CacheIndex(source.cluster_id, cache.cache_id))
    state = sources[1].allocate_blocks_cache(STATE)
    sources[1].write_cache(state, [np.full((5, 32), 9, np.int32)])
    mine = {
        name: user.allocate_blocks_cache(desc)
        for name, desc in {**scales_and_values(range(4)), "state": STATE}.items()
    }
    groups = {
        name: Transfer(
            [
                Rows(cache, blocks)
                for cache, blocks in zip(keys[name], [[1, 2], [3, 0]], strict=True)
            ],
            Rows(mine[name], [4, 5]),
            num_tokens=7,
        )
        for name in ("values", "scales")
    }
    state_rows = Rows(CacheIndex(3, state.cache_id), [2])
    groups["state"] = Transfer(state_rows, Rows(mine["state"], [4]))
    user.on_plan(seen.append)
    user.run(groups, timeout_ms=5000)
    for name, axis in (("values", 2), ("scales", 1)):
        for number, array in enumerate(user.arrays(mine[name], copy=True)):
            by_token = np.moveaxis(array, axis, 0)  # (head, block, token, dim)
            assert not by_token[:, :4].any()
            for head in range(4):
                tokens = by_token[head, 4:].reshape(8, -1)
                assert (tokens[:7] == 10 * (head // 2) + number + 1).all()
                assert not tokens[7:].any()
    assert user.arrays(mine["state"], copy=True)[0].max(axis=1).tolist() == [0, 0, 0, 0, 9]
    assert [event.cluster_id for event in seen] == [1, 3]
    first, second = (event.plan for event in seen)
    assert [*first.by_part()] == ["values: source 0", "scales: source 0"]
    assert [*second.by_part()] == ["values: source 1", "scales: source 1", "state"]
    assert user.plan(groups).by_part() == first.by_part() | second.by_part()
    assert user.metrics()["in_flight"] == 0

    without_sources = {"state": Transfer([], Rows(mine["state"], [4]))}
    with refused(INVALID, "part state: src is empty; a gather needs at least one source"):
        user.run(without_sources)
    no_table = {"state": Transfer([Rows(state_rows.cache)], Rows(mine["state"], [4]))}
    with refused(INVALID, r"part state: src\[0\].blocks is None"):
        user.run(no_table)
    half = {
        "values": Transfer(
            [Rows(keys["values"][0], [1, 2])], Rows(mine["values"], [4, 5]), num_tokens=7
        )
    }
    with refused(INVALID, r"part values: no source has layers 0..1, heads 2..3"):
        user.run(half)
    unsigned = dataclasses.replace(
        scales_and_values(range(4))["values"], data_type=DataType.DT_UINT8
    )
    other = Rows(user.allocate_blocks_cache(unsigned), [4, 5])
    with refused(INVALID, "part values: .*DT_INT8.*DT_UINT8"):
        user.run({"values": structs.replace(groups["values"], dst=other)})
    sources[0].finalize()
    with pytest.raises(GatherError, match=r"gather_groups: .*sources\[0\]"):
        user.run(groups, timeout_ms=5000)


def test_sources_come_in_any_order_in_each_group(make_engine: MakeEngine) -> None:
    """Two peers have two heads each, in separate caches. Their sources may also alternate."""

    def one_head(heads: range) -> CacheDesc:
        shard = Shard(range(1), heads, 1, 4)
        shape = 6, 4, len(heads), 2
        return CacheDesc(2, shape, DataType.DT_INT16, kv_tensor_format="NHD", shard=shard)

    engines, user = [make_engine(number, listen=True) for number in (1, 3)], make_engine(2)
    for engine in engines:
        link(user, engine)
    sources, content = [], []
    for head in range(4):
        engine, desc = engines[head % 2], one_head(range(head, head + 1))
        cache = engine.allocate_blocks_cache(desc)
        numbers = 100 * head + np.arange(48, dtype=np.int16).reshape(desc.shape)
        engine.write_cache(cache, [numbers, -numbers])
        content.append(numbers)
        sources.append(CacheIndex(engine.cluster_id, cache.cache_id))
    mine = {name: user.allocate_blocks_cache(one_head(range(4))) for name in "abc"}
    random = Random(1)
    for _ in range(10):
        orders = {name: random.sample(range(4), 4) for name in mine}
        tables = {name: [random.sample(range(6), 2) for _ in range(4)] for name in mine}
        user.run(
            {
                name: Transfer(
                    [Rows(sources[head], tables[name][head]) for head in orders[name]],
                    Rows(mine[name], [5, 2]),
                    num_tokens=8,
                )
                for name in mine
            }
        )
        for name, tensor in itertools.product(mine, range(2)):
            found = user.arrays(mine[name], copy=True)[tensor][[5, 2]]
            for head in range(4):
                wanted = content[head][tables[name][head], :, 0] * (-1) ** tensor
                np.testing.assert_array_equal(found[:, :, head], wanted)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_source_that_is_not_needed_leaves_the_places_of_the_others(
    make_engine: MakeEngine, rank: int
) -> None:
    """The first two peers have the same heads, and the rank chooses between them."""
    peers, user = [make_engine(number, listen=True) for number in (1, 3, 4)], make_engine(2)
    sources = []
    for peer, first in zip(peers, (0, 0, 2), strict=True):
        link(user, peer)
        desc = scales_and_values(range(first, first + 2))["values"]
        sources.append(Rows(CacheIndex(peer.cluster_id, peer.allocate_blocks_cache(desc).cache_id)))
    mine = user.allocate_blocks_cache(scales_and_values(range(4))["values"])
    rows = [structs.replace(source, blocks=[1, 2]) for source in sources]
    task = user.submit(Transfer(rows, Rows(mine, [4, 5]), rank=rank))
    task.wait()
    assert [*task.tasks] == [rank, 2]


def pulls_from(peers: list[LlmDataDist], user: LlmDataDist) -> dict[str, Transfer]:
    """Return a pull from each peer; together they are one transfer."""
    return {
        f"of {peer.cluster_id}": Transfer(
            Rows(CacheIndex(peer.cluster_id, peer.allocate_blocks_cache(STATE).cache_id), [1]),
            Rows(user.allocate_blocks_cache(STATE), [2]),
        )
        for peer in peers
    }


def test_peers_are_notified_of_each_transfer_between_the_same_caches(
    make_engine: MakeEngine,
) -> None:
    peers, user = [make_engine(number, listen=True) for number in (1, 3)], make_engine(2)
    transfers = pulls_from(peers, user)
    for peer in peers:
        link(user, peer)
    for text in (b"first", b"second", b"third"):
        user.run(transfers, notify=text)
    for peer in peers:
        assert [arrived.data for arrived in peer.notifications()] == [b"first", b"second", b"third"]


def test_every_peer_is_notified_of_a_failure_although_a_success_has_no_notice(
    make_engine: MakeEngine,
) -> None:
    peers, user = [make_engine(number, listen=True) for number in (1, 3)], make_engine(2)
    transfers = pulls_from(peers, user)
    for peer in peers:
        link(user, peer)
    lost = structs.replace(transfers["of 3"], src=Rows(CacheIndex(3, 99), [1]))
    with pytest.raises(LLMException, match="99"):
        user.run({**transfers, "of 3": lost}, notify_failure=b"failed")
    for peer in peers:
        user.notify(peer.cluster_id, b"last")
        assert [arrived.data for arrived in peer.notifications()] == [b"failed", b"last"]


def test_a_peer_that_is_linked_while_others_are_looked_up_is_notified(
    make_engine: MakeEngine,
) -> None:
    peers, user = [make_engine(number, listen=True) for number in (1, 3)], make_engine(2)
    transfers = pulls_from(peers, user)
    link(user, peers[0])
    for at in itertools.count(1):
        outcome: list[LLMStatusCode] = []

        def run(outcome: list[LLMStatusCode] = outcome) -> None:
            try:
                user.run(transfers, notify=b"whole")
            except LLMException as error:
                outcome.append(error.status_code)

        came = interrupted(at, run, partial(link, user, peers[1]), {Several._find.__code__})
        told = [arrived.data for arrived in peers[1].notifications()]
        assert (told, outcome) == (
            ([b"whole"], []) if came and not outcome else ([], [LLMStatusCode.LLM_NOT_YET_LINK])
        )
        if not came:
            break
        user.unlink_clusters([3]).raise_for_status()
    assert at > 5


@pytest.mark.over_tcp
def test_a_gather_by_leases(make_engine: MakeEngine, machine: Machine) -> None:
    sources, user = [make_engine(number, listen=True) for number in (1, 3)], make_engine(2)
    leases = []
    for rank, source in enumerate(sources):
        link(user, source)
        desc = scales_and_values(range(2 * rank, 2 * rank + 2))["values"]
        cache = source.allocate_blocks_cache(desc)
        source.write_cache(cache, [np.full(desc.shape, rank + 1, np.int8)] * 4)
        leases.append(source.lease_blocks(cache, [1, 2], tag=f"rank {rank}"))
    mine = user.allocate_blocks_cache(scales_and_values(range(4))["values"])
    user.run(
        Transfer(
            [Rows(cache, blocks) for cache, blocks in zip(leases, [None, [2, 1]], strict=True)],
            Rows(mine, [4, 5]),
        )
    )
    for array in user.arrays(mine, copy=True):
        by_head = np.moveaxis(array, 2, 0)
        assert [set(by_head[index, 4:].flat) for index in range(4)] == [{1}, {1}, {2}, {2}]
    with refused(INVALID, r"src\[1\].blocks\[0\]=3 is not a block of lease 1 of rank 1"):
        user.run(
            Transfer(
                [Rows(cache, blocks) for cache, blocks in zip(leases, [None, [3, 1]], strict=True)],
                Rows(mine, [4, 5]),
            )
        )
    sources[1].release(leases[1])
    with pytest.raises(GatherError, match="lease 1 of rank 1 was released") as caught:
        user.run(
            Transfer(
                [Rows(cache, blocks) for cache, blocks in zip(leases, [None, None], strict=True)],
                Rows(mine, [4, 5]),
            )
        )
    assert list(caught.value.failed) == [1]
    assert user.metrics()["in_flight"] == 0
