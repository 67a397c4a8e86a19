"""Pages of peers' arenas that are mapped here are populated while they are mapped."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from textwrap import dedent
from types import FrameType
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np
import pytest

from kvnative._host import Arena
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport import pages as pages_module
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.memory import PeerArenas, offer
from kvplan.transport.local.metadata import Range
from kvplan.transport.pages import MAX_PREMAPPED_ARENAS, BackgroundPages, _Task, background_pages
from tests.support.refusals import refused
from tests.support.smaps import num_mappings, smaps_of
from tests.transport.owner import Owner

if TYPE_CHECKING:
    from _typeshed import TraceFunction

MIB = 1 << 20
CHUNK = 2 * MIB
DEADLINE_S = 60.0  # only a hanging test reaches it


def twin_of(arena: Arena) -> Arena:
    """Map the arena a second time, as a peer does."""
    return Arena.of_peer(os.getpid(), arena.fd, arena.inode, arena.nbytes, writable=True)


def wait_until_done() -> None:
    """Wait until the thread has ended, as it does when its work is done."""
    for thread in threading.enumerate():
        if thread.name == "kvplan-pages":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@pytest.fixture
def pages() -> Iterator[BackgroundPages]:
    made = BackgroundPages()
    yield made
    made.close()


def test_existing_pages_are_mapped_and_the_thread_ends(pages: BackgroundPages) -> None:
    arenas = [Arena(nbytes, prefault=True) for nbytes in (mmap.PAGESIZE, 5 * CHUNK, 3 * MIB)]
    twins = [twin_of(arena) for arena in arenas]
    for twin in twins:
        pages.add(twin, owner=None)
    wait_until_done()
    assert [smaps_of(twin.address)["Rss"] for twin in twins] == [mmap.PAGESIZE, 5 * CHUNK, 3 * MIB]


def test_without_work_no_thread_starts(pages: BackgroundPages) -> None:
    pages.cancel(object())
    assert "kvplan-pages" not in {thread.name for thread in threading.enumerate()}


def test_pages_that_the_owner_fills_later_are_mapped_later(pages: BackgroundPages) -> None:
    arena = Arena(2 * CHUNK)
    twin = twin_of(arena)
    pages.add(twin, owner=None)
    np.frombuffer(arena, np.uint8)[:] = 1
    wait_until_done()
    assert smaps_of(twin.address)["Rss"] == 2 * CHUNK


def test_passes_over_holes_become_rarer_while_nothing_is_found() -> None:
    """The pass after a pass that found pages counts as the first that found none."""
    arena = Arena(2 * CHUNK)
    np.frombuffer(arena, np.uint8)[:CHUNK] = 1
    twin = twin_of(arena)
    task = _Task(twin, None, collapse=False)
    for wait_s in (0.05, 0.1, 0.2, 0.4):
        task.due = began = time.monotonic()
        while task.due <= time.monotonic():
            task.take_turn()
        assert began + wait_s <= task.due < math.inf
    assert smaps_of(twin.address)["Rss"] == CHUNK


def test_the_pause_after_a_pass_follows_from_that_pass_only() -> None:
    """A first pass that took long, over many pages, does not delay the passes after it."""

    class Walk:
        is_complete = stopped = False
        is_pass_over = True
        took_s = 0.3

        def advance(self, arena: Arena, turn_s: float) -> int:
            until = time.monotonic() + self.took_s
            while time.monotonic() < until:
                pass
            return int(self.took_s > 0)

        def again(self) -> None:
            self.took_s = 0.0

    arena = Arena(CHUNK)
    task = _Task(arena, None, collapse=False)
    task.walk = Walk()  # type: ignore[assignment]
    pauses = []
    for _ in range(2):
        began = time.monotonic()
        task.take_turn()
        took_s = time.monotonic() - began
        pauses.append((task.due - began, took_s))
    (first_s, _), (second_s, second_took_s) = pauses
    assert first_s >= 5 * 0.3
    assert second_s <= max(0.1, 50 * second_took_s) + second_took_s


def test_a_cancelled_arena_releases_its_mapping(pages: BackgroundPages) -> None:
    arena = Arena(64 * CHUNK, prefault=True, pages="small")
    for _ in range(5):
        owner, twin = object(), twin_of(arena)
        pages.add(twin, owner)
        pages.cancel(owner)
        del twin
        assert num_mappings(arena.inode) == 1, "its owner's"


def test_a_collected_arena_is_forgotten(pages: BackgroundPages) -> None:
    holes = Arena(CHUNK)
    twin = twin_of(holes)
    pages.add(twin, owner=None)
    del twin
    wait_until_done()
    assert num_mappings(holes.inode) == 1


def test_cancelling_one_arena_does_not_stop_the_others(pages: BackgroundPages) -> None:
    arenas = [Arena(8 * CHUNK, prefault=True, pages="small") for _ in range(4)]
    twins = [twin_of(arena) for arena in arenas]
    owners = [object() for _ in twins]
    for twin, owner in zip(twins, owners, strict=True):
        pages.add(twin, owner)
    pages.cancel(owners[0])
    wait_until_done()
    assert [smaps_of(twin.address)["Rss"] for twin in twins[1:]] == [8 * CHUNK] * 3


def test_jobs_are_done_in_order_and_may_fail(pages: BackgroundPages) -> None:
    done: list[int] = []

    def job(number: int) -> None:
        done.append(number)
        if number == 1:
            raise LLMException("the peer is gone")

    for number in range(3):
        pages.submit(lambda number=number: job(number), owner=None)  # type: ignore[misc]
    wait_until_done()
    assert done == [0, 1, 2]


def test_jobs_of_a_cancelled_owner_are_dropped(pages: BackgroundPages) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    pages.submit(first, owner=1)
    pages.submit(lambda: done.append(2), owner=2)
    pages.submit(lambda: done.append(3), owner=3)
    assert begun.wait(DEADLINE_S)
    pages.cancel(2)
    go_on.set()
    wait_until_done()
    assert done == [3]


def test_cancel_waits_for_a_running_job(
    pages: BackgroundPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the job wakes the call, long before its timeout."""
    monkeypatch.setattr(pages_module, "_STOPPED_S", DEADLINE_S)
    begun, go_on, done = threading.Event(), threading.Event(), []

    def job() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        done.append(1)

    pages.submit(job, owner=1)
    assert begun.wait(DEADLINE_S)
    releasing = threading.Timer(0.05, go_on.set)
    releasing.start()
    began = time.monotonic()
    pages.cancel(1)
    assert done == [1]
    assert time.monotonic() - began < DEADLINE_S / 2
    releasing.join()


