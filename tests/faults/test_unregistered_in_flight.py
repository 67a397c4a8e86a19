"""A cache that an engine unregisters under its own transfers: they end, and no other goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from kvplan import (
    AddressRanges,
    Cache,
    CacheDesc,
    CacheIndex,
    DataType,
    GatherTask,
    LlmDataDist,
    LLMException,
    LLMStatusCode,
    Rows,
    Shard,
    Transfer,
    Transfers,
    TransferTask,
)
from tests.faults.conftest import Attempt, MakeEngine
from tests.faults.contents import own
from tests.faults.gate import DEADLINE_S, Gate
from tests.faults.peer import Peer
from tests.faults.transfers import LONG_MS, link
from tests.support.refusals import refused
from tests.support.wrappers import limit_bandwidth

DESC = CacheDesc(
    8,
    (4, 16, 2, 2),
    DataType.DT_INT32,
    kv_tensor_format="block token head dim",
    shard=Shard(range(4), range(2), 4, 2),
)
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
OFFER = """
cache = datadist.allocate_blocks_cache(desc)
for array in datadist.arrays(cache):
    array[:] = 1
result = cache.cache_id, list(cache.tensor_addrs)
"""
THEIR_BLOCKS, OWN_BLOCKS = [0, 2], [1, 3]
ROW = DESC.stride


class Scene(NamedTuple):
    """A registered paged cache that transfers read or write, and a cache of the peer."""

    user: LlmDataDist
    cache: Cache
    arrays: list[NDArray[np.int32]]
    remote_cache: CacheIndex
    addresses: list[int]

    def unregister(self) -> None:
        self.user.unregister_cache(self.cache.cache_id)

    def assert_unused(self, outcome: Callable[[], object]) -> LLMException:
        """Check that memory belongs to the program before the outcome is read, and after."""
        for array in self.arrays:
            array[:] = 7
        reason = f"this engine has unregistered cache {self.cache.cache_id} "
        with refused(NOT_EXIST, reason) as caught:
            outcome()
        assert all((array == 7).all() for array in self.arrays)
        assert self.user.metrics()["in_flight"] == 0
        return caught.value


@pytest.fixture
def slowly() -> Iterator[Transfers]:
    """Transfers that do not end by themselves before the test does."""
    made = Transfers(1, lambda value: limit_bandwidth(value, 100.0))
    yield made
    made.close(cancel=True)


def scene_of(user: LlmDataDist, peer: Peer, of: str = "host", desc: CacheDesc = DESC) -> Scene:
    remote_cache, addresses = peer.run(OFFER, desc=desc)
    link(user, peer)
    arrays = [np.zeros(desc.shape, np.int32) for _ in range(desc.num_tensors)]
    given: list[Any]
    if of == "addresses":
        given = [array.ctypes.data for array in arrays]
    else:
        arrays, given = own(of, user.cluster_id, arrays)
    cache = user.register_blocks_cache(desc, given)
    return Scene(user, cache, arrays, CacheIndex(1, remote_cache), addresses)


def ranges(scene: Scene, direction: Literal["pull", "push"] = "pull") -> AddressRanges:
    local = [address + block * ROW for address in scene.cache.tensor_addrs for block in OWN_BLOCKS]
    remote = [address + block * ROW for address in scene.addresses for block in THEIR_BLOCKS]
    return AddressRanges(1, local, remote, [ROW] * len(local), direction)


def other(scene: Scene) -> Cache:
    return scene.user.allocate_blocks_cache(DESC)


def layers(scene: Scene) -> TransferTask:
    task = scene.user.layered(
        Transfer(Rows(scene.cache, THEIR_BLOCKS), Rows(scene.remote_cache, OWN_BLOCKS))
    )
    task.ready(0)
    return task


def groups(scene: Scene) -> TransferTask:
    """Submit a transfer to two caches, of which one is unregistered."""
    pulled = {"a": scene.cache, "b": other(scene)}
    return scene.user.submit(
        {
            name: Transfer(Rows(scene.remote_cache, THEIR_BLOCKS), Rows(cache, OWN_BLOCKS))
            for name, cache in pulled.items()
        }
    )


def gather(scene: Scene) -> GatherTask:
    group = Transfer([Rows(scene.remote_cache, THEIR_BLOCKS)], Rows(scene.cache, OWN_BLOCKS))
    return scene.user.submit({"a": group})


SUBMIT: dict[str, Callable[[Scene], TransferTask | GatherTask]] = {
    "pull": lambda value: value.user.submit(
        Transfer(Rows(value.remote_cache, THEIR_BLOCKS), Rows(value.cache, OWN_BLOCKS))
    ),
    "push": lambda value: value.user.submit(
        Transfer(Rows(value.cache, THEIR_BLOCKS), Rows(value.remote_cache, OWN_BLOCKS))
    ),
    "pull_groups": groups,
    "gather_groups": gather,
    "pull_ranges": lambda value: value.user.submit(ranges(value)),
    "push_ranges": lambda value: value.user.submit(ranges(value, "push")),
    "push_layers": layers,
    "copy_blocks": lambda value: value.user.submit(
        Transfer(Rows(value.cache, [0]), Rows(value.cache, [1]))
    ),
}


@pytest.mark.over_tcp
@pytest.mark.over_hccl
@pytest.mark.over_ucx
@pytest.mark.parametrize("name", SUBMIT)
def test_a_submitted_transfer_is_stopped(
    make_engine: MakeEngine, peer: Peer, slowly: Transfers, machine: str, name: str
) -> None:
    scene = scene_of(make_engine(2, transfers=slowly), peer, machine)
    task = SUBMIT[name](scene)
    assert not task.done
    scene.unregister()
    assert task.done
    error = scene.assert_unused(task.wait)
    assert error.unconfirmed


def test_a_transfer_of_memory_registered_by_addresses_is_stopped(
    make_engine: MakeEngine, peer: Peer, slowly: Transfers
) -> None:
    scene = scene_of(make_engine(2, transfers=slowly), peer, "addresses")
    task = SUBMIT["pull"](scene)
    scene.unregister()
    scene.assert_unused(task.wait)


def test_other_transfers_go_on(make_engine: MakeEngine, peer: Peer, slowly: Transfers) -> None:
    scene = scene_of(make_engine(2, transfers=slowly), peer)
    goes_on = scene.user.submit(
        Transfer(Rows(scene.remote_cache, THEIR_BLOCKS), Rows(other(scene), OWN_BLOCKS))
    )
    scene.unregister()
    assert not goes_on.wait_done(10)
    goes_on.cancel()


def test_a_task_without_ready_layers_is_stopped(
    make_engine: MakeEngine, peer: Peer, slowly: Transfers
) -> None:
    """The outcome is reported at once, although no further layer becomes ready."""
    scene = scene_of(make_engine(2, transfers=slowly), peer)
    completions = scene.user.completions()
    task = layers(scene)
    scene.unregister()
    assert completions.wait(DEADLINE_S * 1000)
    assert list(completions) == [task]
    task.ready(1)
    scene.assert_unused(task.wait)


def test_a_completed_transfer_stays_a_success(make_engine: MakeEngine, peer: Peer) -> None:
    """The outcome is read only after the cache was unregistered."""
    scene = scene_of(make_engine(2), peer)
    task = SUBMIT["pull"](scene)
    while not task.done:
        pass
    scene.unregister()
    task.wait()
    assert all((array[OWN_BLOCKS] == 1).all() for array in scene.arrays)


def test_a_call_in_another_thread_ends_before_the_memory_is_returned(
    gated: MakeEngine, peer: Peer, gate: Gate, attempt: Attempt
) -> None:
    """A transfer that cannot be stopped at this point delays every call that returns the memory."""
    scene = scene_of(gated(2), peer)
    user, cache = scene.user, scene.cache
    call = attempt(
        lambda: user.pull_blocks(
            scene.remote_cache, cache, THEIR_BLOCKS, OWN_BLOCKS, timeout_ms=LONG_MS
        )
    )
    gate.wait()
    ending = [attempt(scene.unregister)]
    while user.caches():
        pass
    ending.append(attempt(scene.unregister))
    assert not any(task.done() for task in ending)
    gate.open()
    assert [task.result(DEADLINE_S) for task in ending] == [None, None]
    for array in scene.arrays:
        array[:] = 7
    error = call.result(DEADLINE_S)
    assert error is None or "this engine has unregistered cache" in str(error)
    assert all((array == 7).all() for array in scene.arrays)


def test_a_hook_of_the_transfer_unregisters_its_cache(make_engine: MakeEngine, peer: Peer) -> None:
    """The cache was resolved before the hook ran, and is gone when its transfer is submitted."""
    scene = scene_of(make_engine(2), peer)
    scene.user.on_plan(lambda _: scene.unregister())
    scene.assert_unused(
        lambda: scene.user.pull_blocks(scene.remote_cache, scene.cache, THEIR_BLOCKS, OWN_BLOCKS)
    )


@pytest.fixture
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.over_tcp
@pytest.mark.usefixtures("switching_often")
@pytest.mark.parametrize("nbytes", [256, 64 << 10], ids=["small", "large"])
def test_calls_race_with_unregistering(make_engine: MakeEngine, peer: Peer, nbytes: int) -> None:
    """Calls come before, after or in between, and no byte is written afterwards."""
    user = make_engine(2)
    desc = CacheDesc(8, (4, nbytes // 4), DataType.DT_INT32)
    scene = scene_of(user, peer, desc=desc)
    stop = threading.Event()
    current: list[Cache] = [scene.cache]
    wrong: list[Any] = []

    def pull() -> None:
        while not stop.is_set():
            with suppress(LLMException):
                user.pull_blocks(scene.remote_cache, current[0], THEIR_BLOCKS, OWN_BLOCKS)

    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            user.unregister_cache(current[0].cache_id)
            for array in scene.arrays:
                array[:] = 7
            wrong += [item for item in scene.arrays if not (item == 7).all()]
            current[0] = user.register_blocks_cache(desc, scene.arrays)
        user.unregister_cache(current[0].cache_id)
        for array in scene.arrays:
            array[:] = 7
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert all((item == 7).all() for item in scene.arrays)
