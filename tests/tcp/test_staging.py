"""Memory of a simulated GPU on a connection: few copies, which run while the socket is busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from ctypes import c_uint8
from pathlib import Path

import numpy as np
import pytest

from kvnative._backend import KVN_FAILED, KVN_NO_DEVICE_MEMORY, KVN_OK, CallError
from kvnative._cuda import CudaLibrary
from kvnative._device import Device
from kvnative._executor import Executor
from kvnative._report import Report
from kvnative._tcp import TcpService, tcp_backend
from tests.ascend.simulator import Log
from tests.cuda_sim.simulator import CudaControls, cuda_simulator, sim_folder
from tests.datadist.layers import wait_until
from tests.support.compiled import Check, compiled
from tests.support.held import Held
from tests.tcp.frames import ANSWER_NBYTES, PULL, Attacked, Range, Run, answer, attack, request
from tests.tcp.peer import (
    DIRECTIONS,
    SECRET,
    TIMEOUT_MS,
    Bytes,
    Span,
    blocks,
    both,
    descriptors,
    link_within,
    u64,
)

__all__ = ["cuda_simulator", "sim_folder"]  # fixtures

MIB = 1 << 20
NBYTES = 16 * MIB  # more than may be in flight at first
SLOT = MIB // 2  # of device memory per copy
COPIES = (
    *("cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"),
    *("cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"),
)
KERNEL = "cuLaunchKernel"
BLOCK = 32 << 10
ROOM = 32 << 10  # roughly the bytes that the sockets of a peer buffer
A_WHILE_S = 0.1  # enough for a call to return that does not wait

plain = pytest.mark.parametrize("ends", [None], ids=["plain"], indirect=True)
directions = pytest.mark.parametrize("direction", DIRECTIONS)


@pytest.fixture
def device(cuda_simulator: CudaControls) -> Iterator[Device]:
    device = CudaLibrary.load().device(3)
    yield device
    device.close()


@pytest.fixture
def log(cuda_simulator: CudaControls, sim_folder: Path) -> Log:
    return Log(sim_folder / "log")


class Memory:
    """NBYTES of a device; `bytes` is the device's memory, which the simulator shows."""

    def __init__(self, device: Device, simulator: CudaControls, seed: int) -> None:
        self._buffer = device.allocate(NBYTES)
        self.address = self._buffer.address
        view = (c_uint8 * NBYTES).from_address(simulator.host_view(self.address))
        self.bytes: Bytes = np.ctypeslib.as_array(view)
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8)


class Ends:
    """Two linked services with a device, each with memory of the device."""

    def __init__(self, device: Device, simulator: CudaControls, secret: bytes | None) -> None:
        self.near, self.far = (TcpService(1, max_ranges=4, device=device) for _ in range(2))
        self.links = link_within(self.near, self.far, secret=secret)
        self.here, self.there = (Memory(device, simulator, seed) for seed in (1, 2))
        self.far.add_range(0, self.there.address, NBYTES, True, 1, on_device=True)

    def executor(self, direction: str) -> Executor:
        column = map(u64, (0, 1, self.there.address, NBYTES))
        return Executor(tcp_backend(self.links[0], 0, direction, *column, on_device=True))

    def run(self, direction: str, spans: list[Span]) -> Report:
        with self.executor(direction) as executor:
            moved = descriptors(direction, self.here.address, self.there.address, spans)
            return executor.run(moved, TIMEOUT_MS)

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture(params=[None, SECRET], ids=["plain", "encrypted"])
def ends(
    device: Device, cuda_simulator: CudaControls, request: pytest.FixtureRequest
) -> Iterator[Ends]:
    ends = Ends(device, cuda_simulator, request.param)
    yield ends
    cuda_simulator.end_hangs()
    ends.close()


