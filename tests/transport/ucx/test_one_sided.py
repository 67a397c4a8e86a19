"""The transport in the mode one_sided, between two processes of one host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from kvnative._executor import KVN_OK, KVN_UNMAPPED, Executor, Report, ThreadPool
from kvnative._lower import Descriptors
from kvplan.execution.memory import HostMemory
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.ucx.link import UcxLink
from kvplan.transport.ucx.memory import UcxPeerMemory
from kvplan.transport.ucx.metadata import Metadata
from kvplan.transport.ucx.transport import UcxTransport
from tests.transport.owner import Owner
from tests.transport.owner_process import pattern
from tests.ucx_library import found

TIMEOUT_MS = 20_000
NBYTES = 1 << 20

Bytes = NDArray[np.uint8]


class UcxOwner(Owner):
    """Has an array, and an arena of which two parts are registered."""

    script = Path(__file__).with_name("one_sided_process.py")

    def __init__(self) -> None:
        super().__init__()
        self.run(
            f"""
            array = pattern(1, {NBYTES})
            arena = transport.allocate({NBYTES})
            within = np.frombuffer(arena, dtype=np.uint8)
            within[:] = pattern(2, {NBYTES})
            held = [transport.register(it) for it in (array, within[:65536], within[131072:])]
            """
        )

    def begin_to_connect(self, metadata: bytes, session: bytes) -> None:
        self.run(
            f"""
            links = []
            def connect():
                links.append(transport.connect(
                    {metadata!r}, timeout_ms={TIMEOUT_MS}, session={session!r}))
            connecting = threading.Thread(target=connect)
            connecting.start()
            """
        )


@pytest.fixture(scope="module")
def transport() -> Iterator[UcxTransport]:
    with found():
        transport = UcxTransport(mode="one_sided", max_registrations=64)
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def owner() -> Iterator[UcxOwner]:
    with found():
        owner = UcxOwner()
    yield owner
    owner.close()


@pytest.fixture(scope="module")
def link(transport: UcxTransport, owner: UcxOwner) -> Iterator[UcxLink]:
    owner.begin_to_connect(transport.metadata(()), b"a test")
    try:
        link = transport.connect(owner.metadata(), timeout_ms=TIMEOUT_MS, session=b"a test")
    except LLMException as error:
        if "one-sided transfers need" in str(error):
            pytest.skip(f"process_vm_readv is not allowed here: {error}")
        raise
    owner.run("connecting.join(); result = links[0].way")
    yield link
    link.close()


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(1)


def host_memory(array: Bytes) -> HostMemory:
    one = np.array([array.ctypes.data], dtype=np.uint64)
    return HostMemory(one, np.array([array.nbytes], np.uint64), writable=True, owner=array)


def move(
    pool: ThreadPool, remote: UcxPeerMemory, local: Bytes, direction: Literal["get", "put"]
) -> Report:
    """All of the remote tensors, one after another here."""
    sizes = remote.nbytes
    here = np.uint64(local.ctypes.data) + np.cumsum(sizes) - sizes
    dst, src = (here, remote.addresses) if direction == "get" else (remote.addresses, here)
    backend = remote.backend(pool, direction, host_memory(local))
    with Executor(backend) as executor:
        return executor.run(Descriptors.from_columns(dst, src, sizes), TIMEOUT_MS)


def test_arrays_and_parts_of_an_arena(
    transport: UcxTransport, owner: UcxOwner, link: UcxLink, pool: ThreadPool
) -> None:
    metadata = Metadata.from_bytes(owner.metadata())
    assert [it.region for it in metadata.ranges] == [0, 1, 1]  # the arena is known as a whole
    assert (metadata.mode, len(metadata.regions)) == ("one_sided", 2)
    remote = link.memory(
        [it.address for it in metadata.ranges],
        [it.nbytes for it in metadata.ranges],
        writable=True,
    )
    arena = pattern(2, NBYTES)
    expected = np.concatenate([pattern(1, NBYTES), arena[:65536], arena[131072:]])
    local = np.zeros(expected.nbytes, dtype=np.uint8)
    assert move(pool, remote, local, "get").status == KVN_OK
    np.testing.assert_array_equal(local, expected)
    registration = transport.register(local)
    local[:] = 9
    assert move(pool, remote, local, "put").status == KVN_OK
    transport.deregister(registration)
    assert owner.run("result = bool((array == 9).all())")
    arena[:65536] = arena[131072:] = 9
    assert owner.run("result = within.sum(dtype=np.uint64).item()") == arena.sum(dtype=np.uint64)
    assert link.way == "one-sided over cma/memory"


def test_what_has_ended(owner: UcxOwner, link: UcxLink, pool: ThreadPool) -> None:
    owner.run("extra = np.ones(4096, np.uint8); one = transport.register(extra)")
    newer = owner.metadata()
    address = owner.run("result = extra.ctypes.data")
    remote = link.memory([address], 4096, metadata=newer)
    local = np.zeros(4096, dtype=np.uint8)
    assert move(pool, remote, local, "get").status == KVN_OK
    owner.run("transport.deregister(one); transport.deregister(one)")
    assert move(pool, remote, local, "get").status == KVN_UNMAPPED
    with pytest.raises(LLMException, match="is not inside one range") as caught:
        link.memory([address], 4096, metadata=owner.metadata())
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    owner.run("one = transport.register(extra)")  # the slot's next
    assert move(pool, remote, local, "get").status == KVN_UNMAPPED
    anew = link.memory([address], 4096, metadata=owner.metadata())
    assert move(pool, anew, local, "get").status == KVN_OK
    link.check()


def test_the_transport(transport: UcxTransport, link: UcxLink) -> None:
    assert transport.reaches == {"host"}  # this UCX finds no device
    with pytest.raises(LLMException, match="UCX has no transport for it here") as caught:
        transport.register(DeviceRange(1 << 40, 4096))
    assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    memory = bytearray(4096)
    held = [transport.register(memory) for _ in range(64)]
    with pytest.raises(LLMException, match="max_registrations") as caught:
        transport.register(memory)
    assert caught.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
    for it in held:
        transport.deregister(it)
    memory.append(1)  # nobody holds it any more
    assert transport.refusal(transport.metadata()) is not None
    assert link.finds_freed == "after"


def test_both_ends_have_one_mode(transport: UcxTransport) -> None:
    with found(), UcxTransport(mode="gathered") as other:
        refusal = transport.refusal(other.metadata())
    assert refusal is not None
    assert "give both engines the same kvplan.ucx_mode" in refusal


def test_it_is_closed_with_registrations(ucx: object) -> None:
    transport = UcxTransport(mode="one_sided")
    kept = bytearray(4096)
    transport.register(kept)
    transport.close()
    transport.close()
    kept.append(1)
    with pytest.raises(LLMException, match="the transport is closed"):
        transport.register(kept)
