"""Caches with different descriptions in two processes: refused, reinterpreted or moved by axes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    Rows,
    Shard,
    Transfer,
)
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.layers import ready, there, wait_until
from tests.datadist.peer import Peer
from tests.support.refusals import refused

pytestmark = pytest.mark.over_cuda

FP16 = CacheDesc(4, (8, 4, 2, 8), DataType.DT_FLOAT16)
OFFER_BF16 = """
cache = datadist.allocate_blocks_cache(CacheDesc(4, (8, 4, 2, 8), DataType.DT_BF16))
for number, array in enumerate(datadist.arrays(cache)):
    array.view(np.uint16)[:] = 100 + number
"""
INVALID = "LLM_PARAM_INVALID"


@pytest.fixture
def unlike(user: LlmDataDist, peer: Peer) -> Cache:
    """A cache of fp16 here, while the peer's cache 1 has bf16."""
    peer.run(OFFER_BF16)
    return user.allocate_blocks_cache(FP16)


def bits(user: LlmDataDist, cache: Cache) -> list[int]:
    """Return the first element of block 3 of each tensor, as an integer."""
    return [int(array.view(np.uint16)[3, 0, 0, 0]) for array in user.arrays(cache)]


@pytest.mark.over_tcp
def test_another_data_type_is_refused_before_a_byte_moves(
    user: LlmDataDist, peer: Peer, unlike: Cache
) -> None:
    both = r"data type: src is DT_BF16 \(8, 4, 2, 8\); dst is DT_FLOAT16 \(8, 4, 2, 8\)"
    with refused(INVALID, both):
        user.pull_blocks(CacheIndex(1, 1), unlike, [1], [3])
    with refused(INVALID, "data type"):
        user.submit(Transfer(Rows(CacheIndex(1, 1), [1]), Rows(unlike, [3])))
    with refused(INVALID, "data type: src is DT_FLOAT16 .* dst is DT_BF16"):
        user.push_blocks(unlike, CacheIndex(1, 1), [1], [3])
    with refused(INVALID, "data type"):
        user.layered(
            Transfer(
                Rows(unlike, [1]),
                Rows(CacheIndex(1, 1), [3]),
                layers=KvCacheExtParam(tensor_num_per_layer=2),
            )
        )
    assert bits(user, unlike) == [0, 0, 0, 0]
    assert peer.run(
        "result = [int(array.view(np.uint16).min()) for array in datadist.arrays(cache)]"
    ) == [100 + number for number in range(4)]
    metrics = user.metrics()
    assert metrics["in_flight"] == 0
    assert metrics["operations"]["pull_blocks"]["statuses"] == {INVALID: 2}
    assert metrics["operations"]["pull_blocks"]["nbytes"] == 0


