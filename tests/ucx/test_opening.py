"""Opening UCX does not change the process; libraries and settings that are refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from kvnative._backend import KVN_INVALID, KVN_UNSUPPORTED
from kvnative._ucx import UcxError, UcxLibrary, UcxWorker
from kvplan.transport.ucx.library import Found
from tests.ucx.peer import run


def test_a_process_is_unchanged_but_for_the_threads_of_a_worker(ucx: Found) -> None:
    """Signal handlers, libc and the environment stay the same, and nothing is printed."""
    script = """
        libc = ctypes.CDLL(None)

        def handler(number):
            action = ctypes.create_string_buffer(256)
            libc.sigaction(number, None, action)
            return action.raw[:8]

        def state():
            return {
                "signals": [handler(number) for number in range(1, 65)],
                "code": [ctypes.string_at(getattr(libc, name), 16) for name in
                         ("mmap", "munmap", "mremap", "madvise", "brk", "malloc", "shmat")],
                "environment": os.popen("env").read(),
            }

        def num_threads():
            return len(os.listdir("/proc/self/task"))

        before = state(), num_threads()
        library = UcxLibrary.load(path)
        assert (state(), num_threads()) == before
        worker = UcxWorker(library)
        assert (state(), num_threads()) == (before[0], before[1] + 2)  # ours, UCX's to connect
        worker.close()
        del worker
        assert state() == before[0]
        """
    assert run(script, ucx.path) == ""


def test_the_environment_of_other_threads_stays_in_place(ucx: Found) -> None:
    """Other threads may use the array, and the strings that getenv has returned."""
    script = """
        environ = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")

        def state():
            count = 0
            while environ[count]:
                count += 1
            return ctypes.addressof(environ.contents), environ[:count]

        before = state()
        worker = UcxWorker(UcxLibrary.load(path))
        assert state() == before
        worker.close()
        assert state() == before
        """
    assert run(script, ucx.path) == ""


def test_threads_have_names_and_leave_signals_to_those_of_the_program(ucx: Found) -> None:
    script = """
        import signal

        def masks():
            found = {}
            for task in os.listdir("/proc/self/task"):
                lines = open(f"/proc/self/task/{task}/status").read().splitlines()
                status = dict(line.split(":", 1) for line in lines)
                found[task] = status["Name"].strip(), int(status["SigBlk"], 16)
            return found

        all_signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        library = UcxLibrary.load(path)
        before = masks()
        worker = UcxWorker(library)
        after = masks()
        for name, mask in sorted(after[task] for task in after.keys() - before.keys()):
            print(name, [int(number) for number in all_signals if not mask >> (number - 1) & 1])
        assert all(after[task] == before[task] for task in before)
        """
    assert run(script, ucx.path).splitlines() == ["async []", "kvn-ucx []"]  # UCX's and ours


PAIR = """
from kvnative._host import GenerationTable

def connected():
    "A worker, another one with a generation table, and an endpoint from the first to the second."
    board = GenerationTable(4)
    workers = [UcxWorker(UcxLibrary.load(path)) for _ in range(2)]
    region = workers[1].map(board.address, 32, owner=board)
    endpoint = workers[0].endpoint(
        workers[1].address, generations_address=board.address, num_slots=4,
        generations_rkey=region.rkey, tickets_address=region.address, tickets_rkey=region.rkey,
        tag=1,
    )
    endpoint.connect(20_000)
    return workers, region, endpoint

def in_child(function):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        function()
    except UcxError as error:
        print(error, flush=True)
    os._exit(0)
