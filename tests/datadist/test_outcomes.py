"""Submitted and executed transfers end in time, with their claims, also if no call waits."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, ClassVar

import pytest

from kvnative._backend import Backend
from kvplan import (
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    LlmDataDist,
    LLMException,
    LLMStatusCode,
    Plan,
    PlanEvent,
    Rows,
    Transfer,
    Transfers,
)
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.machine import Machine, on_host_only
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at

DESC = CacheDesc(2, (4, 64), DataType.DT_INT8)
KEY = CacheKey(1, 7)
FOR_EVER_MS = 600_000
DEADLINE_S = 30.0
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
REPEATED = LLMStatusCode.LLM_REPEAT_REQUEST

Linked = Callable[..., tuple[LlmDataDist, Cache]]


def held(backend: Backend) -> Backend:
    return delay(backend, FOR_EVER_MS)


def slow(backend: Backend) -> Backend:
    return delay(backend, 100)


def broken(backend: Backend) -> Backend:
    return fail_at(backend, 1)


@pytest.fixture
def owner(make_engine: MakeEngine) -> LlmDataDist:
    """An engine of cluster 1. Its cache 1 is full of fives, and slot 0 has a key."""
    owner = make_engine(1, listen=True)
    for array in owner.arrays(owner.allocate_cache(DESC, [KEY])):
        array[:] = 5
    return owner


@pytest.fixture
def linked(make_engine: MakeEngine, owner: LlmDataDist) -> Iterator[Linked]:
    """A function that makes engines with an empty cache 1, linked with the owner."""
    made = []

    def make(
        wrap: Callable[[Backend], Backend] | None = None, cluster_id: int = 2, **options: str
    ) -> tuple[LlmDataDist, Cache]:
        made.append(Transfers(1, wrap))
        user = make_engine(cluster_id, transfers=made[-1], **options)
        mine = user.allocate_cache(DESC)  # first, because renewing a link takes time
        link(user, owner)
        return user, mine

    yield make
    for transfers in made:
        transfers.close(cancel=True)


def test_a_request_is_claimed_until_the_outcome(linked: Linked) -> None:
    first, mine = linked(held)
    second, other = linked(cluster_id=3)
    task = first.submit(Transfer(Rows(KEY), Rows(mine)))
    assert not task.done
    with refused(REPEATED):
        second.pull_cache(KEY, other)
    task.cancel()
    with refused(LLMStatusCode.LLM_CANCELLED):
        task.wait()
    second.pull_cache(KEY, other)
    with refused(NOT_EXIST):
        second.pull_cache(KEY, other)


@pytest.mark.parametrize("wrap", [None, slow], ids=["at once", "later"])
def test_a_transfer_without_a_handle_still_ends(
    linked: Linked, wrap: Callable[[Backend], Backend] | None
) -> None:
    user, mine = linked(wrap)
    user.submit(Transfer(Rows(KEY), Rows(mine)))
    # Leaving the block waits for transfers in flight.
    user.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
    assert user.metrics()["operations"]["pull_cache"]["statuses"] == {"LLM_SUCCESS": 1}
    assert user.metrics()["in_flight"] == 0
    assert (user.arrays(mine)[1][0] == 5).all()


def test_a_transfer_in_flight_keeps_its_link_until_it_ends(linked: Linked) -> None:
    user, mine = linked(held)
    task = user.submit(Transfer(Rows(CacheIndex(1, 1)), Rows(mine)))
    (result,) = user.unlink_clusters([1], timeout_ms=20)
    assert result.status == LLMStatusCode.LLM_LINK_BUSY
    task.cancel()
    user.unlink_clusters([1], timeout_ms=10_000).raise_for_status()


def test_a_failed_pull_keeps_the_key(linked: Linked) -> None:
    user, mine = linked(broken)
    second, other = linked(cluster_id=3)
    with pytest.raises(LLMException) as caught:
        user.pull_cache(KEY, mine)
    assert caught.value.origin is not None
    assert caught.value.unconfirmed
    second.pull_cache(KEY, other)


def test_an_operation_whose_error_has_no_status_ends(linked: Linked) -> None:
    class Nameless(LLMException):
        @property
        def status_code(self) -> LLMStatusCode:
            raise ArithmeticError("no status")

    def refuse(_: PlanEvent) -> None:
        raise Nameless

    user, mine = linked()
    second, other = linked(cluster_id=3)
    user.on_plan(refuse)
    with pytest.raises(ArithmeticError) as caught:  # its frames hold the operation
        user.pull_cache(KEY, mine)
    assert user.metrics()["in_flight"] == 0
    second.pull_cache(KEY, other)
    user.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
    del caught


def test_a_pull_takes_no_longer_than_its_deadline(linked: Linked) -> None:
    user, mine = linked(held)
    for _ in range(2):  # the key stays
        with refused(LLMStatusCode.LLM_TIMEOUT):
            user.pull_cache(KEY, mine, timeout_ms=10)


def test_the_deadline_of_remote_operations_is_an_option(linked: Linked) -> None:
    user, mine = linked(slow, SyncKvCacheWaitTime="10")
    index = CacheIndex(1, 1)
    with refused(LLMStatusCode.LLM_TIMEOUT):
        user.pull_cache(index, mine)
    with refused(LLMStatusCode.LLM_TIMEOUT):
        user.push_cache(mine, index)
    user.pull_cache(index, mine, timeout_ms=10_000)
    user.copy_cache(mine, mine, 0, 1)


@pytest.mark.parametrize("timeout_ms", [-1, float("nan"), "soon"])
def test_invalid_deadlines_are_refused(linked: Linked, timeout_ms: float) -> None:
    user, mine = linked()
    with pytest.raises((ValueError, TypeError)):
        user.pull_cache(CacheIndex(1, 1), mine, timeout_ms=timeout_ms)
    assert user.metrics()["in_flight"] == 0


def test_finalize_waits_for_transfers_in_flight(linked: Linked) -> None:
    user, mine = linked(slow)
    array = user.arrays(mine)[1]
    task = user.submit(Transfer(Rows(CacheIndex(1, 1)), Rows(mine)))
    user.finalize()
    assert task.done
    task.wait()
    assert (array[0] == 5).all()


def test_finalize_stops_transfers_that_take_too_long(linked: Linked) -> None:
    user, mine = linked(held, SyncKvCacheWaitTime="10")
    tasks = [user.submit(Transfer(Rows(CacheIndex(1, 1)), Rows(mine))) for _ in range(3)]
    user.finalize()
    for task in tasks:
        assert task.done
        with refused(LLMStatusCode.LLM_FAILED):
            task.wait()


def test_finalize_stops_a_transfer_that_begins_while_it_stops_others(linked: Linked) -> None:
    """The later transfer is stopped, too, or refused."""
    user, mine = linked(held, SyncKvCacheWaitTime="10")
    first = user.submit(Transfer(Rows(CacheIndex(1, 1)), Rows(mine)))
    planned = threading.Event()

    def wait_for_the_first(_event: object) -> None:
        planned.set()
        deadline = time.monotonic() + DEADLINE_S
        while not first.done:
            assert time.monotonic() < deadline

    user.on_plan(wait_for_the_first)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(user.submit, Transfer(Rows(CacheIndex(1, 1)), Rows(mine)))
        assert planned.wait(DEADLINE_S)
        user.finalize()
        if second.exception(DEADLINE_S) is not None:
            with refused(LLMStatusCode.LLM_ENGINE_FINALIZED):
                second.result()
            return
    assert second.result().done
    with refused(LLMStatusCode.LLM_FAILED):
        second.result().wait()


@pytest.fixture
def alarm() -> Iterator[None]:
    """Make SIGALRM an interrupt, like Ctrl-C."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_finalize_stops_the_awaited_transfers(linked: Linked, alarm: None) -> None:
    user, mine = linked(lambda backend: delay(backend, 2000), SyncKvCacheWaitTime="600000")
    other = user.allocate_cache(DESC)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(user.copy_cache, other, mine)
        while not user.metrics()["in_flight"]:
            assert not call.done(), call.result()
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            user.finalize()
        assert isinstance(call.exception(10), LLMException), "it went on"


