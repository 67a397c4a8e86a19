"""Counters, log lines and plans that an engine reports."""

from __future__ import annotations

import logging
import math
import select
import time

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    LayerEvent,
    LlmDataDist,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Placement,
    PlanEvent,
    Rows,
    Shard,
    Transfer,
)
from kvplan.engine.prometheus import PrometheusCollector
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.machine import Machine
from tests.support.refusals import refused

DESC = CacheDesc(2, (4, 64), DataType.DT_INT8)
LAYERED = CacheDesc(6, (4, 64), DataType.DT_INT8, shard=Shard(num_layers=3))
Pair = tuple[LlmDataDist, LlmDataDist]


def test_links_have_the_number_of_caches_of_a_peer(pair: Pair) -> None:
    owner, user = pair

    def wait_for(count: int) -> None:
        end = time.monotonic() + 60
        while user.links()[0].caches != count:
            assert time.monotonic() < end
            select.select([], [], [], 0.001)

    first, second = owner.allocate_cache(DESC), owner.allocate_cache(DESC)
    wait_for(2)
    owner.deallocate_cache(first)
    wait_for(1)
    owner.deallocate_cache(second)
    wait_for(0)


@pytest.fixture
def pulled(pair: Pair) -> tuple[LlmDataDist, Cache]:
    """An engine that has pulled once, and was refused once."""
    owner, user = pair
    owner.allocate_cache(DESC)
    cache = user.allocate_cache(DESC)
    user.pull_cache(CacheIndex(1, 1), cache)
    with pytest.raises(LLMException):
        user.pull_cache(CacheIndex(1, 99), cache)
    return user, cache


def test_calls_are_counted_by_operation_and_status(pulled: tuple[LlmDataDist, Cache]) -> None:
    user, _ = pulled
    metrics = user.metrics()
    pulls = metrics["operations"]["pull_cache"]
    assert pulls["statuses"] == {"LLM_SUCCESS": 1, "LLM_KV_CACHE_NOT_EXIST": 1}
    assert pulls["nbytes"] == DESC.num_tensors * DESC.stride
    assert pulls["seconds"]["count"] == pulls["seconds"]["buckets"][math.inf] == 2
    assert 0 < pulls["seconds"]["sum"] < 60
    assert metrics["operations"]["link_clusters"]["statuses"] == {"LLM_SUCCESS": 1}
    assert metrics["cache_bytes"] == {"DEVICE": DESC.nbytes}
    assert metrics["links"] == {"LINKED": 1}


def test_peer_caches_are_the_present_ones(pair: Pair) -> None:
    owner, user = pair
    assert user.caches(1) == []
    slots = owner.allocate_cache(DESC)
    key = BlocksCacheKey(1, 5)
    owner.allocate_blocks_cache(LAYERED, key)
    found = user.caches(1)
    assert [
        (cache.cache_id, cache.cache_desc, cache.paged, cache.blocks_key) for cache in found
    ] == [
        (1, DESC, False, None),
        (2, LAYERED, True, key),
    ]
    assert all(item.reachable and item.writable for item in found)
    owner.deallocate_cache(slots)
    assert [cache.cache_id for cache in user.caches(1)] == [2]
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, "9"):
        user.caches(9)