@directions
@pytest.mark.parametrize("block", [32 << 10, MIB, NBYTES], ids=["blocks", "MiB", "whole"])
def test_each_half_of_a_mebibyte_is_one_copy_at_each_end(
    ends: Ends, log: Log, direction: str, block: int
) -> None:
    spans = blocks(NBYTES // block, block, total=NBYTES)
    expected = both(ends.there.bytes, direction, ends.here.bytes, spans)
    log.restart()
    report = ends.run(direction, spans)
    assert report.status == KVN_OK, report.message
    assert len(log.calls(*COPIES)) == 2 * NBYTES // SLOT
    assert np.array_equal(ends.here.bytes, expected[0])
    assert np.array_equal(ends.there.bytes, expected[1])


@directions
@pytest.mark.parametrize(
    "nbytes",
    [1, SLOT - 1, SLOT, SLOT + 1, MIB - 1, MIB, MIB + 1, 3 * MIB + 777],
)
def test_any_number_of_bytes_arrives(ends: Ends, direction: str, nbytes: int) -> None:
    spans = [(5, 9, nbytes)]
    expected = both(ends.there.bytes, direction, ends.here.bytes, spans)
    report = ends.run(direction, spans)
    assert (report.status, report.bytes_done) == (KVN_OK, nbytes), report.message
    assert np.array_equal(ends.here.bytes, expected[0])
    assert np.array_equal(ends.there.bytes, expected[1])


RUN_STRIDE = 2 * BLOCK


def strided(memory: Memory) -> Bytes:
    """Return the memory of a request for `MANY`: a mebibyte in blocks, which a kernel copies."""
    return memory.bytes[: 2 * MIB].reshape(-1, RUN_STRIDE)[:, :BLOCK]


def many(memory: Memory) -> list[Run]:
    return [Run(memory.address, BLOCK, MIB // BLOCK, RUN_STRIDE)]


@pytest.fixture
def hostile(ends: Ends) -> Iterator[Attacked]:
    peer = attack(ends.far, room=ROOM)
    yield peer
    peer.close()


@plain
def test_the_next_copy_runs_while_the_socket_has_not_taken_the_last(
    ends: Ends, hostile: Attacked, cuda_simulator: CudaControls, log: Log
) -> None:
    """The peer reads nothing until the second copy begins, which runs while it reads the first."""
    cuda_simulator.add_fault(f"{KERNEL}:2=hang")
    log.restart()
    hostile.asks.send(request(PULL, [Range(0, 1)], many(ends.there)))
    wait_until(lambda: len(log.calls(*COPIES)) == 2)
    assert hostile.asks.read_answer() == (0, 0, 0, 0)
    expected = strided(ends.there).tobytes()
    assert hostile.asks.read(BLOCK) == expected[:BLOCK]
    cuda_simulator.end_hangs()
    assert hostile.asks.read(MIB - BLOCK) == expected[BLOCK:]
    assert hostile.asks.read(ANSWER_NBYTES) == answer(0)


@directions
@pytest.mark.parametrize("side", ["near", "far"])
def test_the_end_of_a_transfer_waits_for_the_copy_in_flight(
    ends: Ends, cuda_simulator: CudaControls, log: Log, direction: str, side: str
) -> None:
    """After a peer has deregistered, or a transfer was cancelled, no byte moves."""
    memory = ends.here if side == "near" else ends.there
    on_host = np.zeros(NBYTES, np.uint8)
    there = ends.there.address if side == "far" else on_host.ctypes.data
    here = ends.here.address if side == "near" else on_host.ctypes.data
    ends.far.add_range(1, there, NBYTES, True, 1, on_device=side == "far")
    column = map(u64, (1, 1, there, NBYTES))
    backend = tcp_backend(ends.links[0], 0, direction, *column, on_device=side == "near")
    spans = blocks(12 * MIB // BLOCK, BLOCK, total=NBYTES)  # more than sockets buffer
    log.restart()
    cuda_simulator.add_fault(f"{KERNEL}:4=hang")
    with Executor(backend) as executor:
        task = executor.submit(descriptors(direction, here, there, spans))
        wait_until(lambda: len(log.calls(KERNEL)) == 4)
        stop = task.cancel if side == "near" else lambda: ends.far.remove_range(1)
        thread = threading.Thread(target=stop)
        thread.start()
        thread.join(A_WHILE_S)
        waited = thread.is_alive()
        cuda_simulator.end_hangs()
        thread.join(TIMEOUT_MS / 1000)
        memory.bytes[:] = 0xEE
        report = task.wait(TIMEOUT_MS)
    assert waited
    assert report.status != KVN_OK
    assert (memory.bytes == 0xEE).all()


@directions
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_copy_that_fails_once_is_made_again(
    ends: Ends, cuda_simulator: CudaControls, direction: str, nth: int
) -> None:
    """The copy goes to the first slot, the second, or the first again."""
    spans = blocks(4 * MIB // BLOCK, BLOCK, total=NBYTES)
    expected = both(ends.there.bytes, direction, ends.here.bytes, spans)
    cuda_simulator.add_fault(f"{KERNEL}:{nth}=1")
    report = ends.run(direction, spans)
    assert cuda_simulator.faults_left() == 0
    assert report.status == KVN_OK, report.message
    assert np.array_equal(ends.here.bytes, expected[0])
    assert np.array_equal(ends.there.bytes, expected[1])


def slots(log: Log) -> set[int]:
    """Return the addresses of slots that were pinned since the log was restarted."""
    calls = log.calls("cuMemHostAlloc")
    return {call.fields["address"] for call in calls if call.fields["bytes"] >= 4 * SLOT}


@plain
@directions
def test_a_link_pins_its_slots_when_it_first_moves_memory_of_the_device(
    log: Log, ends: Ends, direction: str
) -> None:
    """A link that moves only host memory pins no memory."""
    idle = [link_within(ends.near, ends.far) for _ in range(64)]
    here, there = (np.zeros(MIB, np.uint8) for _ in range(2))
    ends.far.add_range(1, there.ctypes.data, MIB, True, 1)
    backend = tcp_backend(ends.links[0], 0, direction, *map(u64, (1, 1, there.ctypes.data, MIB)))
    with Executor(backend) as executor:
        moved = descriptors(direction, here.ctypes.data, there.ctypes.data, [(0, 0, MIB)])
        assert executor.run(moved, TIMEOUT_MS).status == KVN_OK
    assert slots(log) == set()
    for _ in range(2):
        assert ends.run(direction, [(0, 0, MIB)]).status == KVN_OK
        assert len(slots(log)) == 2  # of the requesting end, and of the serving end
    pinned = slots(log)
    assert len(idle) == 64
    ends.close()
    assert pinned <= {call.fields["address"] for call in log.calls("cuMemFreeHost")}


@plain
@directions
def test_a_transfer_without_memory_for_the_slots_here_is_refused(
    ends: Ends, cuda_simulator: CudaControls, direction: str
) -> None:
    cuda_simulator.add_fault("cuMemHostAlloc:1=2")
    with pytest.raises(CallError, match="cuMemHostAlloc: 2") as caught:
        ends.executor(direction)
    assert caught.value.status == KVN_NO_DEVICE_MEMORY
    assert ends.run(direction, [(0, 0, MIB)]).status == KVN_OK


def test_services_that_are_closed_leave_no_thread_though_slots_found_no_memory(
    device: Device, cuda_simulator: CudaControls
) -> None:
    """The threads end even while the error is held."""
    before = Held.now()
    ends = Ends(device, cuda_simulator, None)
    cuda_simulator.add_fault("cuMemHostAlloc:1=2")
    with pytest.raises(CallError, match="cuMemHostAlloc: 2"):
        ends.executor("get")
    ends.close()
    before.check_new_threads(set())


@plain
@directions
def test_a_transfer_without_memory_for_the_slots_of_the_peer_fails(
    ends: Ends, cuda_simulator: CudaControls, direction: str
) -> None:
    spans = [(5, 9, 3 * MIB)]
    before = ends.here.bytes.copy(), ends.there.bytes.copy()
    expected = both(ends.there.bytes, direction, ends.here.bytes, spans)
    with ends.executor(direction):
        cuda_simulator.add_fault("cuMemHostAlloc:1=2", "cuMemHostAlloc:2=2", "cuMemHostAlloc:3=2")
    report = ends.run(direction, spans)
    assert (report.status, report.failed) == (KVN_FAILED, 0)
    assert "of the peer, which has it on a device, which did not copy it" in report.message
    assert np.array_equal(ends.there.bytes, before[1])
    cuda_simulator.clear_faults()
    assert ends.run(direction, spans).status == KVN_OK
    assert np.array_equal(ends.here.bytes, expected[0])
    assert np.array_equal(ends.there.bytes, expected[1])


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    return compiled(
        tmp_path_factory.mktemp("stage"), "tests/tcp/stage_main.c", "tcp/stage.c", "tcp/stream.c"
    )


@pytest.mark.parametrize(
    "name", ["reads_beside_a_copy", "sends_beside_a_copy", "waits_after_a_failed_send"]
)
def test_stage(check: Check, name: str) -> None:
    """With a device of the test, the socket acts between the begin and the end of a copy."""
    check(name)