def test_a_cache_that_is_freed_during_a_transfer_stays_until_its_end(linked: Linked) -> None:
    user, mine = linked(slow)
    other = user.allocate_cache(DESC)
    user.pull_cache(CacheIndex(1, 1), other)
    array = user.arrays(mine)[0]
    task = user.submit(Transfer(Rows(other), Rows(mine)))
    user.deallocate_cache(other)
    user.deallocate_cache(mine)
    task.wait()
    assert (array[0] == 5).all()


def test_many_threads_transfer_at_once(linked: Linked, owner: LlmDataDist) -> None:
    users = [linked(cluster_id=cluster_id) for cluster_id in (2, 3)]
    failures = []

    def transfer(user: LlmDataDist, mine: Cache, slot: int) -> None:
        try:
            for _ in range(50):
                user.pull_cache(CacheIndex(1, 1, slot), mine, slot)
                user.submit(Transfer(Rows(CacheIndex(1, 1, slot)), Rows(mine, slot=slot)))
                user.push_cache(mine, CacheIndex(1, 1, slot), slot)
                user.copy_cache(mine, mine, slot, slot)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=transfer, args=(*user, slot)) for user in users for slot in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for user, mine in users:
        user.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
        counted = user.metrics()["operations"]
        assert counted["pull_cache"]["statuses"] == {"LLM_SUCCESS": 400}
        assert counted["push_cache"]["nbytes"] == 200 * DESC.num_tensors * DESC.stride
        assert all((array == 5).all() for array in user.arrays(mine))


