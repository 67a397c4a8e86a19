"""`LeaseExpiry` ends leases at their deadlines, for transports whose peers use another clock."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Iterator
from queue import SimpleQueue
from random import Random

import pytest

from kvplan import LLMException
from kvplan.transport.lease_expiry import Deadlines, LeaseExpiry
from tests.support.refusals import refused

NAME = "kvplan-test-leases"
MS_NS = 10**6
HOUR_NS = 3_600 * 10**9
WAIT_S = 20


class Ended:
    """The ended leases, in order, with the time of each end."""

    def __init__(self) -> None:
        self.leases: SimpleQueue[tuple[tuple[int, int], int]] = SimpleQueue()
        self.failures = 0  # number of next calls that fail

    def end(self, slot: int, generation: int) -> None:
        if self.failures:
            self.failures -= 1
            raise LLMException("the device is gone")
        self.leases.put(((slot, generation), time.monotonic_ns()))

    def next(self) -> tuple[tuple[int, int], int]:
        return self.leases.get(timeout=WAIT_S)


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def expiry(ended: Ended) -> Iterator[LeaseExpiry]:
    expiry = LeaseExpiry(ended.end, NAME)
    yield expiry
    expiry.close()
    assert NAME not in {thread.name for thread in threading.enumerate()}


def test_deadlines_keep_no_memory_of_renewals_and_removed_keys() -> None:
    """A lease of an hour is renewed 20,000 times, and 20,000 other keys come and go."""
    deadlines: Deadlines[int] = Deadlines()
    deadlines.set(0, HOUR_NS)
    tracemalloc.start()
    for number in range(1, 20_001):
        assert not deadlines.set(0, HOUR_NS + number)
        deadlines.set(number, 2 * HOUR_NS)
        del deadlines[number]
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes < 100_000
    next_ns = deadlines.next_ns()
    assert next_ns is not None
    assert HOUR_NS <= next_ns <= HOUR_NS + 20_000
    assert deadlines.pop_late(HOUR_NS + 19_999) is None
    assert deadlines.next_ns() == HOUR_NS + 20_000
    assert deadlines.pop_late(3 * HOUR_NS) == 0
    assert deadlines.pop_late(3 * HOUR_NS) is None
    assert deadlines.next_ns() is None


def test_a_thread_that_sleeps_until_the_next_deadline_is_never_late() -> None:
    """The thread wakes at `next_ns`, or if `set` returns True; removing a key wakes nothing."""
    for seed in range(200):
        random, now_ns, wakes_ns = Random(seed), 0, None
        deadlines: Deadlines[int] = Deadlines()
        for _ in range(40):
            key, now_ns = random.randrange(3), now_ns + random.randrange(3)
            wakes = wakes_ns is not None and wakes_ns <= now_ns
            if random.randrange(2):
                wakes |= deadlines.set(key, now_ns + random.randrange(1, 20))
            else:
                deadlines.pop(key, None)
            if wakes:
                while deadlines.pop_late(now_ns) is not None:
                    pass
                wakes_ns = deadlines.next_ns()
            earliest_ns = min(deadlines.values(), default=None)
            if earliest_ns is not None:
                assert wakes_ns is not None, f"sleeps for ever: {seed=}, {deadlines}"
                assert wakes_ns <= earliest_ns, f"sleeps too long: {seed=}, {deadlines}"


def test_leases_end_in_the_order_of_their_deadlines_and_not_before(ended: Ended) -> None:
    now = time.monotonic_ns()
    is_stopped = True  # until all leases are added, however long that takes
    expiry = LeaseExpiry(ended.end, NAME, lambda: now if is_stopped else time.monotonic_ns())
    deadlines = {(slot, 7): now + slot * MS_NS for slot in (30, 10, 20, 40)}
    for lease, deadline_ns in deadlines.items():
        expiry.add(*lease, deadline_ns)
    is_stopped = False
    for slot in (10, 20, 30, 40):
        lease, when = ended.next()
        assert lease == (slot, 7)
        assert when >= deadlines[lease]
    expiry.close()


def test_a_lease_whose_deadline_has_passed_has_ended_on_return(
    ended: Ended, expiry: LeaseExpiry
) -> None:
    expiry.add(1, 3, time.monotonic_ns() - 1)
    assert ended.leases.get_nowait()[0] == (1, 3)
    expiry.add(2, 3, time.monotonic_ns() + HOUR_NS)
    expiry.renew(2, 3, 1)
    assert ended.leases.get_nowait()[0] == (2, 3)


def test_renewed_and_forgotten_leases_do_not_end(ended: Ended) -> None:
    now = 0
    expiry = LeaseExpiry(ended.end, NAME, lambda: now)
    for slot in (1, 2):
        expiry.add(slot, 5, MS_NS)
    for _ in range(2):
        expiry.renew(1, 5, HOUR_NS)
    expiry.forget(2, 5)
    expiry.forget(9, 5)  # an unknown lease
    expiry.add(3, 5, MS_NS + 1)
    now = MS_NS + 1
    assert ended.next()[0] == (3, 5)  # after both could have ended
    assert ended.leases.empty()
    expiry.renew(1, 5, MS_NS)  # back to its first deadline
    assert ended.next()[0] == (1, 5)
    expiry.close()


def test_a_lease_with_an_earlier_deadline_wakes_the_thread(
    ended: Ended, expiry: LeaseExpiry
) -> None:
    """The thread waits for the later deadline by then: it holds its lock until it waits."""
    now = time.monotonic_ns()
    expiry.add(1, 1, now + 100 * MS_NS)
    expiry.add(2, 1, now + HOUR_NS)
    assert ended.next()[0] == (1, 1)
    expiry.add(3, 1, time.monotonic_ns() + 50 * MS_NS)
    assert ended.next()[0] == (3, 1)


def test_an_ended_lease_is_not_renewed(ended: Ended, expiry: LeaseExpiry) -> None:
    expiry.add(1, 3, 1)
    expiry.add(2, 3, time.monotonic_ns() + HOUR_NS)
    expiry.forget(2, 3)
    for slot in (1, 2, 3):
        with refused("LLM_KV_CACHE_NOT_EXIST", "has ended"):
            expiry.renew(slot, 3, time.monotonic_ns() + HOUR_NS)


def test_a_lease_that_could_not_be_ended_is_tried_again(
    ended: Ended, expiry: LeaseExpiry, caplog: pytest.LogCaptureFixture
) -> None:
    ended.failures = 2
    expiry.add(1, 3, 1)
    assert ended.next()[0] == (1, 3)
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "event=lease_not_ended"
    ] * 2


def test_no_lease_ends_after_close(ended: Ended, expiry: LeaseExpiry) -> None:
    soon = time.monotonic_ns() + 1_000_000
    expiry.add(1, 3, soon)
    expiry.close()
    count = ended.leases.qsize()
    while time.monotonic_ns() < soon + 2_000_000:
        pass
    assert ended.leases.qsize() == count
