"""Memory and processes that end before or during a transfer: an error, never a success."""

from __future__ import annotations

import mmap
import select
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import kvplan
from kvnative._backend import KVN_OK, KVN_UNMAPPED, ThreadPool
from kvnative._executor import Executor
from kvnative._lower import Descriptors
from kvplan import CacheDesc, DataType, LLMException, LLMStatusCode, Rows, Transfer, Transfers
from kvplan.execution import HostMemory
from kvplan.lease import BlockLease, LeaseWord
from kvplan.transport.local import LocalTransport
from kvplan.transport.local.link import LocalLink
from kvplan.transport.local.metadata import Metadata
from tests.support.peer import EXECUTE_ANOTHER_PROGRAM
from tests.support.refusals import refused
from tests.support.wrappers import limit_bandwidth
from tests.transport.owner import Owner

PAGE = mmap.PAGESIZE
TIMEOUT_MS = 30_000  # only a hanging test reaches it
NBYTES = 64 * PAGE
DESC = CacheDesc(1, (64, PAGE), DataType.DT_UINT8)
EVERY_BLOCK = kvplan.plan(Transfer(Rows(DESC, range(64)), Rows(DESC, range(64)[::-1])), local="dst")

ARENA = f"""
    arena = transport.allocate({NBYTES})
    memory = transport.register(arena)
    result = memory.address
"""
# Mapped and unmapped by hand, far from where the kernel maps the next memory of a process: nothing
# else may be at the address afterwards.
REGISTERED = f"""
    import ctypes, os
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    hint = ctypes.c_void_p(1 << 45 | int.from_bytes(os.urandom(3), "big") << 20)
    address = libc.mmap(hint, ctypes.c_size_t({NBYTES}), 3, 0x22, -1, ctypes.c_long(0))
    memory = transport.register((address, {NBYTES}))
    result = memory.address
"""
KINDS = pytest.mark.parametrize("setup", [ARENA, REGISTERED], ids=["arena", "registered"])


@pytest.fixture
def link(owner: Owner, transport: LocalTransport, setup: str) -> Iterator[LocalLink]:
    """A link to an owner whose memory was registered by `setup`."""
    owner.run(setup)
    with transport.connect(owner.metadata()) as link:
        yield link


def pull(
    link: LocalLink, transfers: Transfers | None = None, *, metadata: bytes | None = None
) -> np.ndarray:
    memory = link.memory([link.metadata.ranges[0].address], NBYTES, metadata=metadata)
    local = np.zeros(NBYTES, dtype=np.uint8)
    (transfers or kvplan).execute(EVERY_BLOCK, memory, [local])
    return local


@KINDS
def test_memory_with_a_lease_shares_nothing_with_the_same_memory_without(
    owner: Owner, link: LocalLink, setup: str
) -> None:
    """The two memories also have separate announcements of writes, which each piece checks."""
    word = LeaseWord("local", *owner.run("lease = transport.begin_lease(); result = lease"))
    lease = BlockLease(1, bytes(16), 1, 1, (0,), paged=True, tag="", words=(word,))
    plain = link.memory([link.metadata.ranges[0].address], NBYTES, writable=True)
    local, pool = HostMemory.from_arrays([np.zeros(NBYTES, np.uint8)]), ThreadPool(1)
    leased = [plain.leased([lease])]  # before a write to the memory without the lease

    def statuses() -> list[int]:
        leased.append(plain.leased([lease]))
        found = []
        for memory in (plain, *leased):
            work = Descriptors.from_columns(memory.addresses, local.addresses, local.nbytes)
            with Executor(memory.backend(pool, "put", local, None)) as moving:
                found.append(moving.run(work, TIMEOUT_MS).status)
        return found

    assert statuses() == [KVN_OK] * 3
    owner.run("transport.end_leases([lease])")
    assert statuses() == [KVN_OK] + [KVN_UNMAPPED] * 3