def test_cluster_0_is_a_peer_like_any_other(make_engine: MakeEngine) -> None:
    owner, user = make_engine(0, listen=True), make_engine(2)
    link(user, owner)
    key = BlocksCacheKey(0, 5)
    theirs, mine = owner.allocate_blocks_cache(DESC, key), user.allocate_blocks_cache(DESC)
    user.allocate_cache(DESC)
    assert [(cache.cache_id, cache.blocks_key) for cache in user.caches(0)] == [(1, key)]
    sources = CacheIndex(0, theirs.cache_id), key, owner.lease_blocks(theirs, [1, 3])
    for number, source in enumerate(sources):
        owner.write_cache(theirs, [np.full(DESC.shape, 7 + number, np.int8)] * 2)
        user.run(Transfer(Rows(source, [1, 3]), Rows(mine, [0, 2])))
        assert [array[0, 0] for array in user.arrays(mine, copy=True)] == [7 + number] * 2
    user.write_cache(mine, [np.full(DESC.shape, 99, np.int8)] * 2)
    user.run(Transfer(Rows(mine, [0]), Rows(sources[0], [2])))
    assert [array[2, 0] for array in owner.arrays(theirs, copy=True)] == [99, 99]
    for sender, receiver in ((user, owner), (owner, user)):
        sender.notify(receiver.cluster_id, b"moved")
        assert list(receiver.notifications()) == [(sender.cluster_id, b"moved")]
    assert [status.cluster_id for status in user.links()] == [0]
    user.unlink_clusters([0]).raise_for_status()
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, "cluster 0"):
        user.caches(0)


def test_counters_keep_their_values_after_finalize(pulled: tuple[LlmDataDist, Cache]) -> None:
    user, _ = pulled
    user.finalize()
    assert user.metrics()["operations"]["pull_cache"]["seconds"]["count"] == 2
    assert user.metrics()["cache_bytes"] == user.metrics()["links"] == {}


def test_plans_move_and_count_nothing(pulled: tuple[LlmDataDist, Cache]) -> None:
    user, cache = pulled
    user.plan(Transfer(Rows(CacheIndex(1, 1)), Rows(cache)))
    assert user.metrics()["operations"]["pull_cache"]["seconds"]["count"] == 2


def test_caches_are_listed(engine: LlmDataDist) -> None:
    engine.allocate_cache(DESC)
    host = CacheDesc(1, (8, 16), DataType.DT_INT8, Placement.HOST)
    engine.register_blocks_cache(host, [bytearray(128)], remote_accessible=False)
    first, second = engine.caches()
    assert (first.cache_id, first.cache_desc, first.nbytes) == (1, DESC, DESC.nbytes)
    assert (first.paged, first.allocated, first.remote_accessible) == (False, True, True)
    assert (second.cache_id, second.cache_desc, second.nbytes) == (2, host, 128)
    assert (second.paged, second.allocated, second.remote_accessible) == (True, False, False)
    assert first.age_s >= second.age_s >= 0
    assert not first.deallocated


def test_a_cache_that_lives_by_its_keys_is_listed(engine: LlmDataDist) -> None:
    key = CacheKey(2, 7)
    engine.deallocate_cache(engine.allocate_cache(DESC, [key]))
    (freed,) = engine.caches()
    assert (freed.cache_id, freed.deallocated) == (1, True)
    assert engine.metrics()["cache_bytes"] == {"DEVICE": DESC.nbytes}
    engine.remove_cache_key(key)
    assert engine.caches() == []
    assert engine.metrics()["cache_bytes"] == {}


def test_links_are_listed(pulled: tuple[LlmDataDist, Cache], machine: Machine) -> None:
    user, _ = pulled
    (status,) = user.links()
    assert (status.cluster_id, status.transport, status.role) == (
        1,
        machine.transport,
        LlmRole.MIX,
    )
    assert (status.bytes_pulled, status.bytes_pushed) == (DESC.num_tensors * DESC.stride, 0)
    assert (status.operations, status.in_flight) == (2, 0)
    assert "99" in status.last_error


