"""Life of a peer as shared memory shows it: the kernel marks a word when the process ends."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from kvnative._host import GenerationTable
from kvnative._lower import lower
from kvnative._process import Peer
from kvnative._task import Revocable

SLOTS = 4
WORD = 2 * 8 * SLOTS + 8  # behind the generations, the deadlines and the list for the kernel

OWNER = """
    import os, sys
    from kvnative._host import GenerationTable
    table = GenerationTable(4)
    slot, generation = table.take()
    print(table.fd, table.inode, slot, generation, flush=True)
"""


@contextmanager
def owner(program: str = "") -> Iterator[tuple[subprocess.Popen[str], Peer, bytes]]:
    """Yield a process with a generation table, the attached peer, and a word of the table."""
    process = subprocess.Popen(
        [sys.executable, "-c", dedent(OWNER) + dedent(program) + "\nsys.stdin.read()\n"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            fd, inode, slot, generation = map(int, process.stdout.readline().split())
            peer = Peer(process.pid)
            peer.attach(fd, inode, SLOTS)
            yield process, peer, np.array([slot, generation], np.uint64).tobytes()
        finally:
            process.kill()


def test_a_kill_is_seen_as_soon_as_the_process_can_be_waited_for() -> None:
    for _ in range(20):
        with owner() as (process, peer, words):
            assert peer.check(words) == -1
            poll = select.poll()
            poll.register(peer.pidfd, select.POLLIN)
            process.send_signal(signal.SIGKILL)
            poll.poll()
            with pytest.raises(ProcessLookupError, match="has exited"):
                peer.check(words)


def test_a_process_that_executes_another_program_is_refused() -> None:
    """The kernel marks the word at execve, although the process continues."""
    program = """
        sys.stdin.readline()
        os.execv(sys.executable, [sys.executable, "-c", "print('another', flush=True); input()"])
    """
    with owner(program) as (process, peer, words):
        assert process.stdin is not None
        assert process.stdout is not None
        assert peer.check(words) == -1
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "another\n"
        with pytest.raises(ProcessLookupError, match="executes another program"):
            peer.check(words)


def test_a_forked_child_does_not_keep_its_parent_alive() -> None:
    program = """
        if not os.fork():
            print("child", flush=True)
            os.read(0, 1)  # until the test has looked
            os._exit(0)
    """
    with owner(program) as (process, peer, words):
        assert process.stdout is not None
        assert process.stdout.readline() == "child\n"
        assert peer.check(words) == -1
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError, match="has exited"):
            peer.check(words)


def test_a_forked_child_has_a_word_of_its_own() -> None:
    """The child has its own table, which outlives the table of the parent."""
    reader, writer = os.pipe()
    own = GenerationTable(SLOTS)
    child = os.fork()
    if not child:  # the child has no thread of its parent: a new one owns the child's words
        table = GenerationTable(SLOTS)
        own.close()
        slot, generation = table.take()
        os.write(writer, f"{table.fd} {table.inode} {slot} {generation}\n".encode())
        signal.pause()
    try:
        fd, inode, slot, generation = map(int, os.read(reader, 100).split())
        peer = Peer(child)
        peer.attach(fd, inode, SLOTS)
        words = np.array([slot, generation], np.uint64).tobytes()
        assert peer.check(words) == -1
        assert word_of(own).value != 0, "the child has closed its copy of what is the parent's"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for fd in (reader, writer):
            os.close(fd)
    with pytest.raises(ProcessLookupError, match="has exited"):
        peer.check(words)


def test_a_kill_is_seen_after_the_oom_killer_has_reaped_the_process() -> None:
    """The OOM killer takes private pages (`MADV_DONTNEED`) before the threads end."""
    program = f"""
        import ctypes, signal
        libc, head, size = ctypes.CDLL(None), ctypes.c_void_p(), ctypes.c_size_t()
        keeper = ctypes.c_uint32.from_address(table.address + {WORD}).value
        call = {{"x86_64": 274, "aarch64": 100}}[os.uname().machine]  # get_robust_list(2)
        assert libc.syscall(call, keeper, ctypes.byref(head), ctypes.byref(size)) == 0
        page = os.sysconf("SC_PAGESIZE")
        address = ctypes.c_void_p(head.value & -page)
        madvise, kill, own, number = libc.madvise, libc.kill, os.getpid(), int(signal.SIGKILL)
        print("ready", flush=True)
        sys.stdin.readline()
        madvise(address, ctypes.c_size_t(page), 4)
        kill(own, number)
    """
    with owner(program) as (process, peer, words):
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        assert peer.check(words) == -1
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError, match="has exited"):
            peer.check(words)


def word_of(table: GenerationTable) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(table.address + WORD)


def test_without_a_word_the_system_is_asked() -> None:
    """A table has no word if no thread could start, or if the kernel lacks robust futexes."""
    program = """
        import ctypes
        ctypes.c_uint32.from_address(table.address + 2 * 8 * 4 + 8).value = 0
        print("cleared", flush=True)
    """
    with owner(program) as (process, peer, words):
        assert process.stdout is not None
        assert process.stdout.readline() == "cleared\n"
        assert peer.check(words) == -1
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError, match="has exited"):
            peer.check(words)


def test_a_process_that_ends_is_refused_while_the_system_still_shows_it() -> None:
    """The kernel marks the word first, and closes the descriptors much later."""
    program = """
        import ctypes
        ctypes.c_uint32.from_address(table.address + 2 * 8 * 4 + 8).value |= 0x40000000
        print("marked", flush=True)
    """
    with owner(program) as (process, peer, words):
        assert process.stdout is not None
        assert process.stdout.readline() == "marked\n"
        with pytest.raises(ProcessLookupError, match="ends, or begins to execute another program"):
            peer.check(words)
        empty = lower(*(np.array([], np.uint64),) * 5)
        assert peer.copy(empty, words, Revocable()) == "refused"


@pytest.mark.parametrize("then", ["", "os.dup2(os.memfd_create('another'), number)"])
def test_a_closed_table_is_reported_as_a_closed_transport(then: str) -> None:
    """Without a word the system is asked, and finds no descriptor or one of another file."""
    program = f"""
        sys.stdin.readline()
        number = table.fd
        table.close()
        {then}
        print("closed", flush=True)
    """
    with owner(program) as (process, peer, words):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("close\n")  # this process has attached the table by now
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        with pytest.raises(ProcessLookupError, match="has closed its transport"):
            peer.check(words)


def test_tables_come_and_go_in_any_order() -> None:
    tables = [GenerationTable(SLOTS) for _ in range(9)]
    keeper = word_of(tables[0]).value
    assert (Path("/proc/self/task") / str(keeper) / "comm").read_text() == "kvplan-life\n"
    assert {word_of(table).value for table in tables} == {keeper}
    for index in (4, 0, 8, 3, 5):
        tables[index].close()
    assert {word_of(table).value for table in tables if not table.closed} == {keeper}
    tables.append(GenerationTable(SLOTS))
    for table in reversed(tables):
        table.close()
    assert word_of(GenerationTable(SLOTS)).value == keeper


NO_SYSTEM_CALLS = """
    import ctypes, os, platform, struct, sys
    import numpy as np
    from kvnative._process import Peer
    pid, fd, inode, slot, generation = map(int, sys.argv[1:])
    words = np.array([slot, generation], np.uint64).tobytes()
    peer = Peer(pid)
    peer.attach(fd, inode, 4)
    # A filter that ends this process at any call but read, write and exit_group.
    numbers = {"x86_64": (0, 1, 231), "aarch64": (63, 64, 94)}[platform.machine()]
    code = [(0x20, 0, 0, 0)]
    for index, number in enumerate(numbers):
        code.append((0x15, len(numbers) - index, 0, number))
    code += [(6, 0, 0, 0x80000000), (6, 0, 0, 0x7FFF0000)]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed)
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer))
    )
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    check, write, read, leave = peer.check, os.write, os.read, os._exit
    assert libc.prctl(22, 2, program, 0, 0) == 0
    write(1, b"%d\\n" % check(words))
    leave(0)
