"""Failures on demand: each wrapper alone, across batches, and in combination."""

import json
import os
import time

import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_FAILED,
    KVN_NO_DEVICE_MEMORY,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_PENDING,
    KVN_TIMEOUT,
    Backend,
    ThreadPool,
    host_backend,
)
from kvnative._executor import Executor
from tests.native.scatter import scatter
from tests.support.wrappers import delay, fail_at, limit_bandwidth, limit_batch, trace

COUNT = 40


@pytest.fixture
def host() -> Backend:
    return host_backend(ThreadPool(2))


@pytest.mark.parametrize("size", [100, 30_000])
@pytest.mark.parametrize("max_batch", [1, 7, COUNT])
@pytest.mark.parametrize("index", [0, 1, 6, 7, 20, COUNT - 1])
def test_a_fault_moves_all_before_it_and_nothing_after(
    host: Backend, size: int, max_batch: int, index: int
) -> None:
    case = scatter([size] * COUNT, seed=index)
    backend = fail_at(limit_batch(host, max_batch), index, status=KVN_PEER_GONE, code=77)
    report = Executor(backend).run(case.descriptors)
    assert (report.status, report.code, report.failed) == (KVN_PEER_GONE, 77, index)
    assert report.unconfirmed == ((index, COUNT),)
    assert report.descriptors_done == index
    assert report.bytes_done == index * size
    assert f"descriptor {index} was made to fail" in report.message
    case.assert_moved(set(range(index)))


@pytest.mark.parametrize(("max_batch", "first"), [(COUNT, 0), (7, 14), (1, 20)])
def test_a_refusal_moves_nothing_of_its_batch(host: Backend, max_batch: int, first: int) -> None:
    case = scatter([100] * COUNT)
    backend = limit_batch(fail_at(host, 20, KVN_PEER_GONE, 77, at_submit=True), max_batch)
    report = Executor(backend).run(case.descriptors)
    assert (report.status, report.code, report.failed) == (KVN_PEER_GONE, 77, 20)
    assert report.unconfirmed == ((first, COUNT),)
    assert report.bytes_done == first * 100
    assert "descriptor 20 was made to be refused" in report.message
    case.assert_moved(set(range(first)))


def test_a_fault_counts_from_zero_for_every_task(host: Backend) -> None:
    executor = Executor(limit_batch(fail_at(host, 5), 4))
    longer, shorter = scatter([10] * 9), scatter([10] * 5)
    for _ in range(3):
        assert executor.run(longer.descriptors).failed == 5
        assert executor.run(shorter.descriptors).status == KVN_OK


def test_two_tasks_at_once_fail_each_at_its_own_descriptor(host: Backend) -> None:
    executor = Executor(limit_batch(fail_at(host, 3), 2))
    cases = [scatter([200_000] * 6, seed=seed) for seed in range(2)]
    tasks = [executor.submit(case.descriptors) for case in cases]
    while {task.done for task in tasks} != {True}:
        pass
    for case, task in zip(cases, tasks, strict=True):
        assert task.report.failed == 3
        case.assert_moved({0, 1, 2})


def test_a_fault_past_the_end_does_nothing(host: Backend) -> None:
    case = scatter([10] * COUNT)
    assert Executor(fail_at(host, COUNT)).run(case.descriptors).status == KVN_OK
    case.assert_moved()


@pytest.mark.parametrize("size", [100, 2_000_000])
def test_a_delay_holds_the_outcome_back(host: Backend, size: int) -> None:
    case = scatter([size] * 4)
    began = time.monotonic()
    task = Executor(delay(host, 30)).submit(case.descriptors)
    polled = [task.report.status for _ in range(3)]
    were_early = time.monotonic() - began < 0.030
    assert task.wait().status == KVN_OK
    assert time.monotonic() - began >= 0.030
    if were_early:
        assert polled == [KVN_PENDING] * 3
    case.assert_moved()


def test_a_delayed_batch_that_is_given_up_is_not_confirmed(host: Backend) -> None:
    executor = Executor(delay(host, 1e9))
    case = scatter([100] * 4)
    report = executor.run(case.descriptors, timeout_ms=1)
    assert (report.status, report.unconfirmed) == (KVN_TIMEOUT, ((0, 4),))
    task = executor.submit(case.descriptors)
    assert task.cancel().status == KVN_CANCELLED


