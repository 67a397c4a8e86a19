"""Transfers through staging memory: host memory of both kinds, unbound device memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_FAILED,
    KVN_INVALID,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_TIMEOUT,
)
from tests.ascend.hccl_ends import A2, A950, Connection, Ends, ends_on, reversed_pieces
from tests.support.compiled import compiled
from tests.support.peer import RemoteError

NBYTES = 1 << 20
SLOTS = {"slot_nbytes": 65536, "buffer_sets": 1}
# Larger than one slot, or than two, tiny ones, and odd lengths.
SIZES = [200_000, 65536, 1, 63, 65, 65535, 140_001, *[977] * 300]


ends = ends_on(A2, A950)


@pytest.fixture
def connection(ends: Ends) -> Iterator[Connection]:
    connection = ends.connect(NBYTES, staging=SLOTS)
    yield connection
    ends[0].faults_left()
    connection.close()


def through(connection: Connection, kind: str) -> dict[str, Any]:
    return {"staging": connection.name, "local": "device" if kind == "device" else "host"}


@pytest.mark.parametrize("kind", ["device", "pinned", "pageable"])
@pytest.mark.parametrize("direction", ["get", "put"])
def test_bytes_are_staged_in_both_directions(
    connection: Connection, kind: str, direction: str
) -> None:
    ends, remote, total = connection.ends, connection.addresses[1], sum(SIZES)
    local = ends[0].memory(kind, NBYTES)  # unknown to HCCL
    content = random.Random(kind + direction).randbytes(total)
    rows = connection.rows(SIZES, local)
    if direction == "put":
        ends[0].write(local, 0, content)
    else:
        ends[1].write(remote, 0, content)
    report = connection.transfer(direction, rows, **through(connection, kind))
    assert (report.status, report.bytes_done) == (KVN_OK, total), report
    arrived = ends[1].read(remote) if direction == "put" else ends[0].read(local)
    sizes = SIZES if direction == "put" else SIZES[::-1]
    assert arrived[:total] == reversed_pieces(content, sizes)
    assert set(arrived[total:]) == {0xA5}
    ends[0].free(local)


@pytest.mark.parametrize("direction", ["get", "put"])
def test_chunks_fill_slots_and_keep_batches_small(connection: Connection, direction: str) -> None:
    ends = connection.ends
    local = ends[0].memory("pinned", NBYTES)
    rows = connection.rows([256] * 1024, local)
    assert connection.transfer(direction, rows, **through(connection, "pinned")).status == KVN_OK
    calls = ends.log.calls("HcclBatchPut" if direction == "put" else "HcclBatchGet")
    most = ends.product.max_batch
    assert [call.fields["descriptors"] for call in calls] == [most] * (1024 // most)
    assert len(ends.log.calls("aclrtMemcpyBatchAsync")) == 1024 // most, (
        "a copy for each descriptor"
    )
    assert not ends.log.calls("aclrtMemcpyAsync")
    ends[0].free(local)


def test_guards_are_read_after_the_last_chunk(connection: Connection) -> None:
    ends, remote = connection.ends, connection.addresses[1]
    local = ends[0].memory("pinned", NBYTES)
    ends[1].write(remote, NBYTES - 8, (3).to_bytes(8, "little"))
    rows = connection.rows([65536] * 5, local)
    options = through(connection, "pinned") | {"guards": [(remote + NBYTES - 8, 3)]}
    assert connection.transfer("put", rows, **options).status == KVN_OK
    calls = [call.name for call in ends.log.calls("HcclBatchPut", "HcclBatchGet")]
    assert calls == ["HcclBatchPut"] * 5 + ["HcclBatchGet"]
    ends[0].free(local)


@pytest.mark.parametrize("direction", ["get", "put"])
@pytest.mark.parametrize("kind", ["device", "pinned", "pageable"])
def test_a_peer_that_hangs_does_not_delay_the_deadline(
    connection: Connection, kind: str, direction: str
) -> None:
    """The third of eight chunks hangs; the buffer set serves the next transfer."""
    ends = connection.ends
    local = ends[0].memory(kind, NBYTES)
    ends[0].fault("HcclBatchPut:3=hang" if direction == "put" else "HcclBatchGet:3=hang")
    rows = connection.rows([65536] * 8, local)
    report = connection.hanging(direction, rows, **through(connection, kind))
    assert (report.status, report.unconfirmed) == (KVN_TIMEOUT, ((0, 8),))
    assert report.message.startswith("the deadline passed: 0 of 524288 bytes were moved")
    assert ends[0].faults_left() == 0
    assert ends[0].ask(connection.name, "disturbed")
    content = random.Random(5).randbytes(524288)
    (ends[0] if direction == "put" else ends[1]).write(
        local if direction == "put" else connection.addresses[1], 0, content
    )
    assert connection.transfer(direction, rows, **through(connection, kind)).status == KVN_OK
    arrived = ends[1].read(connection.addresses[1]) if direction == "put" else ends[0].read(local)
    assert arrived[:524288] == reversed_pieces(content, [65536] * 8)
    ends[0].free(local)


@pytest.mark.parametrize(
    ("kind", "call"), [("device", "aclrtMemcpyAsync"), ("pinned", "aclrtMemcpyBatchAsync")]
)
@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_copy_that_hangs_does_not_delay_the_deadline(
    connection: Connection, kind: str, call: str, direction: str
) -> None:
    ends = connection.ends
    local = ends[0].memory(kind, NBYTES)
    ends[0].fault(f"{call}:2=hang")
    rows = connection.rows([65536] * 8, local)
    report = connection.hanging(direction, rows, **through(connection, kind))
    assert (report.status, report.unconfirmed) == (KVN_TIMEOUT, ((0, 8),))
    assert ends[0].faults_left() == 0
    for _ in range(2):
        report = connection.transfer(direction, rows, **through(connection, kind))
        assert report.status == KVN_OK, report
    ends[0].free(local)


@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_failed_copy_in_the_middle_fails_the_transfer(
    connection: Connection, direction: str
) -> None:
    ends = connection.ends
    local = ends[0].memory("device", NBYTES)
    ends[0].fault("aclrtMemcpyAsync:4=507000")
    rows = connection.rows([65536] * 8, local)
    report = connection.transfer(direction, rows, **through(connection, "device"))
    assert (report.status, report.code, report.unconfirmed) == (KVN_FAILED, 507000, ((0, 8),))
    assert report.failed == 3
    assert report.message.startswith("descriptor 3: aclrtMemcpyAsync: 507000")
    assert connection.transfer(direction, rows, **through(connection, "device")).status == KVN_OK
    ends[0].free(local)


@pytest.mark.parametrize("call", ["aclrtMemcpyAsync", "batch"])
@pytest.mark.parametrize("direction", ["get", "put"])
def test_an_error_at_synchronization_fails_the_transfer(
    connection: Connection, call: str, direction: str
) -> None:
    """The stream is that of copies, or that of operations."""
    ends = connection.ends
    local = ends[0].memory("device", NBYTES)
    name = f"HcclBatch{direction.capitalize()}" if call == "batch" else call
    ends[0].fault(f"{name}:2=sync:507053")
    rows = connection.rows([65536] * 8, local)
    report = connection.transfer(direction, rows, **through(connection, "device"))
    assert (report.code, report.unconfirmed) == (507053, ((0, 8),))
    assert "507053" in report.message
    assert connection.transfer(direction, rows, **through(connection, "device")).status == KVN_OK
    ends[0].free(local)


def test_a_lost_stream_of_copies_is_made_again_by_a_later_transfer(
    connection: Connection,
) -> None:
    """The stream is lost by an error.

    The next transfer fails to make one, and the one after succeeds.
    """
    ends = connection.ends
    local = ends[0].memory("device", NBYTES)
    rows = connection.rows([65536] * 8, local)

    def put() -> Any:
        return connection.transfer("put", rows, timeout_ms=5_000, **through(connection, "device"))

    ends[0].fault("aclrtMemcpyAsync:2=sync:507053")
    assert put().code == 507053
    ends[0].fault("aclrtCreateStream:2=207000")  # the first stream is the communicator's
    report = put()
    assert report.code == 207000
    assert "aclrtCreateStream: 207000" in report.message
    assert ends[0].faults_left() == 0
    assert put().status == KVN_OK
    ends[0].free(local)


def test_one_transfer_at_a_time_uses_a_buffer_set(ends: Ends) -> None:
    """The second transfer waits for the buffer set, until its deadline or the first one's end."""
    first = ends.connect(NBYTES, staging=SLOTS)
    second = ends.connect(NBYTES, staging=SLOTS)
    local = ends[0].memory("pinned", NBYTES)
    third = ends.open()
    region = ends.memory(NBYTES)
    ends[0].bind(third, first.name, region[0])
    ends[1].bind(third, region[1])
    ends.at_once("prepare", third)
    ends[0].fault("HcclBatchPut:1=hang")
    ends[0].start("a", first.name, "put", first.rows([4096], local), **through(first, "pinned"))
    while ends[0].faults_left_now():
        pass  # until the first has begun
    rows = [(local, region[1], 4096)]
    message = ""
    while not message.endswith("; all 1 buffer sets of the staging memory are in use"):
        assert not message or message.endswith("confirmed"), message
        ends[0].start("b", third, "put", rows, staging=first.name, local="host")
        report = ends[0].wait("b", 50)
        assert report["status"] == KVN_TIMEOUT
        message = report["message"]
    assert not ends[0].ask(third, "disturbed")
    assert (
        second.transfer("put", second.rows([4096], local), **through(second, "pinned")).status == 0
    )
    ends[0].start("c", third, "put", rows, staging=first.name, local="host")
    ends[0].cancel(first.name, "the peer of this link has left")
    report = ends[0].wait("a")
    assert (report["status"], report["message"]) == (
        KVN_PEER_GONE,
        "the peer of this link has left",
    )
    assert ends[0].wait("c")["status"] == KVN_OK
    ends.take_back(third, region)
    ends[0].free(local)
    first.close()
    second.close()