"""


@pytest.mark.parametrize(
    ("call", "code", "output"),
    [("check(words)", 0, "-1\n"), ("check(words) + os.getppid()", -signal.SIGSYS, "")],
    ids=["check", "the filter works"],
)
def test_a_check_makes_no_system_call(call: str, code: int, output: str) -> None:
    with owner() as (process, _, words):
        slot, generation = np.frombuffer(words, np.uint64).tolist()
        files = Path(f"/proc/{process.pid}/fd").iterdir()
        (table,) = (file for file in files if "kvplan-generations" in str(file.readlink()))
        numbers = (process.pid, table.name, table.stat().st_ino, slot, generation)
        program = dedent(NO_SYSTEM_CALLS).replace("check(words))", f"({call}))")
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, numbers)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (code, output, "")


NO_THREADS = """
    import ctypes, platform, struct
    from kvnative._host import GenerationTable
    # A filter by which the system refuses each thread, as at the limit of processes (EAGAIN).
    numbers = {"x86_64": (56, 435), "aarch64": (220, 435)}[platform.machine()]  # clone, clone3
    code = [(0x20, 0, 0, 0)]
    for index, number in enumerate(numbers):
        code.append((0x15, len(numbers) - index, 0, number))
    code += [(6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x0005000B)]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed)
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer))
    )
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, program, 0, 0) == 0
    for _ in range(2):
        table = GenerationTable(4)
        print(table.take()[0], ctypes.c_uint32.from_address(table.address + WORD).value)
        table.close()