@KINDS
class TestBefore:
    """Memory, processes and links that end before the transfer starts."""

    def test_a_dead_peer_fails_the_transfer(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        memory = link.memory([link.metadata.ranges[0].address], NBYTES)
        owner.kill()
        with refused(LLMStatusCode.LLM_LINK_FAILED, f"process {owner.pid} has exited"):
            memory.check()
        with refused(LLMStatusCode.LLM_LINK_FAILED, "has exited"):
            pull(link)
        with refused(LLMStatusCode.LLM_LINK_FAILED, "has exited"):
            link.check()

    def test_a_peer_that_executes_another_program_fails_the_transfer(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        link.check()
        assert owner.run(EXECUTE_ANOTHER_PROGRAM) == "another"
        with refused(LLMStatusCode.LLM_LINK_FAILED, "executes another program"):
            pull(link)

    def test_a_transport_that_its_owner_closed_fails_the_transfer(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        owner.run("transport.close()")
        with refused(LLMStatusCode.LLM_LINK_FAILED, "closed its transport"):
            pull(link)

    def test_a_generation_table_that_is_another_file_fails_the_transfer(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        owner.run(f"""
            import os
            transport.close()
            os.dup2(os.memfd_create("another"), {link.metadata.generations.fd})
        """)
        with refused(LLMStatusCode.LLM_LINK_FAILED, "closed its transport"):
            pull(link)

    def test_a_deregistered_range_fails_the_transfer(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        pull(link)
        owner.run("transport.deregister(memory)")
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "has deregistered"):
            pull(link)

    def test_a_range_that_was_registered_again_fails_the_transfer(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        owner.run("""
            transport.deregister(memory)
            again = [transport.register((memory.address, memory.nbytes)) for _ in range(100)]
        """)
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "has deregistered"):
            pull(link)
        pull(link, metadata=owner.metadata())

    def test_a_deregistration_between_two_parts_fails_the_transfer(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        memory = link.memory([link.metadata.ranges[0].address], NBYTES)
        memory.check(range(1))
        owner.run("transport.deregister(memory)")
        with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "has deregistered"):
            memory.check(range(1))
        link.close()
        with refused(LLMStatusCode.LLM_NOT_YET_LINK, "is closed"):
            memory.check(range(1))

    def test_an_exit_between_two_parts_fails_the_transfer(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        memory = link.memory([link.metadata.ranges[0].address], NBYTES)
        owner.kill()
        for check in (partial(memory.check, range(1)), memory.check):
            with refused(LLMStatusCode.LLM_LINK_FAILED, "has exited"):
                check()

    def test_a_closed_link_fails_the_transfer(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        memory = link.memory([link.metadata.ranges[0].address], NBYTES)
        link.close()
        link.close()
        with refused(LLMStatusCode.LLM_NOT_YET_LINK, "is closed"):
            memory.check()

    def test_the_error_of_a_closed_link_has_the_reason_of_its_close(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        memory = link.memory([link.metadata.ranges[0].address], NBYTES)
        link.close(LLMException("lost", status_code=LLMStatusCode.LLM_LINK_FAILED))
        link.close()
        with refused(LLMStatusCode.LLM_LINK_FAILED, "lost"):
            memory.check()


class InterruptedLink(LocalLink):
    """A link whose first `close` is interrupted after it has marked the link as closed."""

    is_interrupted = False

    def _disconnect(self, why: LLMException) -> None:
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        super()._disconnect(why)
        self.disconnected = str(why)


def test_descriptor_zero_is_a_death_fd_like_any_other(
    owner: Owner, transport: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may have closed its standard input."""
    owner.run(ARENA)
    with transport.connect(owner.metadata()) as link, monkeypatch.context() as zero:
        zero.setattr(link, "process", SimpleNamespace(pidfd=0))
        assert link.death_fd == 0


@pytest.mark.parametrize("setup", [ARENA])
def test_a_close_that_was_interrupted_is_finished_by_the_next(owner: Owner, setup: str) -> None:
    owner.run(setup)
    link = InterruptedLink(Metadata.from_bytes(owner.metadata()), populate="off")
    memory = link.memory([link.metadata.ranges[0].address], NBYTES)
    with pytest.raises(KeyboardInterrupt):
        link.close(LLMException("lost", status_code=LLMStatusCode.LLM_LINK_FAILED))
    assert link.closed
    assert link.death_fd is not None
    link.close()
    assert link.death_fd is None
    assert link.disconnected == "lost (LLM_LINK_FAILED)"
    with refused(LLMStatusCode.LLM_LINK_FAILED, "lost"):
        memory.check()


@pytest.mark.parametrize("setup", [REGISTERED], ids=["registered"])
class TestUnmapped:
    """Registered memory that its owner unmapped, but did not deregister."""

    def test_memory_that_was_unmapped_before_the_link_is_an_error(
        self, owner: Owner, transport: LocalTransport, setup: str
    ) -> None:
        base = owner.run(setup)
        owner.run(f"libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t({NBYTES}))")
        with (
            transport.connect(owner.metadata()) as link,
            refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"{base:#x}") as error,
        ):
            pull(link)
        assert "remote memory" in str(error.value)

    def test_partly_unmapped_memory_is_an_error(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        pull(link)
        owner.run(f"libc.munmap(ctypes.c_void_p(address + {5 * PAGE}), ctypes.c_size_t({PAGE}))")
        hole = link.metadata.ranges[0].address + 5 * PAGE
        with refused(
            LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"{hole:#x} of process {owner.pid}"
        ) as error:
            pull(link)
        assert "remote memory" in str(error.value)
        assert error.value.unconfirmed

    def test_an_unmapping_after_the_deregistration_reports_the_deregistration(
        self, owner: Owner, link: LocalLink, setup: str
    ) -> None:
        """The error gives the deregistration as the reason, not the unmapping."""
        memory = link.memory([link.metadata.ranges[0].address], NBYTES)
        local = np.zeros(NBYTES, dtype=np.uint8)
        with Transfers(1, wrap=lambda backend: limit_bandwidth(backend, NBYTES / 0.2)) as slow:
            task = slow.submit(EVERY_BLOCK, memory, [local])
            owner.run(f"""
                transport.deregister(memory)
                libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t({NBYTES}))
            """)
            code = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            with refused(code, "has deregistered") as error:
                task.wait(timeout_ms=30_000)
        assert error.value.unconfirmed


@KINDS
class TestDuring:
    """Ends while bytes move: a limited bandwidth holds the transfer open."""

    @pytest.mark.parametrize(
        ("end", "code", "message"),
        [
            (Owner.kill, LLMStatusCode.LLM_LINK_FAILED, "has exited"),
            (
                lambda owner: owner.run("transport.deregister(memory)"),
                LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
                "has deregistered",
            ),
            (
                lambda owner: owner.run("transport.close()"),
                LLMStatusCode.LLM_LINK_FAILED,
                "closed its transport",
            ),
        ],
        ids=["kill", "deregister", "close"],
    )
    def test_the_transfer_fails_with_the_reason(
        self,
        owner: Owner,
        link: LocalLink,
        setup: str,
        end: Callable[[Owner], None],
        code: LLMStatusCode,
        message: str,
    ) -> None:
        memory = link.memory([link.metadata.ranges[0].address], NBYTES)
        local = np.zeros(NBYTES, dtype=np.uint8)
        with Transfers(1, wrap=lambda backend: limit_bandwidth(backend, NBYTES / 0.2)) as slow:
            task = slow.submit(EVERY_BLOCK, memory, [local])
            end(owner)
            with refused(code, message):
                task.wait(timeout_ms=30_000)


class TestThisSide:
    """Errors of this process and its own memory."""

    def test_a_forked_child_of_the_owner_is_not_the_owner(self, owner: Owner) -> None:
        answer = owner.run("""
            import os
            end, other_end = os.pipe()
            if os.fork() == 0:
                for name in ("metadata", "close", "metadata"):
                    try:
                        getattr(transport, name)()
                    except Exception as error:
                        os.write(other_end, f"{error}|".encode())
                with open("/proc/self/maps") as maps:
                    tables = maps.read().count("kvplan-generations")
                os.write(other_end, f"{tables} tables".encode())
                os._exit(0)
            os.close(other_end)
            os.wait()
            result = os.read(end, 1000).decode()
            transport.register(transport.allocate(100))
        """)
        assert "forked child" in answer
        assert "closed" in answer
        assert "|0 tables" in answer  # the child does not keep its parent's memory
        metadata = owner.metadata()
        with LocalTransport() as transport, transport.connect(metadata) as link:
            link.check()  # closing the child's copy did not close the link

    def test_a_forked_child_of_the_user_is_not_the_user(
        self, owner: Owner, transport: LocalTransport
    ) -> None:
        user = Owner()
        try:
            answer = user.run(f"""
                import os
                link = transport.connect({owner.run(ARENA) and owner.metadata()!r})
                span = link.metadata.ranges[0]
                memory = link.memory([span.address], span.nbytes)
                end, other_end = os.pipe()
                if os.fork() == 0:
                    for call in (memory.check, link.check, lambda: link.memory([span.address], 1)):
                        try:
                            call()
                        except Exception as error:
                            os.write(other_end, f"{{error}}|".encode())
                    link.close()
                    os._exit(0)
                os.close(other_end)
                os.wait()
                result = os.read(end, 1000).decode()
                memory.check()
            """)
        finally:
            user.close()
        assert answer.count("forked child") == answer.count("LLM_FAILED") == 3

    def test_a_link_that_closes_while_bytes_move_fails_the_transfer(
        self, owner: Owner, transport: LocalTransport
    ) -> None:
        owner.run(ARENA)
        link = transport.connect(owner.metadata())
        memory = link.memory([link.metadata.ranges[0].address], NBYTES)
        local = np.zeros(NBYTES, dtype=np.uint8)
        with Transfers(1, wrap=lambda backend: limit_bandwidth(backend, NBYTES / 0.2)) as slow:
            task = slow.submit(EVERY_BLOCK, memory, [local])
            del memory
            link.close()
            code = LLMStatusCode.LLM_NOT_YET_LINK
            with refused(code, "is closed"):
                task.wait(timeout_ms=30_000)

    def test_a_closed_transport_refuses_and_releases(self, transport: LocalTransport) -> None:
        growing = bytearray(10)
        registration = transport.register(growing)
        metadata = transport.metadata()
        transport.close()
        transport.close()
        growing.append(1)  # nothing pins its address any more
        for act in (
            transport.metadata,
            lambda: transport.register(bytearray(10)),
            lambda: transport.deregister(registration),
            lambda: transport.connect(metadata),
            lambda: transport.allocate(10),
            lambda: transport.refusal(metadata),
        ):
            with refused(LLMStatusCode.LLM_FAILED, "is closed"):
                act()


def test_the_death_of_a_peer_can_be_polled_for(owner: Owner, transport: LocalTransport) -> None:
    link = transport.connect(owner.metadata())
    assert link.death_fd is not None
    poll = select.poll()
    poll.register(link.death_fd, select.POLLIN)
    assert poll.poll(0) == []
    owner.kill()
    assert poll.poll(30_000) == [(link.death_fd, select.POLLIN)]
    link.close()
    assert link.death_fd is None
