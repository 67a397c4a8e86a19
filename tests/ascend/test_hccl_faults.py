"""Failed transfers: by a batch, at synchronization, by a hang, a dead peer or freed memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_DEVICE_MEMORY,
    KVN_FAILED,
    KVN_INVALID,
    KVN_NO_DEVICE_MEMORY,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_SUSPECT_REMOTE,
    KVN_TIMEOUT,
    KVN_UNMAPPED,
    KVN_UNSUPPORTED,
)
from tests.ascend.hccl_ends import A2, A3, A950, Connection, Ends, Product, ends_on, two_ends
from tests.support.peer import RemoteError

NBYTES = 1 << 20
NUM = 1000


ends = ends_on(A2, A3, A950)


@pytest.fixture
def connection(ends: Ends) -> Iterator[Connection]:
    connection = ends.connect(NBYTES)
    yield connection
    assert ends[0].faults_left() == 0
    connection.close()


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        (1, "PARA", KVN_INVALID),
        (4, "INTERNAL", KVN_FAILED),
        (5, "NOT_SUPPORT", KVN_UNSUPPORTED),
        (9, "TIMEOUT", KVN_TIMEOUT),
        (21, "REMOTE", KVN_FAILED),
    ],
)
@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_failed_batch_in_the_middle_confirms_nothing_before(
    connection: Connection, direction: str, code: int, words: str, status: int
) -> None:
    """Earlier batches have ended when the failure is reported, and confirm nothing."""
    ends, most = connection.ends, connection.ends.product.max_batch
    name = f"HcclBatch{direction.capitalize()}"
    ends[0].fault(f"{name}:3={code}")
    report = connection.transfer(direction, connection.rows([64] * NUM))
    assert (report.status, report.code, report.failed) == (status, code, None)
    assert (report.bytes_done, report.unconfirmed) == (0, ((0, NUM),))
    first, last = 2 * most, min(3 * most, NUM) - 1
    assert report.message.startswith(f"descriptors {first} to {last}: {name}: {code} ({words})")
    calls = ends.log.calls(name, "aclrtSynchronizeStreamWithTimeout")
    assert [call.name for call in calls if not call.code][-1] == "aclrtSynchronizeStreamWithTimeout"
    assert ends[0].ask(connection.name, "disturbed")
    assert connection.transfer(direction, connection.rows([64] * NUM)).status == KVN_OK


def test_a_failed_batch_of_one_names_the_descriptor(connection: Connection) -> None:
    connection.ends[0].fault("HcclBatchPut:1=4")
    report = connection.transfer("put", connection.rows([64]))
    assert report.failed == 0
    assert report.message.startswith("descriptor 0: HcclBatchPut: 4 (INTERNAL): ")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (1, KVN_INVALID),
        (5, KVN_UNSUPPORTED),
        (9, KVN_TIMEOUT),
        (24, KVN_NO_DEVICE_MEMORY),
        (103900, KVN_INVALID),
        (103901, KVN_TIMEOUT),
        (103905, KVN_UNSUPPORTED),
        (503900, KVN_FAILED),
    ],
)
def test_a_code_of_hccl_or_hixl_has_its_status(
    connection: Connection, code: int, status: int
) -> None:
    connection.ends[0].fault(f"HcclBatchPut:1={code}")
    report = connection.transfer("put", connection.rows([64]))
    assert (report.status, report.code) == (status, code)


@pytest.mark.parametrize(
    ("code", "status"),
    [(507053, KVN_DEVICE_MEMORY), (507057, KVN_SUSPECT_REMOTE), (507899, KVN_FAILED)],
)
def test_an_error_at_synchronization_fails_the_transfer(
    connection: Connection, code: int, status: int
) -> None:
    ends = connection.ends
    ends[0].fault(f"HcclBatchPut:2=sync:{code}")
    report = connection.transfer("put", connection.rows([64] * NUM))
    assert (report.status, report.code, report.unconfirmed) == (status, code, ((0, NUM),))
    assert report.message.startswith(f"aclrtSynchronizeStreamWithTimeout: {code}")
    assert connection.transfer("put", connection.rows([64] * NUM)).status == KVN_OK


def test_half_a_batch_fails_the_transfer(connection: Connection) -> None:
    connection.ends[0].fault("HcclBatchPut:1=partial:507899")
    report = connection.transfer("put", connection.rows([64] * NUM))
    assert (report.code, report.unconfirmed) == (507899, ((0, NUM),))


@pytest.mark.parametrize("call", ["aclrtMemcpyAsync", "HcclBatchGet"])
def test_a_failed_read_of_guards_fails_the_transfer(connection: Connection, call: str) -> None:
    ends, (_, remote) = connection.ends, connection.addresses
    ends[0].fault(f"{call}:1={507000 if call.startswith('acl') else 4}")
    rows, guards = connection.rows([64] * NUM), [(remote, int.from_bytes(b"\xa5" * 8, "little"))]
    report = connection.transfer("put", rows, guards=[(remote + NBYTES - 8, guards[0][1])])
    assert (report.status, report.unconfirmed) == (KVN_FAILED, ((0, NUM),))
    assert f"{call}: " in report.message


def test_a_transfer_that_hangs_times_out(connection: Connection) -> None:
    ends = connection.ends
    ends[0].fault("HcclBatchPut:2=hang")
    report = connection.hanging("put", connection.rows([64] * NUM))
    assert report.status == KVN_TIMEOUT
    assert report.message == (
        f"the deadline passed: 0 of {64 * NUM} bytes were moved, {NUM} of {NUM} descriptors are "
        "not confirmed"
    )
    assert connection.transfer("put", connection.rows([64] * NUM)).status == KVN_OK


def test_a_long_transfer_that_hangs_times_out(connection: Connection) -> None:
    """The stream cannot hold all operations, so its thread waits before all are issued."""
    ends = connection.ends
    ends[0].fault("HcclBatchGet:2=hang")
    report = connection.hanging("get", connection.rows([16] * 20000))
    assert report.status == KVN_TIMEOUT
    assert len(ends.log.calls("HcclBatchGet")) == 2048 // ends.product.max_batch
    assert connection.transfer("get", connection.rows([16] * 20000)).status == KVN_OK


def test_a_cancelled_communicator_ends_all_transfers(connection: Connection) -> None:
    ends = connection.ends
    ends[0].fault("HcclBatchPut:1=hang")
    connection.begin("put", connection.rows([64]))
    ends[0].start("next", connection.name, "put", connection.rows([64]))
    ends[0].cancel(connection.name, "cluster 7 does not answer")
    for key in (connection.name, "next"):
        report = ends[0].wait(key)
        assert report["status"] == KVN_PEER_GONE
        assert report["message"] == "cluster 7 does not answer"
    report = connection.transfer("put", connection.rows([64]))
    assert (report.status, report.message) == (KVN_PEER_GONE, "cluster 7 does not answer")


def test_a_cancelled_task_ends(connection: Connection) -> None:
    ends = connection.ends
    ends[0].fault("HcclBatchPut:2=hang")
    connection.begin("put", connection.rows([64] * NUM))
    assert ends[0].cancel_task(connection.name)["status"] == KVN_CANCELLED
    ends[0].faults_left()  # the task may have been cancelled before that batch


@pytest.fixture
def deregistered(ends: Ends) -> Iterator[tuple[Connection, list[int]]]:
    """A connection whose peer has deregistered its memory, and the peer's generation table."""
    connection, board = ends.connect(NBYTES), ends.memory(4096)
    connection.close_communicator()
    connection.name = ends.open()
    for end, own, words in zip(ends.both, connection.addresses, board, strict=True):
        end.bind(connection.name, own, words)
    ends.at_once("prepare", connection.name)
    ends[1].write(board[1], 0, (1).to_bytes(8, "little"))
    rows, guards = connection.rows([64] * NUM), [(board[1], 1)]
    assert connection.transfer("put", rows, guards=guards).status == KVN_OK
    ends[1].write(board[1], 0, (2).to_bytes(8, "little"))
    ends[1].unbind(connection.name, connection.addresses[1])
    ends[1].deregister(connection.addresses[1])
    yield connection, board
    ends[1].region(connection.addresses[1])
    connection.close()
    for end, words in zip(ends.both, board, strict=True):
        end.deregister(words)
        end.free(words)