def of_operations(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return all lines except those of the link, which the first use may renew."""
    return [record for record in caplog.records if "operation=" in record.getMessage()]


def test_each_operation_logs_one_line(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    owner, user = pair
    owner.allocate_cache(DESC)
    cache = user.allocate_cache(DESC)
    with caplog.at_level(logging.INFO, "kvplan"):
        user.pull_cache(CacheIndex(1, 1), cache)
    (record,) = of_operations(caplog)
    assert record.levelno == logging.INFO
    fields = dict(pair.split("=") for pair in record.getMessage().split())
    assert float(fields.pop("us")) > 0
    assert fields == {
        "operation": "pull_cache",
        "cluster": "2",
        "peer": "1",
        "cache": "1",
        "kind": "C2C",
        "descriptors": "2",
        "bytes": "128",
        "status": "LLM_SUCCESS",
    }


@pytest.mark.parametrize("verbose", [True, False])
def test_a_raising_log_handler_disturbs_no_operation(
    pair: Pair, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verbose: bool
) -> None:
    """A handler that raises does not disturb threads that settle tasks or pass signals on."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("this handler is broken")

    owner, user = pair
    owner.allocate_cache(LAYERED)
    cache = user.allocate_cache(LAYERED)
    monkeypatch.setattr(logging, "raiseExceptions", verbose)
    logger, handler = logging.getLogger("kvplan"), Broken(logging.INFO)
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        for _ in range(2):
            user.push_cache(cache, CacheIndex(1, 1))
            first, second = (
                user.layered(Transfer(Rows(cache), Rows(CacheIndex(1, 1, row)))) for row in range(2)
            )
            with LayerEvent(first, second) as event:
                event.signal(4)  # one too many
                first.wait(30_000)
                second.wait(30_000)
            user.submit(Transfer(Rows(cache), Rows(CacheIndex(1, 1))))  # no call waits for it
            user.unlink_clusters([1], timeout_ms=10_000).raise_for_status()
            link(user, owner)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert ("this handler is broken" in capfd.readouterr().err) is verbose


def test_a_failed_operation_logs_its_reason(
    engine: LlmDataDist, caplog: pytest.LogCaptureFixture
) -> None:
    cache = engine.allocate_cache(DESC)
    with caplog.at_level(logging.WARNING, "kvplan"), pytest.raises(LLMException):
        engine.copy_cache(cache, cache, 0, 4)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "status=LLM_PARAM_INVALID error=" in record.getMessage()
    assert "dst.slot=4 is out of range" in record.getMessage()


def test_a_hook_sees_plans_before_they_are_executed(pair: Pair) -> None:
    owner, user = pair
    owner.allocate_cache(DESC)
    cache = user.allocate_cache(DESC)
    user.arrays(cache)[0][:] = 3
    seen = []

    def look(event: PlanEvent) -> None:
        seen.append((event.plan.operation, *event[1:], int(user.arrays(cache)[0].sum())))

    remove = user.on_plan(look)
    user.pull_cache(CacheIndex(1, 1), cache, 0, tag="request 7")
    user.submit(Transfer(Rows(CacheIndex(1, 1)), Rows(cache, slot=1))).wait()
    remove()
    remove()
    user.pull_cache(CacheIndex(1, 1), cache, 2)
    first, row = int(DESC.tensor_nbytes) * 3, DESC.stride * 3
    assert seen == [
        ("pull_cache", "pull_cache", 1, 1, "request 7", first),
        ("pull_cache", "pull_cache", 1, 1, "", first - row),
    ]


def test_a_push_by_layers_is_one_call(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """The push is shown once, before it moves a byte, and counted and logged once, at its end."""
    owner, user = pair
    owner.allocate_cache(LAYERED)
    cache = user.allocate_cache(LAYERED)
    seen: list[PlanEvent] = []
    user.on_plan(seen.append)
    with caplog.at_level(logging.INFO, "kvplan"):
        task = user.layered(Transfer(Rows(cache), Rows(CacheIndex(1, 1))))
        assert [
            (notification.operation, notification.cache_id, notification.cluster_id)
            for notification in seen
        ] == [("push_layers", 1, 1)]
        assert seen[0].plan is task.plan
        for layer in task.layers:
            assert user.metrics()["in_flight"] == user.links()[0].in_flight == 1
            assert "push_layers" not in user.metrics()["operations"]
            task.ready(layer)
        task.wait()
        task.wait()
    assert len(seen) == 1
    (record,) = of_operations(caplog)
    fields = dict(pair.split("=") for pair in record.getMessage().split())
    assert float(fields.pop("us")) > 0
    assert fields == {
        "operation": "push_layers",
        "cluster": "2",
        "peer": "1",
        "cache": "1",
        "kind": "C2C",
        "descriptors": "6",
        "bytes": "384",
        "status": "LLM_SUCCESS",
    }
    metrics = user.metrics()
    assert metrics["operations"]["push_layers"]["statuses"] == {"LLM_SUCCESS": 1}
    assert metrics["operations"]["push_layers"]["nbytes"] == 384
    assert metrics["in_flight"] == 0
    (status,) = user.links()
    assert (status.bytes_pulled, status.bytes_pushed) == (0, 384)
    assert (status.operations, status.in_flight) == (1, 0)


def test_a_hook_that_raises_stops_the_operation(engine: LlmDataDist) -> None:
    cache = engine.allocate_cache(DESC)
    engine.arrays(cache)[0][0] = 3

    def refuse(event: PlanEvent) -> None:
        raise KeyError(event.cluster_id)

    remove = engine.on_plan(refuse)
    for verb in (engine.run, engine.submit):
        with pytest.raises(KeyError):
            verb(Transfer(Rows(cache, slot=0), Rows(cache, slot=1)))
    assert not engine.arrays(cache)[0][1].any()
    assert engine.metrics()["in_flight"] == 0
    remove()
    engine.copy_cache(cache, cache, 0, 1)


@pytest.mark.parametrize(
    "error",
    [
        LLMException(),
        LLMException("a", status_code=100),  # type: ignore[arg-type]
        LLMException("a", status_code=[]),  # type: ignore[arg-type]
    ],
)
def test_an_exception_of_the_program_is_logged_and_counted(
    engine: LlmDataDist, error: LLMException
) -> None:
    cache = engine.allocate_cache(DESC)

    def refuse(event: PlanEvent) -> None:
        raise error

    engine.on_plan(refuse)
    with pytest.raises(LLMException) as raised:
        engine.copy_cache(cache, cache, 0, 1)
    assert raised.value is error
    error.__traceback__ = None  # it survives, with the objects of its frames
    assert engine.metrics()["operations"]["copy_cache"]["statuses"] == {"LLM_FAILED": 1}


def test_a_hook_that_raises_stops_a_push_by_layers(pair: Pair) -> None:
    owner, user = pair
    owner.allocate_cache(LAYERED)
    cache = user.allocate_cache(LAYERED)

    def refuse(event: PlanEvent) -> None:
        raise KeyError(event.cluster_id)

    user.on_plan(refuse)
    with pytest.raises(KeyError):
        user.layered(Transfer(Rows(cache), Rows(CacheIndex(1, 1))))
    assert user.metrics()["in_flight"] == user.links()[0].in_flight == 0
    assert user.metrics()["operations"]["push_layers"]["statuses"] == {"LLM_FAILED": 1}


def test_a_hook_must_be_callable(engine: LlmDataDist) -> None:
    with pytest.raises(TypeError, match="hook"):
        engine.on_plan(1)  # type: ignore[arg-type]


def test_prometheus_reads_the_counters(pulled: tuple[LlmDataDist, Cache]) -> None:
    user, _ = pulled
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(user))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"cluster_id": "2", **labels})

    pull = {"operation": "pull_cache"}
    assert value("kvplan_operations_total", **pull, status="LLM_SUCCESS") == 1
    assert value("kvplan_operations_total", **pull, status="LLM_KV_CACHE_NOT_EXIST") == 1
    assert value("kvplan_bytes_total", **pull) == 128
    assert value("kvplan_operation_seconds_count", **pull) == 2
    assert value("kvplan_operation_seconds_bucket", **pull, le="+Inf") == 2
    took_s = user.metrics()["operations"]["pull_cache"]["seconds"]["sum"]
    assert value("kvplan_operation_seconds_sum", **pull) == took_s
    assert value("kvplan_in_flight") == 0
    assert value("kvplan_links", state="LINKED") == 1
    assert value("kvplan_cache_bytes", placement="DEVICE") == DESC.nbytes