def test_finalize_ends_all_running_transfers(linked: Linked) -> None:
    user, mine = linked()
    begun = threading.Barrier(5)
    seen: list[LLMStatusCode] = []

    def transfer() -> None:
        begun.wait()
        try:
            while True:
                user.pull_cache(CacheIndex(1, 1), mine)
        except LLMException as error:
            seen.append(error.status_code)

    threads = [threading.Thread(target=transfer) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    user.finalize()
    for thread in threads:
        thread.join(10)
    assert seen == [LLMStatusCode.LLM_ENGINE_FINALIZED] * 4


class _Watched(Transfers):
    """Transfers whose batches take 100 ms, and that record their time limits."""

    limits: ClassVar[list[Any]] = []  # shared by all instances

    def execute(self, plan: Plan, src: Any, dst: Any, timeout_ms: Any = None, *more: Any) -> None:
        self.limits.append(timeout_ms)
        super().execute(plan, src, dst, timeout_ms, *more)

    def verify(self, *args: Any) -> None:
        self.limits.append(args[-1])
        super().verify(*args)


def test_verification_has_the_rest_of_the_time_limit(
    make_engine: MakeEngine, owner: LlmDataDist, machine: Machine
) -> None:
    on_host_only(machine, "what a device has moved is not compared")
    _Watched.limits.clear()
    with closing(_Watched(1, slow)) as transfers:
        user = make_engine(2, transfers=transfers)
        mine = user.allocate_cache(DESC)
        link(user, owner)
        user.run(Transfer(Rows(CacheIndex(1, 1)), Rows(mine)), timeout_ms=30_000, verify=True)
    first, second = _Watched.limits
    assert 0 < second <= first - 100 <= 29_900


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_wrong_time_limit_is_refused_with_its_value(linked: Linked, wrong: float) -> None:
    user, mine = linked()
    with pytest.raises(ValueError, match=f"timeout_ms={wrong} must be >= 0"):
        user.run(Transfer(Rows(CacheIndex(1, 1)), Rows(mine)), timeout_ms=wrong, tag="a")