def test_a_range_that_the_peer_has_deregistered_is_refused(
    deregistered: tuple[Connection, list[int]],
) -> None:
    """The guard decides, although the stream has an error of its own."""
    connection, board = deregistered
    rows = connection.rows([64] * NUM)
    report = connection.transfer("put", rows, guards=[(board[1], 1)])
    assert (report.status, report.unconfirmed) == (KVN_UNMAPPED, ((0, NUM),))
    assert report.message.startswith("the peer has deregistered the memory meanwhile (guard 0")
    report = connection.transfer("get", rows)
    assert (report.status, report.unconfirmed) == (KVN_FAILED, ((0, NUM),))
    assert report.code in (4, 507899)


def test_a_peer_that_has_closed_its_engine_is_reported(
    deregistered: tuple[Connection, list[int]],
) -> None:
    """The generation table is deregistered last, and cannot be read afterwards."""
    connection, board = deregistered
    peer = connection.ends[1]
    peer.unbind(connection.name, board[1])
    peer.deregister(board[1])
    report = connection.transfer("get", connection.rows([64] * NUM), guards=[(board[1], 1)])
    assert (report.status, report.unconfirmed) == (KVN_PEER_GONE, ((0, NUM),))
    assert report.message.startswith("the peer has closed its engine, or cannot be reached: ")
    assert report.code == 507899
    peer.region(board[1])