"""


def test_a_process_that_can_start_no_thread_has_tables_without_a_word() -> None:
    """The second table does not wait for the thread that did not start."""
    done = subprocess.run(
        [sys.executable, "-c", f"WORD = {WORD}\n" + dedent(NO_THREADS)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "0 0\n" * 2


def test_the_thread_starts_with_large_thread_local_storage() -> None:
    """Thread-local memory of libraries lies on the stack of the thread, which is small."""
    program = f"""
        import ctypes
        from kvnative._host import GenerationTable
        table = GenerationTable({SLOTS})
        print(ctypes.c_uint32.from_address(table.address + {WORD}).value != 0)
    """
    settings = {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1000000"}
    output = subprocess.check_output(
        [sys.executable, "-c", dedent(program)], env=os.environ | settings, text=True
    )
    assert output == "True\n"


@pytest.mark.skipif(
    "thread" in os.environ.get("KVPLAN_SANITIZE", ""), reason="it refuses the handler"
)
def test_a_kill_while_a_table_is_closed_leaves_no_live_word() -> None:
    """The kernel marks only words in its list: a killed process must not leave another word set."""
    program = """
        import ctypes, signal
        libc, page = ctypes.CDLL(None), ctypes.c_void_p(table.address & -os.sysconf("SC_PAGESIZE"))

        @ctypes.CFUNCTYPE(None, ctypes.c_int)
        def die(number):
            libc.mprotect(page, 1, 3)  # the kernel may write it again
            os.kill(os.getpid(), signal.SIGKILL)

        libc.signal(signal.SIGSEGV, die)
        print("ready", flush=True)
        sys.stdin.readline()
        libc.mprotect(page, 1, 1)
        table.close()
    """
    with owner(program) as (process, peer, words):
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        assert peer.check(words) == -1
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError, match="has exited"):
            peer.check(words)


def test_a_kill_is_seen_with_more_tables_than_the_kernel_marks() -> None:
    """The kernel walks 2048 words; for tables beyond that, the system is asked."""
    program = """
        import resource
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        more = [GenerationTable(4) for _ in range(2048 if most > 3000 else 0)]
        print(len(more), flush=True)
    """
    with owner(program) as (process, peer, words):
        assert process.stdout is not None
        if process.stdout.readline() == "0\n":
            pytest.skip("too few descriptors are allowed")
        assert peer.check(words) == -1
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError, match="has exited"):
            peer.check(words)


def test_the_child_of_a_fork_without_handlers_has_a_word_of_its_own() -> None:
    """After clone(2) or _Fork(3), the parent's state of its thread does not hold in the child."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "_Fork"):
        pytest.skip("glibc before 2.34")
    program = """
        import ctypes, signal
        child = ctypes.PyDLL(None)._Fork()
        if not child:
            table = GenerationTable(4)
            print(os.getpid(), table.fd, table.inode, *table.take(), flush=True)
            signal.pause()
    """
    with owner(program) as (process, _, _):
        assert process.stdout is not None
        child, fd, inode, slot, generation = map(int, process.stdout.readline().split())
        peer = Peer(child)
        peer.attach(fd, inode, SLOTS)
        words = np.array([slot, generation], np.uint64).tobytes()
        try:
            assert peer.check(words) == -1
        finally:
            os.kill(child, signal.SIGKILL)
        poll = select.poll()
        poll.register(peer.pidfd, select.POLLIN)
        poll.poll()
        with pytest.raises(ProcessLookupError, match="has exited"):
            peer.check(words)