def test_new_work_wakes_a_thread_that_waits_for_its_next_pass(pages: BackgroundPages) -> None:
    arena = Arena(2 * CHUNK)  # all holes
    twin = twin_of(arena)
    pages.add(twin, owner=None)
    later, is_waiting = time.monotonic() + DEADLINE_S, False
    pages.submit(lambda: setattr(pages._tasks[0], "due", later), owner=None)
    while not is_waiting:
        assert time.monotonic() < later
        with pages._changed:  # which the thread gives up only while it waits
            is_waiting = pages._turn_of is None and [each.due for each in pages._tasks] == [later]
    done = threading.Event()
    pages.submit(done.set, owner=None)
    assert done.wait(DEADLINE_S / 2)


def test_a_signal_handler_may_come_at_any_line(pages: BackgroundPages) -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[object] = []
    twin = twin_of(arena := Arena(CHUNK, prefault=True, pages="small"))
    handled: list[Arena] = []
    before = sys.gettrace()

    def first() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    def handler(frame: FrameType, event: str, argument: object) -> TraceFunction:
        sys.settrace(None)
        here = frame.f_code.co_filename == BackgroundPages.cancel.__code__.co_filename
        if here and len(handled) < MAX_PREMAPPED_ARENAS // 4:  # more would starve the jobs
            pages.submit(partial(done.append, len(handled)), owner=4)
            handled.append(twin_of(arena))
            pages.add(handled[-1], owner=4)
        sys.settrace(handler)
        return handler

    pages.submit(first, owner=None)
    assert begun.wait(DEADLINE_S)
    for owner in (1, 2, 1, 3):
        pages.submit(lambda owner=owner: done.append(f"of {owner}"), owner)  # type: ignore[misc]
        pages.add(twin, owner)
    sys.settrace(handler)
    try:
        pages.cancel(1)
        pages.add(twin, 5)
    finally:
        sys.settrace(before)
    go_on.set()
    wait_until_done()
    assert len(handled) > 5
    assert done == ["of 2", "of 3", *range(len(handled))]
    assert {smaps_of(item.address)["Rss"] for item in handled} == {CHUNK}


def test_a_finished_job_is_released(pages: BackgroundPages) -> None:
    """A job holds its link, which must not wait up to 10 s for the next job."""

    class Job:
        def __call__(self) -> None:
            pass

    gone = threading.Event()
    job = Job()
    watch = ref(job, lambda _: gone.set())
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    pages.submit(first, owner=None)
    assert begun.wait(DEADLINE_S)
    twin = twin_of(arena := Arena(CHUNK))  # has holes, so that the thread waits
    pages.add(twin, owner=None)
    pages._tasks[0].due = time.monotonic() + DEADLINE_S
    pages.submit(job, owner=None)
    del job
    go_on.set()
    assert gone.wait(DEADLINE_S / 2), watch
    del twin, arena


def test_an_arena_that_fails_in_another_way_is_given_up(
    pages: BackgroundPages, caplog: pytest.LogCaptureFixture
) -> None:
    class NoArena:
        nbytes = CHUNK

    wrong, twin = NoArena(), twin_of(arena := Arena(CHUNK, prefault=True))
    pages.add(wrong, owner=None)  # type: ignore[arg-type]
    pages.add(twin, owner=None)
    wait_until_done()
    assert smaps_of(twin.address)["Rss"] == arena.nbytes
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_many_arenas_with_huge_pages_leave_room_for_others(
    pages: BackgroundPages, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "kvplan")
    arenas = [
        Arena(4096) for _ in range(MAX_PREMAPPED_ARENAS + 1)
    ]  # smaller than a huge page: the whole range is populated
    for arena in arenas:
        pages.add(arena, owner=None, collapse=True)
    assert not [message for message in caplog.messages if "at their first use" in message]