def test_a_caller_may_reinterpret_the_data_type(
    user: LlmDataDist, unlike: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvplan"):
        user.pull_blocks(CacheIndex(1, 1), unlike, [1], [3], reinterpret=True)
    assert bits(user, unlike) == [100, 101, 102, 103]
    assert caplog.messages == []  # the caller asked for it
    plan = user.plan(Transfer(Rows(CacheIndex(1, 1), [1]), Rows(unlike, [3]), reinterpret=True))
    assert "DT_BF16 (8, 4, 2, 8) -> DT_FLOAT16 (8, 4, 2, 8), REINTERPRETED" in plan.explain()


def test_an_option_turns_the_refusal_into_a_warning(
    make_engine: MakeEngine, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.run(OFFER_BF16)
    user = make_engine(2, **{"kvplan.unlike_caches": "warn"})
    user.link_clusters([ClusterInfo(1, peer.address)], 5000).raise_for_status()
    cache, other = (user.allocate_blocks_cache(FP16) for _ in range(2))
    with caplog.at_level(logging.WARNING, "kvplan"):
        for block in (1, 2, 3):
            user.pull_blocks(CacheIndex(1, 1), cache, [block], [block])
        (warning,) = caplog.messages
        assert "pull_blocks between caches that differ: src is DT_BF16" in warning
        assert "dst is DT_FLOAT16" in warning
        user.pull_blocks(CacheIndex(1, 1), other, [1], [3])
        assert len(caplog.messages) == 2  # another pair
    assert bits(user, cache) == bits(user, other) == [100, 101, 102, 103]
    assert user.metrics()["operations"]["pull_blocks"]["statuses"] == {"LLM_SUCCESS": 4}


def test_the_option_does_not_hide_a_flag_that_is_not_a_bool(make_engine: MakeEngine) -> None:
    owner, user = make_engine(1, listen=True), make_engine(2, **{"kvplan.unlike_caches": "warn"})
    link(user, owner)
    desc = CacheDesc(
        2, (8, 4, 2, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD", shard=Shard(num_layers=1)
    )
    key = CacheIndex(1, owner.allocate_blocks_cache(desc).cache_id)
    own, other = (user.allocate_blocks_cache(desc) for _ in range(2))
    read, written = Rows(key, [1]), Rows(own, [3])
    for flag in ("no", 0, None):
        wrong: Any = {"reinterpret": flag}
        transfers = {
            "pull": Transfer(read, written, **wrong),
            "push": Transfer(written, read, **wrong),
            "gather": Transfer([read], written, **wrong),
            "copy": Transfer(Rows(other, [1]), written, **wrong),
        }
        requests = [*transfers.values(), *({name: part} for name, part in transfers.items())]
        calls: list[Callable[[], object]] = [
            partial(method, request)
            for method in (user.run, user.submit, user.layered, user.plan)
            for request in requests
        ]
        calls.append(partial(user.pull_blocks, key, own, [1], [3], **wrong))
        calls.append(partial(user.push_blocks, own, key, [3], [1], **wrong))
        for call in calls:
            with pytest.raises(TypeError, match=f"reinterpret={flag!r} must be bool, not"):
                call()
    assert user.metrics()["in_flight"] == 0


def test_the_option_accepts_two_words(make_engine: MakeEngine) -> None:
    with refused(INVALID, "kvplan.unlike_caches.*'allow' must be one of refuse, warn"):
        make_engine(3, **{"kvplan.unlike_caches": "allow"})


@pytest.mark.over_tcp
def test_shards_and_layouts_of_the_peer_are_used(user: LlmDataDist, peer: Peer) -> None:
    """Prefill has heads 2 and 3 of 4 in HND, in blocks of 8; decode has all in NHD, blocks of 4."""
    peer.run(
        """
        cache = datadist.allocate_blocks_cache(
            CacheDesc(
                2, (4, 2, 8, 16), DataType.DT_INT16, kv_tensor_format="HND",
                shard=Shard(num_layers=1, heads=range(2, 4), num_heads=4),
            ),
            BlocksCacheKey(1),
        )
        token, dim = np.arange(8)[:, None], np.arange(16)
        for kv, array in enumerate(datadist.arrays(cache)):
            for block in range(4):
                for head in range(2):
                    array[block, head] = 10000 * kv + 2000 * block + 1000 * head + 16 * token + dim
        """
    )
    desc = CacheDesc(
        2,
        (8, 4, 4, 16),
        DataType.DT_INT16,
        kv_tensor_format="block token head dim",
        shard=Shard(num_layers=1, num_heads=4),
    )
    mine = user.allocate_blocks_cache(desc)
    plan = user.plan(
        Transfer(Rows(BlocksCacheKey(1), [3, 1]), Rows(mine, [6, 0, 5]), num_tokens=11)
    )
    assert plan.part.src.shard == Shard(num_layers=1, heads=range(2, 4), num_heads=4)
    assert "heads 2..3 of 4" in plan.explain().splitlines()[1]
    user.pull_blocks(BlocksCacheKey(1), mine, [3, 1], [6, 0, 5], num_tokens=11)
    for kv, array in enumerate(user.arrays(mine)):
        expected = np.zeros_like(array)
        for token in range(11):
            block, inside = [6, 0, 5][token // 4], token % 4
            for head in (2, 3):
                first = 10000 * kv + 2000 * [3, 1][token // 8] + 1000 * (head - 2)
                expected[block, inside, head] = first + 16 * (token % 8) + np.arange(16)
        assert (array == expected).all()


@pytest.mark.over_tcp
@pytest.mark.parametrize("by_tensor", [True, False], ids=["a tensor each", "inside of each block"])
def test_a_ready_layer_moves_alone(user: LlmDataDist, peer: Peer, by_tensor: bool) -> None:
    """Keys and values are in one tensor for each layer, or all layers of a block are together."""
    layers = 3
    number, shape, text = (
        (layers, (2, 6, 4, 2, 8), "kv block token head dim")
        if by_tensor
        else (1, (6, layers, 2, 4, 2, 8), "block layer kv token head dim")
    )
    peer.run(
        "desc = CacheDesc(number, shape, DataType.DT_INT32, kv_tensor_format=text)\n"
        "cache = datadist.allocate_blocks_cache(desc)",
        number=number,
        shape=shape,
        text=text,
    )
    source = user.allocate_blocks_cache(
        CacheDesc(number, shape, DataType.DT_INT32, kv_tensor_format=text)
    )
    task = user.layered(Transfer(Rows(source, [2, 5]), Rows(CacheIndex(1, 1), [4, 0])))
    assert task.layers == range(layers)
    arrays = user.arrays(source)

    def layer_of(tensors: Any, layer: int, block: int) -> Any:
        """Return keys and values of a block in a layer."""
        return tensors[layer][:, block] if by_tensor else tensors[0][block, layer]

    for layer in (1, 0, 2):
        for block in (2, 5):
            layer_of(arrays, layer, block)[:] = 100 * layer + block  # computed only now
        task.ready(layer)
        wait_until(lambda layer=layer: layer in task.progress().done)  # type: ignore[misc]
        arrived = there(peer, "cache")
        for other in range(layers):
            done = other in task.progress().done
            assert (layer_of(arrived, other, 4) == (100 * other + 2 if done else 0)).all()
            assert (layer_of(arrived, other, 0) == (100 * other + 5 if done else 0)).all()
    task.wait()


def test_mla_has_one_tensor_per_layer(user: LlmDataDist, peer: Peer) -> None:
    peer.run(
        """
        desc = CacheDesc(4, (6, 4, 9), DataType.DT_INT32, kv_tensor_format="block token dim")
        cache = datadist.allocate_blocks_cache(desc)
        """
    )
    source = user.allocate_blocks_cache(
        CacheDesc(4, (6, 4, 9), DataType.DT_INT32, kv_tensor_format="block token dim")
    )
    for number, array in enumerate(user.arrays(source)):
        array[:] = number + 1
    task = user.layered(Transfer(Rows(source, [2]), Rows(CacheIndex(1, 1), [4])))
    assert task.layers == range(4)
    task.ready(0)
    wait_until(lambda: task.progress().done == (0,))
    assert there(peer, "cache")[:, 4].max(axis=(1, 2)).tolist() == [1, 0, 0, 0]
    ready(task)
    task.wait()


def test_layers_with_an_unknown_number_of_tensors_are_refused(
    user: LlmDataDist, peer: Peer
) -> None:
    """The default of two would send tensor 1 with layer 0, although it may be a layer itself."""
    desc = CacheDesc(4, (4, 64), DataType.DT_INT32)
    peer.run("cache = datadist.allocate_cache(CacheDesc(4, (4, 64), DataType.DT_INT32))")
    source, target = user.allocate_cache(desc), CacheIndex(1, 1)
    with refused(INVALID, "tensor_num_per_layer=None, .* number of tensors per layer"):
        user.layered(Transfer(Rows(source), Rows(target)))
    for per_layer, layers in ((1, range(4)), (2, range(2))):
        task = user.layered(
            Transfer(
                Rows(source), Rows(target), layers=KvCacheExtParam(tensor_num_per_layer=per_layer)
            )
        )
        assert task.layers == layers
        ready(task)
        task.wait()


@pytest.mark.parametrize("count", [1, 2])
def test_the_number_of_tensors_must_be_known_for_each_cache_of_a_group(
    user: LlmDataDist, count: int
) -> None:
    caches = [user.allocate_blocks_cache(CacheDesc(4, (4, 64), DataType.DT_INT32))] * 2
    source, target = (Rows(cache, [block]) for block, cache in enumerate(caches))
    known = Transfer(source, target, layers=KvCacheExtParam(tensor_num_per_layer=1))
    transfers = dict.fromkeys(["a", "b"][: count - 1], known) | {"last": Transfer(source, target)}
    with refused(INVALID, "tensor_num_per_layer=None, .* number of tensors per layer"):
        user.layered(transfers)
    task = user.layered(transfers | {"last": known})
    assert task.layers == tuple(range(4))
    ready(task)
    task.wait()


def test_the_layers_of_the_source_hold_if_bytes_are_reinterpreted(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.run("cache = datadist.allocate_cache(CacheDesc(4, (4, 64), DataType.DT_FLOAT))")
    source = user.allocate_cache(
        CacheDesc(4, (4, 64), DataType.DT_INT32, shard=Shard(num_layers=4))
    )
    task = user.layered(Transfer(Rows(source), Rows(CacheIndex(1, 1)), reinterpret=True))
    assert task.layers == range(4)
    ready(task)
    task.wait()


def test_a_request_is_pulled_from_two_engines(make_engine: MakeEngine) -> None:
    """Each engine has one of the two layers."""
    whole = CacheDesc(
        4, (4, 4, 2, 8), DataType.DT_INT16, kv_tensor_format="NHD", shard=Shard(num_layers=2)
    )
    stages = [make_engine(cluster_id, listen=True) for cluster_id in (1, 3)]
    user = make_engine(2)
    for layer, stage in enumerate(stages):
        link(user, stage)
        shard = Shard(layers=range(layer, layer + 1), num_layers=2)
        cache = stage.allocate_blocks_cache(
            CacheDesc(2, (4, 4, 2, 8), DataType.DT_INT16, kv_tensor_format="NHD", shard=shard)
        )
        values = [np.full((4, 4, 2, 8), 10 * layer + kv + 1, np.int16) for kv in range(2)]
        stage.write_cache(cache, values)
    mine = user.allocate_blocks_cache(whole)
    sources = [CacheIndex(1, 1), CacheIndex(3, 1)]
    user.run(
        Transfer(
            [Rows(cache, blocks) for cache, blocks in zip(sources, [[1], [2]], strict=True)],
            Rows(mine, [3]),
        )
    )
    arrays = user.arrays(mine, copy=True)
    assert [int(array[3].min()) for array in arrays] == [1, 2, 11, 12]
    assert [int(array[:3].max()) for array in arrays] == [0, 0, 0, 0]
    with refused(INVALID, r"no source has layers 1\.\.1"):
        user.run(
            Transfer(
                [Rows(cache, blocks) for cache, blocks in zip(sources[:1], [[1]], strict=True)],
                Rows(mine, [3]),
            )
        )


def test_a_layout_on_one_side_only_is_refused_before_a_byte_moves(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.run(
        """
        desc = CacheDesc(2, (6, 2, 4, 8), DataType.DT_INT32, kv_tensor_format="HND")
        cache = datadist.allocate_blocks_cache(desc)
        for array in datadist.arrays(cache):
            array[:] = 7
        """
    )
    unsaid = user.allocate_blocks_cache(CacheDesc(2, (6, 2, 4, 8), DataType.DT_INT32))
    for move in (user.pull_blocks, lambda key, own, *rows: user.push_blocks(own, key, *rows)):
        for _ in range(2):  # the second call is refused, too
            with refused("LLM_PARAM_INVALID", "differ in layout"):
                move(CacheIndex(1, 1), unsaid, [1], [2])
    assert not any(array.any() for array in user.arrays(unsaid))
    user.pull_blocks(CacheIndex(1, 1), unsaid, [1], [2], reinterpret=True)
    assert all((array[2] == 7).all() for array in user.arrays(unsaid))