"""


def test_an_interpreter_may_exit_with_an_endpoint_open(ucx: Found) -> None:
    run(PAIR + "held = connected()", ucx.path)


def test_a_forked_child_is_refused_and_may_only_drop_objects(ucx: Found) -> None:
    script = """
        workers, region, endpoint = connected()
        child = os.fork()
        if not child:
            for call in (
                lambda: workers[0].map(1, 1), lambda: endpoint.connect(1), endpoint.close
            ):
                try:
                    call()
                except Exception as error:
                    print(type(error).__name__, error, flush=True)
            workers[0].close()
            region.release()
            del endpoint, region, workers
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert endpoint.connected
        """
    assert (
        run(PAIR + dedent(script), ucx.path).splitlines()
        == [
            "NativeError UCX does not work in a process forked from the one that opened it: start"
            " such processes with the method spawn"
        ]
        * 3
    )


def test_a_child_that_is_forked_while_ucx_is_in_use_is_refused_with_advice(ucx: Found) -> None:
    script = """
        workers, region, endpoint = connected()
        in_child(connected)
        workers[0].close()  # it is there still
        in_child(lambda: (workers.clear(), connected()))
        """
    printed = run(PAIR + dedent(script), ucx.path).splitlines()
    assert len(printed) == 2
    for line in printed:
        assert line.startswith("UCX was in use in process ")
        assert "start such processes with the method spawn" in line


def test_a_child_that_is_forked_while_ucx_is_idle_may_open_ucx(ucx: Found) -> None:
    script = """
        assert in_child(connected) == 0
        connected()
        assert in_child(connected) == 0
        """
    assert run(PAIR + dedent(script), ucx.path) == ""


def fake(folder: Path, code: str) -> str:
    """Compile a library that pretends to be UCX."""
    source = folder / "fake.c"
    source.write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "fake.so", source], check=True)
    return str(folder / "fake.so")


VERSION = (
    "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) {{ *a = {}; *b = {}; *c = {}; }}"
)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("int nothing;", "{path} is not a libucp of UCX"),
        (VERSION.format(1, 12, 1), "{path} is UCX 1.12.1; it must be 1.13 or a later 1.x"),
        (VERSION.format(2, 0, 0), "{path} is UCX 2.0.0; it must be 1.13 or a later 1.x"),
        (VERSION.format(1, 13, 0), "{path} (UCX 1.13.0) lacks ucp_config_read"),
    ],
)
def test_a_library_that_cannot_be_used_is_refused(code: str, words: str, tmp_path: Path) -> None:
    path = fake(tmp_path, code)
    script = """
        for i in range(2):
            try:
                UcxLibrary.load(path)
            except UcxError as error:
                print(error.status, error)
        """
    assert run(script, path) == f"{KVN_UNSUPPORTED} {words.format(path=path)}\n" * 2


def test_a_missing_file_is_named() -> None:
    script = """
        try:
            UcxLibrary.load(path)
        except UcxError as error:
            print(error.status, error)
        """
    printed = run(script, "/nowhere/libucp.so.0")
    assert printed.startswith(f"{KVN_UNSUPPORTED} /nowhere/libucp.so.0: cannot open")


def test_a_library_is_opened_once_and_shared(ucx: Found) -> None:
    library = UcxLibrary.load(ucx.path)
    assert UcxLibrary.load(ucx.path) is library
    assert Path(UcxLibrary.load("libucp.so.0").path).samefile(library.path)
    assert library.version >= (1, 13, 0)
    with pytest.raises(TypeError, match=r"comes from UcxLibrary\.load"):
        UcxLibrary()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"UCX_TLS": "none7"}, "^ucp_init: No such device"),
        ({"ZCOPY_THRESH": "many"}, "Invalid value for ZCOPY_THRESH: 'many'"),
        ({"UCX_": "1"}, "settings: 'UCX_'='1' must be a name of UCX"),
    ],
)
def test_settings_that_ucx_rejects_are_refused(
    settings: dict[str, str], words: str, ucx: Found
) -> None:
    with pytest.raises((UcxError, ValueError), match=words):
        UcxWorker(UcxLibrary.load(ucx.path), settings=settings)


@pytest.mark.parametrize("transports", ["all", "tcp", "shm,tcp", "^cma", "\\tcp"])
def test_tcp_is_refused(transports: str, ucx: Found) -> None:
    with pytest.raises(UcxError, match="UCX_TLS lets UCX use TCP") as refused:
        UcxWorker(UcxLibrary.load(ucx.path), settings={"UCX_TLS": transports})
    assert refused.value.status == KVN_INVALID


def test_tcp_of_the_environment_is_refused(ucx: Found) -> None:
    script = """
        os.environ["UCX_TLS"] = "all"
        try:
            UcxWorker(UcxLibrary.load(path))
        except UcxError as error:
            print(error)
        """
    assert run(script, ucx.path).startswith("UCX_TLS lets UCX use TCP")


def test_ucx_opens_no_network_socket(ucx: Found) -> None:
    """The system lists no listening or connected sockets."""
    script = """
        import socket

        def sockets():
            "Print the sockets of this process."
            mine = {os.readlink(entry.path)
                    for entry in os.scandir("/proc/self/fd") if entry.is_symlink()}
            for name in ("tcp", "tcp6", "udp", "udp6"):
                for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
                    if f"socket:[{line.split()[9]}]" in mine:
                        print(name, line)

        held = connected()
        sockets()
        listener = socket.create_server(("127.0.0.1", 0))
        print("now ours:")
        sockets()
        """
    printed = run(PAIR + dedent(script), ucx.path).splitlines()
    assert printed[0] == "now ours:"
    assert len(printed) == 2  # the check would find a socket


def test_the_resources_that_ucx_may_use_are_listed(ucx: Found) -> None:
    worker = UcxWorker(UcxLibrary.load(ucx.path), settings={"UCX_TLS": "self"})
    assert worker.transports == "self/memory"
    worker.close()
