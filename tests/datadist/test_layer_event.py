"""Layers signalled through a descriptor: from Python, from C, wrongly, and not at all."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest

from kvnative._backend import Backend
from kvplan import (
    Cache,
    CacheIndex,
    KvCacheExtParam,
    LayerEvent,
    LayerTask,
    LlmDataDist,
    LLMException,
    LLMStatusCode,
    Rows,
    Transfer,
    Transfers,
)
from kvplan.engine import layer_event
from kvplan.execution.completion import completion_thread
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.layers import NUM_LAYERS, OFFER, SLOTS, SLOTS_THERE, fill, there, wait_until
from tests.datadist.peer import Peer
from tests.support.refusals import refused
from tests.support.wrappers import delay

LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def engines(pair: tuple[LlmDataDist, LlmDataDist]) -> tuple[LlmDataDist, Cache]:
    """An engine with a full cache, linked with an engine of this process that has an empty one."""
    owner, user = pair
    owner.allocate_cache(SLOTS)
    cache = user.allocate_cache(SLOTS)
    fill(user, cache)
    return user, cache


Begin = Callable[..., LayerTask]


@pytest.fixture
def begin(engines: tuple[LlmDataDist, Cache]) -> Begin:
    user, cache = engines

    def push(layers: tuple[int, int] | None = None) -> LayerTask:
        return user.layered(
            Transfer(Rows(cache), Rows(CacheIndex(1, 1)), layers=KvCacheExtParam(layers, layers))
        )

    return push


def write(fd: int, count: int) -> None:
    """Write to the descriptor as C does, without the GIL."""
    assert LIBC.write(fd, ctypes.byref(ctypes.c_uint64(count)), ctypes.c_size_t(8)) == 8


def done(task: LayerTask, count: int) -> None:
    """Wait until exactly the first `count` layers are done."""
    wait_until(lambda: len(task.progress().done) >= count)
    assert task.progress().done == tuple(task.layers)[:count]


def test_c_code_makes_layers_ready(user: LlmDataDist, peer: Peer) -> None:
    peer.run(OFFER)
    cache = user.allocate_cache(SLOTS)
    arrays = fill(user, cache)
    task = user.layered(Transfer(Rows(cache), Rows(CacheIndex(1, SLOTS_THERE))))
    with LayerEvent(task) as event:
        for counts in (1, 4, 25):
            thread = threading.Thread(target=write, args=(event.fileno(), counts))
            thread.start()
            thread.join()
        task.wait(30_000)
    arrived = there(peer, "cache")
    for tensor, array in enumerate(arrays):
        assert (arrived[tensor][0] == array[0]).all()


def test_a_signal_makes_the_next_layers_ready_in_every_task(begin: Begin) -> None:
    whole, middle = begin(), begin((10, 12))
    with LayerEvent(whole, middle) as event:
        event.signal()
        done(whole, 1)
        event.signal(10)
        done(whole, 11)
        done(middle, 1)
        event.signal(1)
        event.signal(1)
        done(whole, 13)
        middle.wait(30_000)
        event.signal(17)
        whole.wait(30_000)
    assert event.fileno() == -1


def test_many_signals_at_once_are_all_received(begin: Begin) -> None:
    tasks = [begin() for _ in range(4)]
    events = [LayerEvent(task) for task in tasks]
    threads = [threading.Thread(target=event.signal) for event in events for _ in range(NUM_LAYERS)]
    for thread in threads:
        thread.start()
    for task in tasks:
        task.wait(30_000)
    for thread in threads:
        thread.join()
    for event in events:
        event.close()


def test_closing_passes_on_written_signals(begin: Begin) -> None:
    for _ in range(50):
        task = begin()
        with LayerEvent(task) as event:
            write(event.fileno(), NUM_LAYERS)
        assert task.progress().waiting == ()
        task.wait(30_000)


def test_an_interrupted_close_loses_no_layer(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    task = begin()
    event = LayerEvent(task)
    completion_thread().remove_reader(event.fileno())  # only `close` reads
    event.signal(NUM_LAYERS)
    with monkeypatch.context() as patch:
        patch.setattr(layer_event, "_make_ready", Mock(side_effect=[None, KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            event.close()
    task.ready(0)  # as the first call would
    event.close()
    assert task.progress().waiting == ()
    task.wait(30_000)


def test_closing_makes_no_layer_ready(begin: Begin) -> None:
    task = begin()
    event = LayerEvent(task)
    event.signal(3)
    event.close()
    event.close()
    assert task.progress().waiting == tuple(range(3, NUM_LAYERS))
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        event.signal()
    task.cancel()


@pytest.mark.parametrize("count", [NUM_LAYERS + 1, 2**32, 2**64 - 2])
def test_a_count_beyond_the_layers_is_logged(
    begin: Begin, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    task, after = begin(), begin()
    with caplog.at_level(logging.WARNING, "kvplan"), LayerEvent(task) as event:
        write(event.fileno(), count)
        task.wait(30_000)
    assert "layer_event" in caplog.text
    assert f"{count:,} layers" in caplog.text
    with LayerEvent(after) as event:  # the listener lives
        event.signal(NUM_LAYERS)
        after.wait(30_000)


def test_signals_after_the_end_change_nothing(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    task, other = begin(), begin()
    with LayerEvent(task, other) as event:
        event.signal(2)
        done(task, 2)
        task.cancel()
        event.signal(NUM_LAYERS - 2)
        other.wait(30_000)
    assert len(task.progress().waiting) == NUM_LAYERS - 2


def test_a_signal_never_waits_for_a_copy(make_engine: MakeEngine) -> None:
    def slow(backend: Backend) -> Backend:
        return delay(backend, 600_000)

    with Transfers(1, slow) as transfers:
        owner, user = make_engine(1, listen=True), make_engine(2, transfers=transfers)
        link(user, owner)
        owner.allocate_cache(SLOTS)
        cache = user.allocate_cache(SLOTS)
        task = user.layered(Transfer(Rows(cache), Rows(CacheIndex(1, 1))))
        with LayerEvent(task) as event:
            for _ in range(NUM_LAYERS):
                event.signal()
            wait_until(lambda: task.progress().moving == tuple(task.layers))
            assert not task.done
        task.cancel()


def test_a_dropped_event_warns_and_releases_its_tasks(begin: Begin) -> None:
    task = begin()
    event = LayerEvent(task)
    fd = event.fileno()
    with pytest.warns(ResourceWarning, match="unclosed <LayerEvent"):
        del event
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with LayerEvent(task) as again:
        again.signal(NUM_LAYERS)
        task.wait(30_000)


def test_an_event_keeps_its_tasks_until_it_is_closed(begin: Begin) -> None:
    task = begin()
    held = ref(task)
    with LayerEvent(task) as event:
        del task
        gc.collect()
        assert held() is not None
        event.signal(NUM_LAYERS)
        wait_until(lambda: held().done)  # type: ignore[union-attr]
    wait_until(lambda: held() is None)  # once the completion thread has settled the task


def test_events_are_refused_in_a_forked_child(begin: Begin) -> None:
    task = begin()
    with LayerEvent(task) as event:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                with refused(LLMStatusCode.LLM_FAILED):
                    event.signal()
                event.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        event.signal(NUM_LAYERS)
        task.wait(30_000)


def test_short_lived_events_leave_nothing_behind(begin: Begin) -> None:
    def rounds(count: int) -> int:
        for _ in range(count):
            task = begin()
            with LayerEvent(task) as event:
                event.signal(NUM_LAYERS)
                task.wait(30_000)
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())) + threading.active_count()

    before = rounds(10)
    assert rounds(200) <= before + 2


def test_a_closed_event_is_not_watched_although_a_child_has_its_descriptor(begin: Begin) -> None:
    """Its writes would wake the thread again and again, because no event reads them."""
    task = begin()
    with LayerEvent(task) as event:
        fd = event.fileno()
        assert fd in watched()
        of_child = os.dup(fd)
        event.signal(NUM_LAYERS)
        task.wait(30_000)
    try:
        assert fd not in watched()
    finally:
        os.close(of_child)


def watched() -> set[int]:
    """Return the descriptors that the thread of completions waits for."""
    info = Path(f"/proc/self/fdinfo/{completion_thread()._epoll.fileno()}").read_text()
    return {int(line.split()[1]) for line in info.splitlines() if line.startswith("tfd:")}


def test_a_lack_of_descriptors_is_reported(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    task = begin()

    def refuse_descriptor(*_: int) -> int:
        raise OSError(24, "Too many open files")

    with LayerEvent(task) as event:
        monkeypatch.setattr(os, "eventfd", refuse_descriptor)
        with refused(LLMStatusCode.LLM_OUT_OF_MEMORY) as error:
            LayerEvent(task)
        assert "Too many open files" in str(error.value)
        lack = LLMException("no thread", status_code=LLMStatusCode.LLM_OUT_OF_MEMORY)
        monkeypatch.setattr(layer_event, "completion_thread", Mock(side_effect=lack))
        with refused(LLMStatusCode.LLM_OUT_OF_MEMORY):  # of the thread that the process shares
            LayerEvent(task)
        event.signal(NUM_LAYERS)
        task.wait(30_000)


def test_tasks_must_share_their_layers(begin: Begin) -> None:
    part, whole = begin((3, 5)), begin()
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        LayerEvent(part, whole)
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        LayerEvent()
    for task in (part, whole):
        task.cancel()


@pytest.mark.parametrize("given", [None, 1, "task"])
def test_a_value_that_is_not_a_task_is_refused(begin: Begin, given: Any) -> None:
    task = begin()
    with pytest.raises(TypeError, match=r"tasks\[1\]"):
        LayerEvent(task, given)
    task.cancel()


def test_a_signal_is_a_positive_number(begin: Begin) -> None:
    task = begin()
    with LayerEvent(task) as event:
        for count in (0, -1, 2**32):
            with pytest.raises(ValueError, match="out of range"):
                event.signal(count)
        for other in (1.0, "1", True):
            with pytest.raises(TypeError):
                event.signal(other)  # type: ignore[arg-type]
    assert len(task.progress().waiting) == NUM_LAYERS
    task.cancel()
