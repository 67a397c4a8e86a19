"""Memory of a simulated device on either side, alone and together with host memory."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from ctypes import c_uint8

import numpy as np
import pytest

from kvnative._backend import KVN_CANCELLED, KVN_FAILED, KVN_OK
from kvnative._device import Device, DeviceBuffer
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._report import Report
from kvnative._tcp import TcpNativeLink, TcpService, tcp_backend
from tests.ascend.fixtures import device, sim_folder, simulator
from tests.ascend.simulator import Controls
from tests.support.spare import copy_of, is_same
from tests.tcp.frames import (
    ANSWER_NBYTES,
    DEREGISTERED,
    MOVED,
    PULL,
    Range,
    Run,
    answer,
    attack,
    request,
)
from tests.tcp.peer import (
    DIRECTIONS,
    PAGE,
    SECRET,
    TIMEOUT_MS,
    Bytes,
    Span,
    backend_of,
    both,
    descriptors,
    link_within,
    protect,
    u64,
)

__all__ = ["device", "sim_folder", "simulator"]  # fixtures

NBYTES = 8 << 20  # more than sockets buffer
PLACES = ["host", "device"]
SPANS = [(i * 9000, (i * 7919 % 900) * 9000, 9000) for i in range(900)]

directions = pytest.mark.parametrize("direction", DIRECTIONS)
remotes = pytest.mark.parametrize("remote", PLACES)
locals_ = pytest.mark.parametrize("local", PLACES)


class Memory:
    """NBYTES on the host or on a device; `bytes` is the content."""

    def __init__(self, place: str, device: Device, seed: int) -> None:
        self.on_device = place == "device"
        self.bytes: Bytes = np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        if self.on_device:
            self._buffer: DeviceBuffer = device.allocate(NBYTES)
            self.address = self._buffer.address
            device.write(self.address, self.bytes)

    def see(self, simulator: Controls) -> Memory:
        """Let `bytes` be the device's own memory from now on."""
        if self.on_device:
            view = (c_uint8 * NBYTES).from_address(simulator.host_view(self.address))
            self.bytes = np.frombuffer(view, np.uint8)
        return self


def memories(device: Device, simulator: Controls, places: Sequence[str]) -> Iterator[Memory]:
    return (Memory(place, device, seed).see(simulator) for seed, place in enumerate(places))


