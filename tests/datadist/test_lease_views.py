"""Views of leased blocks: readers see the owner's memory without a copy."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvplan import BlockLease, CacheDesc, ClusterInfo, DataType, LlmDataDist, LlmRole
from kvplan.engine.views import LeaseView
from tests.datadist.peer import Peer
from tests.support.places import PEER_COMMAND
from tests.support.refusals import refused

pytestmark = pytest.mark.skipif(bool(PEER_COMMAND), reason="memory of other hosts is not mapped")

DESC = CacheDesc(1, (8, 64), DataType.DT_UINT8)
DESCS = {
    "blocks first": "CacheDesc(3, (8, 4, 16), DataType.DT_INT16)",
    "rows apart": "CacheDesc(3, (8, 4, 16), DataType.DT_INT16, row_stride=192)",
    "blocks second": "CacheDesc(3, (1, 8, 4, 16), DataType.DT_INT16, batch_dim_index=1)",
}
BLOCKS = [6, 0, 3]


@pytest.fixture
def peer() -> Iterator[Peer]:
    """An engine of cluster 1 in another process, on the host only."""
    peer = Peer()
    yield peer
    peer.close()


@contextmanager
def linked(peer: Peer, **options: str) -> Iterator[LlmDataDist]:
    with LlmDataDist(2, LlmRole.DECODER) as user:
        user.initialize(options)
        user.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
        yield user


@pytest.fixture
def user(peer: Peer) -> Iterator[LlmDataDist]:
    """An engine of this process, linked with the peer over local."""
    with linked(peer) as user:
        yield user


def offer(peer: Peer, desc: str = DESCS["blocks first"], lease: str = "{BLOCKS}") -> BlockLease:
    """Let the peer lease blocks; each holds 100 times the tensor's number plus its own."""
    code = f"""
desc = {desc}
cache = datadist.allocate_blocks_cache(desc)
for tensor, array in enumerate(datadist.arrays(cache)):
    for block in range(8):
        np.moveaxis(array, desc.batch_dim_index, 0)[block] = 100 * tensor + block
lease = datadist.lease_blocks(cache, {lease.format(BLOCKS=BLOCKS)})
result = lease.to_bytes()
"""
    return BlockLease.from_bytes(peer.run(code))


def numbers(view: LeaseView) -> list[list[int]]:
    return [[int(np.unique(block)[0]) for block in view[tensor]] for tensor in range(len(view))]


@pytest.mark.parametrize("desc", DESCS.values(), ids=DESCS)
def test_blocks_are_seen_in_the_order_of_the_lease(
    user: LlmDataDist, peer: Peer, desc: str
) -> None:
    lease = offer(peer, desc)
    with user.arrays(lease) as view:
        assert view.lease is lease
        assert numbers(view) == [[100 * tensor + block for block in BLOCKS] for tensor in range(3)]
        assert {block.shape[-2:] for block in view[2]} == {(4, 16)}
        assert view[-1][0] is view[-1][0]
        assert len(view[1:]) == 2
        with pytest.raises(ValueError, match="read-only"):
            view[0][0][:] = 1
        with pytest.raises(IndexError):
            view[3]
        peer.run("datadist.arrays(cache)[0][...] = 9; result = None")
        assert numbers(view)[0] == [9] * 3, "no copy"


def test_a_slot_is_one_row(user: LlmDataDist, peer: Peer) -> None:
    blob = peer.run(
        """
cache = datadist.allocate_cache(CacheDesc(2, (3, 10), DataType.DT_UINT8))
datadist.arrays(cache)[1][2] = 5
result = datadist.lease_blocks(cache, [2]).to_bytes()
"""
    )
    with user.arrays(BlockLease.from_bytes(blob)) as view:
        assert numbers(view) == [[0], [5]]


@pytest.mark.parametrize(
    "end",
    [
        "datadist.release(lease)",
        "datadist.deallocate_cache(cache)",
        "datadist.renew(lease, 0.001)",
    ],
)
def test_the_end_of_a_lease_is_always_detected(user: LlmDataDist, peer: Peer, end: str) -> None:
    lease = offer(peer, lease="{BLOCKS}, ttl_ms=60_000")
    with refused("LLM_KV_CACHE_NOT_EXIST", "lease|deregistered"), user.arrays(lease) as view:
        view.check()
        kept = view[0][1]
        peer.run(f"{end}; result = None")
        with refused("LLM_KV_CACHE_NOT_EXIST", "lease|deregistered"):
            view.check()
    assert kept.shape == (4, 16), "what was handed out stays mapped"
    assert kept.sum() >= 0
    with refused("LLM_KV_CACHE_NOT_EXIST", "lease|deregistered|cache_id"):
        user.arrays(lease)