@pytest.mark.parametrize("size", [1, 999, 50_000, 400_000])
def test_bandwidth_is_not_exceeded(host: Backend, size: int) -> None:
    rate = 20e6
    case = scatter([size] * (400_000 // size), gap=3)
    began = time.monotonic()
    report = Executor(limit_bandwidth(host, rate)).run(case.descriptors)
    assert time.monotonic() - began >= case.total / rate
    assert (report.status, report.bytes_done) == (KVN_OK, case.total)
    assert all(case.arrived(index) for index in range(0, len(case.nbytes), 1 + 4000 // size))


def test_bandwidth_is_shared_by_tasks(host: Backend) -> None:
    executor = Executor(limit_bandwidth(host, 20e6))
    cases = [scatter([50_000] * 4, seed=seed) for seed in range(3)]
    began = time.monotonic()
    tasks = [executor.submit(case.descriptors) for case in cases]
    for task, case in zip(tasks, cases, strict=True):
        assert task.wait().status == KVN_OK
        case.assert_moved()
    assert time.monotonic() - began >= 600_000 / 20e6


def test_a_batch_of_limited_size_begins_after_the_previous_one(host: Backend) -> None:
    read_fd, write_fd = os.pipe()
    case = scatter([300_000] * 9)
    Executor(limit_batch(trace(host, write_fd), 2)).run(case.descriptors)
    lines = traced(read_fd)
    os.close(read_fd)
    os.close(write_fd)
    order = [
        (line["call"], line["first"]) for line in lines if line["call"] in ("submit", "release")
    ]
    assert order == [(call, first) for first in range(0, 9, 2) for call in ("submit", "release")]
    case.assert_moved()


def traced(read_fd: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in os.read(read_fd, 1 << 16).splitlines()]


def test_a_trace_is_one_json_line_for_each_call(host: Backend) -> None:
    read_fd, write_fd = os.pipe()
    case = scatter([100, 200, 300])
    before = time.monotonic() * 1e6
    Executor(limit_batch(trace(fail_at(host, 2), write_fd), 2)).run(case.descriptors)
    lines = traced(read_fd)
    os.close(read_fd)
    os.close(write_fd)
    submits = [line for line in lines if line["call"] == "submit"]
    assert [(line["first"], line["count"], line["nbytes"]) for line in submits] == [
        (0, 2, 300),
        (2, 1, 300),
    ]
    assert {line["backend"] for line in lines} == {"fail_at"}
    assert [line["request"] for line in submits] == [0, 1]
    last = [line["call"] for line in lines if line["request"] == 1]
    assert last[0] == "submit"
    assert last[-1] == "release"
    assert [line["status"] for line in lines if line["call"] in ("poll", "wait")][-1] == KVN_FAILED
    times = [line["us"] for line in lines]
    assert times == sorted(times)  # type: ignore[type-var]
    assert before <= times[0] <= times[-1] <= time.monotonic() * 1e6  # type: ignore[operator]


def test_a_trace_that_cannot_be_written_stops_nothing(host: Backend) -> None:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    backend = trace(host, write_fd)
    case = scatter([100])
    assert Executor(backend).run(case.descriptors).status == KVN_OK
    os.close(read_fd)
    case.assert_moved()


def test_wrappers_compose_in_any_order(host: Backend) -> None:
    read_fd, write_fd = os.pipe()
    layers = [
        lambda inner: trace(inner, write_fd),
        lambda inner: delay(inner, 0.1),
        lambda inner: limit_bandwidth(inner, 1e9),
        lambda inner: fail_at(inner, 11),
        lambda inner: limit_batch(inner, 4),
    ]
    for turn in range(len(layers)):
        backend = host
        for layer in layers[turn:] + layers[:turn]:
            backend = layer(backend)
        case = scatter([70_000] * 16, seed=turn)
        report = Executor(backend).run(case.descriptors)
        assert (report.failed, report.unconfirmed) == (11, ((11, 16),)), (turn, report)
        case.assert_moved(set(range(11)))
        assert len(traced(read_fd)) >= 3
    os.close(read_fd)
    os.close(write_fd)


def test_arguments_are_checked(host: Backend) -> None:
    with pytest.raises(ValueError, match=r"ms = -1.0: expected 0 to 1e9"):
        delay(host, -1)
    for rate in (0, -5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"bytes_per_second = .*: expected a number > 0"):
            limit_bandwidth(host, rate)
    with pytest.raises(ValueError, match="max_batch = 0: expected at least 1"):
        limit_batch(host, 0)
    with pytest.raises(ValueError, match="fd = -1"):
        trace(host, -1)
    with pytest.raises(ValueError, match=rf"status = 0: expected {KVN_NO_DEVICE_MEMORY} to -1"):
        fail_at(host, 1, status=KVN_OK)
