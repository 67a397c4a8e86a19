"""The lifetime of regions and communicators: order, refusals, timeouts, leaks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_FAILED,
    KVN_INVALID,
    KVN_OK,
    KVN_TIMEOUT,
    KVN_UNSUPPORTED,
)
from kvnative._hccl import HixlPeer
from kvnative._hccl_memory import ENDPOINT_NBYTES
from tests.ascend.hccl_ends import A2, A950, Ends, ends_on, two_ends
from tests.support.peer import RemoteError

NBYTES = 1 << 16
BIND_950 = "HcclRegisterMem"  # this call registers, too
OVER_HIXL = HixlPeer(bytes(ENDPOINT_NBYTES), bytes(ENDPOINT_NBYTES), "127.0.0.1", 1)


module_ends = ends_on(A2, A950)


@pytest.fixture
def ends(module_ends: Ends) -> Iterator[Ends]:
    module_ends.log.restart()
    yield module_ends
    assert module_ends[0].faults_left() == 0
    assert [end.left() for end in module_ends.both] == [{}, {}]


def remote_error(ends: Ends, method: str, *arguments: object, **options: object) -> RemoteError:
    with pytest.raises(RemoteError) as failure:
        getattr(ends[0], method)(*arguments, **options)
    return failure.value


def begin_to_prepare(ends: Ends, name: str, timeout_ms: int) -> None:
    """Begin to prepare in a thread of the first end, and return once the call is running."""
    ends[0].call_in_thread("prepare", "prepare", name, timeout_ms)
    while ends[0].ask(name, "state") != "preparing":
        pass


# ---- regions ----


def test_overlap_is_refused_and_both_ranges_are_named(ends: Ends) -> None:
    address = ends[0].memory("device", NBYTES)
    ends[0].region(address)
    failure = remote_error(ends, "region", address)
    assert failure.kind == "ValueError"
    end = f"{address + NBYTES:#x}"
    assert failure.message == (
        f"[{address:#x}, {end}) overlaps the device region [{address:#x}, {end}) of device 0"
    )
    ends[0].deregister(address)
    ends[0].region(address)
    ends[0].deregister(address)
    ends[0].free(address)


@pytest.mark.parametrize("nbytes", [0, (64 << 30) + 1])
def test_sizes_that_hccl_refuses_are_named(ends: Ends, nbytes: int) -> None:
    address = ends[0].memory("device", NBYTES)
    failure = remote_error(ends, "region", address, nbytes=nbytes)
    assert failure.kind == "ValueError"
    assert failure.message == (
        f"nbytes is {nbytes}; of device memory HCCL registers 1 to {64 << 30} bytes at a time"
    )
    ends[0].free(address)


def test_region_that_is_bound_cannot_be_closed(ends: Ends) -> None:
    connection = ends.connect(NBYTES)
    address = connection.addresses[0]
    failure = remote_error(ends, "deregister", address)
    assert (failure.kind, failure.status, failure.code) == ("HcclError", KVN_INVALID, 0)
    assert failure.message.endswith("is bound to 1 communicator(s)")
    ends[0].unbind(connection.name, address)
    ends[0].deregister(address)
    ends[0].region(address)
    connection.close()


def test_pinned_host_memory_is_registered(ends: Ends) -> None:
    if ends.product is A950:
        name = ends.open()
        address = ends[0].memory("pinned", NBYTES)
        ends[0].region(address)
        failure = remote_error(ends, "bind", name, address)
        assert (failure.code, failure.status) == (5, KVN_UNSUPPORTED)
        assert failure.message.startswith("HcclRegisterMem: 5 (NOT_SUPPORT)")
        for end in ends.both:
            end.close(name)
        ends[0].deregister(address)
        ends[0].free(address)
        return
    connection = ends.connect(NBYTES, kind="pinned")
    ends[0].write(connection.addresses[0], 0, b"pinned" * 100)
    assert connection.transfer("put", connection.rows([600]), local="host").status == KVN_OK
    assert ends[1].read(connection.addresses[1])[:600] == b"pinned" * 100
    connection.close()


# ---- creation ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"traffic_class": 256}, "traffic_class is 256; it must be None or in [0, 255]"),
        ({"service_level": 8}, "service_level is 8; it must be None or in [0, 7]"),
        ({"max_batch": 257}, "max_batch is 257; it must be in [1, 256]"),
        ({"max_batch": 0}, "max_batch is 0; it must be in [1, 256]"),
        ({"max_batch": -1}, "max_batch is -1; it must be in [1, 256]"),
        ({"max_batch": 129, "peer": OVER_HIXL}, "max_batch is 129; it must be in [1, 128]"),
        ({"name": ""}, "name is 0 bytes long; it must be 1 to 127"),
        ({"name": "n" * 128}, "name is 128 bytes long; it must be 1 to 127"),
        ({"rank": 1}, "rank is 1 and remote_rank 1; they must be two numbers >= 0"),
    ],
)
def test_arguments_out_of_range_are_refused(
    ends: Ends, options: dict[str, object], message: str
) -> None:
    failure = remote_error(ends, "open_with", ends.table, options)
    assert (failure.kind, failure.message) == ("ValueError", message)


def test_the_longest_name_and_settings_of_rdma_are_accepted(ends: Ends) -> None:
    options = {"name": "n" * 127, "traffic_class": 132, "service_level": 4}
    ends[0].open_with(ends.table, options)
    ends[0].close("n" * 127)
    failure = remote_error(ends, "close", "n" * 127)
    assert failure.kind == "KeyError"


@pytest.mark.parametrize(
    "call",
    [
        "aclrtCreateStream",
        "aclrtMallocAlign32",
        "aclrtMallocHost",
        "aclrtCreateEventExWithFlag",
        "HcclRegisterGlobalMem",
        "HcclCommInitClusterInfoMemConfig",
        "HcclCommBindMem",
    ],
)
def test_a_failed_step_leaves_no_resources(ends: Ends, call: str) -> None:
    if ends.product is A950:
        call = {"HcclRegisterGlobalMem": BIND_950, "HcclCommBindMem": BIND_950}.get(call, call)
    code = 2 if call.startswith("Hccl") else 207001  # HCCL_E_PTR, which no retry helps
    ends[0].fault(f"{call}:1={code}")
    failure = remote_error(ends, "open", "name", ends.table, 0)
    assert (failure.kind, failure.code) == ("HcclError", code)
    assert f"{call}: {code}" in failure.message


@pytest.mark.parametrize(("code", "attempts"), [(4, 6), (7, 6), (15, 6), (1, 1), (24, 1)])
def test_a_communicator_is_retried_after_a_passing_error(
    ends: Ends, code: int, attempts: int
) -> None:
    """Errors that may pass are retried five times, permanent ones are not.

    The vendor's texts of earlier attempts are in no message.
    """
    call, text = "HcclCommInitClusterInfoMemConfig", "a fault of the test"
    for nth in range(1, attempts):
        ends[0].fault(f"{call}:{nth}={code}")
    ends.log.restart()
    ends[0].open("name", ends.table, 0)
    ends[0].close("name")
    calls = ends.log.calls(call)
    assert len(calls) == attempts
    assert calls[-1].fields["buffer_mb"] == 2, "of device memory, twice for each link"
    assert text not in remote_error(ends, "open", "name", "{}", 0).message
    ends.log.restart()
    for nth in range(1, attempts + 1):
        ends[0].fault(f"{call}:{nth}={code}")
    failure = remote_error(ends, "open", "name", ends.table, 0)
    assert (failure.kind, failure.code) == ("HcclError", code)
    assert failure.message.count(text) == 1
    assert ends.log.counts(call) == {call: attempts}


def test_wrong_rank_table_has_the_vendors_text(ends: Ends) -> None:
    failure = remote_error(ends, "open", "name", "{}", 0)
    assert failure.kind == "HcclError"
    assert failure.message.startswith("HcclCommInitClusterInfoMemConfig: ")
    assert len(failure.message) > len("HcclCommInitClusterInfoMemConfig: 1 (PARA): ")


def test_threads_initialize_one_after_another(ends: Ends) -> None:
    """HCCL does not support concurrent calls; the simulator reports them as violations."""
    for i in range(4):
        ends[0].call_in_thread(str(i), "open", f"name-{i}", ends.table, 0)
    assert [ends[0].join(str(i))[0] for i in range(4)] == [True] * 4
    for i in range(4):
        ends[0].close(f"name-{i}")


# ---- order ----


def test_memory_cannot_be_bound_after_prepare(ends: Ends) -> None:
    connection = ends.connect(NBYTES)
    address = ends[0].memory("device", NBYTES)
    ends[0].region(address)
    failure = remote_error(ends, "bind", connection.name, address)
    assert (failure.kind, failure.status) == ("HcclError", KVN_INVALID)
    assert failure.message == (
        f"communicator {connection.name} is ready: memory must be bound before prepare"
    )
    failure = remote_error(ends, "prepare", connection.name)
    name = connection.name
    assert failure.message == f"communicator {name} is ready: it can be prepared only once"
    failure = remote_error(ends, "unbind", connection.name, address)
    assert failure.message.endswith(f"is not bound to communicator {connection.name}")
    ends[0].deregister(address)
    ends[0].free(address)
    connection.close()


def test_region_is_bound_once_and_not_when_closed(ends: Ends) -> None:
    name = ends.open()
    (address, other) = ends.memory(NBYTES)
    ends[0].bind(name, address)
    assert remote_error(ends, "bind", name, address).message.endswith("is bound already")
    ends.take_back(name, [address, other])


def test_the_end_calls_hccl_in_its_order(ends: Ends) -> None:
    connection = ends.connect(NBYTES)
    ends.log.restart()
    connection.close()
    pid = ends[0].peer.pid
    calls = [call.name for call in ends.log.calls(pid=pid) if call.name.startswith("Hccl")]
    if ends.product is A950:
        assert calls == [
            *["HcclDisableMemAccess"] * 2,
            *["HcclDeregisterMem"] * 2,
            "HcclCommDestroy",
        ]
    else:
        assert calls == [
            *["HcclCommUnbindMem"] * 2,
            "HcclCommDestroy",
            *["HcclDeregisterGlobalMem"] * 2,
        ]


# ---- prepare ----


@pytest.mark.parametrize("timeout_ms", [1, pytest.param(1000, marks=pytest.mark.slow)])
def test_prepare_without_the_peer_times_out(ends: Ends, timeout_ms: int) -> None:
    """HCCL's timeouts are whole seconds, and 0 would mean two minutes."""
    name = ends.open()
    began = time.monotonic()
    failure = remote_error(ends, "prepare", name, timeout_ms)
    assert 0.9 < time.monotonic() - began < 10
    assert (failure.kind, failure.status, failure.code) == ("HcclError", KVN_TIMEOUT, 9)
    assert ends[0].ask(name, "state") == "failed"
    report = ends[0].transfer(name, "put", [(4096, 4096, 1)])
    assert report["status"] == KVN_FAILED
    assert report["message"] == (
        f"communicator {name} is not connected: its prepare failed: nothing can be transferred"
    )
    for end in ends.both:
        end.close(name)


