"""Device memory and peers on this host whose memory is reached without the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    CacheIndex,
    CacheKey,
    ClusterInfo,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    Options,
    PeerTensors,
    Rows,
    Transfer,
)
from tests.ascend.simulator import Controls
from tests.datadist.conftest import link
from tests.datadist.peer import Peer
from tests.device.engines import DEVICE, HOST, NUM_TENSORS, ROWS, contents, engine_on, same
from tests.support.refusals import refused

ALL = list(range(ROWS))
ONE_EACH = KvCacheExtParam(tensor_num_per_layer=1)
THEIR_ROWS = np.arange(ROWS * 96, dtype=np.uint16).reshape(ROWS, 96)
OF_PEER = "CacheDesc(3, (8, 96), DataType.DT_UINT16, shard=Shard(num_layers=3))"


@pytest.fixture(scope="module")
def process() -> Iterator[Peer]:
    process = Peer()
    yield process
    process.close()


@pytest.fixture
def datadist(simulator: Controls) -> Iterator[LlmDataDist]:
    """An engine of cluster 2 on a device, linked with peers on this host only."""
    with engine_on(simulator, listen_ip_info="127.0.0.1:0") as made:
        yield made
        del made


@pytest.fixture
def peer(process: Peer, datadist: LlmDataDist) -> Iterator[Peer]:
    """An engine of cluster 5 in another process, without a device."""
    address = process.run("""
        other = LlmDataDist(5, LlmRole.MIX)
        other.initialize({"llm.ListenIpInfo": "127.0.0.1:0", "kvplan.accelerator": "none"})
        rows = np.arange(8 * 96, dtype=np.uint16).reshape(8, 96)
        result = other.listen_address
    """)
    datadist.link_clusters([ClusterInfo(5, address)], timeout_ms=5000).raise_for_status()
    yield process
    process.run("other.finalize()")


@pytest.fixture
def on_device(simulator: Controls, datadist: LlmDataDist) -> Iterator[LlmDataDist]:
    """An engine of cluster 1 in this process, on another device, linked with cluster 2."""
    with LlmDataDist(1, LlmRole.MIX) as made:
        made.initialize(
            Options(
                accelerator="ascend",
                device_id=4,
                transport="local",
                listen_ip_info="127.0.0.1:0",
            )
        )
        link(datadist, made)
        yield made
        del made


class TestHostPeer:
    """A peer without a device: its arenas are mapped here, so the device copies directly."""

    def test_blocks_are_pulled_and_pushed(self, peer: Peer, datadist: LlmDataDist) -> None:
        peer.run(f"""
            cache = other.allocate_blocks_cache({OF_PEER}, BlocksCacheKey(5))
            for number, it in enumerate(other.arrays(cache)):
                it[:] = rows + number
        """)
        cache = datadist.allocate_blocks_cache(DEVICE)
        datadist.pull_blocks(BlocksCacheKey(5), cache, ALL, ALL[::-1])
        expected = [THEIR_ROWS[::-1] + number for number in range(NUM_TENSORS)]
        assert same(datadist.arrays(cache, copy=True), expected)
        datadist.push_blocks(cache, BlocksCacheKey(5), [0, 1], [0, 1])
        sums = peer.run("result = [int(row[:2].astype(int).sum()) for row in other.arrays(cache)]")
        assert sums == [int(item[:2].astype(int).sum()) for item in expected]

    def test_layers_are_pushed(self, peer: Peer, datadist: LlmDataDist) -> None:
        peer.run(f"cache = other.allocate_cache({OF_PEER})")
        cache = datadist.allocate_cache(DEVICE)
        datadist.write_cache(cache, contents(1))
        task = datadist.layered(
            Transfer(Rows(cache, slot=1), Rows(CacheIndex(5, 1, 2)), layers=ONE_EACH)
        )
        for layer in range(NUM_TENSORS):
            task.ready(layer)
        task.wait(5000)
        found = peer.run("result = [array[2].tolist() for array in other.arrays(cache)]")
        assert found == [content[1].tolist() for content in contents(1)]

    def test_memory_that_the_peer_registered_cannot_be_a_side_with_a_device(
        self, peer: Peer, datadist: LlmDataDist
    ) -> None:
        peer.run(f"""
            held = [rows + number for number in range(3)]
            other.register_cache({OF_PEER}, held)
        """)
        device, host = datadist.allocate_cache(DEVICE), datadist.allocate_cache(HOST)
        with refused("LLM_FEATURE_NOT_ENABLED", "has registered host memory outside of arenas"):
            datadist.pull_cache(CacheIndex(5, 1), device)
        datadist.pull_cache(CacheIndex(5, 1, 3), host, 1)
        datadist.copy_cache(host, device, 1, 1)
        assert all(
            np.array_equal(array[1], THEIR_ROWS[3] + number)
            for number, array in enumerate(datadist.arrays(device, copy=True))
        )


class TestHostPeerOverTcp:
    """A peer as on another host: registered memory is reached, too, in both directions."""

    @pytest.fixture
    def datadist(self, simulator: Controls) -> Iterator[LlmDataDist]:
        with engine_on(simulator, transport="tcp", listen_ip_info="127.0.0.1:0") as made:
            yield made
            del made

    def test_blocks_are_pulled_and_pushed_over_tcp(self, peer: Peer, datadist: LlmDataDist) -> None:
        peer.run(f"""
            held = [rows + number for number in range(3)]
            cache = other.register_blocks_cache({OF_PEER}, held, BlocksCacheKey(5))
        """)
        cache = datadist.allocate_blocks_cache(DEVICE, BlocksCacheKey(2))
        datadist.pull_blocks(BlocksCacheKey(5), cache, ALL, ALL[::-1])
        pulled = [THEIR_ROWS[::-1] + number for number in range(NUM_TENSORS)]
        assert same(datadist.arrays(cache, copy=True), pulled)
        datadist.write_cache(cache, contents(1))
        datadist.push_blocks(cache, BlocksCacheKey(5), [0, 1], [2, 3])
        assert peer.run("result = [array[2:4].tolist() for array in held]") == [
            content[:2].tolist() for content in contents(1)
        ]
        peer.run("other.pull_blocks(BlocksCacheKey(2), cache, [7, 4], [0, 1])")
        assert peer.run("result = [array[:2].tolist() for array in held]") == [
            content[[7, 4]].tolist() for content in contents(1)
        ]
        peer.run("other.push_blocks(cache, BlocksCacheKey(2), [6], [5])")
        assert all(
            np.array_equal(array[5], THEIR_ROWS[6] + number)
            for number, array in enumerate(datadist.arrays(cache, copy=True))
        )


class TestDevicePeer:
    """A peer on a device that the transport does not reach: errors name the reason."""

    def test_device_caches_of_the_peer_are_known_but_unreachable(
        self, on_device: LlmDataDist, datadist: LlmDataDist
    ) -> None:
        there = on_device.allocate_blocks_cache(DEVICE, BlocksCacheKey(1))
        cache = datadist.allocate_blocks_cache(DEVICE)
        why = "cache 1 of cluster 1 is in device memory, which transport local does not reach"
        for key in (BlocksCacheKey(1), CacheIndex(1, 1)):
            with refused("LLM_FEATURE_NOT_ENABLED", why):
                datadist.pull_blocks(key, cache, [0], [1])
            with refused("LLM_FEATURE_NOT_ENABLED", why):
                datadist.push_blocks(cache, key, [0], [1])
        with refused("LLM_FEATURE_NOT_ENABLED", why):
            datadist.layered(
                Transfer(
                    Rows(cache, [0]), Rows(PeerTensors(1, there.tensor_addrs), [1]), layers=ONE_EACH
                )
            )

    def test_a_key_is_free_again_when_its_cache_is_not_reached(
        self, on_device: LlmDataDist, datadist: LlmDataDist
    ) -> None:
        on_device.allocate_cache(DEVICE, [CacheKey(1, req_id=7)])
        cache = datadist.allocate_cache(DEVICE)
        for _ in range(2):
            with refused("LLM_FEATURE_NOT_ENABLED", "does not reach"):
                datadist.pull_cache(CacheKey(1, req_id=7), cache)

    @pytest.mark.parametrize("registered", [False, True])
    def test_host_caches_of_the_peer_are_reached(
        self, on_device: LlmDataDist, datadist: LlmDataDist, registered: bool
    ) -> None:
        """The device copies to any address of this process, also to registered memory."""
        if registered:
            theirs = on_device.register_blocks_cache(HOST, contents(1), BlocksCacheKey(1))
        else:
            theirs = on_device.allocate_blocks_cache(HOST, BlocksCacheKey(1))
            on_device.write_cache(theirs, contents(1))
        mine = datadist.allocate_blocks_cache(DEVICE)
        datadist.pull_blocks(BlocksCacheKey(1), mine, ALL, ALL)
        assert same(datadist.arrays(mine, copy=True), contents(1))
        datadist.write_cache(mine, contents(2))
        datadist.push_blocks(mine, BlocksCacheKey(1), ALL, ALL)
        assert same(on_device.arrays(theirs, copy=True), contents(2))


def test_remapped_memory_is_published(on_device: LlmDataDist, datadist: LlmDataDist) -> None:
    assert datadist.device is not None
    buffer = datadist.device.allocate(DEVICE.nbytes)
    addresses = [buffer.address + i * DEVICE.tensor_nbytes for i in range(NUM_TENSORS)]
    cache = datadist.register_cache(DEVICE, addresses)
    datadist.remap_registered_memory([(buffer.address, DEVICE.nbytes)])
    assert datadist.arrays(cache, copy=True)
    with refused("LLM_PARAM_INVALID", "the byte at .* is in none of the 1 registered cache"):
        datadist.remap_registered_memory([(buffer.address, DEVICE.nbytes + 1)])
    del buffer
    with refused("LLM_PARAM_INVALID", "cache 1: "):
        datadist.remap_registered_memory([(addresses[0], 1)])
