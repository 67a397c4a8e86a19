"""Memory that is freed or unregistered while a peer pushes to it: no byte changes afterwards.

KVPLAN_TEST_ROUNDS=1000 tries each case 1,000 times.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan import Cache, CacheDesc, DataType, LlmDataDist, LLMException, LLMStatusCode, PoolConfig
from tests.faults.conftest import MakeEngine, MakePeer
from tests.faults.gate import DEADLINE_S
from tests.faults.peer import Peer
from tests.support.refusals import refused

ROUNDS = int(os.environ.get("KVPLAN_TEST_ROUNDS", "8"))
# 16 MiB, which move in about 2 ms, in 32 pieces or more
DESC = CacheDesc(4, (1, 1 << 22), DataType.DT_UINT8)
PUSHED, STAMPED = 1, 2

Tensors = list[NDArray[np.uint8]]


class Memory(Protocol):
    def make(self, owner: LlmDataDist) -> tuple[Cache, Tensors]: ...
    def end(self, owner: LlmDataDist, cache: Cache) -> None: ...


class Pooled:
    """A cache that fills the engine's pool."""

    def make(self, owner: LlmDataDist) -> tuple[Cache, Tensors]:
        cache = owner.allocate_cache(DESC)
        return cache, owner.arrays(cache)

    def end(self, owner: LlmDataDist, cache: Cache) -> None:
        owner.deallocate_cache(cache)


class Arrays:
    def make(self, owner: LlmDataDist) -> tuple[Cache, Tensors]:
        arrays = [np.zeros(DESC.shape, np.uint8) for _ in range(DESC.num_tensors)]
        return owner.register_cache(DESC, arrays), arrays

    def end(self, owner: LlmDataDist, cache: Cache) -> None:
        owner.unregister_cache(cache.cache_id)


class Addresses(Arrays):
    def make(self, owner: LlmDataDist) -> tuple[Cache, Tensors]:
        area = mmap.mmap(-1, DESC.nbytes)
        first = ctypes.addressof(ctypes.c_char.from_buffer(area))
        arrays = np.frombuffer(area, np.uint8).reshape(DESC.num_tensors, *DESC.shape)
        addresses = [first + i * DESC.tensor_nbytes for i in range(DESC.num_tensors)]
        return owner.register_cache(DESC, addresses), list(arrays)


MEMORIES: dict[str, Memory] = {"pooled": Pooled(), "arrays": Arrays(), "addresses": Addresses()}


@pytest.fixture(params=MEMORIES)
def memory(request: pytest.FixtureRequest) -> Memory:
    return MEMORIES[request.param]


@pytest.fixture
def owner(make_engine: MakeEngine) -> LlmDataDist:
    return make_engine(9, mem_pool_config=PoolConfig(DESC.nbytes), heartbeat_timeout_ms=60_000)


@pytest.fixture
def pusher(make_peer: MakePeer, owner: LlmDataDist) -> Callable[[], Peer]:
    """A function that makes a peer that is linked with the owner."""

    def make() -> Peer:
        peer = make_peer(1)
        peer.run(
            """
            from threading import Thread
            desc = CacheDesc(4, (1, 1 << 22), DataType.DT_UINT8)
            cache = datadist.allocate_cache(desc)
            for it in datadist.arrays(cache):
                it[:] = 1
            datadist.link_clusters([ClusterInfo(9, address)], 10_000).raise_for_status()

            def push(to):
                try:
                    while True:
                        datadist.push_cache(cache, CacheIndex(9, to), timeout_ms=60_000)
                except LLMException as error:
                    why.append(error.status_code.name)
            """,
            address=owner.listen_address,
        )
        return peer

    return make


def begin(peer: Peer, cache: Cache, arrays: Tensors) -> None:
    """Let the peer push to the cache repeatedly, and return when the first bytes have arrived."""
    peer.run(
        "why = []; thread = Thread(target=push, args=(to,), daemon=True); thread.start()",
        to=cache.cache_id,
    )
    deadline = time.monotonic() + DEADLINE_S
    while arrays[0][0, 0] != PUSHED:
        assert time.monotonic() < deadline


def stamp(arrays: Tensors) -> None:
    for array in arrays:
        array[:] = STAMPED


def changed(arrays: Tensors) -> int:
    return sum(int((array != STAMPED).sum()) for array in arrays)


def errors_of_push(peer: Peer) -> list[str]:
    return list(peer.run("thread.join(30); result = why"))


def test_unregistering_while_the_peer_goes_on(
    owner: LlmDataDist, pusher: Callable[[], Peer], memory: Memory
) -> None:
    peer = pusher()
    for number in range(ROUNDS):
        cache, arrays = memory.make(owner)
        begin(peer, cache, arrays)
        memory.end(owner, cache)
        stamp(arrays)
        assert errors_of_push(peer) == ["LLM_KV_CACHE_NOT_EXIST"]
        assert changed(arrays) == 0, f"round {number}"
        del cache, arrays


