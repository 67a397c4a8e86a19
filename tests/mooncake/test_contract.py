"""Transfers between two processes: right bytes, and no more of them after -1."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import combinations
from typing import Any, cast

import numpy as np
import pytest

import kvplan
from kvplan import AddressRanges, CacheDesc, DataType, LLMException, Rows, Transfer, Transfers
from kvplan.addressed.engine import Request
from kvplan.execution import TransferTask
from kvplan.mooncake.engine import TransferEngine, TransferNotify, Write
from tests.support import peer
from tests.support.refusals import refused

MIB = 1 << 20


class Peer(peer.Peer):
    """A process with an engine called `name`, and its `memory` at `address`."""

    module = "tests.mooncake.peer_process"

    def __init__(self, nbytes: int = MIB) -> None:
        super().__init__()
        self.name, self.address = self.run(
            """
            memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
            memory[:] = np.resize(np.arange(251, dtype=np.uint8), nbytes)
            engine = TransferEngine()
            assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
            assert engine.register_memory(memory.ctypes.data, nbytes) == 0
            result = f"127.0.0.1:{engine.get_rpc_port()}", memory.ctypes.data
            """,
            nbytes=nbytes,
        )


class Here:
    """An engine of this process, and its memory."""

    def __init__(self, peer: Peer, nbytes: int = MIB) -> None:
        self.peer = peer
        self.engine = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.memory = np.full(nbytes, 0xAB, np.uint8)
        self.address = self.memory.ctypes.data
        assert self.engine.register_memory(self.address, nbytes) == 0


@pytest.fixture(params=["local", "tcp"])
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], Here]]:
    """A function that makes a peer with memory of a size, and an engine here with as much."""
    monkeypatch.setenv("KVPLAN_TRANSPORT", request.param)
    with ExitStack() as held:

        def make(nbytes: int = MIB) -> Here:
            peer = Peer(nbytes)
            held.callback(peer.close)
            here = Here(peer, nbytes)
            held.callback(here.engine.close)
            return here

        yield make


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_batch_that_is_refused_registers_nothing(wrong: int) -> None:
    """Any of three pieces is refused; afterwards all of the memory can be registered."""
    engine, memory = TransferEngine(), np.zeros(4096, np.uint8)
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    addresses, sizes = [memory.ctypes.data + 1024 * i for i in range(3)], [1024] * 3
    sizes[wrong] = 0
    assert engine.batch_register_memory(addresses, sizes) < 0
    assert engine.get_first_buffer_address(engine._own) == 0
    assert engine.register_memory(memory.ctypes.data, 4096) == 0
    engine.close()


def test_a_restarted_engine_has_no_earlier_memory() -> None:
    engine, memory = TransferEngine(), np.zeros(4096, np.uint8)
    for _ in range(2):
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert engine.get_first_buffer_address(engine._own) == 0
        assert engine.register_memory(memory.ctypes.data, 4096) == 0
        engine.close()


OUTCOMES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "get_rpc_port": ((), -1),
    "send_probe": (("127.0.0.1:9",), -1),
    "register_memory": ((4096, 1), -1),
    "unregister_memory": ((4096,), -1),
    "batch_register_memory": (([4096], [1]), -1),
    "batch_unregister_memory": (([4096],), -1),
    "allocate_managed_buffer": ((1,), 0),
    "free_managed_buffer": ((4096, 1), -1),
    "write_bytes_to_buffer": ((4096, b"a", 1), -1),
    "get_first_buffer_address": (("127.0.0.1:9",), 0),
    "transfer_sync_read": (("127.0.0.1:9", 4096, 4096, 1), -1),
    "transfer_submit_write": (("127.0.0.1:9", 4096, 4096, 1), -1),
    "batch_transfer_async_read": (("127.0.0.1:9", [4096], [4096], [1]), 0),
    "get_batch_transfer_status": (([],), -1),
    "transfer_check_status": ((1,), -1),
    "get_notifies": ((), []),
}


def test_calls_of_an_engine_that_is_not_initialized_or_closed() -> None:
    engine = TransferEngine()
    for initialized_before in (False, True):
        for name, (arguments, expected) in OUTCOMES.items():
            assert getattr(engine, name)(*arguments) == expected, (name, initialized_before)
        with refused("LLM_PARAM_INVALID", "is not registered"):
            engine.read_bytes_from_buffer(4096, 1)
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        engine.close()


@pytest.fixture
def single_engine() -> Iterator[TransferEngine]:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    yield engine
    engine.close()


class Transferring:
    """A transfer that ends once a call has waited for it long enough."""

    done = settled = False

    def __init__(self, takes_ms: float, failure: LLMException | None = None) -> None:
        self._takes_ms, self._failure = takes_ms, failure

    def wait_done(self, timeout_ms: float) -> bool:
        self.done = self.settled = timeout_ms >= self._takes_ms
        return self.done

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure


@pytest.mark.parametrize("takes_ms", [0, 3_000_000], ids=["at once", "in fifty minutes"])
@pytest.mark.parametrize("failed", [None, 0, 1, 2])
def test_a_failed_batch_fails_all_and_all_are_forgotten(
    single_engine: TransferEngine, failed: int | None, takes_ms: float
) -> None:
    """Each batch has a timeout of an hour, and the wait lasts as long."""
    requests = single_engine._running().requests
    batches = [
        requests.add(
            Request(
                cast(
                    TransferTask,
                    Transferring(takes_ms, LLMException("cut") if number == failed else None),
                ),
                AddressRanges(1, [1], [1], [1]),
                "there",
                "READ",
                time.monotonic() + 3600,
            )
        )
        for number in range(3)
    ]
    assert single_engine.get_batch_transfer_status(batches) == (0 if failed is None else -1)
    assert requests.numbers() == []


@pytest.mark.parametrize(
    ("has_ended", "left_s", "status"), [(False, 3600, 0), (False, 0, -2), (True, 0, 1)]
)
def test_a_batch_that_times_out_is_stopped(
    single_engine: TransferEngine, has_ended: bool, left_s: float, status: int
) -> None:
    """A batch that has ended in time is a success, even if its status is queried late."""
    desc = CacheDesc(1, (1, 8), DataType.DT_INT8)
    plan = kvplan.plan(Transfer(Rows(desc, [0]), Rows(desc, [0])), local="dst")
    arrays = [[np.full(8, fill, np.uint8)] for fill in (1, 2)]
    with Transfers() as transfers:
        task = transfers.layered(plan, *arrays)
        if has_ended:
            task.ready(0)
            task.wait()
        ranges = AddressRanges(1, [1], [1], [1])
        request = Request(task, ranges, "there", "READ", time.monotonic() + left_s)
        batch = single_engine._running().requests.add(request)
        assert single_engine.transfer_check_status(batch) == status
        assert (task.done, arrays[1][0][0]) == (status != 0, 1 if has_ended else 2)
        assert single_engine._running().requests.numbers() == ([batch] if status == 0 else [])
        task.cancel()


@pytest.mark.parametrize("unknown", [0, 1, 2])
def test_an_unknown_batch_does_not_end_the_wait_for_others(
    make: Callable[[int], Here], unknown: int
) -> None:
    """The other batches have ended when -1 is returned."""
    here = make()
    lists = [here.address], [here.peer.address], [MIB]
    batches = [here.engine.batch_transfer_async_read(here.peer.name, *lists) for _ in range(2)]
    batches.insert(unknown, 1 << 40)
    assert here.engine.get_batch_transfer_status(batches) == -1
    assert here.engine._running().requests.numbers() == []
    assert here.memory.tobytes() == pattern(0, MIB)


def test_a_batch_is_withdrawn_completely(single_engine: TransferEngine) -> None:
    memory = np.zeros(4096, np.uint8)
    addresses = [memory.ctypes.data + 1024 * i for i in range(3)]
    assert single_engine.batch_register_memory(addresses, [1024] * 3) == 0
    assert single_engine.batch_unregister_memory(addresses) == 0
    assert single_engine.register_memory(memory.ctypes.data, 4096) == 0


def test_bytes_move_only_inside_of_registrations(
    single_engine: TransferEngine,
) -> None:
    memory = np.zeros(4096, np.uint8)
    first = memory.ctypes.data + 1024
    for address in (first, first + 1024 + 8):  # with a gap of 8 bytes
        assert single_engine.register_memory(address, 1024) == 0
        for at in (address, address + 1024 - 4):
            assert single_engine.write_bytes_to_buffer(at, b"text", 4) == 0
            assert single_engine.read_bytes_from_buffer(at, 4) == b"text"
        memory[:] = 0
        for at in (address - 1, address + 1024 - 3, address + 1024):
            assert single_engine.write_bytes_to_buffer(at, b"text", 4) < 0
            with refused("LLM_PARAM_INVALID", "is not registered"):
                single_engine.read_bytes_from_buffer(at, 4)
        assert not memory.any()


def test_a_length_below_0_neither_reads_nor_writes(single_engine: TransferEngine) -> None:
    memory = np.zeros(4096, np.uint8)
    memory[:8] = 7
    assert single_engine.register_memory(memory.ctypes.data, 4096) == 0
    with pytest.raises(TypeError, match="length=-0x1 is out of range"):
        single_engine.read_bytes_from_buffer(memory.ctypes.data, -1)
    with pytest.raises(TypeError, match="length=-0x1 is out of range"):
        single_engine.write_bytes_to_buffer(memory.ctypes.data, b"text", -1)
    assert memory.tobytes() == b"\7" * 8 + bytes(4088)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
def test_pieces_without_a_gap_are_registered_in_any_order(
    single_engine: TransferEngine, order: tuple[int, ...]
) -> None:
    memory = np.zeros(3072, np.uint8)
    for piece in order:
        assert single_engine.register_memory(memory.ctypes.data + 1024 * piece, 1024) == 0


def test_memory_that_overlaps_a_registration_is_refused_and_only_then(
    single_engine: TransferEngine,
) -> None:
    """The test tries every range of units, beside and between registrations of two units each."""
    memory = np.zeros(8 * 64, np.uint8)
    taken = {1, 2, 5, 6}
    for unit in (1, 5):
        assert single_engine.register_memory(memory.ctypes.data + 64 * unit, 128) == 0
    for begin, end in combinations(range(9), 2):
        address = memory.ctypes.data + 64 * begin
        is_refused = single_engine.register_memory(address, 64 * (end - begin)) < 0
        assert is_refused is not taken.isdisjoint(range(begin, end)), (begin, end)
        assert is_refused or single_engine.unregister_memory(address) == 0


def test_a_managed_buffer_is_freed_though_it_was_unregistered(
    single_engine: TransferEngine,
) -> None:
    address = single_engine.allocate_managed_buffer(4096)
    assert single_engine.unregister_memory(address) == 0
    assert single_engine.free_managed_buffer(address, 4096) == 0
    assert single_engine._buffers == {}
    assert single_engine.free_managed_buffer(address, 4096) < 0


def test_memory_that_is_registered_inside_a_managed_buffer_is_withdrawn_with_it(
    single_engine: TransferEngine,
) -> None:
    address = single_engine.allocate_managed_buffer(1 << 14)
    assert single_engine.unregister_memory(address) == 0
    for offset in (4096, 12288):
        assert single_engine.register_memory(address + offset, 4096) == 0
    other = np.zeros(4096, np.uint8)
    assert single_engine.register_memory(other.ctypes.data, 4096) == 0
    assert single_engine.free_managed_buffer(address, 1 << 14) == 0
    assert [*single_engine._registered] == [other.ctypes.data]


@pytest.mark.parametrize("short", [0, 1, 2])
def test_lists_of_a_batch_need_equal_lengths(single_engine: TransferEngine, short: int) -> None:
    memory = np.zeros(4096, np.uint8)
    address = memory.ctypes.data
    assert single_engine.register_memory(address, 4096) == 0
    lists = [[address, address + 64], [address + 1024, address + 2048], [8, 8]]
    assert single_engine.batch_transfer_sync_read(single_engine._own, *lists) == 0
    lists[short].pop()
    assert single_engine.batch_transfer_sync_read(single_engine._own, *lists) < 0


@pytest.mark.parametrize("call", ["batch_transfer_async_read", "batch_transfer_async_write"])
def test_a_batch_without_ranges_is_done(make: Callable[[int], Here], call: str) -> None:
    """Mooncake returns a batch, too: 0 means a failure, such as a peer that cannot be reached."""
    here = make()
    begin = getattr(here.engine, call)
    one, other = (begin(here.peer.name, [], [], []) for _ in range(2))
    assert len({0, one, other}) == 3
    assert here.engine.transfer_check_status(one) == 1
    assert here.engine.transfer_check_status(one) == -1  # forgotten
    moving = begin(here.peer.name, [here.address], [here.peer.address], [64])
    assert here.engine.get_batch_transfer_status([other, moving]) == 0
    assert here.engine.get_batch_transfer_status([other]) == -1
    assert begin("127.0.0.1:1", [], [], []) == 0
    at_once = getattr(here.engine, call.replace("async", "sync"))
    assert [at_once(name, [], [], []) for name in (here.peer.name, "127.0.0.1:1")] == [0, -1]


def test_batches_without_ranges_count_as_open_and_end_with_their_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvplan.addressed.engine.MAX_REQUESTS", 2)
    engine, given = TransferEngine(), ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    assert engine.initialize(*given) == 0
    one, other, refused = (
        engine.batch_transfer_async_read(engine._own, [], [], []) for _ in range(3)
    )
    assert len({0, one, other}) == 3
    assert refused == 0
    assert engine.transfer_check_status(one) == 1
    assert engine.batch_transfer_async_read(engine._own, [], [], [])
    engine.close()
    assert engine.initialize(*given) == 0
    assert engine.transfer_check_status(other) == -1
    engine.close()


def test_a_link_causes_no_warning_and_a_failed_one_a_single_line(
    make: Callable[[int], Here], caplog: pytest.LogCaptureFixture
) -> None:
    """The cluster id of a peer is not known before it has answered once."""
    here = make()
    assert here.engine.send_probe(here.peer.name) == 0
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
    assert here.engine.send_probe("127.0.0.1:1") == -1
    (line,) = [record for record in caplog.records if record.levelname != "INFO"]
    assert line.name == "kvplan.mooncake"
    assert "127.0.0.1:1: connect: Connection refused" in line.getMessage()


def test_a_notification_of_several_pieces_comes_with_its_batch(make: Callable[[int], Here]) -> None:
    here = make()
    text = "long " * 100_000  # more than one notification of the engine has room for
    lists = [here.address], [here.peer.address], [64]
    notify = TransferNotify("name", text)
    assert here.engine.batch_transfer_sync(here.peer.name, *lists, Write, notify) == 0
    found = here.peer.run(
        """
        found = []
        while not found:
            found = engine.get_notifies()
        result = [(its.name, its.msg) for its in found], int(memory[:64].min())
        """
    )
    assert found == ([("name", text)], 0xAB)


def test_a_notification_without_ranges_arrives(make: Callable[[int], Here]) -> None:
    here = make()
    notify = TransferNotify("name", "text")
    assert here.engine.batch_transfer_sync(here.peer.name, [], [], [], Write, notify) == 0
    found = here.peer.run("result = [(its.name, its.msg) for its in engine.get_notifies()]")
    assert found == [("name", "text")]


@pytest.mark.parametrize("count", [0, 1])
def test_a_notification_to_oneself(single_engine: TransferEngine, count: int) -> None:
    """The message arrives or is refused: 0 is never returned for a lost one."""
    memory = np.zeros(4096, np.uint8)
    assert single_engine.register_memory(memory.ctypes.data, 4096) == 0
    lists = [memory.ctypes.data], [memory.ctypes.data + 1024], [8]
    given = [each[:count] for each in lists]
    notify = TransferNotify("name", "text")
    status = single_engine.batch_transfer_sync(single_engine._own, *given, Write, notify)
    assert len(single_engine.get_notifies()) == (status == 0)


def pattern(first: int, nbytes: int) -> bytes:
    return np.resize(np.roll(np.arange(251, dtype=np.uint8), -first), nbytes).tobytes()


@pytest.mark.parametrize("nbytes", [1, 4 * MIB + 1, 12 * MIB + 4096])
def test_bytes_of_any_size_arrive(make: Callable[[int], Here], nbytes: int) -> None:
    here = make(13 * MIB)
    name, address = here.peer.name, here.peer.address
    assert here.engine.transfer_sync_read(name, here.address + 1, address + 3, nbytes) == 0
    assert here.memory[1 : 1 + nbytes].tobytes() == pattern(3, nbytes)
    assert (here.memory[0], here.memory[1 + nbytes]) == (0xAB, 0xAB)


def test_a_batch_is_done_when_all_of_its_entries_are(make: Callable[[int], Here]) -> None:
    """A caller that polls Mooncake learns of the first entry only."""
    here = make(16 * MIB)
    count = 64
    size = 16 * MIB // count
    starts = [size * i for i in range(count)]
    batch = here.engine.batch_transfer_async_read(
        here.peer.name,
        [here.address + start for start in starts],
        [here.peer.address + start for start in starts],
        [size - 1] * count,
    )
    assert batch > 0
    while (status := here.engine.transfer_check_status(batch)) == 0:
        pass
    assert status == 1
    expected = np.frombuffer(pattern(0, 16 * MIB), np.uint8).reshape(count, size)[:, :-1]
    assert np.array_equal(here.memory.reshape(count, size)[:, :-1], expected)
    assert here.engine.transfer_check_status(batch) == -1  # the batch is forgotten


def test_after_minus_one_nothing_is_written(
    make: Callable[[int], Here], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Mooncake #4247: a batch returns -1 at its deadline, and still writes."""
    if "local" in request.node.name:
        pytest.skip("over local the owner takes no part")
    monkeypatch.setattr("kvplan.mooncake.values._LEAST_S", 0)
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "0")
    here = make(4 * MIB)
    name, address = here.peer.name, here.peer.address
    assert here.engine.send_probe(name) == 0
    here.peer.stop()
    try:
        status = here.engine.transfer_sync_read(name, here.address, address, 4 * MIB)
        assert status == -1
        here.memory[:] = 0xCD
    finally:
        here.peer.resume()
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "30")
    probe = Here(here.peer, 4096)
    assert probe.engine.transfer_sync_read(name, probe.address, address, 4096) == 0
    probe.engine.close()
    assert (here.memory == 0xCD).all()