class Ends:
    """Two linked services with a device, of which the far one registers `remote`."""

    def __init__(self, device: Device, secret: bytes | None) -> None:
        self.near, self.far = (TcpService(1, max_ranges=4, device=device) for _ in range(2))
        self.links = link_within(self.near, self.far, secret=secret)

    def run(self, direction: str, local: Memory, remote: Memory, spans: list[Span]) -> Report:
        link = self.links[0]
        column = map(u64, (0, 1, remote.address, NBYTES))
        backend = tcp_backend(link, 0, direction, *column, on_device=local.on_device)
        with Executor(backend) as executor:
            moved = descriptors(direction, local.address, remote.address, spans)
            return executor.run(moved, TIMEOUT_MS)

    def register(self, remote: Memory) -> None:
        at = (remote.address, NBYTES, True, 1)
        self.far.add_range(0, *at, on_device=remote.on_device)

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture(params=[None, SECRET], ids=["plain", "encrypted"])
def ends(device: Device, request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(device, request.param)
    yield ends
    ends.close()


@directions
@locals_
@remotes
def test_bytes_arrive(
    ends: Ends, device: Device, simulator: Controls, direction: str, local: str, remote: str
) -> None:
    here, there = memories(device, simulator, (local, remote))
    ends.register(there)
    expected = both(there.bytes, direction, here.bytes, SPANS)
    report = ends.run(direction, here, there, SPANS)
    assert (report.status, report.bytes_done) == (KVN_OK, 900 * 9000), report.message
    assert is_same(here.bytes, expected[0])
    assert is_same(there.bytes, expected[1])


@directions
def test_host_and_device_in_one_request(
    ends: Ends, device: Device, simulator: Controls, direction: str
) -> None:
    """The ranges of the peer alternate between both, and the socket may take only a part."""
    sides = [Memory(place, device, 5).see(simulator) for place in PLACES]
    for slot, memory in enumerate(sides):
        ends.far.add_range(slot, memory.address, NBYTES, True, 1, on_device=memory.on_device)
    local = np.random.default_rng(6).integers(0, 256, NBYTES, dtype=np.uint8)
    sizes = np.resize([1, 30_000, 70, 5_000], 800).astype(np.uint64)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.uint64)
    addresses = np.array([sides[i // 3 % 2].address for i in range(800)], np.uint64) + starts
    mine = np.uint64(local.ctypes.data) + starts
    expected = [copy_of(item) for item in (*(side.bytes for side in sides), local)]
    for i, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        part = slice(start, start + size)
        if direction == "get":
            expected[2][part] = expected[i // 3 % 2][part]
        else:
            expected[i // 3 % 2][part] = local[part]
    ranges = u64(0, 1), u64(1, 1), u64(*(side.address for side in sides)), u64(NBYTES, NBYTES)
    with Executor(tcp_backend(ends.links[0], 0, direction, *ranges)) as executor:
        dst, src = (mine, addresses) if direction == "get" else (addresses, mine)
        moved = Descriptors.from_columns(dst, src, sizes)
        report = executor.run(moved, TIMEOUT_MS)
    assert report.status == KVN_OK, report.message
    for item, wanted in zip((*(side.bytes for side in sides), local), expected, strict=True):
        assert is_same(item, wanted)


@directions
@pytest.mark.parametrize("end", ["local", "remote"])
def test_a_failing_device_fails_the_transfer_and_not_the_link(
    ends: Ends, device: Device, simulator: Controls, direction: str, end: str
) -> None:
    places = PLACES if end == "remote" else PLACES[::-1]
    here, there = memories(device, simulator, places)
    ends.register(there)
    expected = both(there.bytes, direction, here.bytes, SPANS)
    for call in range(1, 20):  # it is retried with fewer descriptors, and finally alone
        simulator.add_fault(f"aclrtMemcpy:{call}=507899")
        simulator.add_fault(f"aclrtMemcpyBatchAsync:{call + 2}=507899")
    report = ends.run(direction, here, there, SPANS)
    simulator.clear_faults()
    assert report.status == KVN_FAILED
    assert report.failed is not None
    if end == "local":
        assert 110 <= report.failed < 120  # the first descriptor of the third copy
        assert re.match(rf"descriptor {report.failed}: aclrtMemcpy\w*: 507899", report.message)
    else:
        assert "has it on a device, which did not copy it" in report.message
    report = ends.run(direction, here, there, SPANS)
    assert report.status == KVN_OK, report.message
    assert is_same(here.bytes, expected[0])
    assert is_same(there.bytes, expected[1])


@directions
@remotes
def test_memory_of_an_abandoned_request_is_not_touched(
    ends: Ends, device: Device, simulator: Controls, direction: str, remote: str
) -> None:
    here, there = memories(device, simulator, ("device", remote))
    ends.register(there)
    column = map(u64, (0, 1, there.address, NBYTES))
    backend = tcp_backend(ends.links[0], 0, direction, *column, on_device=True)
    given_up, spans = 0, SPANS * 5  # more than fits on the wire
    with Executor(backend) as executor:
        for _ in range(100):
            if given_up == 3:
                break
            task = executor.submit(descriptors(direction, here.address, there.address, spans))
            while not task.done and not task.report.bytes_done:
                pass
            report = task.cancel()
            after = copy_of(here.bytes), copy_of(there.bytes)
            given_up += report.status == KVN_CANCELLED
            small = ends.run("get", Memory("host", device, 9), there, [(0, 0, 4096)])
            assert small.status == KVN_OK  # after its rest on the connection
            assert is_same(here.bytes, after[0])
            assert is_same(there.bytes, after[1])
    assert given_up == 3  # the others had ended before


@directions
def test_a_removed_range_is_not_touched(
    ends: Ends, device: Device, simulator: Controls, direction: str
) -> None:
    here, there = memories(device, simulator, PLACES)
    ends.register(there)
    backend = backend_of(ends.links[0], direction, there.address, NBYTES)
    with Executor(backend) as executor:
        many = descriptors(direction, here.address, there.address, SPANS * 20)
        task = executor.submit(many)
        while not task.done and not task.report.bytes_done:
            pass
        ends.far.remove_range(0)
        there.bytes[:] = 0xEE
        report = task.wait(TIMEOUT_MS)
    assert "has deregistered it" in report.message
    assert (there.bytes == 0xEE).all()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_bytes_that_a_socket_has_not_taken_yet_are_sent_before_zeros(
    device: Device, secret: bytes | None
) -> None:
    """Staged bytes of a range that is removed meanwhile arrive in their places."""
    service = TcpService(1, max_ranges=4, device=device)
    there = Memory("device", device, 1)
    service.add_range(0, there.address, NBYTES, True, 1, on_device=True)
    peer = attack(service, room=32 << 10, secret=secret)  # less than is staged at a time
    peer.asks.send(request(PULL, [Range(0, 1)], [Run(there.address, NBYTES)]))
    assert peer.asks.read_answer() == (0, MOVED, 0, 0)
    service.remove_range(0)
    found = np.frombuffer(peer.asks.read(NBYTES), np.uint8)
    begin = int(np.argmin(found == there.bytes))
    assert begin > 0
    assert not found[begin:].any()
    assert peer.asks.read_answer()[:2] == (0, DEREGISTERED)
    service.add_range(0, there.address, NBYTES, True, 2, on_device=True)
    peer.asks.send(request(PULL, [Range(0, 2)], [Run(there.address, PAGE)], number=1))
    assert peer.asks.read(ANSWER_NBYTES) == answer(1)
    assert peer.asks.read(PAGE) == there.bytes[:PAGE].tobytes()
    service.close()
    peer.close()


def test_host_memory_in_the_same_transfer_may_be_unmapped(ends: Ends, device: Device) -> None:
    """The rest of what a socket has taken in part is sent first, whatever memory follows."""
    there, here = Memory("device", device, 1), Memory("host", device, 2)
    ends.register(there)
    ends.far.add_range(1, 4096, 4096, True, 1)  # never mapped
    ranges = u64(0, 1), u64(1, 1), u64(there.address, 4096), u64(NBYTES, 4096)
    count = 200
    sizes = np.full(2 * count, 4096, np.uint64)
    sizes[::2] = 20_000
    theirs = np.full(2 * count, 4096, np.uint64)
    theirs[::2] = there.address + np.arange(count, dtype=np.uint64) * np.uint64(20_000)
    mine = here.address + np.arange(2 * count, dtype=np.uint64) * np.uint64(20_000)
    moved = Descriptors.from_columns(mine, theirs, sizes)
    with Executor(tcp_backend(ends.links[0], 0, "get", *ranges)) as executor:
        report = executor.run(moved, TIMEOUT_MS)
    assert report.failed == 1
    assert "has it registered, but not mapped" in report.message
    assert ends.run("get", here, there, SPANS[:1]).status == KVN_OK


def test_bytes_after_a_refusal_do_not_reach_later_requests(
    device: Device, simulator: Controls
) -> None:
    """Bytes after a refusal, while the device fails, do not go to memory of later requests."""
    service = TcpService(1, max_ranges=1, device=device)
    liar, on_device = attack(service), device.allocate(PAGE)
    memory = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
    protect(memory.ctypes.data, PAGE)
    simulator.add_fault("aclrtMemcpy:1=507899", "aclrtMemcpy:2=507899")  # the copy is retried
    for at, words in ((on_device.address, "deregistered"), (memory.ctypes.data, "are not mapped")):
        column = map(u64, (0, 1, 4096, PAGE))
        backend = tcp_backend(liar.link, 0, "get", *column, on_device=at == on_device.address)
        with Executor(backend) as executor:
            task = executor.submit(descriptors("get", at, 4096, [(0, 0, PAGE)]))
            number, _, _ = liar.answers.read_request()
            if at == on_device.address:
                liar.answers.send(answer(number, DEREGISTERED) + answer(number + 1) + bytes(PAGE))
            assert words in task.wait(TIMEOUT_MS).message
    service.close()
    liar.close()


def test_a_service_without_a_device_refuses_device_memory() -> None:
    service = TcpService(1, max_ranges=4)
    link: TcpNativeLink = link_within(service, service)[0]
    with pytest.raises(ValueError, match="on_device is True; the service has no device"):
        service.add_range(0, 4096, 4096, True, 1, on_device=True)
    with pytest.raises(ValueError, match="on_device is True; the service has no device"):
        tcp_backend(link, 0, "get", *map(u64, (0, 1, 4096, 4096)), on_device=True)
    service.close()


def test_memory_of_a_closed_device_is_refused(device: Device) -> None:
    device.close()
    with pytest.raises(Exception, match="device 3 is closed"):
        TcpService(1, max_ranges=4, device=device)
