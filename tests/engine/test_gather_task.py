"""The task of a transfer with several peers, over tasks that a test ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from kvplan import (
    CacheDesc,
    DataType,
    GatherError,
    GatherTask,
    HostMemory,
    LayerGatherTask,
    LLMException,
    LLMStatusCode,
    Rows,
    Transfer,
    Transfers,
    plan,
)
from kvplan.engine.gather import GatherNotices, Several
from kvplan.engine.transfers import TransferOperations
from kvplan.execution.awaitable import AwaitableTask
from kvplan.execution.completion import Tracker
from kvplan.execution.task import TransferTask
from tests.support.interrupts import Interrupts
from tests.support.refusals import refused
from tests.support.wrappers import fail_at

WAIT_S = 20  # for events that happen at once
LONG_MS = 600_000
TIMEOUT = LLMException("too late", status_code=LLMStatusCode.LLM_TIMEOUT)
LOST = LLMException("no link", status_code=LLMStatusCode.LLM_LINK_FAILED)


class Source(AwaitableTask):
    """A transfer of several. A slow one continues for a moment after it is cancelled."""

    def __init__(self, *, slow: bool = False) -> None:
        super().__init__()
        self._error: LLMException | None = None
        self._ended, self.told, self._slow = Event(), Event(), slow

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait_done(self, timeout_ms: float) -> bool:
        return self._ended.wait(min(timeout_ms / 1000, WAIT_S))

    def wait(self, timeout_ms: float | None = None) -> None:
        assert self.wait_done(WAIT_S * 1000)
        if self._error is not None:
            raise self._error

    def cancel(self, reason: LLMException | None = None) -> None:
        self.told.set()
        if self._slow:
            Thread(target=self.end, args=(reason,)).start()
        else:
            self.end(reason)

    def end(self, error: LLMException | None = None) -> None:
        if not self.done:
            self._error = error
            self._ended.set()
            self._note_settled()

    def _follow(self) -> None:
        pass


def gather(
    *sources: Source, on_outcome: Callable[[BaseException | None], None] | None = None
) -> GatherTask:
    task = GatherTask("pull_blocks", on_outcome)
    for index, source in enumerate(sources):
        task.begin(index, f"source {index}", lambda source=source: cast(TransferTask, source))
    return task


class Late(Source):
    """A source that takes some time of each wait, and records the timeout of the wait."""

    def __init__(self, takes_ms: float) -> None:
        super().__init__()
        self._takes_ms = takes_ms
        self.limit_ms = -1.0

    def wait_done(self, timeout_ms: float) -> bool:
        self.limit_ms = timeout_ms
        self._ended.wait(self._takes_ms / 1000)
        self.end()
        return True


def test_the_time_of_one_wait_counts_for_the_next() -> None:
    sources = [Late(20) for _ in range(3)]
    assert gather(*sources).wait_done(LONG_MS)
    assert sources[0].limit_ms <= LONG_MS
    assert sources[1].limit_ms <= LONG_MS - 20
    assert 0 < sources[2].limit_ms <= LONG_MS - 40


@pytest.mark.parametrize("way", ["wait", "await", "settled"])
@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_a_failure_stops_the_others_however_it_is_found(order: tuple[int, ...], way: str) -> None:
    """A source has ended, the next one fails, and the last one would never end."""
    sources = [Source() for _ in range(3)]
    moved, victim, other = order
    outcomes: list[BaseException | None] = []
    task = gather(*sources, on_outcome=outcomes.append)
    settled = Event()
    if way != "wait":
        task.when_settled(settled.set)
    sources[moved].end()
    sources[victim].end(LOST)
    if way != "wait":
        assert settled.wait(WAIT_S)

    def learn() -> None:
        if way == "await":
            asyncio.run(task.coroutine())
        else:
            task.wait()

    with pytest.raises(GatherError) as error:
        learn()
    assert (error.value.status_code, [*error.value.failed]) == (LOST.status_code, [victim])
    assert [*error.value.stopped] == [other]
    assert sources[other].done
    assert str(error.value).startswith("pull_blocks: 1 of 3 sources failed: ")
    assert isinstance(outcomes[0], GatherError)


@pytest.mark.parametrize("lost", range(3))
def test_failures_are_named_in_the_order_of_the_sources(lost: int) -> None:
    """The last source is refused before the failure of another one is found."""
    sources = [Source() for _ in range(3)]
    task = gather(*sources)
    sources[lost].end(LOST)

    def refuse() -> TransferTask:
        raise TIMEOUT

    with pytest.raises(GatherError) as error:
        task.begin(3, "the one that is refused", refuse)
    assert [*error.value.failed] == [lost, 3]
    assert error.value.status_code is LOST.status_code
    assert [*error.value.stopped] == [index for index in range(3) if index != lost]
    named = [text.partition("]")[0] for text in str(error.value).split("sources[")[1:]]
    assert named[:2] == [str(lost), "3"]


@pytest.mark.parametrize("victim", range(1, 4))
def test_a_source_that_cannot_begin_leaves_none_in_flight(victim: int) -> None:
    """Begun sources are waited for, because each moves bytes for a moment after it is stopped."""
    sources = [Source(slow=True) for _ in range(victim)]
    task = gather(*sources)

    def refuse() -> TransferTask:
        raise LOST

    with pytest.raises(GatherError) as error:
        task.begin(victim, "the one that is refused", refuse)
    assert all(source.done for source in sources)
    assert [*error.value.failed] == [victim]
    assert [*error.value.stopped] == [*range(victim)]


def test_a_loop_over_settled_finds_the_end_without_other_calls() -> None:
    """No other call follows the task, so the loop must also stop the others after a failure."""
    sources = [Source(), Source()]
    task = gather(*sources)
    for source in sources:
        assert not task.settled
        source.end()
    assert task.settled
    sources = [Source(), Source()]
    task = gather(*sources)
    assert not task.settled
    sources[0].end(LOST)
    assert sources[1].told.wait(WAIT_S)
    with pytest.raises(GatherError):
        task.wait()
    assert task.settled
    assert gather().settled


def test_an_empty_gather_has_ended() -> None:
    task, settled = gather(), Event()
    assert task.done
    task.when_settled(settled.set)
    assert settled.wait(WAIT_S)
    task.wait()
    asyncio.run(task.coroutine())


@pytest.mark.parametrize("local", ["src", "dst"])
def test_a_layer_is_ready_in_each_pair_that_has_it(local: str) -> None:
    """Layers have the numbers of this process; each pair has other numbers at the other end."""
    made_ready: dict[int, list[int]] = {0: [], 1: [], 2: []}
    task = LayerGatherTask("pull_layers")
    own = {0: range(4), 1: range(2, 6), 2: range(2, 3)}
    for number, layers in own.items():
        read = range(10 * number, 10 * number + len(layers))
        ends = (layers, read) if local == "src" else (read, layers)
        part = SimpleNamespace(local=local, src_layers=ends[0], dst_layers=ends[1])
        pair: Any = SimpleNamespace(
            plan=SimpleNamespace(part=part),
            layers=ends[0],
            ready=lambda layer, event, number=number: made_ready[number].append(layer),
        )
        task.tasks[number] = pair
    assert task.layers == (0, 1, 2, 3, 4, 5)
    for wrong in ("2", 2.0, True):  # each source refuses these, too
        with pytest.raises(TypeError, match="layer="):
            task.ready(cast(int, wrong))
    for layer in range(6):
        before = {number: len(ready) for number, ready in made_ready.items()}
        task.ready(layer)
        having = [number for number, ready in made_ready.items() if len(ready) > before[number]]
        assert having == [number for number, layers in own.items() if layer in layers]
    for number, layers in own.items():
        start = layers.start if local == "src" else 10 * number
        assert made_ready[number] == [*range(start, start + len(layers))]
    with refused("LLM_PARAM_INVALID", r"layer=6 is not one of the layers \(0, 1, 2, 3, 4, 5\)"):
        task.ready(6)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_failed_notification_is_an_error_if_bytes_would_move(is_held: bool) -> None:
    """Its link is ending: an operation that holds the link moves, another is refused."""
    notices, link = GatherNotices(cast(Any, None), "gather_blocks", {"notify": b"done"}), object()
    notice = SimpleNamespace(hold=Mock(side_effect=LOST))
    notices._new = cast(Any, lambda **_: notice)
    operation = SimpleNamespace(
        link=link if is_held else None,
        engine=SimpleNamespace(links=SimpleNamespace(peers={1: link})),
        peer_key=lambda: SimpleNamespace(cluster_id=1),
        left_ms=lambda: None,
    )
    with refused(LLMStatusCode.LLM_LINK_FAILED) if is_held else nullcontext():
        notices.add([cast(Any, operation)])
    assert notice.hold.call_args.args == (link,)


class Peers(nullcontext[None]):
    """An operation with one peer."""

    peer_key = staticmethod(lambda: "peer")


@pytest.mark.parametrize("error", [ValueError("mine"), LOST])
def test_peers_learn_of_a_failure_when_nothing_moves_any_more(error: Exception) -> None:
    """A hook of the program may raise an error of any type, which stops the transfer."""
    first, told = Source(), list[bool]()
    several: Any = object.__new__(Several)
    several.operations = [Peers(), Peers()]
    prepared = (SimpleNamespace(parts=()),)
    several._use_known = lambda: [(operation, prepared) for operation in several.operations]
    several.notices = SimpleNamespace(finish=lambda _: told.append(first.done))
    with pytest.raises(type(error) if error is not LOST else GatherError):
        several.begin(GatherTask("push_groups"), Mock(side_effect=[first, error]))
    assert told == [True]


def test_a_limited_wait_after_a_failed_source_does_not_say_that_the_bytes_arrived():
    hold, tracker, memory = Event(), Tracker(), HostMemory.from_arrays
    desc = CacheDesc(1, (2, 4), DataType.DT_INT8)
    move = plan(Transfer(Rows(desc, slot=0), Rows(desc, slot=1)))
    task = GatherTask("gather")
    task.settles_aside = True
    with Transfers(1) as good, Transfers(1, lambda backend: fail_at(backend, 0)) as bad:
        for index, (transfers, end) in enumerate(((bad, None), (good, lambda _: hold.wait(30)))):
            src, dst = (memory([np.zeros((2, 4), np.int8)]) for _ in range(2))
            source = transfers.submit(move, src, dst, end)
            source.settles_aside = True
            tracker.track(source, aside=True)
            assert source.wait_done(20_000)
            task.begin(index, "a source", lambda source=source: source)
        with refused("LLM_TIMEOUT", "10 ms passed when 1 of 2 sources had failed; `wait` again"):
            task.wait(10)
        hold.set()
        with refused("LLM_FAILED", "1 of 2 sources failed"):
            task.wait()
        tracker.close(20)


class Held(Source):
    """A source that ends only if it is stopped, in a wait that a first Ctrl-C interrupts."""

    def wait_done(self, timeout_ms: float) -> bool:
        if not self.done:
            raise KeyboardInterrupt
        return True


def test_a_second_interrupt_of_a_call_that_waits_leaves_no_bytes_moving() -> None:
    """The second interrupt is anywhere; before the wait, it is the only one."""
    runner, interrupts, begun = (
        object.__new__(TransferOperations),
        Interrupts("/kvplan/"),
        list[Held](),
    )

    def submit() -> TransferTask:
        begun.append(Held())
        return cast(TransferTask, begun[-1])

    def begin(task: GatherTask, _: object) -> None:
        for index in range(3):
            task.begin(index, f"source {index}", submit)

    several: Any = SimpleNamespace(
        name="pull_blocks",
        by_layer=False,
        notices=SimpleNamespace(any=False),
        operations=[SimpleNamespace(follows_up=False)],
        engine=SimpleNamespace(completion=None),
        limited=lambda: LONG_MS,
        begin=begin,
    )
    while interrupts.call(lambda: runner._begin(several, waits=True)):
        assert all(source.done for source in begun), interrupts.place
        begun.clear()
    assert interrupts.place > 20


@pytest.mark.parametrize("way", ["settled", "callback"])
def test_an_interrupted_follow_loses_no_source(way: str) -> None:
    """After an interrupt anywhere in the first call, later calls find the end."""
    interrupts, goes_on = Interrupts("/kvplan/execution/gather_task.py"), True
    while goes_on:
        sources = [Source() for _ in range(3)]
        task = gather(*sources)
        goes_on = interrupts.call(lambda task=task: task.settled)
        settled = Event()
        if way == "callback":
            task.when_settled(settled.set)
        for source in sources:
            source.end()
        assert settled.wait(WAIT_S) if way == "callback" else task.settled, interrupts.place
    assert interrupts.place > 5


def test_an_interrupted_timeout_stops_all_sources_or_none() -> None:
    """If none is stopped, a failure still stops the others."""
    interrupts, goes_on = Interrupts("/kvplan/execution/gather_task.py"), True
    ends = set[bool]()
    while goes_on:
        sources = [Stoppable() for _ in range(3)]
        task = gather(*sources)
        goes_on = interrupts.call(lambda task=task: caught(task, 0))
        (stopped,) = {source.done for source in sources}
        ends.add(stopped)
        if not stopped:
            task.when_settled(lambda: None)
            sources[0].end(LOST)
            assert sources[2].told.wait(WAIT_S), interrupts.place
    assert ends == {True, False}


class Stoppable(Source):
    """A source that a wait with a timeout stops."""

    def wait(self, timeout_ms: float | None = None) -> None:
        if timeout_ms is not None:
            self.end(TIMEOUT)
        super().wait()


def caught(task: GatherTask, timeout_ms: float) -> GatherError:
    """Wait for a task that fails, and return its error."""
    with pytest.raises(GatherError) as error:
        task.wait(timeout_ms)
    return error.value


class Notice:
    """A notification to a peer. The interrupted one raises the first time."""

    def __init__(self, *, interrupted: bool = False) -> None:
        self.outcomes: list[BaseException | None] = []
        self._interrupted = interrupted

    def finish(self, error: BaseException | None) -> None:
        self.outcomes.append(error)
        if self._interrupted and len(self.outcomes) == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("victim", range(3))
def test_an_interrupted_notification_is_a_failure(victim: int) -> None:
    """The peers without an outcome learn of the failure, as with a single peer."""
    told = [Notice(interrupted=index == victim) for index in range(3)]
    notices = GatherNotices(cast(Any, None), "gather_blocks", {"notify": b"done"})
    notices._operations = cast(Any, dict(enumerate(told)))
    task = gather(Source(), on_outcome=notices.finish)
    cast(Source, task.tasks[0]).end()
    task._num_unsettled = 1  # nothing else settles the task
    with pytest.raises(KeyboardInterrupt):
        task.wait()
    for _ in range(2):
        with refused("LLM_FAILED", "gather_blocks: interrupted after the last byte"):
            task.wait()
    for index, notice in enumerate(told):
        sent = [None] if index <= victim else []
        failures = notice.outcomes[len(sent) :]
        assert notice.outcomes[: len(sent)] == sent
        assert len(failures) == (index >= victim)
        assert all(isinstance(error, LLMException) for error in failures)
