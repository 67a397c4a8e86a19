"""Faults of transfer_cache_async: no failure is reported as a success, and no call hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kvnative._backend import Backend
from kvplan import LlmDataDist, Transfer, Transfers
from kvplan.engine.transfers import AnyLayerTask
from kvplan.llm_datadist import Cache, LLMDataDist, LLMStatusCode
from kvplan.llm_datadist.v2 import llm_datadist as module
from kvplan.llm_datadist.v2.cache_manager import CacheManager
from kvplan.llm_datadist.v2.layer_transfer import Destination, LayerFeed, wait_for_feeds
from tests.llm_datadist.conftest import MakeDataDist, MakePeer
from tests.llm_datadist.contents import clear
from tests.llm_datadist.descs import desc
from tests.llm_datadist.layers import ROW, Computing, Destinations
from tests.llm_datadist.peer import REMOTE, link
from tests.support.wrappers import delay, fail_at

SUCCESS = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED
PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
LAYERS = 30
DEADLINE_S = 30.0
FOR_EVER_MS = 600_000

Wrap = Callable[[Backend], Backend]


@pytest.fixture
def make_destinations(make_peer: MakePeer) -> Callable[[int], Destinations]:
    """A function that makes destinations in a process of their own."""
    return lambda cluster_id: Destinations(
        make_peer(cluster_id, "DECODER", **REMOTE), remote=True, layers=LAYERS
    )


@pytest.fixture
def make_wrapped(
    monkeypatch: pytest.MonkeyPatch, make_datadist: MakeDataDist
) -> Iterator[Callable[..., LLMDataDist]]:
    """A function that makes an LLMDataDist over wrapped backends, which are closed at the end."""
    made: list[Transfers] = []

    def make(wrap: Wrap, **options: str) -> LLMDataDist:
        made.append(Transfers(1, wrap))
        monkeypatch.setattr(module, "LlmDataDist", partial(LlmDataDist, transfers=made[0]))
        return make_datadist(**REMOTE, **options)

    yield make
    for item in made:
        item.close(cancel=True)


def slots_of(manager: CacheManager) -> Cache:
    cache = manager.allocate_cache(desc(2 * LAYERS))
    clear(cache)
    return cache


@pytest.fixture
def slots(datadist: LLMDataDist) -> Cache:
    return slots_of(datadist.cache_manager)


def arrived(destinations: Destinations) -> list[bool]:
    """Return for each tensor if bytes arrived in ROW."""
    return [bool(item) for item in destinations.bytes_of("cache")[:, ROW].any(axis=1)]


class Barrier:
    """A barrier that holds a synchronizer until the test opens it."""

    def __init__(self, result: Any = True) -> None:
        self.entered = threading.Event()
        self._go_on = threading.Event()
        self._result = result
        self.released = threading.Event()

    def __call__(self) -> Any:
        self.entered.set()
        assert self._go_on.wait(DEADLINE_S)
        self.released.set()
        return self._result

    def wait(self) -> None:
        assert self.entered.wait(DEADLINE_S)

    def open(self) -> None:
        self._go_on.set()


@pytest.fixture
def barrier() -> Iterator[Barrier]:
    wire = Barrier()
    yield wire
    wire.open()


def raises(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize("result", [False, None, 0, ""])
def test_a_synchronizer_that_returns_false_ends_its_destinations(
    datadist: LLMDataDist,
    slots: Cache,
    make_destinations: Callable[[int], Destinations],
    caplog: pytest.LogCaptureFixture,
    result: Any,
) -> None:
    one, two = make_destinations(1), make_destinations(3)
    link(datadist, one.peer, two.peer)
    caplog.set_level("WARNING")
    model = Computing(slots, {7: lambda: result})
    configs = [one.slot(), two.slot(range(7)), two.slot(range(9, 12)), two.slot(range(6, 8))]
    task = datadist.cache_manager.transfer_cache_async(slots, model, configs)
    assert task.get_results() == [PARAM_INVALID, SUCCESS, PARAM_INVALID, PARAM_INVALID]
    assert task.synchronize() == PARAM_INVALID
    assert model.layers == list(range(8))  # no layer was requested again
    assert not any(arrived(one)[14:])
    assert arrived(two)[:14] == [True] * 14
    assert not any(arrived(two)[14:])
    pushes = [message for message in caplog.messages if "operation=push_layers" in message]
    assert len(pushes) == 3
    assert all("status=LLM_PARAM_INVALID" in push for push in pushes)
    assert all("synchronize_layer(7) returned False" in push for push in pushes)


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3), KeyboardInterrupt()])
def test_a_synchronizer_that_raises(
    datadist: LLMDataDist,
    slots: Cache,
    make_destinations: Callable[[int], Destinations],
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    one = make_destinations(1)
    link(datadist, one.peer)
    caplog.set_level("ERROR")
    model = Computing(slots, {7: raises(error)})
    task = datadist.cache_manager.transfer_cache_async(
        slots, model, [one.slot(), one.slot(range(3))]
    )
    assert task.get_results() == [FAILED, SUCCESS]
    assert task.synchronize() == FAILED
    assert model.layers == list(range(8))
    assert not any(arrived(one)[14:])
    assert "in raise_it" in caplog.text
    assert type(error).__name__ in caplog.text


def test_a_result_without_a_truth_value_ends_the_transfer(
    datadist: LLMDataDist, slots: Cache, make_destinations: Callable[[int], Destinations]
) -> None:
    class Untrue:
        def __bool__(self) -> bool:
            raise ArithmeticError

    one = make_destinations(1)
    link(datadist, one.peer)
    model = Computing(slots, {2: Untrue})
    task = datadist.cache_manager.transfer_cache_async(slots, model, [one.slot()])
    assert task.get_results() == [FAILED]


def test_a_synchronizer_that_never_returns(
    datadist: LLMDataDist,
    slots: Cache,
    make_destinations: Callable[[int], Destinations],
    barrier: Barrier,
) -> None:
    one, two = make_destinations(1), make_destinations(3)
    link(datadist, one.peer, two.peer)
    model = Computing(slots, {7: barrier})
    configs = [one.slot(), two.slot(range(7))]
    task = datadist.cache_manager.transfer_cache_async(slots, model, configs)
    barrier.wait()
    assert task.synchronize(1) == TIMEOUT
    assert task.get_results(1)[0] == TIMEOUT
    while task.get_results(0) != [TIMEOUT, SUCCESS]:  # the second config needs no further layer
        pass
    assert task.synchronize(0) == TIMEOUT
    assert not any(arrived(one)[14:])
    code = datadist.unlink_clusters([one.peer.info], 50)[0]
    assert code == LLMStatusCode.LLM_LINK_BUSY  # the transfer goes on
    barrier.open()
    assert task.get_results() == [SUCCESS, SUCCESS]
    assert (one.bytes_of("cache")[:, ROW] == model.expected()).all()


def test_one_timeout_is_for_all_destinations_together() -> None:
    timeouts = []

    class Endless(Destination):
        def status(self, timeout_s: float | None) -> None:
            timeouts.append(timeout_s)
            threading.Event().wait(timeout_s)

    feed = LayerFeed([Endless("one", None), Endless("other", None)], synchronizer=None, finish_ms=0)
    assert feed.statuses(0.05) == [None, None]
    first, second = timeouts
    assert second < first <= 0.05


def test_an_exit_waits_for_threads_that_still_hold_ended_pushes() -> None:
    dropped = threading.Event()

    class Held(Destination):
        def finish(self, timeout_ms: float) -> None:
            dropped.wait(DEADLINE_S)

    feed = LayerFeed([Held("one", None)], synchronizer=None, finish_ms=0)
    feed.start()
    threading.Timer(0.05, dropped.set).start()
    wait_for_feeds()
    assert "kvplan-layers" not in {thread.name for thread in threading.enumerate()}


def test_finalize_ends_calls_that_wait_for_a_synchronizer(
    make_datadist: MakeDataDist, make_destinations: Callable[[int], Destinations], barrier: Barrier
) -> None:
    datadist = make_datadist(**REMOTE, **{"llm.SyncKvCacheWaitTime": "50"})
    slots = slots_of(datadist.cache_manager)
    one = make_destinations(1)
    link(datadist, one.peer)
    layers: list[int] = []

    class Late(Computing):
        def synchronize_layer(self, *arguments: Any) -> Any:
            layers.append(arguments[0])
            return barrier() if arguments[0] == 7 else True

    task = datadist.cache_manager.transfer_cache_async(slots, Late(slots), [one.slot()])
    barrier.wait()
    results: list[list[LLMStatusCode]] = []
    waiting = threading.Thread(target=lambda: results.append(task.get_results()))
    waiting.start()
    datadist.finalize()
    waiting.join(DEADLINE_S)  # although the synchronizer has not returned
    assert results == [[FAILED]]
    assert task.synchronize() == FAILED
    wait_for_feeds()  # not for this thread, which is in the synchronizer
    assert not barrier.released.is_set()
    barrier.open()
    assert barrier.released.wait(DEADLINE_S)
    ended = [item for item in threading.enumerate() if item.name == "kvplan-layers"]
    for item in ended:
        item.join(DEADLINE_S)
    assert layers == list(range(8))
    assert task.get_results() == [FAILED]
    datadist.init({"llm.EnableCacheManager": "1"})


def test_a_destination_that_dies_at_layer_7(
    datadist: LLMDataDist, slots: Cache, make_destinations: Callable[[int], Destinations]
) -> None:
    one, two = make_destinations(1), make_destinations(3)
    link(datadist, one.peer, two.peer)

    def kill() -> bool:
        one.peer.kill()
        return True

    model = Computing(slots, {7: kill})
    configs = [one.slot(), two.slot(row=1), one.slot(range(5))]
    task = datadist.cache_manager.transfer_cache_async(slots, model, configs)
    results = task.get_results()
    assert results[:2] == [LINK_FAILED, SUCCESS]
    assert results[2] in (SUCCESS, LINK_FAILED)  # the transfer may have ended before the kill
    assert task.synchronize() == LINK_FAILED
    assert model.layers == list(range(LAYERS))
    assert (two.bytes_of("cache")[:, ROW] == model.expected(1)).all()


def test_a_destination_that_is_freed_at_layer_7(
    datadist: LLMDataDist, slots: Cache, make_destinations: Callable[[int], Destinations]
) -> None:
    one, two = make_destinations(1), make_destinations(3)
    link(datadist, one.peer, two.peer)

    def free() -> bool:
        one.peer.run("manager.deallocate_cache(cache)")
        return True

    model = Computing(slots, {7: free})
    configs = [one.slot(), one.slot(range(20, 25)), two.slot()]
    task = datadist.cache_manager.transfer_cache_async(slots, model, configs)
    assert task.get_results() == [NOT_EXIST, NOT_EXIST, SUCCESS]
    assert (two.bytes_of("cache")[:, ROW] == model.expected()).all()


def test_a_destination_that_is_unlinked_at_layer_7(
    datadist: LLMDataDist, slots: Cache, make_destinations: Callable[[int], Destinations]
) -> None:
    one, two = make_destinations(1), make_destinations(3)
    link(datadist, one.peer, two.peer)

    def unlink() -> bool:
        return datadist.unlink_clusters([one.peer.info], force=True)[0] == SUCCESS

    model = Computing(slots, {7: unlink})
    task = datadist.cache_manager.transfer_cache_async(slots, model, [one.slot(), two.slot()])
    results = task.get_results()
    assert results[0] in (LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK)
    assert results[1] == SUCCESS
    assert not any(arrived(one)[14:])


def test_a_copy_that_fails_at_layer_7(
    make_wrapped: Callable[..., LLMDataDist], make_destinations: Callable[[int], Destinations]
) -> None:
    # The limit is of each transfer: one of 7 layers does not have that descriptor.
    datadist = make_wrapped(lambda value: fail_at(value, 2 * 7 + 1))
    slots = slots_of(datadist.cache_manager)
    one, two = make_destinations(1), make_destinations(3)
    link(datadist, one.peer, two.peer)
    model = Computing(slots)
    configs = [one.slot(), two.slot(range(20, 27), row=1)]
    task = datadist.cache_manager.transfer_cache_async(slots, model, configs)
    assert task.get_results() == [FAILED, SUCCESS]
    found = arrived(one)
    assert found[:14] == [True] * 14
    assert not any(found[16:])  # no further layer was begun
    assert (two.bytes_of("cache")[40:54, ROW] == model.expected(1)[40:54]).all()
    # No layer was requested that no destination needs any more.
    assert model.layers == [*range(8), *range(20, 27)]


def test_layers_are_awaited_while_others_are_copied_and_the_last_has_a_deadline(
    make_wrapped: Callable[..., LLMDataDist], make_destinations: Callable[[int], Destinations]
) -> None:
    datadist = make_wrapped(
        lambda value: delay(value, FOR_EVER_MS), **{"llm.SyncKvCacheWaitTime": "100"}
    )
    slots = slots_of(datadist.cache_manager)
    one = make_destinations(1)
    link(datadist, one.peer)
    model = Computing(slots)
    configs = [one.slot(range(3)), one.slot(range(2))]
    task = datadist.cache_manager.transfer_cache_async(slots, model, configs)
    assert task.get_results() == [TIMEOUT, TIMEOUT]
    assert task.synchronize() == TIMEOUT
    assert model.layers == [0, 1, 2]  # although none of the transfers has ended
    # The transfer was stopped, so the link is free.
    assert datadist.unlink_clusters([one.peer.info]) == (SUCCESS, [SUCCESS])


def test_a_destination_with_all_layers_outlives_the_failure_of_a_later_layer(
    make_wrapped: Callable[..., LLMDataDist], make_destinations: Callable[[int], Destinations]
) -> None:
    """Its bytes are still moving then."""
    datadist = make_wrapped(lambda value: delay(value, 300), **{"llm.SyncKvCacheWaitTime": "30000"})
    slots = slots_of(datadist.cache_manager)
    one = make_destinations(1)
    link(datadist, one.peer)
    model = Computing(slots, {2: lambda: False})
    configs = [one.slot(range(2)), one.slot(range(1, 3))]
    task = datadist.cache_manager.transfer_cache_async(slots, model, configs)
    assert task.get_results() == [SUCCESS, PARAM_INVALID]
    assert arrived(one)[:4] == [True] * 4


def test_the_last_layer_may_use_all_of_its_time(
    make_wrapped: Callable[..., LLMDataDist], make_destinations: Callable[[int], Destinations]
) -> None:
    datadist = make_wrapped(lambda value: delay(value, 300), **{"llm.SyncKvCacheWaitTime": "30000"})
    slots = slots_of(datadist.cache_manager)
    one = make_destinations(1)
    link(datadist, one.peer)
    model = Computing(slots)
    task = datadist.cache_manager.transfer_cache_async(slots, model, [one.slot()])
    assert task.get_results() == [SUCCESS]
    assert (one.bytes_of("cache")[:, ROW] == model.expected()).all()


def test_no_destination_has_more_time_than_another(
    make_wrapped: Callable[..., LLMDataDist], make_destinations: Callable[[int], Destinations]
) -> None:
    """A time that began with the wait for each destination would suffice for the last one."""
    datadist = make_wrapped(lambda value: delay(value, 1300), **{"llm.SyncKvCacheWaitTime": "700"})
    slots = slots_of(datadist.cache_manager)
    one = make_destinations(1)
    link(datadist, one.peer)
    configs = [one.slot(range(2)), one.slot(range(2))]
    task = datadist.cache_manager.transfer_cache_async(slots, Computing(slots), configs)
    assert task.get_results() == [TIMEOUT, TIMEOUT]


def test_a_call_that_fails_early_does_not_hold_the_link(
    datadist: LLMDataDist,
    slots: Cache,
    make_destinations: Callable[[int], Destinations],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = make_destinations(1)
    link(datadist, one.peer)

    def no_more_threads(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    start = datadist.cache_manager.transfer_cache_async
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(RuntimeError):
            start(slots, Computing(slots), [one.slot()])
    broken = one.slot()
    broken._cache_key = None
    with pytest.raises((AttributeError, TypeError)):
        start(slots, Computing(slots), [one.slot(), broken])
    layered = iter([datadist._running().layered])  # the second push is interrupted

    def interrupted(transfer: Transfer) -> AnyLayerTask:
        if (begin := next(layered, None)) is None:
            raise KeyboardInterrupt
        return begin(transfer)

    monkeypatch.setattr(datadist._running(), "layered", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(slots, Computing(slots), [one.slot(), one.slot()])
    # No failed call holds the link.
    assert datadist.unlink_clusters([one.peer.info]) == (SUCCESS, [SUCCESS])


def test_a_process_ends_although_a_synchronizer_does_not(
    make_destinations: Callable[[int], Destinations],
) -> None:
    from tests.llm_datadist.test_engine_lifecycle import run

    one = make_destinations(1)
    code = f"""
import threading
from kvplan.llm_datadist import *
from tests.llm_datadist.conftest import options
from tests.llm_datadist.descs import desc
from tests.llm_datadist.peer import REMOTE, cluster_info

class Never(LayerSynchronizer):
    def synchronize_layer(self, layer, timeout):
        if layer == 1:
            print("stuck", flush=True)
            threading.Event().wait()
        return True

datadist = LLMDataDist(LLMRole.PROMPT, 2)
datadist.init(options(**REMOTE, **{{"llm.SyncKvCacheWaitTime": "10"}}))
datadist.link_clusters([cluster_info(1, "{one.peer.address}")], 10000)
cache = datadist.cache_manager.allocate_cache(desc(4))
config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, 1), range(2), range(2))
task = datadist.cache_manager.transfer_cache_async(cache, Never(), [config])
print(task.synchronize(200).name)
"""
    assert sorted(run(code).split()) == ["LLM_TIMEOUT", "stuck"]
