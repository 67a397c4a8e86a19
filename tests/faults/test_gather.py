"""A gather from two peers of which one fails: the error names that peer, and all transfers end."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvnative._backend import Backend
from kvplan import (
    Cache,
    CacheDesc,
    CacheIndex,
    DataType,
    GatherError,
    GatherTask,
    LinkState,
    LlmDataDist,
    LLMStatusCode,
    Rows,
    Shard,
    Transfer,
    Transfers,
)
from tests.faults.conftest import Attempt, MakeEngine, MakePeer
from tests.faults.gate import Gate
from tests.faults.states import link_of, wait_for_state
from tests.faults.transfers import LONG_MS, link
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at, limit_bandwidth, limit_batch

SLOW = {"heartbeat_interval_ms": 20_000, "heartbeat_timeout_ms": 60_000}
FOR_EVER_MS = 600_000
PEERS = (1, 3)  # the clusters of sources 0 and 1, which have heads 0 and 1
BLOCKS = [3, 1]
TABLES = ([2, 0], [1, 3])
WHOLE = CacheDesc(
    2,
    (4, 16, 2, 64),
    DataType.DT_INT32,
    kv_tensor_format="block token head dim",
    shard=Shard(range(1), range(2), 1, 2),
)
OFFER = """
part = CacheDesc(
    2,
    (4, 1, 16, 64),
    DataType.DT_INT32,
    kv_tensor_format="block head token dim",
    shard=Shard(range(1), range(head, head + 1), 1, 2),
)
arrays = [np.full(part.shape, 5 + head, np.int32) for _ in range(2)]
cache = datadist.register_blocks_cache(part, arrays)
result = cache.cache_id
"""

Wrap = Callable[[Backend], Backend]


class Scene:
    """An engine of cluster 2 linked with two peers, each of which has a head of the request."""

    def __init__(self, user: LlmDataDist, make_peer: MakePeer) -> None:
        self.user, self.peers = user, [make_peer(peer) for peer in PEERS]
        ids = [int(peer.run(OFFER, head=head)) for head, peer in enumerate(self.peers)]
        self.sources = [CacheIndex(*pair) for pair in zip(PEERS, ids, strict=True)]
        self.cache: Cache = user.allocate_blocks_cache(WHOLE)
        self.arrays: list[NDArray[np.int32]] = user.arrays(self.cache)
        link(user, *self.peers)

    @property
    def transfer(self) -> Transfer:
        sources = [Rows(*pair) for pair in zip(self.sources, TABLES, strict=True)]
        return Transfer(sources, Rows(self.cache, BLOCKS))

    def gather(self, timeout_ms: float = LONG_MS, **more: Any) -> None:
        self.user.run(self.transfer, timeout_ms=timeout_ms, **more)

    def submit(self, **more: Any) -> GatherTask:
        task = self.user.submit(self.transfer, **more)
        assert isinstance(task, GatherTask)
        return task

    def notified(self, peer: int) -> list[bytes]:
        """Wait for a notification at the peer of a source, and return all of them."""
        found = self.peers[peer].run(
            """
            assert datadist.notifications().wait(20_000)
            result = [(it.cluster_id, it.data) for it in datadist.notifications()]
            """
        )
        assert {cluster_id for cluster_id, _ in found} == {2}
        return [data for _, data in found]

    def assert_arrived(self, *heads: int) -> None:
        for array in self.arrays:
            for head in heads:
                assert (array[BLOCKS, :, head] == 5 + head).all()
            assert not array[[0, 2]].any()

    def assert_over(self) -> None:
        """Check that no transfer is in flight, and that no byte changes any more."""
        left = [array.copy() for array in self.arrays]
        assert [item.in_flight for item in self.user.links()] == [0, 0]
        assert self.user.metrics()["in_flight"] == 0
        for peer in self.peers:
            if not peer.dead:
                peer.run("result = None")
        assert all((a == b).all() for a, b in zip(self.arrays, left, strict=True))

    def assert_usable(self) -> None:
        """Check that the links still work."""
        assert [item.state for item in self.user.links()] == [LinkState.LINKED] * 2
        self.gather()
        self.assert_arrived(0, 1)


@pytest.fixture
def make_scene(make_engine: MakeEngine, make_peer: MakePeer) -> Iterator[Callable[..., Scene]]:
    """A function that makes a scene; each backend of its engine has a wrapper of its own."""
    made: list[Transfers] = []

    def make(*wraps: Wrap, **options: Any) -> Scene:
        left = [
            lambda value: value,
            *wraps,
        ]  # the first backend is of plain copies, then each source has one
        made.append(Transfers(1, lambda value: left.pop(0)(value) if left else value))
        return Scene(make_engine(2, transfers=made[-1], **{**SLOW, **options}), make_peer)

    yield make
    for transfers in made:
        transfers.close(cancel=True)


def unwrapped(backend: Backend) -> Backend:
    return backend


def never(backend: Backend) -> Backend:
    return delay(backend, FOR_EVER_MS)


def slowly(backend: Backend, bytes_per_second: float = 1e4) -> Backend:
    """Slow a backend down to 1.6 s for the part of a source, one descriptor after the other."""
    return limit_batch(limit_bandwidth(backend, bytes_per_second), 1)


def very_slowly(backend: Backend) -> Backend:
    """Slow a backend down so much that its transfer outlasts the test."""
    return slowly(backend, 100)


def caught(call: Callable[[], object]) -> GatherError:
    with pytest.raises(GatherError) as error:
        call()
    return error.value


@pytest.mark.over_tcp
@pytest.mark.parametrize("fault", ["killed", "unregistered"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_source_fails_during_the_transfer(
    gated: MakeEngine, make_peer: MakePeer, gate: Gate, attempt: Attempt, victim: int, fault: str
) -> None:
    scene = Scene(gated(2, **SLOW), make_peer)
    call = attempt(scene.gather)
    gate.wait()
    if fault == "killed":
        scene.peers[victim].kill()
        wait_for_state(scene.user, PEERS[victim], LinkState.BROKEN)
        status = LLMStatusCode.LLM_LINK_FAILED
    else:
        scene.peers[victim].run("datadist.unregister_cache(cache.cache_id)")
        status = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    gate.open()
    error = call.result(30)
    assert isinstance(error, GatherError), error
    assert (error.status_code, [*error.failed]) == (status, [victim]), error
    assert f"1 of 2 sources failed: sources[{victim}] " in str(error)
    assert f"head {victim} of 2" in str(error)
    if not error.stopped:
        scene.assert_arrived(1 - victim)
    scene.assert_over()
    other = link_of(scene.user, PEERS[1 - victim])
    assert other is not None
    assert other.state is LinkState.LINKED
    if fault == "unregistered":
        scene.sources[victim] = CacheIndex(
            PEERS[victim], scene.peers[victim].run(OFFER, head=victim)
        )
        scene.assert_usable()


@pytest.mark.over_tcp
def test_a_failure_of_the_second_stops_the_first(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(never, lambda value: fail_at(value, 1))
    error = caught(lambda: scene.gather(FOR_EVER_MS))
    assert ([*error.failed], [*error.stopped]) == ([1], [0])
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert str(error).endswith("sources[0] stopped because of that (LLM_FAILED)")
    assert error.unconfirmed == error.failed[1].unconfirmed
    assert error.origin is not None
    scene.assert_over()


@pytest.mark.over_tcp
def test_one_deadline_is_for_all_sources(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(never, unwrapped)
    error = caught(lambda: scene.gather(60))
    assert (error.status_code, [*error.failed]) == (LLMStatusCode.LLM_TIMEOUT, [0])
    assert error.stopped == {}
    scene.assert_arrived(1)
    scene.assert_over()
    scene = make_scene(never, never)
    error = caught(lambda: scene.gather(20))
    assert (error.status_code, [*error.failed]) == (LLMStatusCode.LLM_TIMEOUT, [0, 1])
    scene.assert_over()
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout_ms="):
            scene.gather(wrong)
    scene.assert_over()


@pytest.mark.over_tcp(only=True)
def test_a_peer_is_stopped_until_the_deadline_passes(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    scene.gather()
    for array in scene.arrays:
        array[:] = 0
    scene.peers[1].stop()
    error = caught(lambda: scene.gather(200))
    assert (error.status_code, [*error.failed]) == (LLMStatusCode.LLM_TIMEOUT, [1])
    scene.assert_arrived(0)
    scene.peers[1].resume()
    scene.assert_over()
    scene.assert_usable()


def test_a_gather_is_not_done_when_only_one_source_is(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(lambda value: delay(value, 200), never)
    task = scene.submit()
    first, second = task.tasks.values()
    first.wait(LONG_MS)
    assert (first.done, second.done, task.done) == (True, False, False)
    assert not task.wait_done(0)
    task.cancel()
    assert task.wait_done(LONG_MS)
    assert [*caught(task.wait).failed] == [1]
    scene.assert_arrived(0)
    scene.assert_over()


def test_several_waiters_get_the_same_outcome(make_scene: Callable[..., Scene]) -> None:
    """Waiting threads and a coroutine get the same outcome."""
    scene = make_scene(lambda value: limit_bandwidth(value, 2e5), unwrapped)  # 80 ms
    task = scene.submit()

    async def awaited() -> None:
        await task

    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(task.wait, LONG_MS) for _ in range(3)]
        asyncio.run(awaited())
        assert [wait.result(30) for wait in waits] == [None] * 3
    scene.assert_arrived(0, 1)
    scene.assert_over()
    scene = make_scene(never, unwrapped)
    task = scene.submit()
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(caught, task.wait) for _ in range(3)]
        task.cancel()
        errors = [wait.result(30) for wait in waits]
    assert {(str(error), *error.failed) for error in errors} == {(str(errors[0]), 0)}
    assert "head 0 of 2" in task.explain()
    scene.assert_over()


def test_a_cancelled_await_stops_the_gather(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(never, never)
    task = scene.submit()

    async def cancel_soon() -> None:
        waiting = asyncio.ensure_future(task)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancel_soon())
    assert task.done
    assert [*caught(task.wait).failed] == [0, 1]
    scene.assert_over()


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Let a KeyboardInterrupt reach the main thread after some time."""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer = threading.Timer(
        seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)
    )
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_stops_the_gather(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(slowly, slowly)
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.1):
        scene.gather(FOR_EVER_MS)
    scene.assert_over()
    assert not all(array[BLOCKS].all() for array in scene.arrays)