@pytest.mark.parametrize("timeout_ms", [0, -1])
def test_impossible_timeouts_are_refused(ends: Ends, timeout_ms: int) -> None:
    name = ends.open()
    failure = remote_error(ends, "prepare", name, timeout_ms)
    assert (failure.kind, failure.message) == (
        "ValueError",
        f"timeout_ms is {timeout_ms}; it must be > 0",
    )
    assert ends[0].ask(name, "state") == "open"
    for end in ends.both:
        end.close(name)


def test_close_does_not_wait_for_prepare(ends: Ends) -> None:
    """The preparing thread closes the communicator when HCCL returns; close does not wait."""
    name = ends.open()
    addresses = ends.memory(NBYTES)
    ends[0].bind(name, addresses[0])
    begin_to_prepare(ends, name, 1000)
    ends[0].close_only(name)
    assert ends[0].ask(name, "state") == "preparing"
    assert remote_error(ends, "bind", name, addresses[0]).message == (
        f"communicator {name} is closed: memory must be bound before prepare"
    )
    good, raised = ends[0].join("prepare")
    assert (good, raised[0], raised[3]) == (False, "HcclError", KVN_TIMEOUT)
    assert ends[0].ask(name, "state") == "closed"
    assert not ends[0].ask(name, "regions")
    ends.take_back(name, addresses)


