"""Notifications of transfers arrive once, after the bytes, and only if the bytes arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import perf_counter
from typing import Any

import pytest

from kvnative._backend import Backend
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    ClusterInfo,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LLMException,
    PlanEvent,
    Rows,
    Transfer,
    Transfers,
)
from kvplan.engine.operation import notify_moved
from tests.datadist.conftest import MakeEngine
from tests.datadist.machine import Machine, on_host_only, skip_if_peers_serve
from tests.datadist.peer import Peer
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at

DESC = CacheDesc(2, (4, 64), DataType.DT_INT8)

OFFER = """
desc = CacheDesc(2, (4, 64), DataType.DT_INT8)
slots = datadist.allocate_cache(desc)
paged = datadist.allocate_blocks_cache(desc, BlocksCacheKey(1))
for cache in (slots, paged):
    for array in datadist.arrays(cache):
        array[:] = 5

def next_notification():
    assert datadist.notifications().wait(20_000)
    it = next(iter(datadist.notifications()))
    return it.cluster_id, it.data
"""
NEXT = "result = next_notification()"
WARM_UP = 2  # a table of the peer that arrives late drops the pair that the first transfer keeps
SLOTS, BLOCKS = CacheIndex(1, 1), CacheIndex(1, 2)


def transfers_of(user: LlmDataDist) -> dict[str, Transfer | dict[str, Transfer]]:
    """Return a transfer of each kind between a cache of the user and one of the peer."""
    slots, paged = user.allocate_cache(DESC), user.allocate_blocks_cache(DESC)
    for cache in (slots, paged):
        for array in user.arrays(cache):
            array[:] = 7
    pull = Transfer(Rows(BLOCKS, [0, 1]), Rows(paged, [2, 3]))
    push = Transfer(Rows(paged, [0, 1]), Rows(BLOCKS, [2, 3]))
    return {
        "pull_cache": Transfer(Rows(SLOTS), Rows(slots)),
        "pull_blocks": pull,
        "push_cache": Transfer(Rows(slots), Rows(SLOTS)),
        "push_blocks": push,
        "pull_groups": {"kv": pull},
        "push_groups": {"kv": push},
    }


def push_no_layers(user: LlmDataDist, paged: Cache, **more: Any) -> None:
    param = KvCacheExtParam(tensor_num_per_layer=2)
    transfer = Transfer(Rows(paged, []), Rows(BLOCKS, []), layers=param)
    task = user.layered(transfer, **more)
    for layer in task.layers:
        task.ready(layer)
    task.wait()


NOTHING: dict[str, Callable[..., object]] = {
    "pull": lambda engine, paged, **more: engine.pull_blocks(BLOCKS, paged, [], [], **more),
    "pull of a slot": lambda engine, paged, **more: engine.pull_blocks(
        SLOTS, paged, [], [], **more
    ),
    "submitted pull": lambda engine, paged, **more: engine.submit(
        Transfer(Rows(BLOCKS, []), Rows(paged, [])), **more
    ).wait(),
    "push": lambda engine, paged, **more: engine.push_blocks(paged, BLOCKS, [], [], **more),
    "submitted push": lambda engine, paged, **more: engine.submit(
        Transfer(Rows(paged, ()), Rows(BLOCKS, ())), **more
    ).wait(),
    "groups": lambda engine, paged, **more: engine.run(
        {"kv": Transfer(Rows(BLOCKS, []), Rows(paged, []))}, **more
    ),
    "pushed groups": lambda engine, paged, **more: engine.run(
        {"kv": Transfer(Rows(paged, []), Rows(BLOCKS, []))}, **more
    ),
    "layers": push_no_layers,
}


def test_an_empty_transfer_notifies_of_success(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    paged = user.allocate_blocks_cache(DESC)
    for name, call in NOTHING.items():
        call(user, paged, notify=name.encode())
        assert peer.run(NEXT) == (2, name.encode())
    user.pull_blocks(BLOCKS, paged, [], [])
    with refused("LLM_PARAM_INVALID", "equal length"):
        user.pull_blocks(BLOCKS, paged, [1], [])
    with refused("LLM_PARAM_INVALID", "src_blocks must name blocks of it"):
        user.pull_blocks(BLOCKS, paged, [], [1])


@pytest.mark.over_tcp
def test_each_transfer_notifies_its_peer_when_it_returns(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    for name, transfer in transfers_of(user).items():
        user.run(transfer, notify=b"of " + name.encode(), notify_failure=b"no")
        assert peer.run("result = [tuple(note) for note in datadist.notifications()]") == [
            (2, b"of " + name.encode())
        ]
        user.run(transfer)
        assert peer.run("result = list(datadist.notifications())") == []


@pytest.mark.over_tcp
def test_each_submitted_transfer_notifies_whether_or_not_a_call_waits(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.run(OFFER)
    for transfer in transfers_of(user).values():
        user.submit(transfer, notify=b"unseen", notify_failure=b"no")
        assert peer.run(NEXT) == (2, b"unseen")
        user.submit(transfer, notify=b"seen", notify_failure=b"no").wait()
        assert peer.run("result = [note.data for note in datadist.notifications()]") == [b"seen"]


def test_pushed_bytes_arrive_before_the_notification(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    peer.send(
        """
        result = []
        for _ in range(100):
            _, data = next_notification()
            result.append(all((array[2] == data[0]).all() for array in datadist.arrays(paged)))
            datadist.notify(2, b"seen")
        """
    )
    for value in range(100):
        for array in user.arrays(cache):
            array[:] = value
        user.push_blocks(cache, BLOCKS, [0], [2], notify=bytes((value,)))
        assert user.notifications().wait(20_000)
        assert len(list(user.notifications())) == 1
    assert peer.answer() == [True] * 100


def test_a_push_by_layers_notifies_after_its_last_layer(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    cache = user.allocate_cache(CacheDesc(2, (4, 64), DataType.DT_INT8))
    param = KvCacheExtParam(tensor_num_per_layer=1)
    task = user.layered(
        Transfer(Rows(cache), Rows(SLOTS), layers=param), notify=b"all", notify_failure=b"no"
    )
    task.ready(1)
    assert peer.run("result = datadist.notifications().wait(20)") is False
    task.ready(0)
    assert peer.run(NEXT) == (2, b"all")
    task.wait()
    task = user.layered(
        Transfer(Rows(cache), Rows(SLOTS), layers=param), notify=b"all", notify_failure=b"no"
    )
    task.ready(0)
    task.cancel()
    assert peer.run(NEXT) == (2, b"no")


def faulty(
    user: LlmDataDist, make_engine: MakeEngine, backend: Callable[[Backend], Backend]
) -> LlmDataDist:
    """Make cluster 3, linked with the same peer, whose copies go through a wrapper."""
    engine = make_engine(3, transfers=Transfers(1, wrap=backend))
    engine.link_clusters([ClusterInfo(1, user.links()[0].address)], 5000).raise_for_status()
    return engine


def test_a_failed_transfer_notifies_of_the_failure(
    user: LlmDataDist, peer: Peer, make_engine: MakeEngine
) -> None:
    peer.run(OFFER)
    broken = faulty(user, make_engine, lambda backend: fail_at(backend, 1))
    for transfer in transfers_of(broken).values():
        with refused("LLM_FAILED"):
            broken.run(transfer, notify=b"yes", notify_failure=b"no")
        assert peer.run(NEXT) == (3, b"no")
        with refused("LLM_FAILED"):
            broken.submit(transfer, notify=b"yes", notify_failure=b"no").wait()
        assert peer.run(NEXT) == (3, b"no")
        with refused("LLM_FAILED"):
            broken.run(transfer, notify=b"yes")
        broken.notify(1, b"the next")
        assert peer.run(NEXT) == (3, b"the next")


@pytest.mark.parametrize(
    ("raised", "notified"), [(KeyboardInterrupt, [b"last"]), (ValueError, [b"failed", b"last"])]
)
def test_an_interrupt_is_not_a_failure_that_the_peer_is_notified_of(
    user: LlmDataDist, peer: Peer, raised: type[BaseException], notified: list[bytes]
) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)

    def hook(_: PlanEvent) -> None:
        raise raised

    remove = user.on_plan(hook)
    with pytest.raises(raised):
        user.pull_blocks(BLOCKS, cache, [0], [0], notify_failure=b"failed")
    remove()
    user.pull_blocks(BLOCKS, cache, [0], [0], notify=b"last")
    assert [peer.run(NEXT) for _ in notified] == [(2, data) for data in notified]


def test_a_refused_transfer_notifies_of_the_failure(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    with refused("LLM_KV_CACHE_NOT_EXIST"):
        user.pull_blocks(CacheIndex(1, 99), cache, [0], [0], notify=b"yes", notify_failure=b"no")
    assert peer.run(NEXT) == (2, b"no")
    with refused("LLM_PARAM_INVALID"):
        user.submit(
            Transfer(Rows(BLOCKS, [9]), Rows(cache, [0])), notify=b"yes", notify_failure=b"no"
        )
    assert peer.run(NEXT) == (2, b"no")
    assert peer.run("result = list(datadist.notifications())") == []


def test_memory_that_was_freed_meanwhile_fails_the_transfer(user: LlmDataDist, peer: Peer) -> None:
    """The bytes have moved, but the last check of the memory finds that it was freed."""
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)

    def free(_: PlanEvent) -> None:
        peer.run("datadist.deallocate_cache(paged)")

    user.on_plan(free)
    with refused("LLM_KV_CACHE_NOT_EXIST"):
        user.pull_blocks(BLOCKS, cache, [0], [0], notify=b"yes", notify_failure=b"no")
    assert peer.run(NEXT) == (2, b"no")
    assert peer.run("result = list(datadist.notifications())") == []


def test_a_slow_transfer_delays_no_notification_of_another(
    user: LlmDataDist, peer: Peer, make_engine: MakeEngine, machine: Any
) -> None:
    on_host_only(machine, "the first transfer is held by a wrapper of host backends")
    peer.run(OFFER)
    slow = faulty(user, make_engine, lambda backend: delay(backend, 600_000))
    cache = slow.allocate_blocks_cache(DESC)
    first = slow.submit(
        Transfer(Rows(BLOCKS, [0]), Rows(cache, [0])), notify=b"slow", notify_failure=b"cut"
    )
    other = slow.submit(
        Transfer(Rows(BLOCKS, [1]), Rows(cache, [1])), notify=b"slow", notify_failure=b"off"
    )
    other.cancel()
    assert peer.run(NEXT) == (3, b"off")
    first.cancel()
    assert peer.run(NEXT) == (3, b"cut")


def test_bytes_without_their_notification_are_reported_as_arrived(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)

    def fill(_: PlanEvent) -> None:
        remove()
        for _number in range(4096):
            user.notify(1, b"unread")

    transfer = Transfer(Rows(BLOCKS, [0, 1]), Rows(cache, [2, 3]))
    for verb in (user.run, user.submit):
        remove = user.on_plan(fill)
        with refused("LLM_LINK_BUSY", "pull_blocks: every byte has arrived, .* notifications wait"):
            task = verb(transfer, notify=b"yes", notify_failure=b"no")
            assert task is not None
            task.wait()
        found = peer.run("result = {note.data for note in datadist.notifications()}")
        assert found == {b"unread"}
        for array in user.arrays(cache):
            assert (array[2:] == 5).all()
            array[:] = 0


@pytest.mark.parametrize("watched", [False, True])
def test_a_small_transfer_with_a_refused_notification_counts_once(
    user: LlmDataDist, peer: Peer, watched: bool
) -> None:
    """The count is the same whether or not a hook makes the transfer an operation."""
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    transfer = Transfer(Rows(BLOCKS, [0]), Rows(cache, [2]))
    for _ in range(WARM_UP):
        user.run(transfer, notify=b"first", tag="request")
    if watched:
        user.on_plan(lambda _: None)
    for _number in range(4096 - WARM_UP):
        user.notify(1, b"unread")
    with refused("LLM_LINK_BUSY", "pull_blocks: every byte has arrived, .* notifications wait"):
        user.run(transfer, notify=b"yes", notify_failure=b"no", tag="request", timeout_ms=5000)
    assert all((array[2] == 5).all() for array in user.arrays(cache))
    row = user.metrics()["operations"]["pull_blocks"]
    assert row["statuses"] == {"LLM_SUCCESS": WARM_UP, "LLM_LINK_BUSY": 1}
    assert user.metrics()["in_flight"] == 0
    assert [link.in_flight for link in user.links()] == [0]


def test_a_stopped_peer_fails_the_call_by_its_notification(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    skip_if_peers_serve(machine)
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    user.pull_blocks(BLOCKS, cache, [0], [0])

    def stop(_: PlanEvent) -> None:
        peer.stop()

    remove = user.on_plan(stop)
    words = {"notify": b"late", "notify_failure": b"no"}
    with refused("LLM_TIMEOUT", "every byte has arrived"):
        user.pull_blocks(BLOCKS, cache, [0], [0], **words, timeout_ms=1000)
    remove()
    peer.resume()
    assert peer.run(NEXT) == (2, b"late")
    assert user.metrics()["in_flight"] == 0


def test_the_deadline_of_a_small_pull_covers_its_notification(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    skip_if_peers_serve(machine)
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    for _ in range(WARM_UP):
        user.pull_blocks(BLOCKS, cache, [0], [0])
    peer.stop()
    with refused("LLM_TIMEOUT", r"every byte has arrived.* within (100|\d\d?(\.\d+)?) ms"):
        user.pull_blocks(BLOCKS, cache, [0], [0], notify=b"late", timeout_ms=100)
    peer.resume()


def test_the_time_of_a_small_pull_includes_its_notification(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    on_host_only(machine, "the program sees the bytes before the call returns")
    skip_if_peers_serve(machine)
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    for _ in range(WARM_UP):
        user.pull_blocks(BLOCKS, cache, [0], [0])
    moved = user.arrays(cache)[1][1]

    def seconds() -> float:
        return user.metrics()["operations"]["pull_blocks"]["seconds"]["sum"]

    def hold() -> float:
        while not moved.all():
            pass
        began = perf_counter()
        Event().wait(0.05)
        held_s = perf_counter() - began
        peer.resume()
        return held_s

    before_s = seconds()
    peer.stop()
    with ThreadPoolExecutor() as pool:
        holding = pool.submit(hold)
        user.pull_blocks(BLOCKS, cache, [1], [1], notify=b"late")
        assert seconds() - before_s > holding.result()


def test_a_killed_peer_ends_transfers_that_wait_for_their_notification(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    user.pull_blocks(BLOCKS, cache, [0], [0])
    peer.stop()
    tasks = [
        user.submit(
            Transfer(Rows(BLOCKS, [0]), Rows(cache, [0])), notify=b"never", notify_failure=b"no"
        )
        for _ in range(20)
    ]
    peer.kill()
    for task in tasks:
        with refused("LLM_LINK_FAILED"):
            task.wait()
    assert user.metrics()["in_flight"] == 0


def test_an_awaited_task_has_notified(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)

    async def pull() -> None:
        await user.submit(Transfer(Rows(BLOCKS, [0]), Rows(cache, [0])), notify=b"awaited")

    asyncio.run(pull())
    assert peer.run("result = [note.data for note in datadist.notifications()]") == [b"awaited"]


def test_an_invalid_notification_is_refused_before_a_byte_moves(
    user: LlmDataDist, peer: Peer
) -> None:
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    for name in ("notify", "notify_failure"):
        wrong: dict[str, Any] = {name: bytes(4097)}
        with refused("LLM_PARAM_INVALID", f"{name} has 4097 bytes"):
            user.pull_blocks(BlocksCacheKey(1), cache, [0], [0], **wrong)
        wrong = {name: "text"}
        with pytest.raises(TypeError, match=f"{name}='text' must be bytes"):
            user.submit(Transfer(Rows(BlocksCacheKey(1), [0]), Rows(cache, [0])), **wrong)
    assert not any(array.any() for array in user.arrays(cache))


def test_a_limited_wait_for_a_task_is_not_prolonged_by_its_notification(
    user: LlmDataDist, peer: Peer, machine: Machine
) -> None:
    skip_if_peers_serve(machine)
    peer.run(OFFER)
    cache = user.allocate_blocks_cache(DESC)
    user.pull_blocks(BLOCKS, cache, [0], [0])
    layers = KvCacheExtParam(tensor_num_per_layer=1)
    pull = Transfer(Rows(BLOCKS, [0]), Rows(cache, [2]), layers=layers)
    peer.stop()
    for verb, transfer in ((user.submit, pull), (user.layered, {"kv": pull})):
        task = verb(transfer, notify=b"late")
        for layer in getattr(task, "layers", ()):
            task.ready(layer)
        assert task.wait_done(20_000)
        with refused("LLM_TIMEOUT", "0 ms passed .* the transfer goes on"):
            task.wait(0)
        assert not task.settled
    peer.resume()
    task.wait(20_000)
    assert peer.run(NEXT) == (2, b"late")


def test_a_link_that_ends_before_the_notification_does_not_hide_that_the_bytes_are_there(
    user: LlmDataDist,
) -> None:
    """A small transfer has no operation of its own that would keep the link."""
    engine = user._running()
    link = engine.links.get(1)
    for end in (lambda: user.unlink_clusters([1], 5000), user.finalize):
        end()
        with pytest.raises(LLMException, match="every byte has arrived, but the notification"):
            notify_moved(engine, link, "pull_blocks", perf_counter(), {"notify": b"it"})


def test_a_limited_wait_that_stops_a_pull_by_a_key_does_not_wait_for_the_claim(
    make_engine: MakeEngine, peer: Peer
) -> None:
    peer.run("datadist.allocate_cache(CacheDesc(2, (4, 64), DataType.DT_INT8), [CacheKey(1, 7)])")
    user = make_engine(2, SyncKvCacheWaitTime="5000")
    user.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
    cache = user.allocate_cache(DESC)
    layers = KvCacheExtParam(range(1), range(1), 2)
    task = user.layered(Transfer(Rows(CacheKey(1, 7)), Rows(cache), layers=layers))
    peer.stop()
    start = perf_counter()
    with refused("LLM_TIMEOUT"):
        task.wait(1)
    assert perf_counter() - start < 4
    peer.resume()
