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

import pytest

from kvplan import GatherError, GatherTask, LayerGatherTask, LLMException, LLMStatusCode
from kvplan.engine.gather import GatherNotices
from kvplan.execution.awaitable import AwaitableTask
from kvplan.execution.task import TransferTask
from tests.support.refusals import refused

WAIT_S = 20  # for events that happen at once
LONG_MS = 600_000
TIMEOUT = LLMException("too late", status_code=LLMStatusCode.LLM_TIMEOUT)
LOST = LLMException("no link", status_code=LLMStatusCode.LLM_LINK_FAILED)


class Source(AwaitableTask):
    """One of several transfers. A slow one continues for a moment after it is cancelled."""

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


def test_the_time_of_one_wait_is_missing_for_the_next() -> None:
    sources = [Late(20) for _ in range(3)]
    assert gather(*sources).wait_done(LONG_MS)
    assert sources[0].limit_ms <= LONG_MS
    assert sources[1].limit_ms <= LONG_MS - 20
    assert 0 < sources[2].limit_ms <= LONG_MS - 40


@pytest.mark.parametrize("how", ["wait", "await", "settled"])
@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_a_failure_stops_the_others_however_it_is_found(order: tuple[int, ...], how: str) -> None:
    """One source has ended, the next one fails, and the last one would never end."""
    sources = [Source() for _ in range(3)]
    moved, victim, other = order
    outcomes: list[BaseException | None] = []
    task = gather(*sources, on_outcome=outcomes.append)
    settled = Event()
    if how != "wait":
        task.when_settled(settled.set)
    sources[moved].end()
    sources[victim].end(LOST)
    if how != "wait":
        assert settled.wait(WAIT_S)

    def learn() -> None:
        if how == "await":
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


def test_a_gather_of_nothing_has_ended() -> None:
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
    for wrong in ("2", 2.0, True):  # as one source refuses them
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
def test_a_peer_that_takes_no_notice_is_an_error_if_its_bytes_would_move(is_held: bool) -> None:
    """Its link is ending: an operation that holds the link moves, one that does not is refused."""
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
