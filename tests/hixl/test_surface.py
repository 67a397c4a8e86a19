"""Names, numbers and types, as programs of hixl use them; and calls before `initialize`."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from kvnative._backend import NativeError
from kvplan import LLMException, hixl
from kvplan.addressed.engine import REFUSALS, Request
from kvplan.hixl import TransferOpDesc, TransferStatus
from kvplan.hixl.values import status_of
from tests.hixl.conftest import MakeEngine
from tests.hixl.peer import Peer
from tests.hixl.places import Memory, Place, free_name, registered

LONG_MS = 30_000
NUMBERS = {
    "SUCCESS": 0,
    "PARAM_INVALID": 103900,
    "TIMEOUT": 103901,
    "NOT_CONNECTED": 103902,
    "ALREADY_CONNECTED": 103903,
    "NOTIFY_FAILED": 103904,
    "UNSUPPORTED": 103905,
    "FAILED": 503900,
    "RESOURCE_EXHAUSTED": 203900,
    "FEATURE_NOT_SUPPORTED": 0,
    "FEATURE_SUPPORTED": 1,
    "OPTION_ENABLE_USE_FABRIC_MEM": "EnableUseFabricMem",
    "OPTION_RDMA_TRAFFIC_CLASS": "RdmaTrafficClass",
    "OPTION_RDMA_SERVICE_LEVEL": "RdmaServiceLevel",
    "OPTION_BUFFER_POOL": "BufferPool",
    "OPTION_GLOBAL_RESOURCE_CONFIG": "GlobalResourceConfig",
    "OPTION_AUTO_CONNECT": "AutoConnect",
    "OPTION_LOCAL_COMM_RES": "LocalCommRes",
}
ENUMS = {
    "MemType": "MEM_DEVICE MEM_HOST",
    "TransferOp": "READ WRITE",
    "AsyncConnectStatus": "NOT_CONNECT CONNECT_PENDING CONNECTING CONNECTED CONNECT_FAILED "
    "DISCONNECT_PENDING DISCONNECTING",
    "FeatureType": "AUTO_CONNECT CLIENT_SERVER_COMM",
    "TransferStatus": "WAITING COMPLETED TIMEOUT FAILED",
}
VALUES = {
    "GetTransferStatusArgs",
    "Hixl",
    "MemDesc",
    "NotifyDesc",
    "TransferArgs",
    "TransferOpDesc",
    "TransferResult",
    "get_capability",
}


def test_constants() -> None:
    assert {name: getattr(hixl, name) for name in NUMBERS} == NUMBERS


def test_enums_and_exported_names() -> None:
    exported: set[str] = set()
    for name, members in ENUMS.items():
        kind = getattr(hixl, name)
        assert [item.name for item in kind] == members.split()
        if name != "TransferStatus":
            exported |= set(members.split())
            assert all(getattr(hixl, item.name) is item for item in kind)
        assert [str(item) for item in kind] == [f"{name}.{word}" for word in members.split()]
        assert [f"{item}" for item in kind] == [str(item) for item in kind]
    assert not hasattr(hixl, "WAITING")
    assert (hixl.TIMEOUT, hixl.FAILED) == (103901, 503900)  # unlike those of TransferStatus
    assert set(hixl.__all__) == exported | set(ENUMS) | set(NUMBERS) | VALUES


def test_values_can_be_set_and_are_checked() -> None:
    args, query, result = (
        hixl.TransferArgs(),
        hixl.GetTransferStatusArgs(),
        hixl.TransferResult(),
    )
    assert (query.max_query_count, query.skip_waiting) == (2**32 - 1, False)
    assert hixl.GetTransferStatusArgs(3, True).max_query_count == 3
    settings: list[tuple[Any, str, Any, Any]] = [
        (hixl.MemDesc(addr=1, len=2), "addr", 2**64 - 1, -1),
        (hixl.MemDesc(1, 2), "len", np.uint64(7), 1.5),
        (hixl.MemDesc(1, 2), "local_only", True, 1),
        (hixl.TransferOpDesc(local_addr=1, remote_addr=2, len=3), "local_addr", 9, "9"),
        (hixl.TransferOpDesc(1, 2, 3), "remote_addr", 9, 2**64),
        (hixl.TransferOpDesc(1, 2, 3), "len", 9, None),
        (hixl.NotifyDesc(name="a", notify_msg="b"), "name", "c", b"c"),
        (hixl.NotifyDesc("a", "b"), "notify_msg", "c", 1),
        (query, "max_query_count", 0, 2**32),
        (query, "skip_waiting", True, 1),
        (result, "req", 5, "5"),
    ]
    for item, name, good, bad in settings:
        setattr(item, name, good)
        assert getattr(item, name) == good
        assert not isinstance(getattr(item, name), np.generic), "which would wrap in sums"
        with pytest.raises(TypeError, match=name):
            setattr(item, name, bad)
        assert getattr(item, name) == good
        assert f"{name}=" in repr(item)
    for holder in (args, result):
        assert holder.user_data == 0
        holder.user_data = 77
        assert holder.user_data == 77
    with pytest.raises(AttributeError):
        result.status = hixl.TransferStatus.FAILED  # type: ignore[misc]
    with pytest.raises(AttributeError):
        args.nothing = 1  # type: ignore[attr-defined]
    desc = pickle.loads(pickle.dumps(hixl.TransferOpDesc(1, 2, 3)))
    assert (desc.local_addr, desc.remote_addr, desc.len) == (1, 2, 3)


@pytest.mark.parametrize(
    ("kind", "arguments", "name"),
    [
        (hixl.MemDesc, (None, 2), "addr"),
        (hixl.MemDesc, (1, 2, 1), "local_only"),
        (hixl.TransferOpDesc, (1, 2, "3"), "len"),
        (hixl.NotifyDesc, ("a", b"b"), "notify_msg"),
        (hixl.GetTransferStatusArgs, (3, 1), "skip_waiting"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_when_it_is_made(
    kind: Any, arguments: tuple[Any, ...], name: str
) -> None:
    with pytest.raises(TypeError, match=name):
        kind(*arguments)


def test_numbers_that_cannot_be_printed_are_type_errors_too() -> None:
    huge = 10**5000  # str() of the number raises ValueError
    for make in (
        lambda: hixl.MemDesc(huge, 1),
        lambda: hixl.TransferOpDesc(1, -huge, 1),
        lambda: hixl.GetTransferStatusArgs(huge),
    ):
        with pytest.raises(TypeError, match="out of range"):
            make()


def test_capabilities() -> None:
    for item in hixl.FeatureType:
        assert hixl.get_capability(item) == (hixl.SUCCESS, hixl.FEATURE_SUPPORTED)
    with pytest.raises(TypeError):
        hixl.get_capability(0)  # type: ignore[arg-type]


NAME = "127.0.0.1:9"
ONE_DESCRIPTOR = [hixl.TransferOpDesc(1, 2, 3)]
NOTIFY = hixl.NotifyDesc("a", "b")
STATES = hixl.AsyncConnectStatus
CALLS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "register_mem": ((hixl.MemDesc(1, 2), hixl.MEM_HOST), (hixl.FAILED, 0)),
    "deregister_mem": ((1,), hixl.FAILED),
    "connect": ((NAME,), hixl.FAILED),
    "disconnect": ((NAME, 10), hixl.FAILED),
    "connect_async": ((NAME, 10), hixl.FAILED),
    "disconnect_async": ((NAME,), hixl.FAILED),
    "get_async_connect_status": ((NAME,), (hixl.FAILED, STATES.NOT_CONNECT)),
    "get_all_async_connect_status": ((), (hixl.FAILED, {})),
    "transfer_sync": ((NAME, hixl.READ, ONE_DESCRIPTOR, 10), hixl.FAILED),
    "transfer_async": ((NAME, hixl.WRITE, ONE_DESCRIPTOR), (hixl.FAILED, 0)),
    "get_transfer_status": ((1,), (hixl.FAILED, hixl.TransferStatus.FAILED)),
    "get_all_transfer_status": ((hixl.GetTransferStatusArgs(),), (hixl.FAILED, [])),
    "send_notify": ((NAME, NOTIFY, 10), hixl.FAILED),
    "get_notifies": ((), (hixl.FAILED, [])),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_an_engine_that_is_not_initialized(engine: hixl.Hixl, name: str) -> None:
    arguments, expected = CALLS[name]
    assert getattr(hixl.Hixl(), name)(*arguments) == expected
    engine.finalize()
    engine.finalize()  # the second call changes nothing
    assert getattr(engine, name)(*arguments) == expected


def test_arguments_of_other_types_raise_type_error(engine: hixl.Hixl) -> None:
    for name, (arguments, _) in CALLS.items():
        for position in range(len(arguments)):
            wrong: list[object] = list(arguments)
            has_default = name == "get_all_transfer_status"
            for wrong[position] in (object(),) if has_default else (object(), None):
                for value in (engine, hixl.Hixl()):
                    with pytest.raises(TypeError):
                        getattr(value, name)(*wrong)
    # numbers of NumPy are numbers, too
    assert engine.connect(free_name(), np.int64(500)) == hixl.FAILED
    assert engine.deregister_mem(np.uint64(9)) == hixl.SUCCESS
    for options in ({"a": 1}, {1: "a"}, []):
        with pytest.raises(TypeError):
            hixl.Hixl().initialize("127.0.0.1", options)  # type: ignore[arg-type]
    for descs in (None, [None], {}, ONE_DESCRIPTOR[0]):
        with pytest.raises(TypeError, match="op_descs"):
            engine.transfer_sync(NAME, hixl.READ, descs)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        engine.transfer_sync(NAME, 0, ONE_DESCRIPTOR)  # type: ignore[arg-type]
    for wrong in ((5, hixl.READ, ONE_DESCRIPTOR), (NAME, 0, ONE_DESCRIPTOR)):
        with pytest.raises(TypeError, match=r"^(remote_engine|op) is a int"):
            engine.plan_transfer(*wrong)  # type: ignore[arg-type]


def test_an_argument_that_is_given_twice_or_is_unknown_raises_type_error(engine: hixl.Hixl) -> None:
    for args, kwargs in (
        ((NAME,), {"remote_engine": free_name()}),
        ((NAME, 10, 10), {}),
        ((NAME,), {"timeout": 10}),
        ((), {"timeout_in_millis": 10}),
    ):
        with pytest.raises(TypeError, match="argument"):
            engine.connect(*args, **kwargs)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"RdmaTrafficClass": "132", "adxl.RdmaServiceLevel": "4", "BufferPool": "4:8"}, 0),
        ({"EnableUseFabricMem": "1", "AutoConnect": "0", "LocalCommRes": "", "unknown": "x"}, 0),
        ({"GlobalResourceConfig": '{"connect_pool.thread_num": "3"}'}, 0),
        ({"RdmaTrafficClass": "133"}, hixl.PARAM_INVALID),
        ({"AutoConnect": "yes"}, hixl.PARAM_INVALID),
        ({"BufferPool": "4"}, hixl.PARAM_INVALID),
        ({"GlobalResourceConfig": '{"connect_pool.thread_num": 0}'}, hixl.PARAM_INVALID),
        ({"EnableUseFabricMem": "1", "BufferPool": "0:0"}, 0),
        ({"EnableUseFabricMem": "1", "BufferPool": "4:8"}, hixl.PARAM_INVALID),
        ({"EnableUseFabricMem": "1", "adxl.BufferPool": "4:8"}, hixl.PARAM_INVALID),
        ({"kvplan.mem_device": "device"}, hixl.PARAM_INVALID),
        ({"kvplan.transport": "nothing"}, hixl.PARAM_INVALID),
    ],
)
def test_options(options: dict[str, str], status: int) -> None:
    engine = hixl.Hixl()
    assert engine.initialize("127.0.0.1", options) == status
    engine.finalize()


@pytest.mark.parametrize(
    ("key", "allowed", "refused"),
    [
        ("comm_resource_config.max_active_channels", [1, "8192"], [0, 8193]),
        ("comm_resource_config.qos", [0, 7], [-1, 8]),
        ("transfer_config.max_transfer_count_per_batch", [1, "32766"], [0, 32767, "many"]),
        ("fabric_memory.start_address", [0, 1024], [1025]),
        ("channel_pool.max_channel", [512], [0, 513]),
        ("local_comm_res_path", [__file__], ["", "/nowhere/at.json", "/dev/null", "/tmp", 1]),
    ],
)
def test_resources_that_the_documents_refuse(
    key: str, allowed: list[object], refused: list[object]
) -> None:
    for value in allowed + refused:
        engine = hixl.Hixl()
        expected = hixl.SUCCESS if value in allowed else hixl.PARAM_INVALID
        resources = {"GlobalResourceConfig": json.dumps({key: value})}
        assert engine.initialize("127.0.0.1", resources) == expected
        engine.finalize()


def test_a_path_of_resources_is_ignored_if_they_are_given(engine: hixl.Hixl) -> None:
    engine.finalize()
    resources = '{"local_comm_res_path": "/nowhere/at.json"}'
    given = {"GlobalResourceConfig": resources, "LocalCommRes": '{"version": "1.3"}'}
    assert engine.initialize("127.0.0.1", given) == hixl.SUCCESS


def test_an_engine_can_be_initialized_again(memory: Memory, engine: hixl.Hixl) -> None:
    """A second call succeeds and changes nothing; after `finalize`, an engine begins again."""
    assert engine.initialize("nonsense:::", {}) == hixl.SUCCESS
    assert engine.register_mem(hixl.MemDesc(memory.address, len(memory.array)), hixl.MEM_HOST) == (
        hixl.SUCCESS,
        memory.handle,
    )
    engine.finalize()
    name = free_name()
    assert engine.initialize(name) == hixl.SUCCESS
    assert engine.datadist.listen_address == name
    assert engine.datadist.caches() == []


def test_memory_that_cannot_be_registered(
    engine: hixl.Hixl, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    for address, nbytes in ((0, 8), (memory.address, 0), (4096, 4096), (2**64 - 8, 16)):
        desc = hixl.MemDesc(address, nbytes)
        assert engine.register_mem(desc, hixl.MEM_HOST) == (hixl.PARAM_INVALID, 0)
    device_address = hixl.MemDesc(memory.address, 8)
    # this host has no device
    assert engine.register_mem(device_address, hixl.MEM_DEVICE) == (hixl.UNSUPPORTED, 0)
    assert "KVPLAN_MEM_DEVICE=host" in caplog.text
    assert engine.deregister_mem(0) == hixl.PARAM_INVALID
    assert engine.deregister_mem(4711) == hixl.SUCCESS


DEVICE_MEMORY = """
import os
os.environ["KVPLAN_MEM_DEVICE"] = "host"
engine.finalize()
assert engine.initialize(name) == hixl.SUCCESS
array = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
status, _ = engine.register_mem(hixl.MemDesc(array.ctypes.data, 4096), hixl.MEM_DEVICE)
result = status, array.ctypes.data
"""


def test_device_memory_of_a_host_without_devices(make_engine: MakeEngine, peer: Peer) -> None:
    """This engine sets the option, and the peer the environment variable."""
    engine = make_engine(**{"kvplan.mem_device": "host"})
    own = registered(engine, Place("host", 2))
    array, address = Place("host", 2).zeros(4096)
    assert engine.register_mem(hixl.MemDesc(address, 4096), hixl.MEM_DEVICE)[0] == hixl.SUCCESS
    status, theirs = peer.run(DEVICE_MEMORY, name=peer.name)
    assert status == hixl.SUCCESS
    assert engine.connect(peer.name, 10_000) == hixl.SUCCESS
    array[:] = 7
    written = [hixl.TransferOpDesc(address, theirs, 4096)]
    assert engine.transfer_sync(peer.name, hixl.WRITE, written, 10_000) == hixl.SUCCESS
    both = [
        hixl.TransferOpDesc(own.address, theirs, 64),
        hixl.TransferOpDesc(address + 64, theirs + 64, 64),
    ]
    assert engine.transfer_sync(peer.name, hixl.READ, both, 10_000) == hixl.SUCCESS
    assert own.array[:65].tolist() == [7] * 64 + [0]


def test_the_option_comes_before_the_environment(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, address = Place("host", 2).zeros(4096)
    monkeypatch.setenv("KVPLAN_MEM_DEVICE", "host")
    engine = make_engine(**{"kvplan.mem_device": "refuse"})
    there = hixl.MemDesc(address, array.nbytes)
    assert engine.register_mem(there, hixl.MEM_DEVICE) == (hixl.UNSUPPORTED, 0)
    monkeypatch.setenv("KVPLAN_MEM_DEVICE", "HOST")
    assert hixl.Hixl().initialize("127.0.0.1") == hixl.PARAM_INVALID


def test_memory_that_is_only_local(engine: hixl.Hixl, peer: Peer) -> None:
    """Transfers of its own engine use local-only memory, and those of remote engines do not."""
    register = """
    array = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    desc = hixl.MemDesc(array.ctypes.data, 4096, local_only=True)
    assert engine.register_mem(desc, hixl.MEM_HOST)[0] == hixl.SUCCESS
    result = array.ctypes.data
    """
    theirs = peer.run(register)
    array, address = Place("host", 2).zeros(4096)
    own = hixl.MemDesc(address, 4096, local_only=True)
    assert engine.register_mem(own, hixl.MEM_HOST)[0] == hixl.SUCCESS
    peer.fill(1)
    assert engine.connect(peer.name, 10_000) == hixl.SUCCESS
    allowed = [hixl.TransferOpDesc(address, peer.address, 4096)]
    assert engine.transfer_sync(peer.name, hixl.READ, allowed, 10_000) == hixl.SUCCESS
    assert array.tobytes() == peer.bytes()[:4096]
    for op in hixl.TransferOp:
        refused = [hixl.TransferOpDesc(address, theirs, 64)]
        assert engine.transfer_sync(peer.name, op, refused, 10_000) == hixl.PARAM_INVALID
    # A registration for all is another one.
    peer.run("desc.local_only = False\nassert engine.register_mem(desc, hixl.MEM_HOST)[0] == 0")
    assert engine.transfer_sync(peer.name, hixl.READ, refused, 10_000) == hixl.SUCCESS


def test_an_unknown_handle_deregisters_nothing(engine: hixl.Hixl, peer: Peer) -> None:
    place = Place("host", 2)
    first, second = (registered(engine, place) for _ in range(2))
    assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
    assert engine.deregister_mem(0) == hixl.PARAM_INVALID
    for handle in (first.handle, first.handle, 2**40, first.handle + second.handle + 1):
        assert engine.deregister_mem(handle) == hixl.SUCCESS
    for memory, status in ((first, hixl.PARAM_INVALID), (second, hixl.SUCCESS)):
        moved = [TransferOpDesc(memory.address, peer.address, 4096)]
        assert engine.transfer_sync(peer.name, hixl.READ, moved, LONG_MS) == status


def test_an_exception_of_the_engine_is_an_invalid_argument_or_a_failure() -> None:
    assert {kind: status_of(kind("a reason")) for kind in REFUSALS} == {
        LLMException: hixl.FAILED,
        ValueError: hixl.PARAM_INVALID,
        OverflowError: hixl.FAILED,
        NativeError: hixl.FAILED,
        OSError: hixl.FAILED,
        MemoryError: hixl.FAILED,
    }


class Unreleased:
    """A running engine that cannot release its memory."""

    def close(self) -> None:
        raise LLMException("its memory is still written")


def test_finalize_logs_what_could_not_be_released(caplog: pytest.LogCaptureFixture) -> None:
    engine = hixl.Hixl()
    engine._running = cast(Any, Unreleased())
    engine.finalize()
    assert "finalize: FAILED: its memory is still written" in caplog.text
    assert engine.initialize("127.0.0.1") == hixl.SUCCESS
    engine.finalize()


def test_a_second_finalize_waits_for_the_first() -> None:
    """Each caller may free the memory after its own call. `initialize` waits, too."""
    engine = hixl.Hixl()
    free: list[bool] = []

    class Ending:
        def close(self) -> None:
            with ThreadPoolExecutor(1) as others:
                free.append(others.submit(engine._mutex.acquire, blocking=False).result())

    engine._running = cast(Any, Ending())
    engine.finalize()
    assert free == [False]


class Ended:
    """A task that has ended, or has not."""

    settled = False

    def wait(self) -> None:
        assert self.settled

    def wait_done(self, timeout_ms: float) -> bool:
        return self.settled


def test_open_requests_are_bounded(engine: hixl.Hixl, peer: Peer) -> None:
    """A request beyond the limit moves no byte until the end of another one has been returned."""
    memory = registered(engine, Place("host", 2))
    peer.fill(5)
    assert engine.connect(peer.name, LONG_MS) == hixl.SUCCESS
    moved = [TransferOpDesc(memory.address, peer.address, 4096)]
    running: Any = engine._running
    before = memory.array.copy()
    tasks = [Ended() for _ in range(65_536)]  # as docs/how-to/hixl.md says
    numbers = [running.requests.add(Request(task, None, peer.name, "READ")) for task in tasks]
    for done in (False, True):
        tasks[7].settled = done  # a task is open until its status is asked for
        refused = engine.transfer_async(peer.name, hixl.READ, moved)
        assert refused == (hixl.RESOURCE_EXHAUSTED, 0)
    np.testing.assert_array_equal(memory.array, before)
    assert engine.get_transfer_status(numbers[7]) == (hixl.SUCCESS, TransferStatus.COMPLETED)
    status, request = engine.transfer_async(peer.name, hixl.READ, moved)
    assert status == hixl.SUCCESS
    assert engine.transfer_async(peer.name, hixl.READ, moved)[0] == hixl.RESOURCE_EXHAUSTED
    while (ended := engine.get_transfer_status(request))[1] == TransferStatus.WAITING:
        pass
    assert ended == (hixl.SUCCESS, TransferStatus.COMPLETED)
    running.requests = type(running.requests)()  # these objects cannot be stopped as tasks