def test_a_communicator_may_be_closed_while_prepare_succeeds(ends: Ends) -> None:
    name = ends.open()
    begin_to_prepare(ends, name, 5000)
    ends[0].close_only(name)
    with suppress(RemoteError):  # the call may see that the other end has closed already
        ends[1].prepare(name)
    good, raised = ends[0].join("prepare")
    assert (good, raised[0], raised[3]) == (False, "HcclError", KVN_CANCELLED)
    assert raised[1] == f"communicator {name} was closed meanwhile"
    for end in ends.both:
        end.close(name)


def test_unbinding_waits_for_prepare(ends: Ends) -> None:
    name = ends.open()
    addresses = ends.memory(NBYTES)
    for end, address in zip(ends.both, addresses, strict=True):
        end.bind(name, address)
    begin_to_prepare(ends, name, 5000)
    ends[0].call_in_thread("unbind", "unbind", name, addresses[0])
    ends[1].prepare(name)
    assert ends[0].join("prepare")[0]
    assert ends[0].join("unbind") == (True, None)
    ends.take_back(name, addresses)


# ---- the end ----


def test_a_closed_communicator_refuses_calls(ends: Ends) -> None:
    connection = ends.connect(NBYTES)
    rows = connection.rows([64])
    ends[0].close_only(connection.name)
    ends[0].close_only(connection.name)
    assert ends[0].ask(connection.name, "state") == "closed"
    report = connection.transfer("put", rows)
    assert (report.status, report.unconfirmed) == (KVN_FAILED, ((0, 1),))
    assert report.message == (
        f"communicator {connection.name} is closed: nothing can be transferred"
    )
    connection.close()


