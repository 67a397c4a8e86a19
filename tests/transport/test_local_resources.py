"""Resources that a `LocalTransport` and its links hold, and release."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.device.sharing import AllocationRef, Exported
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.registrations import LocalRegistrations
from kvplan.transport.protocol import DeviceRange
from tests.support.held import Held
from tests.support.refusals import refused
from tests.transport.owner import Owner
from tests.transport.test_lifetime import ARENA, NBYTES, PAGE, REGISTERED


def test_registered_memory_is_held_until_it_is_deregistered(transport: LocalTransport) -> None:
    growing = bytearray(10)
    registration = transport.register(growing)
    with pytest.raises(BufferError):
        growing.append(1)
    transport.deregister(registration)
    transport.deregister(registration)  # a second call is allowed
    growing.append(1)
    arena = transport.allocate(10)
    registration = transport.register(memoryview(arena)[3:5])
    with pytest.raises(BufferError):
        arena.close()
    transport.deregister(registration)
    arena.close()


def test_a_closed_link_has_no_entry_in_the_writer_table(transport: LocalTransport) -> None:
    registration = transport.register(bytearray(10))
    link = transport.connect(transport.metadata())
    writers = link.metadata.writers
    table = np.frombuffer(mmap.mmap(writers.fd, 0), np.uint64)
    entry = table[PAGE // 8 :]
    memory = link.memory([registration.address], 10, writable=True)
    assert entry[0] != 0
    del memory
    link.close()
    assert entry[0] == 0


def test_memory_that_is_refused_is_not_held_with_the_error(
    transport: LocalTransport, tmp_path: Path
) -> None:
    path = tmp_path / "cut"
    path.write_bytes(bytes(2 * PAGE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        file.truncate(PAGE)
        message = "past the file's end"
        with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
            transport.register(mapped)
        mapped.close()  # raises BufferError if the error holds the memory


def test_mappings_outlive_a_closed_link_as_long_as_they_are_used(
    owner: Owner, transport: LocalTransport
) -> None:
    owner.run(ARENA)
    link = transport.connect(owner.metadata())
    memory = link.memory([link.metadata.ranges[0].address], NBYTES)
    at = f"{int(memory.addresses[0]):x}-"
    link.close()
    assert at in Path("/proc/self/maps").read_text()
    del memory, link
    assert at not in Path("/proc/self/maps").read_text()


def test_nothing_is_left_of_a_hundred_links(owner: Owner, transport: LocalTransport) -> None:
    address = owner.run(ARENA)
    owner.run(REGISTERED)
    metadata = owner.metadata()

    def once() -> None:
        with transport.connect(metadata) as link:
            link.memory([address], NBYTES, writable=True).check()

    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line for line in lines if "kvplan" in line}

    first = Held.now()
    with transport.connect(metadata) as link:
        memory = link.memory([address], NBYTES, writable=True)
        first.check_new_are_not_inherited()
    del memory, link
    before, mapped_before = Held.now(), mapped()
    for _ in range(100):
        once()
    before.check_nothing_new()
    assert mapped() <= mapped_before


def test_nothing_is_left_of_a_hundred_refusals(owner: Owner, transport: LocalTransport) -> None:
    owner.run(ARENA)
    metadata = msgspec.msgpack.decode(owner.metadata())
    metadata["generations"]["inode"] += 1
    caught = msgspec.msgpack.encode(metadata)
    before = Held.now()
    for _ in range(100):
        with pytest.raises(LLMException):
            transport.connect(caught)
    before.check_nothing_new()


def test_max_registrations_is_checked() -> None:
    for number in (0, 2**24 + 1):
        with refused("LLM_PARAM_INVALID", rf"max_registrations={number} .* \[1, 16777216\]"):
            LocalTransport(max_registrations=number)
    with pytest.raises(TypeError, match="max_registrations='a' must be int"):
        LocalTransport(max_registrations="a")  # type: ignore[arg-type]


def test_a_pool_that_is_exported_while_the_transport_is_closed_is_refused() -> None:
    def export(*_: object, **__: object) -> object:
        registrations.close()
        return Exported(AllocationRef("0" * 32, 4096, 8, 7, -1, "", is_pool=True), device, None)

    device: Any = SimpleNamespace(sharing=SimpleNamespace(export=export))
    registrations = LocalRegistrations(4, device)
    with refused(LLMStatusCode.LLM_FAILED, "the transport is closed"):
        registrations.preregister_pool(DeviceRange(1 << 40, 4096), None)


def test_memory_beyond_the_last_slot_is_refused() -> None:
    with LocalTransport(max_registrations=2) as transport:
        held = [transport.register(bytearray(8)) for _ in range(2)]
        with refused(LLMStatusCode.LLM_OUT_OF_MEMORY, "all 2 slots .* more max_registrations"):
            transport.register(bytearray(8))
        memory = bytearray(8)
        with pytest.raises(LLMException) as caught:
            transport.register(memory)
        memory.extend(b"more")  # is released, although the error is held
        assert "all 2 slots" in str(caught.value)
        transport.deregister(held[0])
        transport.register(bytearray(8))