def test_memory_that_a_transfer_uses_is_not_freed(connection: Connection) -> None:
    """Unbinding the region meanwhile does not end the transfer."""
    ends, name = connection.ends, connection.name
    local = ends[0].memory("pinned", NBYTES)
    ends[0].fault("aclrtMemcpyBatchAsync:1=hang")
    ends[0].start("a", name, "put", connection.rows([4096], local), **through(connection, "host"))
    while ends[0].faults_left_now():
        pass  # until the transfer has begun
    ends[0].unbind_staging(name, name)
    before = ends[0].left()
    with pytest.raises(RemoteError, match=r"1 transfer\(s\) use the staging memory") as caught:
        ends[0].close_staging(name)
    assert caught.value.status == KVN_INVALID
    assert ends[0].left() == before
    assert ends[0].cancel_task("a")["status"] == KVN_CANCELLED
    ends[0].free(local)


@pytest.mark.parametrize("num_refused", [1, 3])
def test_copies_whose_stream_cannot_be_stopped_are_waited_for(
    connection: Connection, num_refused: int
) -> None:
    """The system refuses to abort the copies and to destroy their stream, a few times."""
    ends = connection.ends
    local = ends[0].memory("pinned", NBYTES)
    rows = connection.rows([4096] * 8, local)
    options = through(connection, "pinned")
    assert connection.transfer("put", rows, **options).status == KVN_OK
    before = ends[0].left()
    ends[0].fault("aclrtMemcpyBatchAsync:1=hang")
    connection.start("put", rows, **options)
    while ends[0].faults_left_now():
        pass  # until the copies hang
    for number in range(1, num_refused + 1):
        ends[0].fault(
            f"aclrtStreamAbort:{number}=507899", f"aclrtDestroyStreamForce:{number}=507899"
        )
    report = connection.wait(50)
    assert (report.status, report.unconfirmed) == (KVN_TIMEOUT, ((0, 8),))
    ends[0].faults_left()
    report = connection.transfer("put", rows, **options)
    assert report.status == KVN_OK, report
    assert ends[0].left() == before  # a surplus stream would still copy
    ends[0].free(local)


def test_a_transfer_without_a_thread_releases_its_buffer_set(tmp_path: Path) -> None:
    compiled(tmp_path, "tests/ascend/shared_main.c")("claimed_without_a_thread")