def test_a_communicator_that_failed_to_close_is_closed(tmp_path: Path) -> None:
    with two_ends(tmp_path, A2) as ends:
        connection = ends.connect(NBYTES)
        ends[0].fault("HcclCommDestroy:1=4")
        assert remote_error(ends, "close_only", connection.name).code == 4
        assert ends[0].ask(connection.name, "state") == "closed"
        report = connection.transfer("put", connection.rows([64]))
        assert report.status == KVN_FAILED
        assert "is closed: nothing can be transferred" in report.message
        connection.close()


def test_closing_waits_only_for_the_running_transfer(ends: Ends) -> None:
    connection = ends.connect(NBYTES)
    name, addresses = connection.name, connection.addresses
    ends[0].set("latency_us", 60_000_000)
    connection.begin("put", connection.rows([64]))
    ends[0].call_in_thread("close", "close_only", name)
    while "is closed" not in remote_error(ends, "bind", name, addresses[0]).message:
        pass  # the thread has not got so far
    assert ends[0].ask(name, "state") == "ready"
    assert ends[0].cancel_task(name)["status"] == KVN_CANCELLED
    assert ends[0].join("close", 20) == (True, None)
    assert ends[0].ask(name, "state") == "closed"
    ends[0].set("latency_us", 0)
    connection.close()


def test_contexts_of_the_calling_thread_are_unchanged(ends: Ends) -> None:
    """A framework in the same process has a context of its own."""
    ends[0].set_own_context()
    connection = ends.connect(NBYTES, staging={"slot_nbytes": 4096, "buffer_sets": 1})
    assert connection.transfer("put", connection.rows([64])).status == KVN_OK
    ends[0].unbind(connection.name, connection.addresses[0])
    connection.close()
    assert ends[0].has_own_context()
    ends[0].drop_own_context()