def test_a_region_that_is_unbound_without_a_context_is_not_bound(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The failure came before HCCL was called, but the region has no connection any more."""
    with two_ends(tmp_path_factory.mktemp("kvsim"), A950) as ends:
        connection = ends.connect(NBYTES)
        address = connection.addresses[0]
        ends[0].fault("aclrtSetCurrentContext:1=107002")
        for reason in ("aclrtSetCurrentContext: 107002 ", "the region .* is not bound to"):
            with pytest.raises(RemoteError, match=reason):
                ends[0].unbind(connection.name, address)
        ends[0].deregister(address)
        ends[0].region(address)
        connection.close()


def test_after_a_failed_call_the_other_memory_of_a_communicator_is_released(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with two_ends(tmp_path_factory.mktemp("kvsim"), A950) as ends:
        connection = ends.connect(NBYTES)
        ends.log.restart()
        ends[0].fault("HcclDisableMemAccess:1=4")
        with pytest.raises(RemoteError, match="HcclDisableMemAccess: 4 "):
            ends[0].close(connection.name)
        calls = [call.name for call in ends.log.calls(pid=ends[0].peer.pid)]
        assert calls.count("HcclDisableMemAccess") == 2
        ends[1].close(connection.name)


def test_a_region_that_could_not_be_bound_without_a_context_can_be_deregistered(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with two_ends(tmp_path_factory.mktemp("kvsim"), A2) as ends:
        name = ends.open()
        addresses = address, _ = ends.memory(NBYTES)
        ends[0].fault("aclrtSetCurrentContext:1=107002")
        with pytest.raises(RemoteError, match="aclrtSetCurrentContext: 107002 "):
            ends[0].bind(name, address)
        ends[0].deregister(address)
        ends[0].region(address)
        ends.take_back(name, addresses)


@pytest.mark.parametrize(
    "product", [A2, pytest.param(A950, marks=pytest.mark.slow)], ids=["A2", "950"]
)
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("direction", ["get", "put"])
def test_a_killed_peer_ends_transfers(
    tmp_path_factory: pytest.TempPathFactory, product: Product, direction: str, staged: bool
) -> None:
    """The peer dies in the middle of a transfer; the next one fails in finite time, too."""
    folder = tmp_path_factory.mktemp("kvsim")
    with two_ends(folder, product, KVSIM_LATENCY_US=300000, KVSIM_RETRY_US=20000) as ends:
        connection = ends.connect(
            NBYTES, staging={"slot_nbytes": 4096, "buffer_sets": 1} if staged else None
        )
        local = ends[0].memory("pinned", NBYTES) if staged else None
        options = {"staging": connection.name, "local": "host"} if staged else {}
        sizes = [4096] * 3 if staged else [16] * (2 * product.max_batch + 1)  # three batches
        connection.begin(direction, connection.rows(sizes, local), **options)
        ends[1].peer.kill()
        ends[0].set("latency_us", 0)
        report = connection.wait(None)
        assert report.status in (KVN_SUSPECT_REMOTE, KVN_FAILED), report
        assert report.unconfirmed == ((0, len(sizes)),)
        assert "HcclGetCommAsyncError: 21 (REMOTE)" in report.message
        report = connection.transfer(direction, connection.rows([64], local), **options)
        assert report.status != KVN_OK
        ends[0].close(connection.name)
        ends[0].deregister(connection.addresses[0])
        ends[0].free(connection.addresses[0])
        if staged:
            ends[0].free(local)
            ends[0].close_staging(connection.name)
        assert ends[0].left() == {}
