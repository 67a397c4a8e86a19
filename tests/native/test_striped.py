"""Several backends that move one transfer together, and failures of some."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_FAILED,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_PENDING,
    KVN_TIMEOUT,
    Backend,
    ThreadPool,
    host_backend,
    striped,
)
from kvnative._executor import Executor
from kvnative._report import Report
from tests.native.scatter import Scattered, indices, scatter
from tests.support.wrappers import delay, fail_at, limit_batch, trace

COUNT, SIZE = 42, 1000
POOLS = [ThreadPool(1) for _ in range(3)]


@pytest.fixture
def backends() -> list[Backend]:
    return [host_backend(pool) for pool in POOLS]


def stripes(number: int) -> list[range]:
    """Return the spans of `number` stripes for COUNT descriptors of one size."""
    ends = [COUNT * (n + 1) // number for n in range(number)]
    return [range(first, last) for first, last in zip([0, *ends], ends, strict=False)]


@given(
    sizes=st.lists(st.sampled_from([1, 100, 5000, 200_000]), min_size=1, max_size=30),
    number=st.integers(1, 3),
    min_nbytes=st.sampled_from([1, 1000, 100_000]),
    max_batch=st.sampled_from([1, 4, 1000]),
)
def test_all_arrives(sizes: list[int], number: int, min_nbytes: int, max_batch: int) -> None:
    case = scatter(sizes, seed=len(sizes))
    backends = [limit_batch(host_backend(pool), max_batch) for pool in POOLS[:number]]
    with Executor(striped(backends, min_nbytes=min_nbytes)) as executor:
        report = executor.run(case.descriptors)
    assert (report.status, report.bytes_done) == (KVN_OK, case.total)
    case.assert_moved()


@given(
    sizes=st.lists(st.sampled_from([1, 100, 5000]), min_size=1, max_size=30),
    failing=st.lists(st.none() | st.integers(0, 30), min_size=3, max_size=3),
)
def test_confirmed_descriptors_have_arrived(sizes: list[int], failing: list[int | None]) -> None:
    case = scatter(sizes)
    backends = [
        backend if index is None else fail_at(backend, index)
        for backend, index in zip([host_backend(pool) for pool in POOLS], failing, strict=True)
    ]
    with Executor(striped(backends, min_nbytes=100)) as executor:
        report = executor.run(case.descriptors)
    unconfirmed = indices(report.unconfirmed)
    assert (report.status == KVN_OK) == (not unconfirmed)
    assert all(case.arrived(number) for number in set(range(len(sizes))) - unconfirmed)
    if unconfirmed:
        assert report.failed in failing
        assert f"descriptor {report.failed} was made to fail" in report.message


def test_each_has_a_stripe(backends: list[Backend]) -> None:
    """A failure is in one stripe: fail_at counts in the task, but each backend sees only a part."""
    for stripe, last in zip(stripes(3), (False, False, True), strict=True):
        case = scatter([SIZE] * COUNT)
        index = stripe[-1] if last else stripe[0]
        backend = striped(
            [fail_at(backend, index, KVN_PEER_GONE, 77) for backend in backends], min_nbytes=1
        )
        report = Executor(backend).run(case.descriptors)
        assert (report.status, report.code, report.failed) == (KVN_PEER_GONE, 77, index)
        assert report.unconfirmed == ((index, stripe[-1] + 1),)
        case.assert_moved(set(range(COUNT)) - set(range(index, stripe[-1] + 1)))


@pytest.mark.parametrize(
    ("min_nbytes", "used"), [(SIZE * COUNT // 2 + 1, 1), (SIZE * 15, 2), (SIZE * 14, 3)]
)
def test_each_has_enough_to_do(backends: list[Backend], min_nbytes: int, used: int) -> None:
    case = scatter([SIZE] * COUNT)
    backends[used:] = [fail_at(backend, COUNT - 1) for backend in backends[used:]]
    backend = striped(backends, min_nbytes=min_nbytes)
    assert Executor(backend).run(case.descriptors).status == KVN_OK
    case.assert_moved()


def test_a_descriptor_that_is_larger_than_its_share(backends: list[Backend]) -> None:
    """The other stripes are empty, and no later descriptor is lost."""
    for sizes in ([100_000, 1, 1], [1, 100_000, 1], [1, 1, 100_000], [100_000]):
        case = scatter(sizes)
        report = Executor(striped(backends, min_nbytes=1)).run(case.descriptors)
        assert report.status == KVN_OK
        case.assert_moved()


@pytest.mark.parametrize("stripe", range(3))
def test_a_stripe_that_its_backend_does_not_take_is_a_failure(
    backends: list[Backend], stripe: int
) -> None:
    """Such an answer asks for another try, which a striped backend does not make."""
    case = scatter([SIZE] * COUNT)
    first = stripes(3)[stripe][0]
    backends[stripe] = fail_at(backends[stripe], first, KVN_PENDING, at_submit=True)
    report = Executor(striped(backends, min_nbytes=1)).run(case.descriptors)
    assert (report.status, report.unconfirmed) == (KVN_FAILED, ((0, COUNT),))
    assert report.message == "the backend fail_at has not taken its stripe, and is not asked again"


def late_report(executor: Executor, case: Scattered, num_moved: int) -> Report:
    """Return the report of a deadline that passes once so many descriptors have moved."""
    task = executor.submit(case.descriptors)
    while task.report.bytes_done < num_moved * SIZE:
        task.wait(1, give_up=False)
    return task.wait(20)


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_a_stripe_that_is_late(backends: list[Backend], how: str) -> None:
    case = scatter([SIZE] * COUNT)
    backend = striped([backends[0], delay(backends[1], 1e9), backends[2]], min_nbytes=1)
    late = stripes(3)[1]
    with Executor(backend) as executor:
        report = late_report(executor, case, COUNT - len(late))
        if how == "cancel":
            task = executor.submit(case.descriptors)
            report = task.cancel()
    assert report.status == (KVN_TIMEOUT if how == "deadline" else KVN_CANCELLED)
    assert set(late) <= indices(report.unconfirmed)
    words = "the deadline passed" if how == "deadline" else "cancelled"
    assert report.message.startswith(f"{words}: ")
    assert f"of {SIZE * COUNT} bytes" in report.message
    assert f"of {COUNT} descriptors are not confirmed" in report.message
    if how == "deadline":
        assert report.unconfirmed == ((late[0], late[-1] + 1),)


def test_a_reason_precedes_the_fact_that_others_were_given_up(backends: list[Backend]) -> None:
    case = scatter([SIZE] * COUNT)
    failing = fail_at(backends[2], COUNT - 1, KVN_FAILED)
    with Executor(
        striped([delay(backends[0], 1e9), backends[1], failing], min_nbytes=1)
    ) as executor:
        report = late_report(executor, case, COUNT - len(stripes(3)[0]) - 1)
    assert (report.status, report.failed) == (KVN_FAILED, COUNT - 1)
    assert indices(report.unconfirmed) == {*stripes(3)[0], COUNT - 1}


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_a_peer_that_died_before_the_others_were_given_up_is_the_reason(
    backends: list[Backend], how: str
) -> None:
    case, first = scatter([SIZE] * COUNT), stripes(3)[2][0]
    gone = fail_at(backends[2], first, KVN_PEER_GONE, 77)  # at once: no descriptor precedes it
    with Executor(striped([delay(backends[0], 1e9), backends[1], gone], min_nbytes=1)) as executor:
        task = executor.submit(case.descriptors)
        report = task.wait(20) if how == "deadline" else task.cancel()
    assert (report.status, report.code, report.failed) == (KVN_PEER_GONE, 77, first)


@pytest.mark.parametrize("how", ["deadline", "cancel"])
@pytest.mark.parametrize("stripe", range(3))
def test_a_connection_that_breaks_as_others_are_given_up_is_not_the_reason(
    backends: list[Backend], how: str, stripe: int
) -> None:
    """An abort may close the connection that all stripes use."""
    case, first = scatter([SIZE] * COUNT), stripes(3)[stripe][0]
    backends[stripe] = delay(fail_at(backends[stripe], first, KVN_PEER_GONE, 77), 1e9)
    with Executor(striped(backends, min_nbytes=1)) as executor:
        task = executor.submit(case.descriptors)
        report = task.wait(20) if how == "deadline" else task.cancel()
    status, words = (
        (KVN_TIMEOUT, "the deadline passed") if how == "deadline" else (KVN_CANCELLED, "cancelled")
    )
    assert (report.status, report.code, report.failed) == (status, 0, None)
    assert report.message.startswith(f"{words}: ")


def test_the_first_of_several_reasons_is_reported(backends: list[Backend]) -> None:
    case = scatter([SIZE] * COUNT)
    failing = [
        fail_at(backend, index) for backend, index in zip(backends, (3, 20, COUNT - 1), strict=True)
    ]
    report = Executor(striped(failing, min_nbytes=1)).run(case.descriptors)
    assert report.failed == 3
    assert "descriptor 3 was made to fail" in report.message


@pytest.mark.parametrize("index", [0, 20, COUNT - 1])
def test_a_refused_stripe_ends_the_batch(
    backends: list[Backend], tmp_path: Path, index: int
) -> None:
    """Begun stripes are given up, although they could continue, and no later one begins.

    The first stripe is the last to begin.
    """
    case = scatter([SIZE] * COUNT)
    first, *others = stripes(3)
    order = [*others, first]
    before = next(order[:at] for at, stripe in enumerate(order) if index in stripe)
    with (tmp_path / "trace").open("w+b") as file:
        late = [trace(delay(backend, 1e9), file.fileno()) for backend in backends]
        refusing = stripes(3).index(order[len(before)])
        late[refusing] = fail_at(late[refusing], index, KVN_PEER_GONE, 77, at_submit=True)
        backend = striped(late, min_nbytes=1)
        report = Executor(backend).run(case.descriptors)
        file.seek(0)
        lines = [json.loads(line) for line in file]
    assert (report.status, report.code, report.failed) == (KVN_PEER_GONE, 77, index)
    assert f"descriptor {index} was made to be refused" in report.message
    assert report.unconfirmed == ((0, COUNT),)
    for stripe in before:
        calls = [
            line["call"] for line in lines if line["first"] == stripe[0] and line["call"] != "poll"
        ]
        assert calls == ["submit", "abort", "release"]
    assert {line["first"] for line in lines} == {stripe[0] for stripe in before}


def test_batches_before_a_refused_one_are_confirmed(backends: list[Backend]) -> None:
    case = scatter([SIZE] * COUNT)
    refusing = fail_at(backends[1], 30, at_submit=True)
    backend = limit_batch(striped([backends[0], refusing, backends[2]], min_nbytes=1), COUNT // 2)
    report = Executor(backend).run(case.descriptors)
    assert (report.failed, report.unconfirmed) == (30, ((COUNT // 2, COUNT),))
    assert all(case.arrived(number) for number in range(COUNT // 2))
    assert not any(
        case.arrived(number) for number in range(COUNT // 2, COUNT)
    )  # the last stripe is the first to begin


def test_a_failure_is_reported_rather_than_that_others_were_given_up(
    backends: list[Backend],
) -> None:
    case = scatter([SIZE] * COUNT)
    backend = striped(
        [delay(backends[0], 1e9), backends[1], fail_at(backends[2], COUNT - 1)], min_nbytes=1
    )
    report = late_report(Executor(backend), case, COUNT - len(stripes(3)[0]) - 1)
    assert (report.status, report.failed) == (KVN_FAILED, COUNT - 1)
    assert "was made to fail" in report.message


def test_a_wait_covers_all_of_several_tasks(backends: list[Backend]) -> None:
    executor = Executor(striped(backends, min_nbytes=1))
    cases = [scatter([50_000] * 9, seed=seed) for seed in range(8)]
    threads = [threading.Thread(target=executor.run, args=[case.descriptors]) for case in cases]
    for thread in threads:
        thread.start()
    for thread, case in zip(threads, cases, strict=True):
        thread.join()
        case.assert_moved()


def test_wrong_arguments_are_refused(backends: list[Backend]) -> None:
    with pytest.raises(ValueError, match="0 backends: expected 1 to 16"):
        striped([], min_nbytes=1)
    with pytest.raises(ValueError, match="17 backends"):
        striped(backends[:1] * 17, min_nbytes=1)
    with pytest.raises(ValueError, match="min_nbytes = 0"):
        striped(backends, min_nbytes=0)
    with pytest.raises(TypeError):
        striped([None], min_nbytes=1)  # type: ignore[list-item]
    assert striped(backends[:1], min_nbytes=1).name == "striped"
