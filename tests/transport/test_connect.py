"""Identity of a peer, and permissions of the system: each error has the reason and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.transport.local import LocalTransport, identity
from tests.support.held import Held
from tests.support.refusals import refused
from tests.support.rights import DUMPABLE, PID_NAMESPACE, denying, may, needs_root
from tests.transport.owner import Owner

UNPRIVILEGED = 65534
ARENA = "transport.register(transport.allocate(100))"
REGISTERED = "memory = np.zeros(100, np.uint8); transport.register(memory)"
DROP = f"import os; os.setresgid(*[{UNPRIVILEGED}] * 3); os.setresuid(*[{UNPRIVILEGED}] * 3)"
NO_PROCESS_VM = denying("process_vm_readv", "process_vm_writev")
HIDE_OTHERS = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'


needs_namespaces = pytest.mark.skipif(
    not may(*PID_NAMESPACE, "--mount-proc"),
    reason="only root outside of containers can make a PID namespace, with `unshare` of util-linux",
)


@contextmanager
def owners(*prefixes: list[str]) -> Iterator[list[Owner]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Owner(prefix=prefix))) for prefix in prefixes]


def altered(metadata: bytes, **changes: Any) -> bytes:
    """Return the metadata with fields like `identity__pid` replaced."""
    document = msgspec.msgpack.decode(metadata)
    for path, value in changes.items():
        section, _, name = path.partition("__")
        document[section][name] = value
    return msgspec.msgpack.encode(document)


def refusal(transport: LocalTransport, metadata: bytes) -> str:
    with refused(LLMStatusCode.LLM_LINK_FAILED) as caught:
        transport.connect(metadata)
    return str(caught.value)


def refusal_in(peer: Owner, metadata: bytes) -> str:
    """Return the error of `peer` when it connects with `metadata`, or "" if it succeeds."""
    return str(
        peer.run(f"""
            from kvplan import LLMException
            result = ""
            try:
                link = transport.connect({metadata!r})
                registered = link.metadata.ranges[0]
                link.memory([registered.address], registered.nbytes).check()
            except LLMException as error:
                result = str(error)
        """)
    )


class TestIdentity:
    def test_a_peer_on_another_host_is_refused(
        self, owner: Owner, transport: LocalTransport
    ) -> None:
        elsewhere = "00000000-0000-0000-0000-000000000000"
        message = refusal(transport, altered(owner.metadata(), identity__boot_id=elsewhere))
        assert "another host" in message
        assert elsewhere in message

    def test_a_peer_in_another_pid_namespace_is_refused(
        self, owner: Owner, transport: LocalTransport
    ) -> None:
        message = refusal(transport, altered(owner.metadata(), identity__pid_namespace=17))
        assert "another PID namespace (17, here" in message
        assert "docker run --pid=container:" in message

    def test_a_peer_in_another_time_namespace_is_refused(
        self, owner: Owner, transport: LocalTransport
    ) -> None:
        message = refusal(transport, altered(owner.metadata(), identity__time_namespace=17))
        assert "another time namespace (17, here" in message
        assert "over tcp" in message

    def test_a_reused_pid_is_refused(self, owner: Owner, transport: LocalTransport) -> None:
        """The peer has ended, and the system has given its pid to this later process."""
        metadata = owner.metadata()
        started = msgspec.msgpack.decode(metadata)["identity"]["start_time"]
        message = refusal(transport, altered(metadata, identity__start_time=started - 100))
        assert f"started at {started} ticks" in message
        assert f"the peer at {started - 100}" in message

    def test_a_zombie_is_refused(self, owner: Owner, transport: LocalTransport) -> None:
        metadata = owner.metadata()
        owner.kill()
        assert "has exited" in refusal(transport, metadata)

    def test_a_reaped_process_is_refused(self, owner: Owner, transport: LocalTransport) -> None:
        metadata = owner.metadata()
        owner.kill()
        owner.process.wait()
        assert "has exited" in refusal(transport, metadata)

    @pytest.mark.parametrize("field", ["fd", "inode", "num_slots"])
    def test_another_generation_table_is_refused(
        self, owner: Owner, transport: LocalTransport, field: str
    ) -> None:
        metadata = owner.metadata()
        other = msgspec.msgpack.decode(metadata)["generations"][field] + 100
        message = refusal(transport, altered(metadata, **{f"generations__{field}": other}))
        assert re.search("closed its transport|inode differs|size differs", message)

    @pytest.mark.parametrize(
        "changes",
        [{"identity__start_time": 1}, {"generations__inode": 1}, {"generations__num_slots": 1}],
        ids=["another process", "another table", "another size"],
    )
    def test_a_refused_link_leaves_nothing_open(
        self, owner: Owner, transport: LocalTransport, changes: dict[str, int]
    ) -> None:
        metadata = altered(owner.metadata(), **changes)
        refusal(transport, metadata)  # libraries that the first one loads stay
        before = Held.now()
        refusal(transport, metadata)
        assert not before.new().descriptors
        before.check_nothing_new()

    def test_a_process_name_may_have_spaces_and_parentheses(self, owner: Owner) -> None:
        before = identity.start_time(owner.pid)
        owner.run("open('/proc/self/comm', 'w').write(') S 1 (a b)')")
        assert identity.start_time(owner.pid) == before


class TestArenas:
    """An arena that differs from its metadata, although the peer is the right one."""

    def memory(self, transport: LocalTransport, metadata: bytes) -> LLMException:
        with transport.connect(metadata) as link, pytest.raises(LLMException) as caught:
            link.memory([link.metadata.ranges[0].address], 4096)
        return caught.value

    @pytest.fixture
    def metadata(self, owner: Owner) -> dict[str, Any]:
        owner.run("memory = transport.register(transport.allocate(8192))")
        return dict(msgspec.msgpack.decode(owner.metadata()))

    def test_an_unsealed_arena_is_refused(
        self, owner: Owner, transport: LocalTransport, metadata: dict[str, Any]
    ) -> None:
        fd, inode = owner.run("""
            import os
            fd = os.memfd_create("unsealed")
            os.ftruncate(fd, 8192)
            result = [fd, os.fstat(fd).st_ino]
        """)
        metadata["ranges"][0]["arena"] |= {"fd": fd, "inode": inode}
        error = self.memory(transport, msgspec.msgpack.encode(metadata))
        assert error.status_code == LLMStatusCode.LLM_LINK_FAILED
        assert "not sealed" in str(error)

    @pytest.mark.parametrize("nbytes", [4096, 8191, 8193])
    def test_an_arena_of_another_size_is_refused(
        self, transport: LocalTransport, metadata: dict[str, Any], nbytes: int
    ) -> None:
        metadata["ranges"][0]["nbytes"] = 4096
        metadata["ranges"][0]["arena"]["nbytes"] = nbytes
        error = self.memory(transport, msgspec.msgpack.encode(metadata))
        assert "size differs" in str(error)

    def test_an_arena_with_two_sizes_is_refused(
        self, transport: LocalTransport, metadata: dict[str, Any]
    ) -> None:
        """The second size must not be reached through the mapping of the first."""
        whole = metadata["ranges"][0]
        larger = {"nbytes": 1 << 40}
        metadata["ranges"].append({**whole, **larger, "arena": {**whole["arena"], **larger}})
        with transport.connect(msgspec.msgpack.encode(metadata)) as link:
            base = link.metadata.ranges[0].address
            link.memory([base], 8192)
            with pytest.raises(LLMException, match="size differs"):
                link.memory([base], 1 << 40)

    def test_an_arena_that_was_deregistered_is_refused(
        self, owner: Owner, transport: LocalTransport, metadata: dict[str, Any]
    ) -> None:
        owner.run("transport.deregister(memory)")
        error = self.memory(transport, msgspec.msgpack.encode(metadata))
        assert error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


class TestRefusal:
    """`refusal` returns the reasons of `connect` as text, for the choice of a transport."""

    def test_a_reachable_peer_has_no_refusal(self, owner: Owner, transport: LocalTransport) -> None:
        assert transport.refusal(owner.metadata()) is None
        assert transport.refusal(transport.metadata()) is None

    def test_the_refusal_of_a_dead_peer(self, owner: Owner, transport: LocalTransport) -> None:
        metadata = owner.metadata()
        owner.kill()
        reason = f"process {owner.pid} has exited"
        assert transport.refusal(metadata) == f"peer {owner.pid} cannot be reached: {reason}"

    def test_the_refusal_of_bytes_that_are_not_metadata(self, transport: LocalTransport) -> None:
        assert "expected `object`" in str(transport.refusal(b"nothing"))


@needs_root
class TestPermission:
    """Each side is a process of its own, so that it can drop the rights of root."""

    KINDS = (ARENA, REGISTERED)

    @pytest.mark.parametrize("kind", KINDS, ids=["arena", "registered"])
    def test_one_user_is_enough(self, kind: str) -> None:
        with owners([], []) as (exporter, importer):
            exporter.run(DROP, DUMPABLE, kind)
            importer.run(DROP, DUMPABLE)
            assert refusal_in(importer, exporter.metadata()) == ""

    @pytest.mark.parametrize("kind", KINDS, ids=["arena", "registered"])
    def test_a_peer_of_another_user_is_refused(self, kind: str) -> None:
        with owners([], []) as (exporter, importer):
            exporter.run(kind)
            importer.run(DROP, DUMPABLE)
            message = refusal_in(importer, exporter.metadata())
        assert (
            f"the peer runs as uid 0, this process as {UNPRIVILEGED}: run both as one user"
            in message
        )
        assert "CAP_SYS_PTRACE" in message
        assert "holds capabilities that this process lacks" in message

    def test_a_peer_that_is_not_dumpable(self) -> None:
        with owners([], []) as (exporter, importer):
            exporter.run(DROP, REGISTERED)
            importer.run(DROP)
            message = refusal_in(importer, exporter.metadata())
        assert "not dumpable" in message
        assert "as one user" not in message


def test_a_link_that_the_system_refuses_leaves_nothing_open(owner: Owner) -> None:
    """The probe of memory outside of arenas fails after everything else was opened."""
    owner.run(REGISTERED)
    connect = f"""
        import pytest
        from kvplan import LLMException
        from tests.support.held import Held
        refused = None
        before = Held.now()
        with pytest.raises(LLMException, match="seccomp") as refused:
            transport.connect({owner.metadata()!r})
        result = sorted(before.new().descriptors)
    """
    with owners([]) as (importer,):
        importer.run(NO_PROCESS_VM, connect)  # libraries that the first one loads stay
        assert importer.run(connect) == []  # although the error and its frames are held


def test_a_sandbox_without_process_vm(owner: Owner) -> None:
    with owners([]) as (importer,):
        importer.run(NO_PROCESS_VM)
        owner.run(ARENA)
        assert refusal_in(importer, owner.metadata()) == "", "arenas need no process_vm_readv"
        owner.run(REGISTERED)
        message = refusal_in(importer, owner.metadata())
        assert "a seccomp filter is active" in message
        assert "--cap-add=SYS_PTRACE" in message


def test_a_sandbox_does_not_make_address_checks_blind(owner: Owner) -> None:
    answer = owner.run(
        NO_PROCESS_VM,
        """
        import mmap, os
        from kvnative._host import Pin
        from kvplan import LLMException
        fd = os.memfd_create("truncated")
        page = mmap.PAGESIZE
        os.ftruncate(fd, 2 * page)
        whole = Pin(mmap.mmap(fd, 2 * page))
        transport.register((whole.address, 2 * page))
        os.ftruncate(fd, page)
        try:
            transport.register((whole.address, 2 * page))
        except LLMException as error:
            result = str(error)
        """,
    )
    assert "past the file's end" in answer


@needs_namespaces
class TestNamespaces:
    def test_a_peer_in_another_namespace_is_refused(self, transport: LocalTransport) -> None:
        with owners([*PID_NAMESPACE, "--mount-proc"]) as (inner,):
            assert inner.pid == 1
            assert "is in another PID namespace" in refusal(transport, inner.metadata())

    def test_two_peers_in_one_namespace_link(self) -> None:
        with owners([*PID_NAMESPACE, "--mount-proc"]) as (inner,):
            inner.run("from kvplan.transport.local import LocalTransport; other = LocalTransport()")
            inner.run("other.register(other.allocate(100))")
            metadata = inner.run("result = other.metadata()")
            assert refusal_in(inner, metadata) == ""

    def test_a_foreign_proc_is_refused(self) -> None:
        with owners(PID_NAMESPACE) as (inner,):
            inner.run(ARENA)
            assert "--mount-proc" in refusal_in(inner, inner.metadata())

    def test_a_proc_that_hides_others_is_refused(self, owner: Owner) -> None:
        owner.run(ARENA)
        with owners(["unshare", "--mount", "sh", "-c", HIDE_OTHERS, "sh"]) as (inner,):
            inner.run(DROP)
            assert "hidepid" in refusal_in(inner, owner.metadata())


@pytest.mark.parametrize(
    ("scope", "remedy"), [(1, "permit_any_peer=True"), (2, "0 or 1"), (3, "or use arenas")]
)
def test_yama_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: Owner, scope: int, remedy: str
) -> None:
    monkeypatch.setattr(identity, "_ptrace_scope", lambda: scope)
    peer = identity.Identity(**msgspec.msgpack.decode(owner.metadata())["identity"])
    advice = identity.advice(peer)
    assert f"kernel.yama.ptrace_scope is {scope}" in advice
    assert remedy in advice


def test_permit_any_peer_is_harmless_without_yama() -> None:
    with (
        LocalTransport(permit_any_peer=True) as transport,
        transport.connect(transport.metadata()) as link,
    ):
        link.check()


class TestRegister:
    @pytest.mark.parametrize(
        ("memory", "message"),
        [
            (lambda: (4096, 100), "is not mapped"),
            (lambda: (0, 0), "nbytes is 0"),
            (lambda: (-1, 5), "address is -1"),
            (lambda: (1, 2, 3), r"must be \(address, nbytes\)"),
            (lambda: np.zeros((4, 4))[:, ::2], "contiguous"),
            (lambda: b"constant", "writable|read-only|BufferError"),
            (bytearray, "nbytes is 0"),
        ],
    )
    def test_refuses(
        self, transport: LocalTransport, memory: Callable[[], Any], message: str
    ) -> None:
        with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
            transport.register(memory())
        assert msgspec.msgpack.decode(transport.metadata())["ranges"] == []

    def test_read_only_memory_only_as_such(self, transport: LocalTransport) -> None:
        registration = transport.register(b"constant", writable=False)
        assert (registration.nbytes, registration.writable) == (8, False)
        with transport.connect(transport.metadata()) as link:
            link.memory([registration.address], 8).check()
            with refused(LLMStatusCode.LLM_PARAM_INVALID, "writable=False"):
                link.memory([registration.address], 8, writable=True)

    def test_memory_without_an_address_is_refused(self, transport: LocalTransport) -> None:
        with pytest.raises(TypeError):
            transport.register(7)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a str"):
            transport.deregister("all")  # type: ignore[arg-type]


class TestMemory:
    """The tensors that a link finds in its ranges."""

    @pytest.mark.parametrize(
        ("offsets", "nbytes", "found"),
        [
            ([0], 100, True),
            ([0, 50, 99], [100, 50, 1], True),
            ([0], 101, False),
            ([1], 100, False),
            ([100], 1, False),
            ([-1], 1, False),
        ],
    )
    def test_a_tensor_lies_inside_one_range(
        self, transport: LocalTransport, offsets: list[int], nbytes: Any, found: bool
    ) -> None:
        base = transport.register(np.zeros(300, np.uint8)[100:200]).address
        with transport.connect(transport.metadata()) as link:
            addresses = [base + offset for offset in offsets]
            if found:
                link.memory(addresses, nbytes, writable=True)
                return
            with refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"{base:#x}\\+100") as caught:
                link.memory([base, *addresses], [1, nbytes])
        assert "tensor 1" in str(caught.value)

    def test_a_tensor_across_two_ranges_is_refused(self, transport: LocalTransport) -> None:
        array = np.zeros(200, np.uint8)
        halves = [transport.register(half) for half in (array[:100], array[100:])]
        with transport.connect(transport.metadata()) as link:
            link.memory([half.address for half in halves], 100)
            with pytest.raises(LLMException, match="not inside one range"):
                link.memory([halves[0].address], 101)

    @pytest.mark.parametrize(
        ("addresses", "nbytes"), [([], []), ([1, 2], [1, 2, 3]), ([-1], 1), ([2**64], 1), ([1], 0)]
    )
    def test_wrong_arguments_are_refused(
        self, transport: LocalTransport, addresses: Any, nbytes: Any
    ) -> None:
        with (
            transport.connect(transport.metadata()) as link,
            refused(LLMStatusCode.LLM_PARAM_INVALID),
        ):
            link.memory(addresses, nbytes)

    @pytest.mark.parametrize("addresses", [np.array([1.5]), [1.5], ["1"]])
    def test_addresses_are_whole_numbers(self, transport: LocalTransport, addresses: Any) -> None:
        with transport.connect(transport.metadata()) as link, pytest.raises(TypeError):
            link.memory(addresses, 1)

    def test_metadata_of_another_transport_is_refused(self, transport: LocalTransport) -> None:
        with LocalTransport() as other:
            foreign = other.metadata()
            link = transport.connect(transport.metadata())
            with refused(LLMStatusCode.LLM_PARAM_INVALID, "another transport"):
                link.memory([1], 1, metadata=foreign)