def test_a_peer_that_is_killed(
    make: Callable[[int], Here], caplog: pytest.LogCaptureFixture
) -> None:
    here = make(MIB)
    args = (here.peer.name, here.address, here.peer.address, 4096)
    assert here.engine.transfer_sync_read(*args) == 0
    here.peer.kill()
    with caplog.at_level(logging.WARNING, "kvplan.mooncake"):
        assert here.engine.transfer_sync_read(*args) == -1
    assert f"batch_transfer_sync '{here.peer.name}'" in caplog.text
    assert here.engine.unregister_memory(here.address) == 0


def test_an_error_names_the_range(
    make: Callable[[int], Here], caplog: pytest.LogCaptureFixture
) -> None:
    here = make(MIB)
    start = here.peer.address + MIB
    with caplog.at_level(logging.WARNING, "kvplan.mooncake"):
        assert here.engine.transfer_sync_read(here.peer.name, here.address, start, 8) == -1
    assert f"remote range 0, [{start:#x}, {start + 8:#x})" in caplog.text
    assert (here.memory == 0xAB).all()


def test_an_unknown_batch_is_logged_by_its_number(
    make: Callable[[int], Here], caplog: pytest.LogCaptureFixture
) -> None:
    here = make(1)
    with caplog.at_level(logging.WARNING, "kvplan.mooncake"):
        assert here.engine.get_batch_transfer_status([99]) == -1
        assert here.engine.transfer_check_status(99) == -1
    assert [record.getMessage().partition(" is unknown")[0] for record in caplog.records] == [
        "get_batch_transfer_status: request 99",
        "transfer_check_status: request 99",
    ]