def test_an_error_of_the_reader_takes_precedence(user: LlmDataDist, peer: Peer) -> None:
    lease = offer(peer)
    view = user.arrays(lease)
    peer.run("datadist.release(lease); result = None")
    with pytest.raises(ZeroDivisionError), view:
        _ = 1 // 0


def test_a_closed_view_makes_no_arrays(user: LlmDataDist, peer: Peer) -> None:
    with user.arrays(offer(peer)) as view:
        assert numbers(view)[0] == BLOCKS
    with refused("LLM_FAILED", "was closed"):
        view[0]
    view.close()


def test_the_death_of_the_owner_is_always_detected(user: LlmDataDist, peer: Peer) -> None:
    lease = offer(peer)
    with refused("LLM_LINK_FAILED", "process"), user.arrays(lease) as view:
        block = view[0][0]
        peer.kill()
    assert int(block[0, 0]) == BLOCKS[0], "its memory stays mapped"


def test_the_end_of_a_link_is_always_detected(user: LlmDataDist, peer: Peer) -> None:
    lease = offer(peer)
    with refused("LLM_NOT_YET_LINK"), user.arrays(lease):
        user.unlink_clusters([ClusterInfo(1, peer.address)])
    with refused("LLM_NOT_YET_LINK"):
        user.arrays(lease)


def test_only_arrays_keep_the_memory_mapped(user: LlmDataDist, peer: Peer) -> None:
    lease = offer(peer)
    view = user.arrays(lease)
    block = view[0][0]
    view.close()
    del view
    gc.collect()
    assert int(block[3, 15]) == BLOCKS[0]


def test_blocks_that_cannot_be_viewed_are_refused(user: LlmDataDist, peer: Peer) -> None:
    own = user.lease_blocks(user.allocate_blocks_cache(DESC), [1])
    with refused("LLM_PARAM_INVALID", "is a lease of this engine"):
        user.arrays(own)
    lease = offer(peer)
    with refused("LLM_PARAM_INVALID", "copy=True"):
        user.arrays(lease, copy=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        user.arrays(lease.to_bytes())  # type: ignore[call-overload]
    values = {name: getattr(lease, name) for name in BlockLease.__slots__}
    with refused("LLM_PARAM_INVALID", "names block 8; cache .* has 8"):
        user.arrays(BlockLease(**{**values, "blocks": (2, 8), "words": lease.words}))
    blob = peer.run(
        """
mine = np.zeros((8, 64), np.uint8)
cache = datadist.register_blocks_cache(
    CacheDesc(1, (8, 64), DataType.DT_UINT8), [mine], BlocksCacheKey(7)
)
result = datadist.lease_blocks(cache, [1]).to_bytes()
"""
    )
    with refused("LLM_FEATURE_NOT_ENABLED", "not mapped here.*pull the blocks"):
        user.arrays(BlockLease.from_bytes(blob))


def test_memory_that_the_network_reaches_is_not_viewed(peer: Peer) -> None:
    with linked(peer, **{"kvplan.transport": "tcp"}) as user:
        lease = offer(peer)
        with refused("LLM_FEATURE_NOT_ENABLED", "not mapped here.*pull the blocks"):
            user.arrays(lease)


def test_blocks_that_move_are_seen_at_their_new_place(user: LlmDataDist, peer: Peer) -> None:
    """An earlier view is not confirmed. The next view of the same lease follows the move."""
    lease = offer(peer, lease="[6, 0]")
    with refused("LLM_KV_CACHE_NOT_EXIST", "was released or moved"), user.arrays(lease) as before:
        assert numbers(before)[0] == [6, 0]
        peer.run(
            """
            def copy():
                for array in datadist.arrays(cache):
                    array[2] = array[6]
                    array[6] = 99

            datadist.moved(cache, {6: 2}, copy=copy)
            """
        )
    with user.arrays(lease) as view:
        assert numbers(view)[0] == [6, 0]
