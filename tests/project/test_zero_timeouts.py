"""Timeouts of public calls: 0 is a timeout of zero, and other values are milliseconds."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest

import kvplan
from kvplan import (
    AddressRanges,
    Cache,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    HostMemory,
    KvCacheExtParam,
    LlmDataDist,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Options,
    Placement,
    Rows,
    Shard,
    Transfer,
    Transfers,
    hixl,
    llm_datadist,
    serving,
)
from tests.support.wrappers import delay

FOR_EVER_MS = 600_000
DEADLINE_S = 20.0  # reached only by a call that takes 0 for another value

UNIT_MS = 50  # below DEADLINE_S; as seconds, above it

EXEMPT = {
    "kvplan.execute",  # `Transfers.execute`, whose transfers no test can delay
    # Only `hccl` waits for a connection: tests/ascend/test_hccl_renewal.py.
    "kvplan.HostMemory.backend",
    "kvplan.Transfers.submit",
    "kvplan.serving.PullResult",  # a measured time
    "kvplan.llm_datadist.LayerSynchronizer.synchronize_layer",  # implemented by the program
}

PAGED = CacheDesc(
    2,
    (4, 16, 1, 1024),
    DataType.DT_INT32,
    kv_tensor_format="block token head dim",
    shard=Shard(range(1), range(1), 1, 1),
)
HOST, DEVICE = (CacheDesc(2, (4, 1 << 14), DataType.DT_INT32, value) for value in Placement)
SLOTS = CacheDesc(2, (4, 1 << 16), DataType.DT_INT32)
PAIRS = KvCacheExtParam(tensor_num_per_layer=2)


class Scene:
    """An engine that is linked with another one, and whose transfers never end by themselves."""

    def __init__(self, held: ExitStack) -> None:
        self.transfers = Transfers(2, lambda value: delay(value, FOR_EVER_MS))
        self.owner = held.enter_context(LlmDataDist(1, LlmRole.MIX))
        self.owner.initialize(Options(listen_ip_info="127.0.0.1:0"))
        self.user = LlmDataDist(2, LlmRole.MIX, transfers=self.transfers)
        held.enter_context(self.user).initialize(Options(sync_kv_cache_wait_time=FOR_EVER_MS))
        self.theirs = self.owner.allocate_blocks_cache(PAGED)
        self.their_slots = self.owner.allocate_cache(SLOTS)
        self.mine = {
            value: self.user.allocate_blocks_cache(value) for value in (PAGED, HOST, DEVICE)
        }
        self.slots = [self.user.allocate_cache(SLOTS) for _ in range(2)]
        self.remote = CacheIndex(1, self.theirs.cache_id)
        self.remote_slot = CacheIndex(1, self.their_slots.cache_id)
        self.address = self.owner.listen_address or ""
        self.user.link_clusters([ClusterInfo(1, self.address)], 10_000).raise_for_status()
        self.exchange = serving.Exchange(
            self.owner, self.theirs, serving.Compatibility({}), b"instance"
        )
        held.callback(self.exchange.close)
        self.hixl = hixl.Hixl()
        assert self.hixl.initialize("127.0.0.1") == hixl.SUCCESS
        held.callback(self.hixl.finalize)
        self.official = llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, 3)
        self.official.init({"llm.EnableCacheManager": "1"})
        held.callback(self.official.finalize)
        # first, because the engine would wait for them
        held.callback(self.transfers.close, cancel=True)

    @property
    def cache(self) -> Cache:
        return self.mine[PAGED]

    def ranges(self, direction: Literal["pull", "push"]) -> AddressRanges:
        (mine, _), (theirs, _) = self.user.arrays(self.cache), self.owner.arrays(self.theirs)
        local, remote = (np.array([value.ctypes.data], np.uint64) for value in (mine, theirs))
        nbytes = np.array([mine.nbytes], np.uint64)
        return AddressRanges(1, local, remote, nbytes, direction=direction)

    def submitted(self, kind: str) -> Any:
        return self.user.submit(KINDS[kind](self))

    def layered(self, kind: str) -> Any:
        task = self.user.layered(KINDS[kind](self))
        task.ready(0)
        return task

    def verify(self, timeout_ms: float) -> None:
        plan, src, dst = self.executed()
        sides = HostMemory.from_arrays(src), HostMemory.from_arrays(dst)
        self.transfers.verify(plan, *sides, timeout_ms=timeout_ms)

    def num_freed_by_a_book(self, ttl_ms: float) -> int:
        book = serving.LeaseBook(self.user, self.cache, ttl_ms)
        numbered = {"sequence": 0} if "sequence" in inspect.signature(book.enter).parameters else {}
        book.enter(request="request", blocks=[1], digest=b"digest", **numbered)
        return len(book.take_freed())

    def executed(self) -> tuple[Any, ...]:
        plan = kvplan.plan(Transfer(Rows(PAGED, [1]), Rows(PAGED, [2])), local="dst")
        return plan, *([np.zeros(PAGED.shape, np.int32) for _ in range(2)] for _ in range(2))


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with ExitStack() as held:
        yield Scene(held)


TIMEOUT, INVALID = LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_PARAM_INVALID

KINDS: dict[str, Callable[[Scene], Any]] = {
    "pull of a slot": lambda value: Transfer(
        Rows(value.remote_slot), Rows(value.slots[0]), layers=PAIRS
    ),
    "pull of blocks": lambda value: Transfer(Rows(value.remote, [1]), Rows(value.cache, [2])),
    "push of a slot": lambda value: Transfer(
        Rows(value.slots[0]), Rows(value.remote_slot), layers=PAIRS
    ),
    "push of blocks": lambda value: Transfer(Rows(value.cache, [1]), Rows(value.remote, [2])),
    "copy of a slot": lambda value: Transfer(
        Rows(value.slots[0]), Rows(value.slots[1]), layers=PAIRS
    ),
    "copy of blocks": lambda value: Transfer(Rows(value.cache, [1]), Rows(value.cache, [2])),
    "swap": lambda value: Transfer(
        Rows(value.mine[HOST], [1]), Rows(value.mine[DEVICE], [2]), layers=PAIRS
    ),
    "gather": lambda value: Transfer([Rows(value.remote, [1])], Rows(value.cache, [2])),
    "pull of ranges": lambda value: value.ranges("pull"),
    "push of ranges": lambda value: value.ranges("push"),
    **{
        f"groups: {kind}": partial(lambda kind, value: {"all": KINDS[kind](value)}, kind)
        for kind in ("pull of blocks", "push of blocks", "copy of blocks", "gather")
    },
}
"""Every kind of transfer, by its name."""

WAITS: dict[str, tuple[object, Callable[[Scene, float], object]]] = {
    # A running transfer ends with LLM_TIMEOUT; a query returns that the outcome is still open.
    "kvplan.LlmDataDist.pull_cache": (
        TIMEOUT,
        lambda value, ms: value.user.pull_cache(value.remote_slot, value.slots[0], timeout_ms=ms),
    ),
    "kvplan.LlmDataDist.push_cache": (
        TIMEOUT,
        lambda value, ms: value.user.push_cache(value.slots[0], value.remote_slot, timeout_ms=ms),
    ),
    "kvplan.LlmDataDist.copy_cache": (
        TIMEOUT,
        lambda value, ms: value.user.copy_cache(*value.slots, timeout_ms=ms),
    ),
    "kvplan.LlmDataDist.pull_blocks": (
        TIMEOUT,
        lambda value, ms: value.user.pull_blocks(
            value.remote, value.cache, [1], [2], timeout_ms=ms
        ),
    ),
    "kvplan.LlmDataDist.push_blocks": (
        TIMEOUT,
        lambda value, ms: value.user.push_blocks(
            value.cache, value.remote, [1], [2], timeout_ms=ms
        ),
    ),
    "kvplan.LlmDataDist.copy_blocks": (
        TIMEOUT,
        lambda value, ms: value.user.copy_blocks(value.cache, {1: [2]}, timeout_ms=ms),
    ),
    "kvplan.LlmDataDist.swap_blocks": (
        TIMEOUT,
        lambda value, ms: value.user.swap_blocks(
            value.mine[HOST], value.mine[DEVICE], {1: 2}, timeout_ms=ms
        ),
    ),
    "kvplan.LlmDataDist.run": (
        TIMEOUT,
        lambda value, ms: value.user.run(
            Transfer(Rows(value.remote, [1]), Rows(value.cache, [2])), timeout_ms=ms
        ),
    ),
    "kvplan.Transfers.execute": (
        TIMEOUT,
        lambda value, ms: value.transfers.execute(*value.executed(), timeout_ms=ms),
    ),
    "kvplan.Transfers.verify": (TIMEOUT, lambda value, ms: value.verify(ms)),
    "kvplan.TransferTask.wait": (
        TIMEOUT,
        lambda value, ms: value.submitted("pull of blocks").wait(ms),
    ),
    "kvplan.TransferTask.result": (
        TIMEOUT,
        lambda value, ms: value.submitted("pull of blocks").result(ms),
    ),
    "kvplan.TransferTask.wait_done": (
        False,
        lambda value, ms: value.submitted("pull of blocks").wait_done(ms),
    ),
    "kvplan.GatherTask.wait": (TIMEOUT, lambda value, ms: value.submitted("gather").wait(ms)),
    "kvplan.GatherTask.result": (TIMEOUT, lambda value, ms: value.submitted("gather").result(ms)),
    "kvplan.GatherTask.wait_done": (
        False,
        lambda value, ms: value.submitted("gather").wait_done(ms),
    ),
    "kvplan.LayerGatherTask.wait": (TIMEOUT, lambda value, ms: value.layered("gather").wait(ms)),
    "kvplan.LayerGatherTask.result": (
        TIMEOUT,
        lambda value, ms: value.layered("gather").result(ms),
    ),
    "kvplan.LayerGatherTask.wait_done": (
        False,
        lambda value, ms: value.layered("gather").wait_done(ms),
    ),
    "kvplan.LayerTask.wait": (TIMEOUT, lambda value, ms: value.layered("push of blocks").wait(ms)),
    "kvplan.LayerTask.result": (
        TIMEOUT,
        lambda value, ms: value.layered("push of blocks").result(ms),
    ),
    "kvplan.LayerTask.wait_done": (
        False,
        lambda value, ms: value.layered("push of blocks").wait_done(ms),
    ),
    # Events that have not happened.
    "kvplan.Completions.wait": (False, lambda value, ms: value.owner.completions().wait(ms)),
    "kvplan.Notifications.wait": (False, lambda value, ms: value.user.notifications().wait(ms)),
    "kvplan.serving.Exchange.wait": (False, lambda value, ms: value.exchange.wait(ms)),
    "kvplan.llm_datadist.CacheTask.synchronize": (
        TIMEOUT,
        lambda value, ms: llm_datadist.CacheTask(Running(ms)).synchronize(ms),
    ),
    "kvplan.llm_datadist.CacheTask.get_results": (
        [TIMEOUT],
        lambda value, ms: llm_datadist.CacheTask(Running(ms)).get_results(ms),
    ),
}
"""Every public call with a timeout in milliseconds, and its result when the timeout passes."""

CALLS: dict[str, tuple[object, Callable[[Scene], object]]] = {
    **{
        name: (expected, partial(lambda call, value: call(value, 0), call))
        for name, (expected, call) in WAITS.items()
    },
    # A conversation takes time, and a lease must last: 0 is refused.
    "kvplan.LlmDataDist.link_clusters": (
        INVALID,
        lambda value: value.user.link_clusters([ClusterInfo(1, value.address)], 0),
    ),
    "kvplan.LlmDataDist.link_clusters_async": (
        INVALID,
        lambda value: asyncio.run(
            value.user.link_clusters_async([ClusterInfo(1, value.address)], 0)
        ),
    ),
    "kvplan.LlmDataDist.unlink_clusters": (
        INVALID,
        lambda value: value.user.unlink_clusters([1], 0),
    ),
    "kvplan.LlmDataDist.notify": (
        ValueError,
        lambda value: value.user.notify(1, b"x", timeout_ms=0),
    ),
    "kvplan.LlmDataDist.notify_async": (
        ValueError,
        lambda value: asyncio.run(value.user.notify_async(1, b"x", timeout_ms=0)),
    ),
    "kvplan.LlmDataDist.lease_blocks": (
        INVALID,
        lambda value: value.user.lease_blocks(value.cache, [1], ttl_ms=0),
    ),
    "kvplan.LlmDataDist.renew": (
        INVALID,
        lambda value: value.user.renew(
            value.user.lease_blocks(value.cache, [1], ttl_ms=FOR_EVER_MS), 0
        ),
    ),
    "kvplan.serving.LeaseBook": (1, lambda value: value.num_freed_by_a_book(0)),
    **{
        f"kvplan.Options({name})": (
            INVALID,
            partial(lambda name, _: Options(**{name: 0}), name),
        )
        for name in ("heartbeat_interval_ms", "heartbeat_timeout_ms")
    },
    **{
        f"kvplan.serving.ExchangeOptions({name})": (
            INVALID,
            partial(lambda name, _: serving.ExchangeOptions(**{name: 0}), name),
        )
        for name in serving.ExchangeOptions.__annotations__
        if name.endswith("_ms")
    },
    **{
        f"kvplan.hixl.Hixl.{name}": (
            hixl.PARAM_INVALID,
            partial(lambda name, value: getattr(value.hixl, name)("127.0.0.1:1", 0), name),
        )
        for name in ("connect", "disconnect", "connect_async", "disconnect_async")
    },
    "kvplan.hixl.Hixl.send_notify": (
        hixl.PARAM_INVALID,
        lambda value: value.hixl.send_notify("127.0.0.1:1", hixl.NotifyDesc("a", "b"), 0),
    ),
    "kvplan.hixl.Hixl.transfer_sync": (
        hixl.PARAM_INVALID,
        lambda value: value.hixl.transfer_sync(
            "127.0.0.1:1", hixl.READ, [hixl.TransferOpDesc(1, 1, 1)], 0
        ),
    ),
    **{
        f"kvplan.llm_datadist.LLMDataDist.{name}": (
            INVALID,
            partial(lambda name, value: getattr(value.official, name)([], 0), name),
        )
        for name in ("link_clusters", "unlink_clusters")
    },
}


class Running:
    """A transfer that never has an outcome, and records no wait."""

    running_status = TIMEOUT

    def __init__(self, timeout_ms: float) -> None:
        self._timeout_s = timeout_ms / 1000

    def statuses(self, timeout_s: float | None) -> list[LLMStatusCode | None]:
        assert timeout_s == self._timeout_s
        return [None]


def public_calls() -> Iterator[str]:
    """Yield the name of every public function, method and class with a time in milliseconds."""

    def times(function: Callable[..., object]) -> list[str]:
        names: list[str] = []
        for name, parameter in inspect.signature(function).parameters.items():
            options = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
            names += getattr(kvplan, options[1]).__annotations__ if options else [name]
        return [value for value in names if "timeout" in value or value.endswith("_ms")]

    modules: list[ModuleType] = [kvplan, hixl, serving, llm_datadist]
    for module in modules:
        for name in module.__all__:
            whole, value = f"{module.__name__}.{name}", getattr(module, name)
            if not inspect.isclass(value):
                if inspect.isfunction(value) and times(value):
                    yield whole
                continue
            if inspect.isfunction(value.__init__) and (found := times(value.__init__)):
                options = dataclasses.is_dataclass(value) and whole not in EXEMPT
                yield from (f"{whole}({value})" for value in found) if options else [whole]
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_") and times(function):
                    yield f"{whole}.{method}"


def test_every_public_call_with_a_timeout_is_tested() -> None:
    assert {*public_calls()} == {*CALLS} | EXEMPT


def outcome_of(scene: Scene, call: Callable[[Scene], object]) -> object:
    """Return the result of a call that must not wait, or the status or type of its exception."""
    outcome: Future[object] = Future()

    def run() -> None:
        try:
            outcome.set_result(call(scene))
        except LLMException as error:
            outcome.set_result(error.status_code)
        except BaseException as error:
            outcome.set_result(type(error))

    threading.Thread(target=run, daemon=True).start()
    try:
        return outcome.result(DEADLINE_S)
    except NotInTime:
        pytest.fail("it waits, as if no timeout was given")


@pytest.mark.parametrize("name", CALLS)
def test_a_timeout_of_zero_is_zero(scene: Scene, name: str) -> None:
    expected, call = CALLS[name]
    assert outcome_of(scene, call) == expected


@pytest.mark.parametrize("name", WAITS)
def test_a_timeout_is_in_milliseconds(scene: Scene, name: str) -> None:
    """Taken as seconds, the timeout would outlast the test.

    In smaller units, it would end too early.
    """
    expected, call = WAITS[name]
    began = time.monotonic()
    assert outcome_of(scene, lambda value: call(value, UNIT_MS)) == expected
    if "CacheTask" not in name:  # `Running` never waits
        assert time.monotonic() - began >= UNIT_MS / 1000


@pytest.mark.parametrize("kind", KINDS)
def test_a_timeout_of_zero_is_zero_for_every_transfer(scene: Scene, kind: str) -> None:
    def run(value: Scene) -> None:
        value.user.run(KINDS[kind](value), timeout_ms=0)

    assert outcome_of(scene, run) == TIMEOUT
    tasks = [scene.submitted]
    if "ranges" not in kind:
        tasks.append(scene.layered)
    for begin in tasks:
        assert outcome_of(scene, lambda _, begin=begin: begin(kind).wait_done(0)) is False
        assert outcome_of(scene, lambda _, begin=begin: begin(kind).wait(0)) == TIMEOUT


@pytest.mark.parametrize("verb", ["submit", "layered"])
def test_verbs_that_do_not_wait_refuse_a_timeout(scene: Scene, verb: str) -> None:
    for kind in KINDS.values():
        with pytest.raises(TypeError, match=r"timeout_ms is an option of run; .* wait\("):
            getattr(scene.user, verb)(kind(scene), timeout_ms=0)
