"""The transport between two processes of one host, over what UCX has there without RDMA."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

import kvplan
from kvnative._backend import KVN_OK, KVN_PEER_GONE, KVN_TIMEOUT, KVN_UNMAPPED, ThreadPool
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._report import Report
from kvnative._ucx import UcxError
from kvplan import CacheDesc, DataType, Rows, Transfer
from kvplan.execution.binding import bind
from kvplan.execution.memory import HostMemory
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.protocol import DeviceRange
from kvplan.transport.registrations import QUARANTINE
from kvplan.transport.ucx.library import why_no_rdma
from kvplan.transport.ucx.link import UcxLink, UcxPeerMemory
from kvplan.transport.ucx.metadata import Metadata
from kvplan.transport.ucx.registrations import UcxRegistration
from kvplan.transport.ucx.transport import UcxTransport
from tests.support.held import Held
from tests.support.refusals import refused
from tests.support.ucx_library import found
from tests.transport.owner import Owner
from tests.transport.owner_process import pattern

TIMEOUT_MS = 20_000
NBYTES = 1 << 20
SHARED_MEMORY = '{"UCX_TLS": "shm"}'

Bytes = NDArray[np.uint8]


class UcxOwner(Owner):
    """Has an array, and an arena of which two parts are registered."""

    module = "tests.transport.ucx.ucx_process"

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


@pytest.fixture(scope="module")
def transport() -> Iterator[UcxTransport]:
    with found():
        transport = UcxTransport(settings=SHARED_MEMORY, max_registrations=64)
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
    try:
        link = transport.connect(owner.metadata(), timeout_ms=TIMEOUT_MS)
    except LLMException as error:
        pytest.skip(f"process_vm_readv is not allowed here: {error}")
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
    assert [range_.region for range_ in metadata.ranges] == [
        0,
        1,
        1,
    ]  # the arena is known as a whole
    assert len(metadata.regions) == 2
    remote = link.memory(
        [range_.address for range_ in metadata.ranges],
        [range_.nbytes for range_ in metadata.ranges],
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
    assert link.way == "cma/memory"


def test_adjacent_blocks_are_one_get(owner: UcxOwner, link: UcxLink, pool: ThreadPool) -> None:
    """Plans merge them for every transport, in whatever order the table has them."""
    nbytes = 4096
    desc = CacheDesc(1, (NBYTES // nbytes, nbytes), DataType.DT_UINT8)
    there, here = [9, 3, 5, 4, 8, 20], [2, 10, 12, 11, 1, 30]
    plan = kvplan.plan(Transfer(Rows(desc, there), Rows(desc, here)), local="dst")
    address, metadata = owner.run("result = array.ctypes.data"), owner.metadata()
    remote, local = link.memory([address], NBYTES, metadata=metadata), np.zeros(NBYTES, np.uint8)
    owner.run(f"array[:] = pattern(1, {NBYTES})")
    descriptors = bind(plan, remote, host_memory(local), one_space=False)
    assert descriptors.count == 3  # blocks 3 to 5, 8 to 9, and 20
    with Executor(remote.backend(pool, "get", host_memory(local))) as executor:
        assert executor.run(descriptors, TIMEOUT_MS).status == KVN_OK
    expected = np.zeros((NBYTES // nbytes, nbytes), np.uint8)
    expected[here] = pattern(1, NBYTES).reshape(expected.shape)[there]
    np.testing.assert_array_equal(local.reshape(expected.shape), expected)


def test_ended_registrations_and_leases_are_refused(
    owner: UcxOwner, link: UcxLink, pool: ThreadPool
) -> None:
    owner.run("extra = np.ones(4096, np.uint8); one = transport.register(extra)")
    newer = owner.metadata()
    address = owner.run("result = extra.ctypes.data")
    remote = link.memory([address], 4096, metadata=newer)
    local = np.zeros(4096, dtype=np.uint8)
    assert move(pool, remote, local, "get").status == KVN_OK
    owner.run("transport.deregister(one); transport.deregister(one)")
    assert move(pool, remote, local, "get").status == KVN_UNMAPPED
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "is not inside one range"):
        link.memory([address], 4096, metadata=owner.metadata())
    owner.run("one = transport.register(extra)")  # the slot's next
    assert move(pool, remote, local, "get").status == KVN_UNMAPPED
    again = link.memory([address], 4096, metadata=owner.metadata())
    assert move(pool, again, local, "get").status == KVN_OK
    link.check()


def test_memory_that_several_documents_name_is_one_side(
    owner: UcxOwner, link: UcxLink, pool: ThreadPool
) -> None:
    """As of caches that were published one after the other: each names its own registration."""
    named = owner.run(
        """
        several = [np.full(4096, 3 + it, np.uint8) for it in range(2)]
        both = [transport.register(it) for it in several]
        result = [(it.ctypes.data, transport.metadata([to])) for it, to in zip(several, both)]
        """
    )
    addresses, metadata = zip(*named, strict=True)
    remote = link.memory(addresses, 4096, writable=True, metadata=metadata)
    local = np.zeros(8192, dtype=np.uint8)
    assert move(pool, remote, local, "get").status == KVN_OK
    assert (local == np.repeat([3, 4], 4096)).all()
    local[:] = 8
    assert move(pool, remote, local, "put").status == KVN_OK
    assert owner.run("result = [int(it.min()) for it in several]") == [8, 8]
    with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "is not inside one range"):
        link.memory(addresses, 4096, metadata=metadata[::-1])
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "metadata is of 1 tensors; there are 2"):
        link.memory(addresses, 4096, metadata=metadata[:1])
    again = owner.run(
        "twice = transport.register(several[0]); result = transport.metadata([twice])"
    )
    twice = link.memory(addresses[:1] * 2, 4096, metadata=[metadata[0], again])
    assert move(pool, twice, local, "get").status == KVN_OK
    owner.run("transport.deregister(twice)")
    assert move(pool, twice, local, "get").status == KVN_UNMAPPED
    owner.run("transport.deregister(both[1])")
    assert move(pool, remote, local, "get").status == KVN_UNMAPPED
    owner.run("transport.deregister(both[0])")


def test_the_transport(transport: UcxTransport, link: UcxLink) -> None:
    assert transport.reaches == {"host"}  # this UCX finds no device
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "that UCX does not reach here"):
        transport.register(DeviceRange(1 << 40, 4096))
    memory = bytearray(4096)
    held = [transport.register(memory) for _ in range(64)]
    with refused(LLMStatusCode.LLM_OUT_OF_MEMORY, "max_registrations"):
        transport.register(memory)
    for item in held:
        transport.deregister(item)
    memory.append(1)  # nobody holds it any more
    assert transport.refusal(transport.metadata()) is not None
    assert link.detects_freed == "after"


def test_the_peer_need_not_run(owner: UcxOwner, transport: UcxTransport) -> None:
    metadata = owner.metadata()
    owner.stop()
    with transport.connect(metadata, timeout_ms=TIMEOUT_MS) as link:
        link.check()
    owner.resume()
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, "is closed"):
        link.check()
    assert link.death_fd is None


def test_an_unreachable_peer_is_named(transport: UcxTransport, owner: UcxOwner) -> None:
    assert "is this transport itself" in str(transport.refusal(transport.metadata(())))
    assert "cannot be decoded" in str(transport.refusal(b"\x81"))
    assert transport.refusal(owner.metadata()) is None
    with found(), UcxTransport(settings='{"UCX_TLS": "self"}') as alone:
        assert "UCX cannot reach the peer" in str(alone.refusal(owner.metadata()))
    theirs = Metadata.from_bytes(owner.metadata())
    forged = replace(theirs, generations=replace(theirs.generations, address=4096)).to_bytes()
    with refused(LLMStatusCode.LLM_LINK_FAILED, rf"process {owner.pid} of .* cannot be reached"):
        transport.connect(forged, timeout_ms=TIMEOUT_MS)


class TestWriters:
    """A deregistration waits for the writers of its range."""

    TIMES = 2000
    WRITE = """
        from kvnative._backend import ThreadPool
        from kvnative._executor import Executor
        from kvnative._lower import Descriptors
        from kvplan.execution.memory import HostMemory

        def begin_to_write(metadata, address, nbytes, times):
            "The task, of which something is written."
            link = transport.connect(metadata, timeout_ms=20_000)
            source = np.full(nbytes, 9, np.uint8)
            remote = link.memory([address], nbytes, writable=True)
            backend = remote.backend(ThreadPool(1), "put", HostMemory.from_arrays([source]))
            columns = address, source.ctypes.data, nbytes
            executor = Executor(backend)
            task = executor.submit(
                Descriptors.from_columns(*(np.full(times, it, np.uint64) for it in columns)))
            while not task.report.bytes_done:
                assert not task.done, task.report
            return task, source, link, executor
        """

    @pytest.fixture
    def writer(self, link: UcxLink) -> Iterator[UcxOwner]:
        """Linked with this process: `link` shows what it writes."""
        with found():
            writer = UcxOwner()
        writer.run(self.WRITE)
        yield writer
        writer.close()

    def begin(self, transport: UcxTransport, writer: UcxOwner, memory: Bytes) -> UcxRegistration:
        registration = transport.register(memory)
        metadata = transport.metadata([registration])
        where = memory.ctypes.data, memory.nbytes, self.TIMES
        writer.run(f"held = begin_to_write({metadata!r}, *{where})")
        return registration

    def test_a_writer_that_goes_on_is_waited_for(
        self, transport: UcxTransport, writer: UcxOwner
    ) -> None:
        memory = np.zeros(NBYTES, np.uint8)
        with transport.connect(writer.metadata(), timeout_ms=TIMEOUT_MS):
            transport.deregister(self.begin(transport, writer, memory))
            memory[:] = 7
            status, moved = writer.run(
                "report = held[0].wait(20_000); result = report.status, report.bytes_done"
            )
        assert status == KVN_UNMAPPED
        assert moved < self.TIMES * NBYTES  # it has looked again meanwhile
        assert (memory == 7).all()

    def test_a_stopped_writer_keeps_the_memory(
        self, transport: UcxTransport, writer: UcxOwner, caplog: pytest.LogCaptureFixture
    ) -> None:
        memory = bytearray(NBYTES)
        with transport.connect(writer.metadata(), timeout_ms=TIMEOUT_MS):
            registration = self.begin(transport, writer, np.frombuffer(memory, np.uint8))
            writer.stop()
            transport.deregister(registration)
            assert "was writing to this process's memory" in caplog.text
            with pytest.raises(BufferError):
                memory.append(1)
            writer.resume()
            give_up = time.monotonic() + TIMEOUT_MS / 1000
            while is_held(memory):
                assert time.monotonic() < give_up
        assert writer.run("result = held[0].wait(20_000).status") == KVN_UNMAPPED

    def test_leases_wait_for_a_stopped_writer_once(
        self, transport: UcxTransport, writer: UcxOwner
    ) -> None:
        memory = np.zeros(NBYTES, np.uint8)
        with transport.connect(writer.metadata(), timeout_ms=TIMEOUT_MS):
            leases = [transport.begin_lease() for _ in range(7)]
            transport.end_leases(leases[:1])
            registration = self.begin(transport, writer, memory)
            writer.stop()
            spent = []
            for lease in leases[1:]:
                began = time.monotonic()
                with refused(LLMStatusCode.LLM_TIMEOUT, "1 peer had begun to write"):
                    transport.end_leases([lease])
                spent.append(time.monotonic() - began)
            slow = "a busy machine holds up some of them, and not each"
            assert min(spent[1:]) < spent[0] / 2, slow
            writer.resume()
            give_up = time.monotonic() + TIMEOUT_MS / 1000
            while not is_over(transport, leases):
                assert time.monotonic() < give_up
            transport.deregister(registration)
            memory[:] = 7
            assert writer.run("result = held[0].wait(20_000).status") == KVN_UNMAPPED
        assert (memory == 7).all()

    def test_each_lease_of_a_call_ends(self, transport: UcxTransport) -> None:
        deadline_ns = time.monotonic_ns() + 3600 * 10**9
        leases = [transport.begin_lease(deadline_ns) for _ in range(3)]
        for lease in leases:
            transport.renew_lease(*lease, deadline_ns)
        transport.end_leases(leases)
        for lease in leases:
            with refused("LLM_KV_CACHE_NOT_EXIST", "has expired"):
                transport.renew_lease(*lease, deadline_ns)

    def test_a_stopped_writer_is_waited_for_without_a_link(
        self, transport: UcxTransport, writer: UcxOwner
    ) -> None:
        """Nothing else would keep it from writing when it goes on."""
        memory = np.zeros(NBYTES, np.uint8)
        lease = transport.begin_lease()
        with transport.connect(writer.metadata(), timeout_ms=TIMEOUT_MS):
            registration = self.begin(transport, writer, memory)
            writer.stop()
        with refused(LLMStatusCode.LLM_TIMEOUT, "1 peer had begun to write"):
            transport.end_leases([lease])
        transport.deregister(registration)
        writer.resume()
        give_up = time.monotonic() + TIMEOUT_MS / 1000
        while not is_over(transport, [lease]):
            assert time.monotonic() < give_up
        memory[:] = 7
        assert writer.run("result = held[0].wait(20_000).status") == KVN_UNMAPPED
        assert (memory == 7).all()
        instance = Metadata.from_bytes(writer.metadata()).instance
        assert instance in transport._observed
        writer.run("transport.close(); del held, transport")
        for _ in range(2):
            assert is_over(transport, [lease])
        assert instance not in transport._observed

    def test_memory_is_kept_without_a_link(self, transport: UcxTransport, writer: UcxOwner) -> None:
        memory, metadata = bytearray(NBYTES), writer.metadata()
        with transport.connect(metadata, timeout_ms=TIMEOUT_MS):
            registration = self.begin(transport, writer, np.frombuffer(memory, np.uint8))
            writer.stop()
            transport.deregister(registration)
        with transport.connect(metadata, timeout_ms=TIMEOUT_MS):
            late = QUARANTINE._held[-1][0]  # who asks whether somebody writes
            assert late()
            assert is_held(memory)
        assert late()
        writer.kill()
        give_up = time.monotonic() + TIMEOUT_MS / 1000
        while is_held(memory):
            assert time.monotonic() < give_up
        assert is_over(transport, [])

    def test_a_dead_writer_is_not_waited_for(
        self, transport: UcxTransport, writer: UcxOwner
    ) -> None:
        memory = bytearray(NBYTES)
        with transport.connect(writer.metadata(), timeout_ms=TIMEOUT_MS):
            registration = self.begin(transport, writer, np.frombuffer(memory, np.uint8))
            writer.kill()
            transport.deregister(registration)
        assert not is_held(memory)

    def test_readers_are_not(self, transport: UcxTransport, owner: UcxOwner) -> None:
        """They announce nothing."""
        metadata = Metadata.from_bytes(owner.metadata())
        with transport.connect(owner.metadata(), timeout_ms=TIMEOUT_MS) as link:
            range_ = metadata.ranges[0]
            local = np.zeros(range_.nbytes, np.uint8)
            remote = link.memory([range_.address], range_.nbytes)
            backend = remote.backend(ThreadPool(1), "get", host_memory(local))
            columns = local.ctypes.data, range_.address, range_.nbytes
            with Executor(backend) as executor:
                task = executor.submit(
                    Descriptors.from_columns(*(np.full(self.TIMES, n, np.uint64) for n in columns))
                )
                while not task.report.bytes_done:
                    pass
                owner.run(
                    f"linked = transport.connect({transport.metadata(())!r}, timeout_ms=20_000)",
                    "transport.deregister(held.pop(0))",
                    "held.insert(0, transport.register(array))",
                )
                assert not task.done or task.report.status == KVN_UNMAPPED
                assert task.wait(TIMEOUT_MS).status == KVN_UNMAPPED


class Answering:
    """An endpoint that has been read: what is being written, or an error of the look."""

    def __init__(self, answer: frozenset[tuple[int, int]] | int) -> None:
        self.answer = answer

    def writing(self, tag: int, timeout_ms: float) -> frozenset[tuple[int, int]]:
        if isinstance(self.answer, int):
            raise UcxError("no look", 0, self.answer)
        return self.answer


NONE, SOME = frozenset[tuple[int, int]](), frozenset({(3, 7)})


@pytest.mark.parametrize(
    ("of_the_link", "of_another", "wanted"),
    [
        *((SOME, item, SOME) for item in (None, NONE, KVN_TIMEOUT, KVN_PEER_GONE)),
        *((KVN_TIMEOUT, item, None) for item in (None, NONE, SOME, KVN_PEER_GONE)),
        (KVN_PEER_GONE, None, NONE),
        (KVN_PEER_GONE, NONE, NONE),
        (KVN_PEER_GONE, SOME, SOME),
        (KVN_PEER_GONE, KVN_TIMEOUT, None),
        (KVN_PEER_GONE, KVN_PEER_GONE, NONE),
    ],
)
def test_only_a_peer_that_is_gone_writes_nothing(
    transport: UcxTransport, of_the_link: Any, of_another: Any, wanted: Any
) -> None:
    """One that does not answer in time may write: nobody knows."""
    endpoint: Any = Answering(of_the_link)
    transport._endpoints[endpoint] = "a peer"
    if of_another is not None:
        transport._observed["a peer"] = cast(Any, Answering(of_another))
    try:
        assert transport._tickets_of(endpoint) == wanted
    finally:
        transport._observed.pop("a peer", None)


def is_over(transport: UcxTransport, leases: list[tuple[int, int]]) -> bool:
    """Whether no peer writes with them any more."""
    try:
        transport.end_leases(leases)
    except LLMException as error:
        if error.status_code is not LLMStatusCode.LLM_TIMEOUT:
            raise
        return False
    return True


def is_held(memory: bytearray) -> bool:
    """Whether it cannot be resized."""
    try:
        memory.append(1)
    except BufferError:
        return True
    return False


@pytest.mark.usefixtures("ucx")
class TestMaking:
    def test_without_rdma_the_error_says_why_and_what_to_do(self, tmp_path: Path) -> None:
        if not why_no_rdma(""):
            pytest.skip("RDMA is here")
        with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "use the transport tcp") as caught:
            UcxTransport()
        assert 'kvplan.ucx_settings={"UCX_TLS": "cuda,shm"}' in str(caught.value)

    def test_tcp_is_refused(self) -> None:
        with refused(LLMStatusCode.LLM_PARAM_INVALID, "UCX_TLS lets UCX use TCP"):
            UcxTransport(settings='{"UCX_TLS": "all"}')

    def test_unknown_transports_and_settings_are_refused(self) -> None:
        with pytest.raises(LLMException, match=r"UCX .* cannot be used: ucp_init: No such device"):
            UcxTransport(devices="none7", settings='{"UCX_TLS": "ib"}')

    def test_the_number_of_registrations(self) -> None:
        with pytest.raises(LLMException, match=r"max_registrations=0 .*\[1, 65536\]"):
            UcxTransport(settings=SHARED_MEMORY, max_registrations=0)

    def test_a_transport_with_registrations_can_be_closed(self) -> None:
        transport = UcxTransport(settings=SHARED_MEMORY)
        kept = bytearray(4096)
        transport.register(kept)
        with pytest.raises(BufferError):
            kept.append(1)
        transport.close()
        transport.close()
        kept.append(1)
        with pytest.raises(LLMException, match="the transport is closed"):
            transport.register(kept)

    def test_a_closed_transport_has_no_open_files(self) -> None:
        """Not even for as long as something refers to it."""
        before, kept = Held.now(), []
        for _ in range(2):  # UCX has some of its own from the first time on
            before = Held.now()
            ends = [UcxTransport(settings=SHARED_MEMORY) for _ in range(2)]
            link = ends[0].connect(ends[1].metadata(), timeout_ms=TIMEOUT_MS)
            assert before.new().descriptors
            for end in (link, *ends):
                end.close()
                kept.append(end)
            del link, end
        before.check_nothing_new()

    def test_a_forked_child_of_a_process_that_uses_it_is_refused_with_advice(self) -> None:
        with UcxTransport(settings=SHARED_MEMORY) as parents:
            if (child := os.fork()) == 0:
                status = 1
                try:
                    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "with the method spawn"):
                        UcxTransport(settings=SHARED_MEMORY)
                    with pytest.raises(LLMException, match="forked child"):
                        parents.metadata(())
                    parents.close()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            parents.metadata(())