def test_concurrent_callers_share_one_thread() -> None:
    program = """
        import sys, threading
        from kvplan.transport.pages import background_pages
        sys.setswitchinterval(1e-6)
        together, found = threading.Barrier(8), []
        def ask():
            together.wait()
            found.append(background_pages())
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(set(map(id, found))) == 1
    """
    for _ in range(5):
        subprocess.run([sys.executable, "-c", dedent(program)], check=True, timeout=DEADLINE_S)


def test_arenas_are_listed_while_others_come_and_go() -> None:
    arenas = [Arena(4096) for _ in range(64)]
    ranges = [
        Range(arena.address, arena.nbytes, 0, 0, True, offer(arena), None) for arena in arenas
    ]
    peer = PeerArenas(os.getpid(), populate="off")
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            held = [peer.hold(memory) for memory in ranges]
            del held

    with ThreadPoolExecutor(1) as others:
        mapping = others.submit(come_and_go)
        try:
            for _ in range(20_000):
                assert len(peer.mapped()) <= len(ranges)
        finally:
            stop.set()
        mapping.result()


def test_background_pages_can_be_closed_at_any_time(pages: BackgroundPages) -> None:
    twin = twin_of(arena := Arena(64 * CHUNK, prefault=True, pages="small"))
    pages.add(twin, owner=None)
    pages.close()
    assert "kvplan-pages" not in {thread.name for thread in threading.enumerate()}
    pages.close()
    pages.add(twin, owner=None)
    assert "kvplan-pages" not in {thread.name for thread in threading.enumerate()}
    assert smaps_of(twin.address)["Rss"] <= arena.nbytes


def test_a_forked_child_has_its_own_thread() -> None:
    ours = background_pages()
    pid = os.fork()
    if pid == 0:
        ours.close()  # the copy of the parent: `close` does nothing
        os._exit(0 if background_pages() is not ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_process_ends_while_pages_are_populated() -> None:
    program = """
        import os
        from kvnative._host import Arena
        from kvplan.transport.pages import background_pages
        arena = Arena(512 << 20, prefault=True, pages="small")
        twin = Arena.of_peer(os.getpid(), arena.fd, arena.inode, arena.nbytes, writable=True)
        background_pages().add(twin, None)
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(program)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


FILLED = """
    arena = transport.allocate({nbytes})
    memoryview(arena)[:] = b"x" * {nbytes}
    registration = transport.register(arena)
    result = arena.address, arena.inode
"""


def test_a_link_populates_the_arenas_that_it_has_mapped(
    owner: Owner, transport: LocalTransport
) -> None:
    nbytes = 3 * CHUNK
    address, inode = owner.run(FILLED.format(nbytes=nbytes))
    with transport.connect(owner.metadata()) as link:
        memory = link.memory([address], nbytes)
        wait_until_done()
        (arena,) = link.mapped()
        assert smaps_of(arena.address)["Rss"] == nbytes
        del arena, memory
    assert num_mappings(inode) == 0


def test_nothing_is_populated_if_the_option_is_off(owner: Owner) -> None:
    address, _ = owner.run(FILLED.format(nbytes=CHUNK))
    with LocalTransport(populate="off") as off, off.connect(owner.metadata()) as link:
        memory = link.memory([address], CHUNK)
        (arena,) = link.mapped()
        link.prepare(lambda: pytest.fail("it is off"))
        wait_until_done()
        assert smaps_of(arena.address)["Rss"] == 0
        assert memory.addresses.tolist() == [arena.address]


def test_a_closed_link_populates_no_more(owner: Owner, transport: LocalTransport) -> None:
    nbytes = 64 * CHUNK
    address, inode = owner.run(FILLED.format(nbytes=nbytes))
    link = transport.connect(owner.metadata())
    memory = link.memory([address], nbytes)
    link.close()
    del memory
    assert num_mappings(inode) == 0


def test_a_peer_that_is_killed_meanwhile_does_no_harm(
    owner: Owner, transport: LocalTransport
) -> None:
    nbytes = 128 * CHUNK
    address, inode = owner.run(FILLED.format(nbytes=nbytes))
    with transport.connect(owner.metadata()) as link:
        memory = link.memory([address], nbytes)
        owner.kill()
        wait_until_done()  # the memory stays while it is mapped
        (arena,) = link.mapped()
        assert smaps_of(arena.address)["Rss"] == nbytes
        with refused(LLMStatusCode.LLM_LINK_FAILED):
            memory.check()
        del arena, memory
    assert num_mappings(inode) == 0


def test_an_unknown_option_is_refused() -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "populate='later' must be one of background"):
        LocalTransport(populate="later")