def test_an_interrupted_wait_leaves_the_gather_in_flight(make_scene: Callable[..., Scene]) -> None:
    """The caller still has the task, and can wait again or cancel it."""
    scene = make_scene(never, never)
    task = scene.submit()
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.1):
        task.wait(FOR_EVER_MS)
    assert not any(part.done for part in task.tasks.values())
    task.cancel()
    assert [*caught(task.wait).failed] == [0, 1]
    scene.assert_over()


@pytest.mark.over_tcp
def test_finalize_stops_the_gather(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(never, never, sync_kv_cache_wait_time=200)
    task = scene.submit()
    scene.user.finalize()
    assert task.done
    assert [*caught(task.wait).failed] == [0, 1]
    with refused("LLM_ENGINE_FINALIZED"):
        scene.submit()
    for peer in scene.peers:
        peer.wait_for_state(2, "CLOSED")


def test_finalize_ends_the_call_of_another_thread(
    make_scene: Callable[..., Scene], attempt: Attempt
) -> None:
    scene = make_scene(very_slowly, very_slowly, sync_kv_cache_wait_time=200)
    call = attempt(lambda: scene.gather(FOR_EVER_MS))
    while not scene.arrays[0].any():  # until bytes arrive
        assert not call.done(), call.result()
    scene.user.finalize()
    left = [array.copy() for array in scene.arrays]
    error = call.result(30)
    assert isinstance(error, GatherError), error
    assert {*error.failed, *error.stopped} == {0, 1}
    assert "finalized" in str(error)
    for peer in scene.peers:
        peer.wait_for_state(2, "CLOSED")
    assert all((a == b).all() for a, b in zip(scene.arrays, left, strict=True))


def test_each_source_is_counted_and_logged(
    make_scene: Callable[..., Scene], caplog: pytest.LogCaptureFixture
) -> None:
    scene = make_scene(unwrapped, lambda value: fail_at(value, 0))
    with caplog.at_level(logging.INFO, "kvplan"):
        caught(scene.gather)
    lines = [
        record.getMessage() for record in caplog.records if "gather_blocks" in record.getMessage()
    ]
    assert [line.split()[:3] for line in lines] == [
        ["operation=gather_blocks", "cluster=2", f"peer={peer}"] for peer in PEERS
    ]
    assert "bytes=16384 " in lines[0]  # 2 tensors x 32 tokens x 64 elements x 4 bytes
    assert "status=LLM_SUCCESS" in lines[0]
    assert "status=LLM_FAILED" in lines[1]
    counted = scene.user.metrics()["operations"]["gather_blocks"]
    assert counted["statuses"] == {"LLM_SUCCESS": 1, "LLM_FAILED": 1}
    assert counted["nbytes"] == 16384
    assert [item.bytes_pulled for item in scene.user.links()] == [16384, 0]


NOTICES = {"notify": b"whole", "notify_failure": b"failed"}


@pytest.mark.over_tcp
def test_each_peer_is_notified_once_when_all_of_it_has_arrived(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(slowly)
    task = scene.submit(**NOTICES)
    assert scene.notified(1) == [b"whole"]  # although its own part had arrived long before
    scene.assert_arrived(0, 1)
    assert scene.notified(0) == [b"whole"]
    task.wait()
    scene.assert_over()
    scene.gather(**NOTICES)
    scene.user.run(
        {
            "all": Transfer(
                [Rows(cache, blocks) for cache, blocks in zip(scene.sources, TABLES, strict=True)],
                Rows(scene.cache, BLOCKS),
            ),
            "again": Transfer(
                [Rows(cache, blocks) for cache, blocks in zip(scene.sources, TABLES, strict=True)],
                Rows(scene.user.allocate_blocks_cache(WHOLE), BLOCKS),
            ),
        },
        notify=b"groups",
    )
    assert [scene.notified(0), scene.notified(1)] == [[b"whole", b"groups"]] * 2
    scene.assert_over()


def test_a_peer_of_two_sources_gets_one_notification(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    other = scene.peers[0].run(OFFER, head=1)
    scene.sources[1] = CacheIndex(PEERS[0], other)
    scene.gather(**NOTICES)
    scene.user.notify(PEERS[0], b"last")
    assert scene.notified(0) == [b"whole", b"last"]
    scene.assert_over()


@pytest.mark.over_tcp
def test_each_peer_is_notified_of_a_failure_of_any_peer(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(never, lambda value: fail_at(value, 1))
    caught(lambda: scene.gather(FOR_EVER_MS, **NOTICES))
    assert [scene.notified(0), scene.notified(1)] == [[b"failed"]] * 2
    scene.assert_over()
    scene = make_scene(never, never)
    task = scene.submit(**NOTICES)
    task.cancel()  # without a waiting thread
    assert [scene.notified(0), scene.notified(1)] == [[b"failed"]] * 2
    caught(task.wait)  # returns when the peers have acknowledged the notifications
    scene.assert_over()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("known", [True, False], ids=["freed", "unknown"])
def test_each_peer_is_notified_of_a_refused_gather(
    make_scene: Callable[..., Scene], known: bool, failing: int
) -> None:
    scene = make_scene()
    if known:
        scene.peers[failing].run("datadist.unregister_cache(cache.cache_id)")
    else:
        scene.sources[failing] = CacheIndex(PEERS[failing], 99)
    error = caught(lambda: scene.gather(**NOTICES))
    assert error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert [scene.notified(0), scene.notified(1)] == [[b"failed"]] * 2
    scene.assert_over()


@pytest.mark.usefixtures("needs_no_running_peer")
def test_a_complete_gather_fails_if_a_peer_cannot_be_notified(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(sync_kv_cache_wait_time=1000)
    scene.peers[1].stop()
    task = scene.submit(notify=b"whole")
    with refused("LLM_TIMEOUT", "gather_blocks: every byte has arrived, but .* cluster 3 has not"):
        task.wait()
    scene.assert_arrived(0, 1)
    scene.peers[1].resume()
    assert [scene.notified(0), scene.notified(1)] == [[b"whole"]] * 2
    scene.assert_over()


def test_a_notification_that_is_too_long_is_refused_before_anything_moves(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene()
    with refused("LLM_PARAM_INVALID", r"notify has 4097 bytes; allowed are \[1, 4096\]"):
        scene.gather(notify=bytes(4097))
    with pytest.raises(TypeError, match="notify_failure="):
        scene.submit(notify_failure="text")
    assert not any(array.any() for array in scene.arrays)
    scene.assert_over()
