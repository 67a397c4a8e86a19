"""A deregistration waits for peers that write by UCX: running, stopped, dead, or without a link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from kvnative._backend import KVN_PEER_GONE, KVN_TIMEOUT, KVN_UNMAPPED, ThreadPool
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvnative._ucx import UcxError
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.registrations import QUARANTINE
from kvplan.transport.ucx.link import UcxLink
from kvplan.transport.ucx.metadata import Metadata
from kvplan.transport.ucx.registrations import UcxRegistration
from kvplan.transport.ucx.transport import UcxTransport
from tests.support.refusals import refused
from tests.support.ucx_library import found
from tests.transport.ucx.owner import NBYTES, TIMEOUT_MS, Bytes, UcxOwner, host_memory


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
            backend = remote.backend(ThreadPool(1), "put", HostMemory.from_arrays([source]), None)
            columns = address, source.ctypes.data, nbytes
            executor = Executor(backend)
            task = executor.submit(
                Descriptors.from_columns(*(np.full(times, value, np.uint64) for value in columns)))
            while not task.report.bytes_done:
                assert not task.done, task.report
            return task, source, link, executor
        """

    @pytest.fixture
    def writer(self, link: UcxLink) -> Iterator[UcxOwner]:
        """A process with a link to this one; `link` shows what the process writes."""
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

    def test_a_running_writer_is_waited_for(
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
        assert moved < self.TIMES * NBYTES  # the deregistration has read the table again meanwhile
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
            with refused("LLM_KV_CACHE_NOT_EXIST", "has ended"):
                transport.renew_lease(*lease, deadline_ns)

    def test_a_stopped_writer_is_waited_for_without_a_link(
        self, transport: UcxTransport, writer: UcxOwner
    ) -> None:
        """Without the quarantine, the writer would write as soon as it continues."""
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
            late = QUARANTINE._held[-1][0]  # the function that checks for writers
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

    def test_readers_are_not_waited_for(self, transport: UcxTransport, owner: UcxOwner) -> None:
        """Readers do not announce themselves."""
        metadata = Metadata.from_bytes(owner.metadata())
        with transport.connect(owner.metadata(), timeout_ms=TIMEOUT_MS) as link:
            range_ = metadata.ranges[0]
            local = np.zeros(range_.nbytes, np.uint8)
            remote = link.memory([range_.address], range_.nbytes)
            backend = remote.backend(ThreadPool(1), "get", host_memory(local), None)
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
    """An endpoint with a fixed result of a read: the current write, or an error."""

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
def test_only_a_dead_peer_is_known_not_to_write(
    transport: UcxTransport, of_the_link: Any, of_another: Any, wanted: Any
) -> None:
    """A peer that does not answer in time may still write."""
    endpoint: Any = Answering(of_the_link)
    transport._endpoints[endpoint] = "a peer"
    if of_another is not None:
        transport._observed["a peer"] = cast(Any, Answering(of_another))
    try:
        assert transport._tickets_of(endpoint) == wanted
    finally:
        transport._observed.pop("a peer", None)


def is_over(transport: UcxTransport, leases: list[tuple[int, int]]) -> bool:
    """Return True if no peer writes with the leases any more."""
    try:
        transport.end_leases(leases)
    except LLMException as error:
        if error.status_code is not LLMStatusCode.LLM_TIMEOUT:
            raise
        return False
    return True


def is_held(memory: bytearray) -> bool:
    """Return True if the memory cannot be resized."""
    try:
        memory.append(1)
    except BufferError:
        return True
    return False
