"""Pushes by layers to raw addresses in another process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvplan import (
    Cache,
    CacheDesc,
    KvCacheExtParam,
    LlmDataDist,
    LLMStatusCode,
    PeerTensors,
    Rows,
    Transfer,
)
from tests.datadist.layers import BLOCKS, NUM_LAYERS, OFFER, SLOTS, fill, ready, there
from tests.datadist.machine import Machine, on_host_only
from tests.datadist.peer import Peer
from tests.support.refusals import refused

NEVER_READ_ONLY = "a device address has no flag that says read-only"
INVALID, NOT_EXIST = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.fixture(autouse=True)
def offered(peer: Peer) -> None:
    peer.run(OFFER)


@pytest.fixture
def slots(user: LlmDataDist) -> Cache:
    return user.allocate_cache(SLOTS)


@pytest.fixture
def blocks(user: LlmDataDist) -> Cache:
    return user.allocate_blocks_cache(BLOCKS)


def addresses(peer: Peer, name: str) -> list[int]:
    return list(peer.run(f"result = {name}.tensor_addrs"))


def push(
    user: LlmDataDist,
    src: Cache,
    dst: PeerTensors,
    *,
    src_batch_index: int | None = None,
    src_blocks: Any = None,
    dst_blocks: Any = None,
    **more: Any,
) -> None:
    rows = Rows(src, src_blocks, src_batch_index)
    task = user.layered(Transfer(rows, Rows(dst, dst_blocks), **more))
    ready(task)
    task.wait()


def test_a_slot_goes_to_addresses(user: LlmDataDist, peer: Peer, slots: Cache) -> None:
    arrays = fill(user, slots)
    rows = [address + 3 * SLOTS.stride for address in addresses(peer, "cache")]
    push(user, slots, PeerTensors(1, rows), src_batch_index=1)
    arrived = there(peer, "cache")
    for tensor, array in enumerate(arrays):
        assert (arrived[tensor][3] == array[1]).all()
        assert not arrived[tensor][:3].any()


@pytest.mark.over_tcp
def test_blocks_go_to_addresses(user: LlmDataDist, peer: Peer, blocks: Cache) -> None:
    arrays = fill(user, blocks)
    target = PeerTensors(1, addresses(peer, "paged"))
    push(user, blocks, target, src_blocks=[2, 6], dst_blocks=[7, 0])
    arrived = there(peer, "paged")
    for tensor, array in enumerate(arrays):
        assert (arrived[tensor][[7, 0]] == array[[2, 6]]).all()
        assert not arrived[tensor][1:7].any()


def test_a_slot_goes_into_blocks_at_addresses(user: LlmDataDist, peer: Peer, slots: Cache) -> None:
    arrays = fill(user, slots)
    target = PeerTensors(1, addresses(peer, "paged"), stride=BLOCKS.stride)
    push(user, slots, target, dst_blocks=[5, 1, 2, 0])
    arrived = there(peer, "paged")
    for tensor, array in enumerate(arrays):
        assert (arrived[tensor][[5, 1, 2, 0]].ravel() == array[0]).all()
        assert not arrived[tensor][[3, 4, 6, 7]].any()


def test_some_layers_go_to_the_addresses_of_others(
    user: LlmDataDist, peer: Peer, slots: Cache
) -> None:
    arrays = fill(user, slots)
    chosen = addresses(peer, "cache")[20:24]
    layers = KvCacheExtParam(src_layer_range=range(5, 7))
    push(user, slots, PeerTensors(1, chosen), layers=layers)
    arrived = there(peer, "cache")
    for tensor in range(2 * NUM_LAYERS):
        expected = arrays[tensor - 10][0] if 20 <= tensor < 24 else 0
        assert (arrived[tensor][0] == expected).all()


def test_memory_that_was_registered_after_linking_is_found(
    user: LlmDataDist, peer: Peer, slots: Cache
) -> None:
    arrays = fill(user, slots)
    target = peer.run(
        """
        arrays = [zeros((4, 64), np.int32) for _ in range(60)]
        held = datadist.register_cache(slots, addresses(arrays))
        result = held.tensor_addrs
        """
    )
    push(user, slots, PeerTensors(1, target), src_batch_index=2)
    arrived = np.array(peer.run("result = [array.tolist() for array in arrays]"))
    assert (arrived[:, 0] == np.array([array[2] for array in arrays])).all()
    assert not arrived[:, 1:].any()


@pytest.mark.over_tcp
def test_memory_of_a_later_cache_at_the_same_addresses_is_found(
    user: LlmDataDist, peer: Peer, slots: Cache
) -> None:
    """The registration of an earlier cache at the same addresses does not cause a refusal."""
    fill(user, slots)
    code = """
        held = datadist.register_cache(slots, addresses(arrays))
        result = held.tensor_addrs
        """
    peer.run("arrays = [zeros((4, 64), np.int32) for _ in range(60)]")
    for row in range(4):
        target = PeerTensors(1, peer.run(code))
        push(user, slots, target, src_batch_index=row)
        assert peer.run("result = int(arrays[0][0, 0])") == 1 + 64 * row
        peer.run("datadist.unregister_cache(held.cache_id)")
        with refused(NOT_EXIST):
            push(user, slots, target)


def test_the_writable_one_of_two_caches_over_the_same_memory_is_used(
    user: LlmDataDist, peer: Peer, slots: Cache, machine: Machine
) -> None:
    on_host_only(machine, NEVER_READ_ONLY)
    arrays = fill(user, slots)
    target = peer.run(
        """
        arrays = [np.zeros((4, 64), np.int32) for _ in range(60)]
        writable = datadist.register_cache(slots, arrays)
        for array in arrays:
            array.flags.writeable = False
        datadist.register_cache(slots, arrays)
        result = writable.tensor_addrs
        """
    )
    push(user, slots, PeerTensors(1, target))
    arrived = np.array(peer.run("result = [array.tolist() for array in arrays]"))
    assert (arrived[:, 0] == np.array([array[0] for array in arrays])).all()


@pytest.mark.parametrize(("layers", "needed"), [(None, 60), (range(5, 9), 8)])
def test_another_number_of_addresses_is_refused(
    user: LlmDataDist, peer: Peer, slots: Cache, layers: range | None, needed: int
) -> None:
    target = PeerTensors(1, addresses(peer, "cache")[:3])
    ext_param = KvCacheExtParam(layers)
    with refused(INVALID) as error:
        user.layered(Transfer(Rows(slots), Rows(target), layers=ext_param))
    assert f"addresses has 3 elements; {needed} are needed" in str(error.value)


def test_rows_whose_values_lie_elsewhere_do_not_go_to_addresses(
    user: LlmDataDist, peer: Peer
) -> None:
    """An address says where the keys of a block go, but not its values."""
    apart = CacheDesc(1, (2, 4, 2, 8), BLOCKS.data_type, kv_tensor_format="kv block token dim")
    target = PeerTensors(1, addresses(peer, "paged")[:1])
    with refused(INVALID, "dst has no layout.*; addresses have none: name the cache by"):
        user.run(Transfer(Rows(user.allocate_blocks_cache(apart), [0]), Rows(target, [0])))
    assert untouched(peer)


def untouched(peer: Peer) -> bool:
    return not there(peer, "cache").any() and not there(peer, "paged").any()


def test_addresses_in_no_cache_are_refused(user: LlmDataDist, peer: Peer, slots: Cache) -> None:
    fill(user, slots)
    target = addresses(peer, "cache")
    outside = peer.run("other = zeros((64,), np.int32); result = addresses([other])[0]")
    for address in (outside, target[0] - 1, max(target) + SLOTS.tensor_nbytes, 1, 2**64 - 1):
        wrong = [*target[:7], address, *target[8:]]
        with refused(NOT_EXIST) as error:
            user.layered(Transfer(Rows(slots), Rows(PeerTensors(1, wrong))))
        assert f"addresses[7]={address:#x}" in str(error.value)
    assert untouched(peer)
    assert peer.run("result = int(other.sum())") == 0
    assert user.metrics()["in_flight"] == 0


def test_a_row_must_not_reach_into_the_next_tensor(
    user: LlmDataDist, peer: Peer, slots: Cache, blocks: Cache
) -> None:
    """The next tensor may be of the same cache, adjacent, and in the same range."""
    fill(user, slots)
    target = addresses(peer, "cache")
    assert target[1] == target[0] + SLOTS.tensor_nbytes
    straddling = [item + SLOTS.tensor_nbytes - 4 for item in target]
    with refused(INVALID) as error:
        user.layered(Transfer(Rows(slots), Rows(PeerTensors(1, straddling))))
    assert "4 bytes before the end" in str(error.value)
    # As many blocks exist as the tensor has behind the address.
    paged = PeerTensors(1, [address + 2 * BLOCKS.stride for address in addresses(peer, "paged")])
    with refused(INVALID):
        user.layered(Transfer(Rows(blocks, [0]), Rows(paged, [6])))
    push(user, blocks, paged, src_blocks=[0], dst_blocks=[5])
    assert not there(peer, "cache").any()


def test_addresses_of_two_caches_are_refused(user: LlmDataDist, peer: Peer, slots: Cache) -> None:
    fill(user, slots)
    mixed = [*addresses(peer, "cache")[:-1], addresses(peer, "paged")[-1]]
    with refused(INVALID) as error:
        user.layered(Transfer(Rows(slots), Rows(PeerTensors(1, mixed))))
    assert "addresses[59]" in str(error.value)
    assert untouched(peer)


@pytest.mark.over_tcp
def test_read_only_memory_is_not_written(
    user: LlmDataDist, peer: Peer, slots: Cache, machine: Machine
) -> None:
    on_host_only(machine, NEVER_READ_ONLY)
    fill(user, slots)
    target = peer.run(
        """
        arrays = [np.zeros((4, 64), np.int32) for _ in range(60)]
        for array in arrays:
            array.flags.writeable = False
        result = datadist.register_cache(slots, arrays).tensor_addrs
        """
    )
    with refused(INVALID):
        user.layered(Transfer(Rows(slots), Rows(PeerTensors(1, target))))
    assert peer.run("result = int(sum(array.sum() for array in arrays))") == 0


def test_memory_that_peers_must_not_reach_is_not_found(
    user: LlmDataDist, peer: Peer, slots: Cache
) -> None:
    target = peer.run(
        """
        arrays = [zeros((4, 64), np.int32) for _ in range(60)]
        hidden = datadist.register_cache(slots, addresses(arrays), remote_accessible=False)
        result = hidden.tensor_addrs
        """
    )
    with refused(NOT_EXIST):
        user.layered(Transfer(Rows(slots), Rows(PeerTensors(1, target))))


def test_other_clusters_and_numbers_are_refused(
    user: LlmDataDist, peer: Peer, slots: Cache
) -> None:
    target = addresses(peer, "cache")
    with refused(INVALID):
        user.layered(Transfer(Rows(slots), Rows(PeerTensors(2, target))))
    with refused(LLMStatusCode.LLM_NOT_YET_LINK):
        user.layered(Transfer(Rows(slots), Rows(PeerTensors(3, target))))
    with refused(INVALID):
        user.layered(Transfer(Rows(slots), Rows(PeerTensors(1, target[:4]))))
    with refused(INVALID):
        user.layered(Transfer(Rows(slots), Rows(PeerTensors(1, target, stride=SLOTS.stride - 4))))
    twice = PeerTensors(1, [target[0], *target[:-1]])
    with refused(INVALID):
        user.layered(Transfer(Rows(slots), Rows(twice)))
    assert untouched(peer)


def test_addresses_inside_of_one_large_tensor_are_found(
    user: LlmDataDist, peer: Peer, slots: Cache
) -> None:
    """The peer has registered all its layers as one range."""
    arrays = fill(user, slots)
    nbytes = SLOTS.nbytes
    base = peer.run(
        """
        whole = datadist.allocate_cache(CacheDesc(1, (1, nbytes), DataType.DT_INT8))
        result = whole.tensor_addrs[0]
        """,
        nbytes=nbytes,
    )
    target = [base + number * SLOTS.tensor_nbytes for number in range(SLOTS.num_tensors)]
    push(user, slots, PeerTensors(1, target), src_batch_index=1)
    arrived = np.array(
        peer.run("result = datadist.arrays(whole)[0].view(np.int32).reshape(60, 4, 64).tolist()")
    )
    assert (arrived[:, 0] == np.array([array[1] for array in arrays])).all()
    assert not arrived[:, 1:].any()


@pytest.mark.parametrize(
    "arguments",
    [("1", [1]), (1, 5), (1, None), (1, "12"), (1, b"12"), (1, [1.0]), (1, [True]), (1, [1], "4")],
    ids=repr,
)
def test_values_of_another_type_are_refused(arguments: Any) -> None:
    with pytest.raises(TypeError):
        PeerTensors(*arguments)


@pytest.mark.parametrize("arguments", [(-1, [1]), (2**64, [1]), (1, [2**64]), (1, [-1])], ids=repr)
def test_values_beyond_their_width_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match="out of range"):
        PeerTensors(*arguments)


@pytest.mark.parametrize("arguments", [(1, []), (1, [0]), (1, [1], 0), (1, [1], -4)], ids=repr)
def test_invalid_values_are_refused(arguments: Any) -> None:
    with refused(INVALID):
        PeerTensors(*arguments)


def test_a_value_is_frozen_and_hashable() -> None:
    assert PeerTensors(1, [4, 5]) == PeerTensors(1, (4, 5))
    assert hash(PeerTensors(1, [4, 5])) == hash(PeerTensors(1, (4, 5)))