def test_unregistering_while_the_peer_is_killed(
    owner: LlmDataDist, pusher: Callable[[], Peer], memory: Memory
) -> None:
    """The owner waits a second for a stopped peer.

    It does not wait for a peer that died within a piece.
    """
    spent = []
    for number in range(-(-ROUNDS // 4)):
        peer = pusher()
        cache, arrays = memory.make(owner)
        begin(peer, cache, arrays)
        peer.kill()
        began = time.monotonic()
        memory.end(owner, cache)
        spent.append(time.monotonic() - began)
        stamp(arrays)
        owner.unlink_clusters([1], 10_000, force=True)
        assert changed(arrays) == 0, f"round {number}"
        del cache, arrays
    assert min(spent) < 0.9, "a busy machine holds up some of them, and not each"


@pytest.mark.parametrize("kind", [pytest.param("arrays", marks=pytest.mark.slow), "addresses"])
def test_unregistering_addresses_while_the_peer_is_stopped(
    owner: LlmDataDist, pusher: Callable[[], Peer], kind: str
) -> None:
    """The owner waits a second at most, and later writes of the peer are refused."""
    memory = MEMORIES[kind]
    for number in range(-(-ROUNDS // 4)):
        peer = pusher()
        cache, arrays = memory.make(owner)
        begin(peer, cache, arrays)
        peer.stop()
        began = time.monotonic()
        memory.end(owner, cache)
        assert time.monotonic() - began < DEADLINE_S
        stamp(arrays)
        peer.resume()
        (error_name,) = errors_of_push(peer)
        assert error_name in ("LLM_KV_CACHE_NOT_EXIST", "LLM_LINK_FAILED")
        assert changed(arrays) == 0, f"round {number}"
        owner.unlink_clusters([1], 10_000, force=True)
        peer.run("datadist.finalize()")
        del cache, arrays


def make_when_there_is_room(memory: Memory, owner: LlmDataDist) -> tuple[Cache, Tensors]:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            cache, arrays = memory.make(owner)
        except LLMException:
            assert time.monotonic() < deadline
        else:
            return cache, arrays


@pytest.mark.parametrize("kind", ["arrays", "addresses"])
def test_finalize_while_the_peer_is_stopped(
    owner: LlmDataDist, pusher: Callable[[], Peer], kind: str
) -> None:
    peer = pusher()
    cache, arrays = MEMORIES[kind].make(owner)
    begin(peer, cache, arrays)
    peer.stop()
    began = time.monotonic()
    owner.finalize()
    assert time.monotonic() - began < DEADLINE_S
    stamp(arrays)
    peer.resume()
    (error_name,) = errors_of_push(peer)
    assert error_name in ("LLM_KV_CACHE_NOT_EXIST", "LLM_LINK_FAILED")
    assert changed(arrays) == 0


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """A function that returns the owner's warnings of quarantined memory."""
    with caplog.at_level(logging.WARNING, "kvplan"):
        yield lambda: [message for message in caplog.messages if "is quarantined" in message]


@pytest.mark.slow
def test_freeing_in_a_pool_while_the_peer_is_stopped(
    owner: LlmDataDist, pusher: Callable[[], Peer], warnings: Callable[[], list[str]]
) -> None:
    """Memory that the peer has mapped is not allocated again before the peer goes on.

    A warning names the peer.
    """
    memory, peer = MEMORIES["pooled"], pusher()
    num_quarantined = 0
    for number in range(ROUNDS):
        cache, arrays = memory.make(owner)
        begin(peer, cache, arrays)
        peer.stop()
        before = len(warnings())
        began = time.monotonic()
        memory.end(owner, cache)
        assert time.monotonic() - began < DEADLINE_S
        del cache, arrays
        if len(warnings()) > before:  # otherwise the peer was stopped between two pieces
            num_quarantined += 1
            assert f"process {peer.process.pid} " in warnings()[before]
            with refused(LLMStatusCode.LLM_OUT_OF_MEMORY):
                memory.make(owner)
            peer.resume()
            assert errors_of_push(peer) == ["LLM_KV_CACHE_NOT_EXIST"]
        cache, arrays = make_when_there_is_room(memory, owner)
        stamp(arrays)
        peer.resume()
        assert errors_of_push(peer) == ["LLM_KV_CACHE_NOT_EXIST"]
        assert changed(arrays) == 0, f"round {number}"
        memory.end(owner, cache)
        del cache, arrays
    assert num_quarantined or ROUNDS < 8, "the peer was never stopped in the middle of a piece"
